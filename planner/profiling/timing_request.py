"""What a timing process is asked for, and what it answers."""

from dataclasses import dataclass, field

from planner.profiling.loader_seconds import InLine, LoadingRequest
from planner.profiling.synthetic import BatchShape
from runtime.graph.types import GraphTypes
from runtime.plan import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingRequest:
    """What to build and time."""

    workload: Workload
    in_dim: int
    num_classes: int
    task: str
    shape: BatchShape
    scales: list[float]
    threads: int
    steps: int
    """Measured steps of each scale."""
    last: BatchShape | None = None
    """Of an epoch's last, smaller batch, whose layers may sum and multiply in another order, and
    hold more while they do; only its bytes are looked at. None: it is not asked for."""
    types: GraphTypes | None = None
    """Of the graph, for model rgcn."""
    rank: int = 0
    ranks: int = 1
    """Processes that take the same steps and add their gradients."""
    meeting: str = ""
    """File by which they find each other, where there are several."""
    loading: LoadingRequest | None = None
    """What the thread of the steps does before each: sample a batch and gather one's rows. Caches
    then hold other things than after a step (DEC-28). None: nothing."""
    times_loading: bool = False
    """Time what else a loader does between and beside the mean batch's steps, and not the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingAnswer:
    """What one process measured."""

    forward_backward: list[float]
    """Median seconds per step, by scale."""
    spread: float
    """Relative half-width of the median over steps, the largest of the scales."""
    optimizer_seconds: float
    batch_seconds: float
    """Adding edge weights to a mean batch."""
    warmup_seconds: float
    """Warm-up steps above as many steady ones."""
    num_parameters: int
    activation_bytes: int
    in_line: InLine | None = None
    """What was done before each step; None: nothing."""
    all_reduce: list[float] = field(default_factory=list[float])
    """Seconds of adding the gradients over ranks in each measured step, from this rank's entry;
    empty for one rank."""
    own_batches: bool = False
    """Those steps are on batches that each rank drew, as in a run: ranks wait for the longer."""
