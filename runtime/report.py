"""The run report: a run's measurements in the words of the plan, for comparison.

`report.json` is written by rank 0 as a whole or not at all, after the last epoch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime import codec
from gnnplan.runtime.errors import InputError

EMULATED_NOTE = "ranks are GPUs emulated on cores: no seconds here are measured on a GPU"
"""Note on a run whose ranks are emulated."""
REPORT_FILE = "report.json"
WARMUP_STEPS = 10
"""Steps discarded at the start of each process: warm-up, page faults, loading of kernels."""
MIN_MEASURED_STEPS = 30
"""Least number of steps behind a step time that is compared with a prediction."""
MAX_STEP_SAMPLES = 2000
TRACED_STEPS = 16
"""Number of steps after the warm-up whose stages are kept with their times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantiles:
    """Median and spread of a measured quantity."""

    median: float
    p10: float
    p90: float
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StageReport:
    """Seconds per step of one stage on one rank, over the steps of `StepSeconds`."""

    median: float
    p10: float
    p90: float
    count: int
    mean: float
    core_seconds: float
    """Mean processor seconds of the thread that ran the stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """When one stage of one step ran."""

    stage: str
    """A stage of `Stage`, or `step` for the whole step."""
    step: int
    """Number of the step within its process, from 0."""
    thread: int
    """0 for the training thread, 1 and more for loader threads."""
    start_seconds: float
    """Seconds since this rank's first span began; clocks of ranks are not compared."""
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """Measurements of one rank; warm-up steps count in counts but not in times."""

    rank: int
    stages: dict[str, StageReport]
    rows_by_source: dict[str, int]
    bytes_by_source: dict[str, int]
    hit_rates: dict[str, float]
    """Share of the feature rows by source."""
    peak_memory_bytes: int
    """Largest resident memory of the process, pages of mapped files included."""
    private_memory_bytes: int
    """Largest private (anonymous) resident memory at the ends of epochs."""
    lists_by_source: dict[str, int] = field(default_factory=dict[str, int])
    """Number of adjacency lists visited by source; empty with topology on the host."""
    list_bytes_by_source: dict[str, int] = field(default_factory=dict[str, int])
    resident_topology_bytes: int = 0
    """Bytes of adjacency lists and their directory that the rank holds itself."""
    resident_feature_bytes: int = 0
    """Bytes of feature rows that the rank holds itself."""
    cores: list[int] = field(default_factory=list[int])
    """Cores that the rank was allowed to run on."""
    spans: list[Span] = field(default_factory=list[Span], metadata=codec.UNLESS_SET)
    """When each stage ran, for the first `TRACED_STEPS` steps after the warm-up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochReport:
    """Measurements of one epoch."""

    epoch: int
    seconds: float
    """Seconds of training, without evaluation and checkpoints."""
    steps: int
    loss: float
    """Mean loss over the epoch's seeds (or links): each counts alike, whatever step it came in."""
    first_loss: float
    last_loss: float
    val: float | None = None
    """Validation score in the report's metric; None: not evaluated after this epoch."""
    eval_seconds: float = 0.0
    checkpoint_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeconds:
    """Measured seconds of an optimiser step on rank 0, of whole batches after `discarded` steps.

    An epoch's small last batch counts where there are no others.
    """

    median: float
    p10: float
    p90: float
    count: int
    discarded: int
    enough: bool
    """Whether at least `MIN_MEASURED_STEPS` remain after `WARMUP_STEPS`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostNoise:
    """How quiet the machine was."""

    load_before: float
    """One-minute load average when the run began."""
    load_after: float
    steal_fraction: float
    """Share of processor time that the hypervisor took away during the run."""
    cores: int
    overloaded: bool
    """Whether something else was running: the load before passed half the cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanUse:
    """Plan that a run was trained under from a step on."""

    step: int
    """Number of optimiser steps before its first."""
    plan_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """Measurements of a run."""

    plan_id: str
    versions: dict[str, str]
    num_ranks: int
    metric: str
    ranks: list[RankReport]
    step_seconds: StepSeconds
    step_samples: list[float]
    """Seconds of rank 0's steps after the warm-up, small ones too; at most `MAX_STEP_SAMPLES`."""
    epochs: list[EpochReport]
    losses: list[float]
    """Global loss per seed of each step of this process, at most `MAX_STEP_SAMPLES`."""
    first_step: int = 0
    """Number of optimiser steps taken before an interruption."""
    startup_seconds: float
    """Seconds from the start of the rank's process to its first step."""
    test_score: float | None
    """Test score in `metric` (accuracy, micro_f1, roc_auc, mrr); None: not evaluated."""
    noise: HostNoise
    notes: list[str] = field(default_factory=list[str])
    emulated: bool = field(default=False, metadata=codec.UNLESS_SET)
    """Whether the ranks were GPUs emulated on cores, whose seconds are no GPU's."""
    stages: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of each stage in a typical step: the median over steps of the mean over ranks.

    The wait of ranks for each other shows in it. Reports of earlier versions lack it.
    """
    forced: list[str] = field(default_factory=list[str], metadata=codec.UNLESS_SET)
    """How graph and machine differed from the plan's, where the run was forced all the same."""
    overflowed_steps: int = field(default=0, metadata=codec.UNLESS_SET)
    """Steps of a captured plan whose batch did not fit its shapes, taken kernel by kernel."""
    plans: list[PlanUse] = field(default_factory=list[PlanUse], metadata=codec.UNLESS_SET)
    """Plans in the order of their use, where the run tried several; times are the last one's."""


def quantiles(values: Sequence[float]) -> Quantiles:
    """Return median, 10th and 90th percentile of a non-empty sequence."""
    low, middle, high = np.percentile(np.asarray(values, dtype=np.float64), (10, 50, 90))
    return Quantiles(median=float(middle), p10=float(low), p90=float(high), count=len(values))


def measured_steps(
    seconds: Sequence[float],
    whole: Callable[[int], Sequence[float]] | None = None,
    *,
    discard: int = WARMUP_STEPS,
) -> StepSeconds:
    """Return the median step of one process, over epochs; all zero where no step was taken.

    `seconds` has every step in order; `whole` returns those of whole batches after a number of
    steps, None for all. A run too short for `discard` steps leaves out half.
    """
    discard = min(discard, len(seconds) // 2)
    kept = list(seconds[discard:] if whole is None else whole(discard))
    q = quantiles(kept) if kept else Quantiles(median=0.0, p10=0.0, p90=0.0, count=0)
    enough = q.count >= MIN_MEASURED_STEPS and discard >= WARMUP_STEPS
    return StepSeconds(
        median=q.median, p10=q.p10, p90=q.p90, count=q.count, discarded=discard, enough=enough
    )


def typical_epoch(seconds: Sequence[float]) -> float | None:
    """Return the median epoch, without the first where there are others; None without any.

    >>> typical_epoch([9.0, 2.0, 1.0, 2.0]), typical_epoch([9.0]), typical_epoch([])
    (2.0, 9.0, None)
    """
    later = seconds[1:] or seconds
    return float(np.median(later)) if later else None


def over_ranks(seconds: Sequence[Sequence[float]], num_ranks: int) -> NDArray[np.float64]:
    """Return a stage's seconds by step, the mean over all ranks of each step.

    `seconds` has the ranks that have the stage; the others spend none. Whoever is first in a step
    waits in a collective for the last. The mean over one step's ranks shows it; the median of one
    rank does not, as either of two is last in half of the steps.

    >>> over_ranks([[2.0, 0.0, 2.0], [0.0, 2.0, 0.0]], 2).tolist()
    [1.0, 1.0, 1.0]
    """
    steps = min(map(len, seconds))
    stacked = np.asarray([each[:steps] for each in seconds], dtype=np.float64)
    return stacked.sum(axis=0) / num_ranks


def typical_stages(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return the median step of each stage's mean over the ranks (`over_ranks`).

    >>> typical_stages([{"sample": [1.0, 3.0, 9.0]}, {"sample": [1.0, 1.0, 1.0]}])
    {'sample': 2.0}
    """
    names = sorted({name for rank in ranks for name in rank if rank[name]})
    return {
        name: float(np.median(over_ranks([r[name] for r in ranks if r.get(name)], len(ranks))))
        for name in names
    }


def window_means(seconds: Sequence[float], stack: int) -> NDArray[np.float64]:
    """Return the mean step of each window of `stack` steps; an incomplete last window is left out.

    Args:
        seconds: seconds of steps in order, shape (steps,), at least one.
        stack: batches drawn at once, 1 for none.

    Returns:
        float64, one value per window; one over all where no window is complete.

    >>> window_means([9.0, 1.0, 1.0, 1.0, 5.0, 1.0, 1.0, 1.0, 7.0], 4).tolist()
    [3.0, 2.0]
    >>> window_means([9.0, 1.0], 4).tolist(), window_means([9.0, 1.0], 1).tolist()
    ([5.0], [9.0, 1.0])
    """
    found = np.asarray(seconds, dtype=np.float64)
    if found.size < stack:
        return found.mean(keepdims=True)
    whole = found.size - found.size % stack
    return found[:whole].reshape(-1, stack).mean(axis=1)


def save_report(report: RunReport, folder: Path) -> Path:
    """Write report.json into a folder, as a whole or not at all; return its path.

    One that is there already is left as it is.
    """
    path, text = Path(folder) / REPORT_FILE, codec.dumps(report)
    if not path.is_file() or path.read_bytes() != text.encode():
        codec.write_text_atomically(path, text)
    return path


def load_report(folder: Path) -> RunReport:
    """Read report.json from a plan's or a run's folder, or the named file itself."""
    path = folder if folder.name == REPORT_FILE else folder / REPORT_FILE
    if not path.is_file():
        raise InputError(f"{folder}: expected {REPORT_FILE}, found none; train first")
    try:
        return codec.decode(RunReport, codec.parse(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a run report ({error}); train again") from None
