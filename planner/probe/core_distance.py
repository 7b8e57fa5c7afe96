"""Measure how far apart the cores are now: how long a cache line takes from one to another.

The host of a virtual machine moves its cores for seconds or minutes: now they share a cache, now
they do not. This shows as no load and no stolen time, yet steps on several threads take longer
(DEC-17). Timings that are compared must be taken in the same state. Earlier looks are remembered,
since cores that are always far apart look like any others.
"""

import math
import threading
import time
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # pyright: ignore[reportMissingTypeStubs]
from numba.core import types
from numba.extending import intrinsic

from planner.probe.looks import Looks
from runtime.cores import keep_thread_to, usable_core_ids

TRIPS = 2_000
"""There and back."""
WARM_TRIPS = 100
"""Before the clock runs: one thread starts later than the other."""
TRIES = 4
"""The quickest counts: an interrupt is nobody's distance, and a line's own place in a shared cache
makes half as much again."""
MOST_SPINS = 4_000_000
"""Reads of the line in one try, after which another process is taken to have the core."""
MOST_PAIRS = 2
"""Pairs of cores that a look covers at most: more would take too long (DEC-21)."""
FAR = 2.0
"""Ratio to the time between near cores from which cores count as far apart (DEC-17)."""
LINE_BYTES = 128
"""Two lines: they are fetched in pairs."""

_jit: Any = numba.njit(cache=True, nogil=True)


_intrinsic: Any = intrinsic


@_intrinsic
def _seen(typing: Any, address: Any) -> Any:
    """The number at an address, read from memory each time."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), code


@_intrinsic
def _put(typing: Any, address: Any, number: Any) -> Any:
    """Write a number where others see it."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store_atomic(args[1], pointer, "release", 8)
        return args[1]

    return types.int64(types.int64, types.int64), code


@_jit
def _throw(address: int, first: int, trips: int, most_spins: int) -> bool:
    """Put every second number there, each after the other thread has put the one before it.

    Args:
        address: of the line, an int64 that is 0 at first.
        first: 1 for who begins, 2 for the other.
        trips: numbers to put.
        most_spins: looks at the line before giving up, which the other thread then does too.

    Returns:
        Whether all were put.
    """
    spins = 0
    for i in range(trips):
        number = first + 2 * i
        while _seen(address) != number - 1:
            spins += 1
            if spins > most_spins:
                return False
        _put(address, number)
    return True


def line_seconds(one: int, other: int) -> float:
    """Seconds that a cache line takes from one core to another; inf: one of them is taken.

    Args:
        one: number of a core this process may use.
        other: of another.
    """
    return min(_try(one, other) for _ in range(TRIES))


def _try(one: int, other: int) -> float:
    lines = np.zeros(4 * LINE_BYTES // 8, dtype=np.int64)
    warm = lines.ctypes.data + LINE_BYTES - lines.ctypes.data % LINE_BYTES
    start, done, took = threading.Barrier(2), list[bool](), list[float]()

    def play(core: int, first: int) -> None:
        keep_thread_to([core])
        start.wait()
        met = _throw(warm, first, WARM_TRIPS, MOST_SPINS)
        begun = time.perf_counter()
        done.append(met and _throw(warm + LINE_BYTES, first, TRIPS, MOST_SPINS))
        took.append(time.perf_counter() - begun)

    threads = [
        threading.Thread(target=play, args=each, daemon=True) for each in ((one, 1), (other, 2))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(took) / (2 * TRIPS) if all(done) else math.inf


class CoreDistance:
    """How far apart cores are, beside where they are near.

    Near is what a quarter of all looks found (`Looks`). Cores are paired with the next one this
    process may use, `MOST_PAIRS` pairs evenly spread over the machine. A process with one core, or
    on a system that keeps no thread to a core, has none.
    """

    def __init__(self, looks: Looks | None = None) -> None:
        """Cores this process may use now.

        Args:
            looks: at them before this; None: there were none.
        """
        cores = usable_core_ids()
        pairs = list(zip(cores[::2], cores[1::2], strict=False))
        self._pairs = pairs[:: -(-len(pairs) // MOST_PAIRS) or 1]
        self._looks = looks or Looks()

    def slowdown(self) -> float:
        """Seconds of a line over those of near cores, of the pair that is farthest; 1: no pair."""
        found = [
            self._looks.slowdown(f"{one}-{other}", line_seconds(one, other))
            for one, other in self._pairs
        ]
        return max(found, default=1.0)
