"""What a few batches told, kept beside the profiles: a repeated plan reads it and draws nothing.

Sizes are pure functions of graph and settings; seconds are not, and it is the file that makes a
repeated plan the same to the byte.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from planner.machine import Table
from planner.profiling import cache
from runtime import codec

T = TypeVar("T")

ROUNDS = 3
"""Stacks of each size that are timed, after one that warms up."""
DEPENDENT = 8
"""Batches timed for each kappa: two turns of the smallest."""
SINGLES = 3
"""Single batches timed beside each stack; they take turns, so that load meets both."""


def pilot(decided: Sequence[Any], cls: type[T], make: Callable[[], T | str]) -> T | str:
    """A kept answer, or a made one, which is kept; a sentence (why there is none) is not.

    Args:
        decided: all that decides the answer, the name of the question first.
        cls: of the answer, a dataclass.
        make: answers.
    """
    place = _folder() / f"{codec.content_hash(list(decided))[:32]}.json"
    with contextlib.suppress(OSError, ValueError):
        return codec.decode(cls, codec.parse(place.read_bytes()))
    made = make()
    if isinstance(made, str):
        return made
    place.parent.mkdir(parents=True, exist_ok=True)
    codec.write_text_atomically(place, codec.dumps(made))
    return codec.decode(cls, codec.parse(place.read_bytes()))


def stack_rates(
    sizes: Sequence[int],
    stack: Callable[[int, int], object],
    single: Callable[[int], object],
    between: Callable[[], object],
) -> Table:
    """Seconds of a batch in a stack of k over those of one alone, by k.

    Args:
        sizes: values of k, rising.
        stack: stack(first, k) draws batches first .. first + k - 1 together.
        single: draws one batch.
        between: work of a model between two draws, which leaves the caches as training does.
    """
    ratios: list[float] = []
    spreads: list[float] = []
    for k in sizes:
        found: list[float] = []
        for turn in range(ROUNDS + 1):
            between()
            together = _seconds(lambda at=turn * k, k=k: stack(at, k)) / k
            alone: list[float] = []
            for step in range(turn * k, turn * k + min(k, SINGLES)):
                between()
                alone.append(_seconds(lambda step=step: single(step)))
            found.append(together / float(np.median(alone)))
        found = found[1:]
        ratios.append(float(np.median(found)))
        spreads.append((max(found) - min(found)) / 2 / ratios[-1])
    return Table(
        unit="ratio",
        axes=["batches"],
        points=[[float(k) for k in sizes]],
        values=ratios,
        spread=float(np.median(spreads)),
    )


def dependent_rates(
    kappas: Sequence[int], draw: Callable[[int | None, int], object], between: Callable[[], object]
) -> Table:
    """Mean seconds of batches that hang together over those of independent ones, by kappa.

    Args:
        kappas: rising.
        draw: draw(kappa, step) draws one batch; kappa None: as the user's sampler says.
        between: work of a model between two draws, which leaves the caches as training does.
    """

    def seconds(kappa: int | None) -> list[float]:
        found: list[float] = []
        # The batch at a multiple of kappa needs one set of numbers, those between mix two.
        for step in range(1, DEPENDENT + 1):
            between()
            found.append(_seconds(lambda step=step: draw(kappa, step)))
        return found

    for kappa in (None, *kappas):
        draw(kappa, 0)  # grows the workspace
    alone = seconds(None)
    means = [float(np.mean(seconds(kappa))) for kappa in kappas]
    return Table(
        unit="ratio",
        axes=["kappa"],
        points=[[float(k) for k in kappas]],
        values=[mean / float(np.mean(alone)) for mean in means],
        spread=float(np.std(alone) / np.mean(alone)),
    )


def _seconds(task: Callable[[], object]) -> float:
    start = time.perf_counter()
    task()
    return time.perf_counter() - start


def _folder() -> Path:
    return cache.cache_folder().with_name("pilots")
