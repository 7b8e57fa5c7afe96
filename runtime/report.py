"""The run report: what a run measured, in the words of the plan, so that the two can be compared.

`report.json` is written by rank 0 after the last epoch (and after each epoch, so that a run that is
stopped leaves its figures), as a whole or not at all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime import codec
from gnnplan.runtime.errors import InputError

EMULATED_NOTE = "ranks are GPUs emulated on cores: no seconds here are measured on a GPU"
"""What is said of a run whose ranks are emulated."""
REPORT_FILE = "report.json"
WARMUP_STEPS = 10
"""Steps discarded at the start of each process: library warm-up, page faults, compilation loads."""
MIN_MEASURED_STEPS = 30
"""Steps that a step time must rest on to be compared with a prediction."""
MAX_STEP_SAMPLES = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantiles:
    """Median and spread of a measured quantity."""

    median: float
    p10: float
    p90: float
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StageReport:
    """Seconds per step of one stage on one rank."""

    median: float
    p10: float
    p90: float
    count: int
    mean: float
    core_seconds: float
    """Mean processor seconds of the thread that ran the stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What one rank measured, warm-up steps left out of the times but not of the counts."""

    rank: int
    stages: dict[str, StageReport]
    rows_by_source: dict[str, int]
    bytes_by_source: dict[str, int]
    hit_rates: dict[str, float]
    """Share of the feature rows by source."""
    peak_memory_bytes: int
    """Largest resident memory of the process, pages of mapped files included."""
    private_memory_bytes: int
    """Largest private (anonymous) resident memory, looked at after each epoch."""
    lists_by_source: dict[str, int] = field(default_factory=dict[str, int])
    """Adjacency lists visited by source; empty with topology on the host."""
    list_bytes_by_source: dict[str, int] = field(default_factory=dict[str, int])
    resident_topology_bytes: int = 0
    """Bytes of adjacency lists and their directory that the rank holds itself."""
    resident_feature_bytes: int = 0
    """Bytes of feature rows that the rank holds itself."""
    cores: list[int] = field(default_factory=list[int])
    """Cores the rank was allowed to run on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochReport:
    """One epoch."""

    epoch: int
    seconds: float
    """Training only, without evaluation and checkpoints."""
    steps: int
    loss: float
    """Mean over the epoch's steps of the loss per seed."""
    first_loss: float
    last_loss: float
    val: float | None = None
    """Validation score in the report's metric; None: not evaluated after this epoch."""
    eval_seconds: float = 0.0
    checkpoint_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeconds:
    """Measured seconds of one optimiser step on rank 0, `WARMUP_STEPS` discarded."""

    median: float
    p10: float
    p90: float
    count: int
    discarded: int
    enough: bool
    """True where at least `MIN_MEASURED_STEPS` remain after `WARMUP_STEPS`."""


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
    """True where something else was running: the load before passed half the cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """What a run measured."""

    plan_id: str
    versions: dict[str, str]
    num_ranks: int
    metric: str
    ranks: list[RankReport]
    step_seconds: StepSeconds
    step_samples: list[float]
    """Seconds of rank 0's steps after the warm-up, at most `MAX_STEP_SAMPLES`."""
    epochs: list[EpochReport]
    losses: list[float]
    """Global loss per seed of each step of this process, at most `MAX_STEP_SAMPLES`."""
    first_step: int = 0
    """Optimiser steps before those, taken before an interruption."""
    startup_seconds: float
    """From the start of the rank's process to its first step."""
    test_score: float | None
    """Test score in `metric` (accuracy, micro_f1, roc_auc, mrr); None: not evaluated."""
    noise: HostNoise
    notes: list[str] = field(default_factory=list[str])
    emulated: bool = field(default=False, metadata=codec.UNLESS_SET)
    """Whether the ranks were GPUs emulated on cores, whose seconds are no GPU's."""
    stages: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of each stage in a typical step of a typical rank: the median over steps of the mean
    over ranks, in which the wait of ranks for each other shows; empty in reports of versions before
    it."""


def quantiles(values: Sequence[float]) -> Quantiles:
    """Median, 10th and 90th percentile of a non-empty sequence."""
    low, middle, high = np.percentile(np.asarray(values, dtype=np.float64), (10, 50, 90))
    return Quantiles(median=float(middle), p10=float(low), p90=float(high), count=len(values))


def measured_steps(seconds: Sequence[float], *, discard: int = WARMUP_STEPS) -> StepSeconds:
    """Median step of one process, its first `discard` steps left out, over epochs.

    Args:
        seconds: elapsed seconds of every step of one process, in order.
        discard: steps to leave out at the start; a run too short for that leaves out half.

    Returns:
        The timing, flagged `enough` only with `MIN_MEASURED_STEPS` left after at least
        `WARMUP_STEPS`; all zero where no step was taken.
    """
    discard = min(discard, len(seconds) // 2)
    kept = list(seconds[discard:])
    q = quantiles(kept) if kept else Quantiles(median=0.0, p10=0.0, p90=0.0, count=0)
    enough = q.count >= MIN_MEASURED_STEPS and discard >= WARMUP_STEPS
    return StepSeconds(
        median=q.median, p10=q.p10, p90=q.p90, count=q.count, discarded=discard, enough=enough
    )


def over_ranks(seconds: Sequence[Sequence[float]], num_ranks: int) -> NDArray[np.float64]:
    """A stage's seconds by step, the mean over the ranks of each step.

    Whoever is first in a step waits in a collective for the last. That shows in the mean over one
    step's ranks; in the median of a rank alone it does not, as either of two is the last in half of
    the steps.

    Args:
        seconds: of each rank that has the stage, at least one; in order of step.
        num_ranks: all of them: the others have none of it.

    Returns:
        float64, shape (steps,): as many steps as all of them have.

    >>> over_ranks([[2.0, 0.0, 2.0], [0.0, 2.0, 0.0]], 2).tolist()
    [1.0, 1.0, 1.0]
    """
    steps = min(map(len, seconds))
    stacked = np.asarray([each[:steps] for each in seconds], dtype=np.float64)
    return stacked.sum(axis=0) / num_ranks


def typical_stages(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Median step of each stage, of the mean over the ranks (`over_ranks`).

    >>> typical_stages([{"sample": [1.0, 3.0, 9.0]}, {"sample": [1.0, 1.0, 1.0]}])
    {'sample': 2.0}
    """
    names = sorted({name for rank in ranks for name in rank if rank[name]})
    return {
        name: float(np.median(over_ranks([r[name] for r in ranks if r.get(name)], len(ranks))))
        for name in names
    }


def save_report(report: RunReport, folder: Path) -> Path:
    """Write report.json into a folder, as a whole or not at all; returns its path."""
    path = Path(folder) / REPORT_FILE
    codec.write_text_atomically(path, codec.dumps(report))
    return path


def load_report(folder: Path) -> RunReport:
    """Read report.json from a plan's or a run's folder; that file may be named itself.

    Raises:
        InputError: there is none, or it is damaged.
    """
    path = folder if folder.name == REPORT_FILE else folder / REPORT_FILE
    if not path.is_file():
        raise InputError(f"{folder}: expected {REPORT_FILE}, found none; train first")
    try:
        return codec.decode(RunReport, codec.parse(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a run report ({error}); train again") from None
