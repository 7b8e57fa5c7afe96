"""How far apart the cores are at this moment: how long a cache line takes from one to another.

A virtual machine's cores are threads of its host, which puts them now on cores that share a cache,
now on cores that do not, and keeps them there for seconds or for minutes. Nothing else tells: no
load, no stolen time, and each core is as fast as ever. But what one thread has written another then
reads from afar, and threads meet more slowly: on a 2-core machine a line took 25 or 160 ns, and the
very same steps on two threads 7.7 or 11.7 ms, where steps on one thread took 11.

So timings that are compared must be taken in one of the two states. To know which costs 2 to 3
milliseconds; what looks have found is remembered, since cores that are far all along look like any
others.
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
"""Looks at the line in one try, some 10 ms, after which someone else is held to have the core."""
MOST_PAIRS = 2
"""Of many cores a sample is watched: of 16, looks at 8 pairs and all cores took 44 ms, before and
after each point of a probe, and all of 20 found something; at 2 pairs and 4 cores they take 9."""
FAR = 2.0
"""Times what it takes from near from which cores are far apart: a line between cores that share a
cache and ones that do not differs sixfold, chance by less than two."""
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
