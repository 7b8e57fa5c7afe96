"""Short runs of a plan: seconds per step, or seconds until a validation score."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planner.windows import window_means
from runtime.plan import Plan
from runtime.report import WARMUP_STEPS, RunReport, quantiles

Launcher = Callable[..., RunReport]
"""`runtime.launch.train`, or what stands in for it: (plan folder, **options) -> report."""


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
