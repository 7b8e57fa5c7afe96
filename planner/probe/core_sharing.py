"""Measure whether others share the cores now: how long copies of rows within a cache take.

A virtual core is one thread of a real core. A neighbour on the other thread takes part of the
core's units: copies within a cache feel it, gathers from memory hardly (DEC-18). It comes and goes
within a second, or stays for minutes. `pace.py` sees only changes while it looks; here the usual
time is remembered.
"""

import functools
import threading
import time
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from planner.probe.looks import Looks
from runtime.cores import keep_thread_to, usable_core_ids

ROWS, COLUMNS = 1_500, 64
"""Of float32: 384 kB, which a core's own second cache holds."""
COPIED = 3_000
"""Rows copied in one try."""
TRIES = 4
"""The quickest counts: an interrupt is no neighbour."""
MOST_CORES = 4
"""Of more as many are looked at: see `core_distance.MOST_PAIRS`."""
SHARED = 1.2
"""Ratio to the time of a core alone from which it counts as shared (DEC-18)."""

_jit: Any = numba.njit(cache=True, nogil=True)


@_jit
def _copy_rows(
    rows: NDArray[np.float32], places: NDArray[np.int64], into: NDArray[np.float32]
) -> None:
    """Copy rows at places, over and over into the same few.

    Number by number, as a constant count is compiled: one store per cycle, which is what a
    neighbour takes part of; eight at once vary more on cores that nobody shares.

    Args:
        rows: shape (any, COLUMNS).
        places: of rows, shape (any,).
        into: shape (any power of two, COLUMNS).
    """
    last = into.shape[0] - 1
    for i in range(places.size):
        place = places[i]
        for j in range(COLUMNS):
            into[i & last, j] = rows[place, j]


@functools.cache
def _work() -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
    """Rows, places and room of `_copy_rows`, once in a process."""
    places = np.random.default_rng(0).integers(0, ROWS, COPIED)
    return np.ones((ROWS, COLUMNS), np.float32), places, np.empty((128, COLUMNS), np.float32)


def copy_seconds(core: int) -> float:
    """Seconds that the copies take on a core.

    Args:
        core: number of a core this process may use.
    """
    rows, places, into = _work()
    took = list[float]()

    def copy() -> None:
        keep_thread_to([core])
        _copy_rows(rows, places, into)  # fetches them, and compiles once in a process
        for _ in range(TRIES):
            begun = time.perf_counter()
            _copy_rows(rows, places, into)
            took.append(time.perf_counter() - begun)

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    thread.join()
    return min(took)


class CoreSharing:
    """How much others take of the cores, beside how they are alone.

    Alone is what a quarter of all looks found (`Looks`). Of more than `MOST_CORES` as many are
    looked at, evenly spread. A system that keeps no thread to a core has none.
    """

    def __init__(self, looks: Looks | None = None) -> None:
        """Cores this process may use now.

        Args:
            looks: at them before this; None: there were none.
        """
        cores = usable_core_ids()
        self._cores = cores[:: -(-len(cores) // MOST_CORES) or 1]
        self._looks = looks or Looks()

    def slowdown(self) -> float:
        """Seconds of copies over those of a core alone, of the slowest; 1: no core is known."""
        found = [self._looks.slowdown(f"{core}", copy_seconds(core)) for core in self._cores]
        return max(found, default=1.0)
