"""Whether others share the cores at this moment: how long rows take to be copied within a cache.

A virtual core is one thread of a real one, and who has the other thread of it takes part of what it
can do. What waits for memory, as gathers from afar do, hardly feels it; what keeps a core's units
busy does. On a 2-core virtual machine these copies took 52.5 us on most looks of some hours, .3%
more on three quarters of them, and 63 to 81 when shared, with little in between; in other hours two
looks in three found a core shared. The same training steps on two threads took 4.96 ms while cores
were near and nobody shared them, 6.09 when one was shared (654 and 195 looks of 2.5 minutes), 8.1
when they were apart. It comes and goes within a second, or stays for minutes. `pace.py` sees only
what changes while it looks; here what is usual is remembered.
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
"""Rows of one try, some 50 us."""
TRIES = 4
"""The quickest counts: an interrupt is no neighbour."""
MOST_CORES = 4
"""Of more as many are looked at: see `core_distance.MOST_PAIRS`."""
SHARED = 1.2
"""Times what it takes alone from which a core is held to be shared: alone it varies by .3%, and
a neighbour makes it 1.2 to 1.55 times as long."""

_jit: Any = numba.njit(cache=True, nogil=True)


@_jit
def _copy_rows(
    rows: NDArray[np.float32], places: NDArray[np.int64], into: NDArray[np.float32]
) -> None:
    """Copy rows at places, over and over into the same few.

    Number by number, as a constant count is compiled: one store per cycle, which is what a
    neighbour takes part of. Eight at once took 1.2 times their least on cores nobody shared.

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
