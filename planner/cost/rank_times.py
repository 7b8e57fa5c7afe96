"""Define what a rank does for a batch, and the times of its stages."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gnnplan.planner.candidate import Candidate, RankRows
from gnnplan.planner.cost.rates import Rate
from gnnplan.planner.cost.stages.exchange import Exchanges
from gnnplan.planner.machine.model import MachineModel, Table
from gnnplan.planner.workload import BatchProfile, Interference, ModelTiming
from gnnplan.runtime.plan.schema import GraphRef, Workload
from gnnplan.runtime.sampling.registry import DEFAULT_SAMPLER
from gnnplan.runtime.stages import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWork:
    """Work of one rank for a batch, and the machine that does it."""

    candidate: Candidate
    rank: int
    graph: GraphRef
    batch: BatchProfile
    """Sizes of the rank's share of the global batch."""
    timing: ModelTiming
    """Seconds of the model on batches of those sizes."""
    machine: MachineModel
    rows: RankRows
    """Feature rows that the rank reads under the placement."""
    row_bytes: int
    """Bytes of a row as stored and sent."""
    sampler: str = DEFAULT_SAMPLER
    user_parameters: Mapping[str, float | str] = field(default_factory=dict[str, float | str])
    """Parameters of the sampler that the user chose."""
    every_hop: bool = False
    """Whether a hop expands every vertex again, not only new ones."""
    sparse: bool = False
    """Whether rows are sparse, so that cores draw and gather batches also for GPUs."""
    drawn_by_cores: bool = False
    """Whether cores draw the batches of GPUs."""
    core_rates: Mapping[str, Table] = field(default_factory=dict[str, Table])
    """Tables of drawing and gathering, of cores like the machine's, where it has none."""
    captured_bytes: int = 0
    """Bytes of the buffers of a CUDA graph that samples; 0 where there is none."""
    workload: Workload = field(default_factory=Workload)
    """What is trained: its links, and its global batch."""
    exchanges: Exchanges | None = None
    """Exchanges of a shared batch, beside those for the placement's rows."""

    @property
    def draws_on_gpu(self) -> bool:
        """Whether a GPU draws the batches."""
        return self.candidate.kind == "cuda" and not self.drawn_by_cores

    @property
    def parameters(self) -> Mapping[str, float | str]:
        """Return the parameters of the sampler: the user's, and the candidate's own choices."""
        return {**self.user_parameters, **self.candidate.sampler.parameters}

    def is_timed_with(self, parameter: str) -> bool:
        """Return whether a GPU was timed with the sampler's parameter, which the user chose."""
        return self.timing.gpu is not None and parameter not in self.candidate.sampler.parameters

    @property
    def list_places(self) -> Mapping[str, float]:
        """Return the share of neighbour reads by place: own, peer or host."""
        policy = self.candidate.topology.policy
        if policy == "cached":
            return self.rows.list_shares
        return {"own" if policy in ("replicated", "partitioned") else "host": 1.0}

    @property
    def size_variation(self) -> float:
        """Return the relative standard deviation of a batch's size."""
        vertices = self.batch.vertices[-1]
        return vertices.std / vertices.mean if vertices.mean > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTime:
    """Seconds of one stage of a step."""

    seconds: float
    spread: float = 0.0
    """Relative half-width (90%) of the rates behind the seconds."""
    provenance: str = ""
    """Where the seconds come from; empty where nothing is said."""

    @staticmethod
    def of(rate: Rate) -> "StageTime":
        """Take a rate whose seconds are those of the stage."""
        return StageTime(seconds=rate.seconds, spread=rate.spread, provenance=rate.provenance)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTimes:
    """Seconds per batch in which resources that a GPU's lanes share are busy."""

    memory: float = 0.0
    """Seconds in which sampling and gathering use the GPU's own memory."""
    links: float = 0.0
    """Seconds in which sampling and gathering use links to other memories."""
    host: float = 0.0
    """Seconds of a step in which the process launches kernels."""
    host_shrinking: float = 0.0
    """Part of `host` that a smaller batch saves: what a timed loop took beyond its launches."""
    compute: float | None = None
    """Seconds in which the GPU works on forward, backward and update; None: in all of theirs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """Stage times of one rank for a mean batch, each stage alone on its processor."""

    stages: Mapping[Stage, StageTime]
    """Times by stage, absent ones 0; `all_reduce` lacks the wait for the slowest rank."""
    loader_sigma: float = 0.0
    """Standard deviation over batches of sample and gather, as far as ranks differ, in seconds."""
    trainer_sigma: float = 0.0
    """Standard deviation over batches of forward_backward, in seconds."""
    wait_sigma: float | None = None
    """Part of `trainer_sigma` that ranks wait for outside a measured `all_reduce`; None: all."""
    compute_slope: float = 0.0
    """Seconds of forward_backward that grow with the batch; the others it takes at any size."""
    all_reduce_core_seconds: float = 0.0
    """Core-seconds of the all-reduce on this rank."""
    loop_overhead: float = 0.0
    """Seconds per step of the training thread that belong to no stage."""
    gil_held: float = 0.0
    """Seconds per batch in which the loader holds the interpreter's lock."""
    interference: Mapping[str, Interference] = field(default_factory=dict[str, Interference])
    """Slowdowns of a loader thread and the model, by the thread's work; else the machine's."""
    disk_seconds: float = 0.0
    """Seconds of `gather` in which disk reads are in flight."""
    disk_skew: float = 0.0
    """Seconds by which this rank has its rows from disk before the last rank."""
    exchange_lead: float = 0.0
    """Seconds by which this rank leaves the exchange of rows before the last rank."""
    device: DeviceTimes = DeviceTimes()
    in_turn: bool = False
    """Whether one thread makes a batch for a GPU stage after stage, not on lanes."""

    def seconds(self, stage: Stage) -> float:
        """Return the elapsed seconds of a stage."""
        found = self.stages.get(stage)
        return 0.0 if found is None else found.seconds

    def with_stages(self, changed: Mapping[Stage, StageTime]) -> "RankTimes":
        """Return the times with some stages replaced or added."""
        return replace(self, stages={**self.stages, **changed})

    @property
    def loader(self) -> float:
        """Return the seconds of all loader stages of a batch."""
        at = self.seconds
        exchange = at(Stage.EXCHANGE_IDS) + at(Stage.EXCHANGE_ROWS)
        before = at(Stage.SEEDS) + at(Stage.SAMPLE) + at(Stage.GATHER)
        return before + exchange + at(Stage.COPY) + at(Stage.BATCH)

    @property
    def training(self) -> float:
        """Return the seconds of the training thread's stages, exchanges included."""
        at = self.seconds
        passes = at(Stage.FORWARD_BACKWARD) + at(Stage.HALO_EXCHANGE)
        return passes + at(Stage.ALL_REDUCE) + at(Stage.OPTIMIZER)

    @property
    def variation(self) -> float:
        """Return the coefficient of variation of loader and model from batch to batch."""
        mean = self.loader + self.seconds(Stage.FORWARD_BACKWARD)
        return max(self.loader_sigma, self.trainer_sigma) / mean if mean > 0 else 0.0
