"""Seconds of sampling one batch: between two steps of the model, and by a loader thread beside one.

The steps are the model's own. They leave the caches as training does, and they want the
interpreter's lock as often as training does: between two of its kernels a loader thread waits for
it, .1 to .5 ms a batch on two cores, where beside one long product it waits for nothing.
"""

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from planner.profiling.draw import Draw
from runtime.plan import Sampler

WARM_BATCHES = 4
"""Batches each way before the clock counts: a thread makes room for its batches once."""
TIMED_BATCHES = 16
"""Batches timed each way; fewer where steps are long."""
LEAST_BATCHES = 5
MOST_SECONDS = 2.0
"""Each way; after them no more than the least are timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRequest:
    """Which batches a timing process draws."""

    graph: str
    """The dataset's folder."""
    sampler: Sampler
    num_ranks: int
    shared: bool
    """Ranks sample one batch together."""
    beside: bool
    """There is a core for a loader thread besides the model's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingAnswer:
    """Median seconds of one batch."""

    alone_seconds: float
    beside_seconds: float | None
    """On a loader thread, while the model computes; None: not asked for."""


def sampling_seconds(
    draw: Draw, step: Callable[[], object], *, beside: bool = True
) -> SamplingAnswer:
    """Time batches of rank 0, each drawn once: by this thread, then by another one.

    Not in turn: then each batch was slower, as no thread of a run finds it (1.1 ms a batch in turn,
    .7 by one thread: 65,536 nodes of a block model).

    Args:
        draw: draws a batch.
        step: one step of the model.
        beside: whether to time the other thread.
    """
    numbers = itertools.count()

    def one() -> float:
        number = next(numbers)
        start = time.perf_counter()
        draw(0, number)
        return time.perf_counter() - start

    def after_a_step() -> float:
        step()
        return one()

    alone = _median(after_a_step)
    if not beside:
        return SamplingAnswer(alone_seconds=alone, beside_seconds=None)
    with ThreadPoolExecutor(1) as loader:

        def beside_steps() -> float:
            drawn = loader.submit(one)  # a loader begins when training takes the batch before
            step()
            while not drawn.done():
                step()
            return drawn.result()

        return SamplingAnswer(alone_seconds=alone, beside_seconds=_median(beside_steps))


def _median(turn: Callable[[], float]) -> float:
    """Of the seconds that turns say they took."""
    for _ in range(WARM_BATCHES):
        turn()
    until = time.perf_counter() + MOST_SECONDS
    found = [turn() for _ in range(LEAST_BATCHES)]
    while len(found) < TIMED_BATCHES and time.perf_counter() < until:
        found.append(turn())
    return float(np.median(found))
