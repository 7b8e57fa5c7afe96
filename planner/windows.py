"""Measured steps of plans that draw several batches at once.

One step in `stack` then makes them all, so a step's median says nothing of that work: what a step
takes is the median over windows of `stack` steps one after the other, each with one such step.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.plan import Plan
from runtime.report import RunReport


def window_means(seconds: Sequence[float], stack: int) -> NDArray[np.float64]:
    """Mean step of each window of `stack` steps; steps at the end that fill none are left out.

    Args:
        seconds: of steps in order, shape (steps,), at least one.
        stack: batches drawn at once, 1 for none.

    Returns:
        float64, one value per window; one value over all where they are fewer than a window.

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


def measured_step(plan: Plan, report: RunReport) -> float:
    """Seconds of a typical step of a run: its median, by windows where batches are stacked."""
    stack = plan.strategy.bulk_batches
    if stack <= 1 or not report.step_samples:
        return report.step_seconds.median
    return float(np.median(window_means(report.step_samples, stack)))
