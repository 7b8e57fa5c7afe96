"""Short runs of a plan: seconds per step, or seconds until a validation score."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import SettingsError
from planner.queries.compare import window_means
from runtime.plan.schema import Interval, Plan
from runtime.report import WARMUP_STEPS, RunReport, quantiles

Launcher = Callable[..., RunReport]
"""`runtime.launch.launch.train`, or what stands in for it: (plan folder, **options) -> report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Seconds of a candidate's steps, over all its runs; warm-up left out."""

    median: float
    p10: float
    p90: float
    count: int
    rounds: list[float]
    """Median of each run, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Approach:
    """A candidate's way to a validation score."""

    seconds: float | None
    """Of training alone, up to the epoch that reached it; None: none did."""
    epochs: int
    best: float
    """Best validation score seen."""


def measured(reports: Sequence[RunReport], stack: int = 1) -> Measured:
    """All runs of one candidate together; where batches are drawn `stack` at once, by windows."""
    runs = [window_means(report.step_samples, stack) for report in reports]
    spread = quantiles(np.concatenate(runs).tolist())
    return Measured(
        median=spread.median,
        p10=spread.p10,
        p90=spread.p90,
        count=spread.count,
        rounds=[float(np.median(run)) for run in runs],
    )


def run_steps(launch: Launcher, plan: Plan, folder: Path, run: Path, steps: int) -> RunReport:
    """One short run: the steps of the warm-up, and `steps` more."""
    most = WARMUP_STEPS + steps
    return launch(
        folder,
        epochs=-(-most // max(1, plan.prediction.steps_per_epoch)),
        max_steps=most,
        eval_every=0,
        keep_checkpoints=0,
        max_restarts=0,
        run_folder=run,
    )


class _ScoreReachedError(Exception):
    """The score was reached: the run need not go on."""


def run_to(launch: Launcher, folder: Path, run: Path, *, target: float, epochs: int) -> Approach:
    """Train until an epoch's validation score is `target`, at most `epochs`; then end the ranks."""
    seconds: list[float] = []
    scores: list[float] = []

    def watch(event: dict[str, Any]) -> None:
        if event.get("event") != "epoch":
            return
        seconds.append(float(event["seconds"]))
        scores.append(float(event["val"]))
        if scores[-1] >= target:
            raise _ScoreReachedError

    reached = False
    try:
        launch(
            folder, epochs=epochs, keep_checkpoints=0, max_restarts=0, run_folder=run,
            progress=watch,
        )  # fmt: skip
    except _ScoreReachedError:
        reached = True
    return Approach(
        seconds=sum(seconds) if reached else None,
        epochs=len(seconds),
        best=max(scores, default=0.0),
    )


MOST = {"top": 64, "steps": 10**6, "rounds": 100, "epochs": 10**6}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """How tuning is to measure.

    Raises:
        SettingsError: a value cannot be used.
    """

    top: int = 3
    """Candidates to measure."""
    steps: int = 40
    """Steps of each run after its warm-up."""
    rounds: int = 2
    """Runs of each candidate."""
    seed: int = 0
    """Of the order in which they run."""
    target: float | None = None
    """Validation score to reach; None: the seconds of a step decide."""
    epochs: int = 30
    """Most epochs of a run to that score."""

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            found = getattr(self, name)
            if not 1 <= found <= most:
                raise SettingsError(f"--{name}: expected 1 to {most}, found {found}; correct it")
        if self.target is not None and not 0.0 < self.target <= 1.0:
            raise SettingsError(
                f"--to-accuracy: expected a score above 0 and at most 1, found {self.target:g}"
            )

    @property
    def criterion(self) -> str:
        """What decides."""
        return "step_seconds" if self.target is None else "seconds_to_accuracy"


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedCandidate:
    """One candidate: what the model says and what was measured, apart."""

    name: str
    plan_id: str
    statistics: str
    """Equal where candidates need equally many steps to an accuracy."""
    predicted: Interval
    """Seconds per step."""
    measured: Measured
    ape: float
    """|predicted - measured| / measured."""
    within_interval: bool
    to_accuracy: Approach | None = None
    """Of the fastest candidate of its statistics; None for the others, or where none was asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """What tuning found."""

    plan_id: str
    """Of the plan that is kept."""
    kept: str
    model_choice: str
    """The candidate that the planner takes without measuring."""
    model_regret: float | None
    """How much longer that one takes than the kept one, as a share of it; None: it never got
    to the score."""
    criterion: str
    """step_seconds | seconds_to_accuracy."""
    target: float | None
    candidates: list[TunedCandidate]
    """The model's choice first, then fastest predicted first."""
    factors: dict[str, float] = field(default_factory=dict[str, float])
    """The machine's factors by stage after these runs."""
    notes: list[str] = field(default_factory=list[str])


def deciding_seconds(rows: Sequence[TunedCandidate], number: int, asked: Asked) -> float:
    """What a candidate is judged by: seconds of a step, or of training to the score.

    Candidates of equal statistics need equally many steps to a score, so only the fastest of them
    was trained, and another's seconds are to its own as their steps are. Infinite where the score
    was not reached.
    """
    row = rows[number]
    if asked.target is None:
        return row.measured.median
    for other in rows:
        if other.statistics == row.statistics and other.to_accuracy is not None:
            seconds = other.to_accuracy.seconds
            ratio = row.measured.median / other.measured.median
            return float("inf") if seconds is None else seconds * ratio
    return float("inf")
