"""Whether the machine is disturbed at this moment: cores far apart, shared with others, or slow.

Timings that are compared must be taken in the same state, and `Patience` waits for the good one.

Measure how far apart the cores are now: how long a cache line takes from one to another.

The host of a virtual machine moves its cores for seconds or minutes: now they share a cache, now
they do not. This shows as no load and no stolen time, yet steps on several threads take longer
(DEC-17). Timings that are compared must be taken in the same state. Earlier looks are remembered,
since cores that are always far apart look like any others.

Measure whether others share the cores now: how long copies of rows within a cache take.

A virtual core is one thread of a real core. A neighbour on the other thread takes part of the
core's units: copies within a cache feel it, gathers from memory hardly (DEC-18). It comes and goes
within a second, or stays for minutes. `pace.py` sees only changes while it looks; here the usual
time is remembered.

Measure whether all of a core is slower now: how long a small model's training step takes.

Virtual cores share a chip with other machines' cores: its last cache, its way to memory, its heat.
Training steps then take longer for minutes while copies within a core's own cache hardly change. A
small model's step follows them best of all that was tried (DEC-19).

What looks at something have found so far, kept between runs: to know what is usual.

A machine that is as it is cannot be told from one that is disturbed all along, unless it has been
seen otherwise. What a quarter of all looks found is as good as it gets for a time worth waiting
for: one glimpse of something better does not make every other moment a bad one (DEC-20).
"""

import contextlib
import functools
import json
import math
import threading
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # pyright: ignore[reportMissingTypeStubs]
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from runtime.codec import write_text_atomically
from runtime.cores import keep_thread_to, usable_core_ids
from runtime.device import machine_fingerprint

GOOD_SHARE = 0.25
"""Of looks that find things good, where they are so for a time worth waiting for."""
MOST_LOOKS = 4_000
APART_SECONDS = 1.0
"""Looks that follow each other faster are written down once: who waits looks often, and would hold
what it waits for to end for the rule."""


class Looks:
    """Looks at things with names, each beside earlier looks at the same thing."""

    def __init__(
        self,
        seen: Mapping[str, Mapping[str, int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Looks so far.

        Args:
            seen: of earlier `Looks`; what is not in it is new.
            clock: seconds.
        """
        self.seen = {name: dict(looks) for name, looks in (seen or {}).items()}
        """How often a look found so many nanoseconds, to three digits, by name."""
        self._clock, self._written = clock, dict[str, float]()

    def slowdown(self, name: str, seconds: float) -> float:
        """Write a look down; its seconds over those of good moments; inf: there were none yet.

        Args:
            name: of what was looked at.
            seconds: found; inf: somebody else had the core.
        """
        if math.isfinite(seconds):
            self._write(name, seconds)
        if name not in self.seen:
            return math.inf
        return seconds / good_seconds(self.seen[name])

    def _write(self, name: str, seconds: float) -> None:
        if self._clock() < self._written.get(name, -math.inf) + APART_SECONDS:
            return
        self._written[name] = self._clock()
        looks = self.seen.setdefault(name, {})
        nanoseconds = f"{float(f'{seconds * 1e9:.3g}'):g}"
        looks[nanoseconds] = looks.get(nanoseconds, 0) + 1
        if sum(looks.values()) > MOST_LOOKS:  # what is long ago counts for less
            self.seen[name] = {each: -(-times // 2) for each, times in looks.items()}


def good_seconds(looks: Mapping[str, int]) -> float:
    """Seconds that a quarter of all looks found, or less.

    >>> good_seconds({"82": 60, "35": 2, "160": 38})
    8.2e-08
    """
    counted = sorted((float(nanoseconds), times) for nanoseconds, times in looks.items())
    wanted = GOOD_SHARE * sum(times for _, times in counted)
    below = 0
    for nanoseconds, times in counted:
        below += times
        if below >= wanted:
            return nanoseconds * 1e-9
    return math.inf


@contextlib.contextmanager
def remembering(folder: Path) -> Generator[Looks]:
    """Looks that remember in a folder what they have found.

    Args:
        folder: of what is kept between runs; a file there that is damaged is begun anew.
    """
    before = remembered(folder)
    looks = Looks(before)
    yield looks
    if looks.seen != before:
        write_text_atomically(_file(folder), json.dumps(looks.seen))


def remembered(folder: Path) -> dict[str, dict[str, int]]:
    """What was found, by name; nothing where nobody has looked.

    Args:
        folder: of `remembering`.
    """
    try:
        kept = json.loads(_file(folder).read_text())
        found = {
            str(name): {f"{float(each):g}": int(times) for each, times in looks.items()}
            for name, looks in kept.items()
            if looks
        }
    except (OSError, ValueError, AttributeError, TypeError, OverflowError):
        return {}
    numbers = [number for looks in found.values() for each in looks.items() for number in each]
    return found if all(0.0 < float(number) < math.inf for number in numbers) else {}


def _file(folder: Path) -> Path:
    return folder / f"cores-{machine_fingerprint()}.json"


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


ROWS, COLUMNS = 1_500, 64
"""Of float32: 384 kB, which a core's own second cache holds."""
COPIED = 3_000
"""Rows copied in one try."""
SHARING_TRIES = 4
"""The quickest counts: an interrupt is no neighbour."""
MOST_CORES = 4
"""Of more as many are looked at: see `core_distance.MOST_PAIRS`."""
SHARED = 1.2
"""Ratio to the time of a core alone from which it counts as shared (DEC-18)."""

_sharing_jit: Any = numba.njit(cache=True, nogil=True)


@_sharing_jit
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
        for _ in range(SHARING_TRIES):
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


STEP_ROWS, WIDTH, CLASSES = 2_000, 128, 32
"""Rows, width and classes of the small model: its step fills a core's cache many times."""
STEP_TRIES = 3
"""The quickest counts, after one that fetches what it needs."""
SLOW = 1.08
"""Ratio to the time in good moments from which a core counts as slow (DEC-19)."""
NAME = "step"
"""Of these looks."""


@functools.cache
def _step() -> Callable[[], object]:
    """Forward and backward of the model, made once in a process."""
    import torch as torch_module

    torch: Any = torch_module  # its stubs are partial
    made = torch.Generator().manual_seed(0)  # the caller's own numbers stay as they are
    x = torch.randn(STEP_ROWS, WIDTH, generator=made)
    y = torch.randint(0, CLASSES, (STEP_ROWS,), generator=made)
    first, last = (
        torch.randn(size, WIDTH, generator=made).div(WIDTH).requires_grad_()
        for size in (WIDTH, CLASSES)
    )

    def step() -> None:
        out = torch.nn.functional.linear(torch.relu(torch.nn.functional.linear(x, first)), last)
        loss = torch.nn.functional.cross_entropy(out, y)
        torch.autograd.grad(loss, (first, last))

    return step


def step_seconds() -> float:
    """Seconds of the step on one thread, wherever this one runs."""
    import torch

    step, threads = _step(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        step()
        took = list[float]()
        for _ in range(STEP_TRIES):
            begun = time.perf_counter()
            step()
            took.append(time.perf_counter() - begun)
    finally:
        torch.set_num_threads(threads)
    return min(took)


class SmallStep:
    """How much slower the step is than in good moments (`Looks`)."""

    def __init__(self, looks: Looks | None = None) -> None:
        """Looks before this; None: there were none."""
        self._looks = looks or Looks()

    def slowdown(self) -> float:
        """Seconds of the step over those of good moments."""
        return self._looks.slowdown(NAME, step_seconds())


class Disturbance:
    """Looks at the cores that this process may use."""

    def __init__(self, looks: Looks | None = None) -> None:
        """Cores this process may use now.

        Args:
            looks: at them before this; None: there were none.
        """
        self.looks = looks or Looks()
        self._distance, self._sharing = CoreDistance(self.looks), CoreSharing(self.looks)
        self._step = SmallStep(self.looks)

    def level(self) -> float:
        """How far cores are apart, shared or slow, over what is held so: disturbed from 1 on."""
        return max(
            self._distance.slowdown() / FAR,
            self._sharing.slowdown() / SHARED,
            self._step.slowdown() / SLOW,
        )


@contextlib.contextmanager
def disturbance(folder: Path) -> Generator[Disturbance]:
    """The disturbance of this machine, which remembers in a folder how it has been.

    Args:
        folder: of what is kept between runs; a file there that is damaged is begun anew.
    """
    with remembering(folder) as looks:
        yield Disturbance(looks)
