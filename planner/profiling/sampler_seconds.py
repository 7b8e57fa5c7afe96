"""Seconds of sampling one batch, by one thread with nothing beside it."""

import time

import numpy as np

from planner.profiling.draw import Draw

TIMED_BATCHES = 16
"""Batches sampled to time the sampler, after as many that warm it up."""


def sampling_seconds(draw: Draw) -> float:
    """Median elapsed seconds of sampling a batch of one rank, by one thread with nothing beside.

    Between two batches lies a stretch of a model's work, which leaves the caches as training does.
    """
    from planner.probe.interlude import Interlude  # imports torch, which other profiles do without

    taken: list[float] = []
    interlude = Interlude()
    for step in range(2 * TIMED_BATCHES):
        interlude()
        start = time.perf_counter()
        draw(0, step)
        taken.append(time.perf_counter() - start)
    return float(np.median(taken[TIMED_BATCHES:]))
