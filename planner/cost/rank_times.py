"""The nouns of a price: what a rank does for a batch, and the times of its stages."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gnnplan.planner.candidate import Candidate, RankRows
from gnnplan.planner.cost.stages.exchange import Exchanges
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.workload import BatchProfile, Interference, ModelTiming
from gnnplan.runtime.plan.schema import GraphRef
from gnnplan.runtime.sampling.registry import DEFAULT_SAMPLER
from gnnplan.runtime.stages import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWork:
    """What one rank does for a batch, and the machine that it does it on."""

    candidate: Candidate
    rank: int
    graph: GraphRef
    batch: BatchProfile
    """Sizes of this rank's share of the global batch."""
    timing: ModelTiming
    """Seconds of the model on batches of those sizes."""
    machine: MachineModel
    rows: RankRows
    """Feature rows that the placement leaves this rank to read."""
    row_bytes: int
    """Bytes of a row as it is stored and sent."""
    sampler: str = DEFAULT_SAMPLER
    every_hop: bool = False
    """Whether a hop expands every vertex again, not only the new ones."""
    captured_bytes: int = 0
    """Bytes of the buffers of a CUDA graph that samples; 0: kernel by kernel."""
    exchanges: Exchanges | None = None
    """Exchanges of a batch that ranks share, beside those for the placement's rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTime:
    """Seconds of one stage of a step."""

    seconds: float
    spread: float = 0.0
    """Relative half-width (90%) of the rates behind it."""
    provenance: str = ""
    """Where the seconds come from; empty where nothing is said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTimes:
    """Seconds per batch in which what a GPU's lanes share is busy."""

    memory: float = 0.0
    """Seconds in which sampling and gathering keep the GPU's own memory busy."""
    links: float = 0.0
    """Seconds in which they keep the links to other memories busy."""
    host: float = 0.0
    """Seconds of a step in which the process starts kernels, one at a time."""
    compute: float | None = None
    """Seconds of forward, backward and update in which the GPU works; None: all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """The stage times of one rank for a mean batch, each stage alone on its processor."""

    stages: Mapping[Stage, StageTime]
    """Times by stage; a stage that is absent takes nothing. `all_reduce` is the collective itself,
    without the wait for the slowest rank."""
    loader_sigma: float = 0.0
    """Standard deviation over batches of sample and gather, in seconds; of several ranks, of what
    one may do longer than the others."""
    trainer_sigma: float = 0.0
    """Standard deviation over batches of forward_backward, in seconds."""
    wait_sigma: float | None = None
    """Part of `trainer_sigma` whose wait is not in a measured `all_reduce`; None: all of it."""
    all_reduce_core_seconds: float = 0.0
    """Core-seconds of the all-reduce on this rank."""
    loop_overhead: float = 0.0
    """Seconds of a step on the training thread that belong to no stage."""
    gil_held: float = 0.0
    """Seconds of making a batch in which the interpreter's lock is kept from training."""
    interference: Mapping[str, Interference] = field(default_factory=dict[str, Interference])
    """Slowdowns of a loader thread and the model, by the thread's work; else the machine's."""
    disk_seconds: float = 0.0
    """Seconds of `gather` in which reads of a disk are in flight."""
    disk_skew: float = 0.0
    """Seconds by which this rank has its rows from the disk before the last rank."""
    exchange_lead: float = 0.0
    """Seconds by which this rank leaves the exchange of rows before the last rank."""
    device: DeviceTimes = DeviceTimes()

    def seconds(self, stage: Stage) -> float:
        """Elapsed seconds of one stage."""
        found = self.stages.get(stage)
        return 0.0 if found is None else found.seconds

    def with_stages(self, changed: Mapping[Stage, StageTime]) -> "RankTimes":
        """Replace or add stages."""
        return replace(self, stages={**self.stages, **changed})

    @property
    def loader(self) -> float:
        """Seconds of all loader stages of one batch."""
        at = self.seconds
        exchange = at(Stage.EXCHANGE_IDS) + at(Stage.EXCHANGE_ROWS)
        before = at(Stage.SEEDS) + at(Stage.SAMPLE) + at(Stage.GATHER)
        return before + exchange + at(Stage.COPY) + at(Stage.BATCH)

    @property
    def training(self) -> float:
        """Seconds of the training thread's stages, the exchanges among them."""
        at = self.seconds
        passes = at(Stage.FORWARD_BACKWARD) + at(Stage.HALO_EXCHANGE)
        return passes + at(Stage.ALL_REDUCE) + at(Stage.OPTIMIZER)

    @property
    def variation(self) -> float:
        """Coefficient of variation of the loader and the model from batch to batch."""
        mean = self.loader + self.seconds(Stage.FORWARD_BACKWARD)
        return max(self.loader_sigma, self.trainer_sigma) / mean if mean > 0 else 0.0
