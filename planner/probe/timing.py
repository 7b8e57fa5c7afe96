"""Timing with a conscience: medians, robust spread, and repeats where a point is too noisy.

A point whose spread is above the limit is measured again, up to `attempts` times in all and while
time is left; the quietest attempt is kept, and marked uncertain if it is still too noisy.

Timing while the machine is as good as it gets: waiting for that, and timing again what was not.

Both are bounded, and whoever runs out of patience takes what there is: a machine that is never
quiet is what its owner has.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from planner.probe.worker import State

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """A repeated measurement, settled."""

    value: float
    """Median of the repeats, in the unit that was sampled."""
    p90: float
    spread: float
    """Relative half-width: `robust_spread` of the kept attempt."""
    num_samples: int
    attempts: int
    uncertain: bool
    """True where every attempt was noisier than the limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoisePolicy:
    """When a point is too noisy, and how often it is measured again."""

    limit: float = 0.15
    """Largest spread that is accepted."""
    attempts: int = 3
    deadline: float = float("inf")
    """Reading of `clock` after which nothing is repeated."""
    clock: Clock = time.perf_counter


def robust_spread(samples: Sequence[float]) -> float:
    """Robust coefficient of variation: interquartile range / 1.349 / median.

    Equals the standard deviation over the mean for normal samples; one outlier does not move it.
    Zero for fewer than two samples, where nothing is known.

    >>> robust_spread([1.0, 1.0, 1.0, 1.0, 50.0])
    0.0
    """
    if len(samples) < 2:
        return 0.0
    low, middle, high = np.percentile(np.asarray(samples, dtype=np.float64), [25, 50, 75])
    return float((high - low) / 1.349 / middle) if middle > 0 else float("inf")


def summarize(samples: Sequence[float], *, limit: float = np.inf) -> Measurement:
    """Median, p90 and spread of one attempt's samples.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("expected at least one sample, found none")
    spread = robust_spread(samples)
    return Measurement(
        value=float(np.median(samples)),
        p90=float(np.percentile(samples, 90)),
        spread=spread,
        num_samples=len(samples),
        attempts=1,
        uncertain=not spread <= limit,
    )


def settled(sample: Callable[[], Sequence[float]], policy: NoisePolicy) -> Measurement:
    """Measure until quiet enough, at most `policy.attempts` times and before its deadline.

    Args:
        sample: one attempt; returns the seconds (or any positive quantity) of its repeats.
        policy: what is quiet enough.

    Returns:
        The attempt of least spread, with the number of attempts made; `uncertain` where even
        that one is above the limit.
    """
    best = summarize(sample(), limit=policy.limit)
    attempts = 1
    while best.uncertain and attempts < policy.attempts and policy.clock() < policy.deadline:
        found = summarize(sample(), limit=policy.limit)
        best = min(best, found, key=lambda m: m.spread)
        attempts += 1
    return replace(best, attempts=attempts)


def timed(
    kernel: Callable[[], object],
    *,
    seconds: float,
    least: int,
    clock: Clock = time.perf_counter,
    before: Callable[[], object] | None = None,
) -> list[float]:
    """Call a kernel for about `seconds`, at least `least` times; the seconds of each call.

    The caller warms up: the first call counts. `before` runs before each call and is not timed,
    but takes of the `seconds`.
    """
    out: list[float] = []
    end = clock() + seconds
    while len(out) < least or clock() < end:
        if before is not None:
            before()
        start = clock()
        kernel()
        out.append(clock() - start)
    return out


def wait_until(moment: float, clock: Clock = time.perf_counter) -> None:
    """Wait, without sleeping past it, for a moment that several processes start at."""
    while (left := moment - clock()) > 0:
        if left > 0.002:
            time.sleep(left - 0.002)


def fixed_kernel(num_loops: int) -> None:
    """A fixed amount of one core's work: products of 128 x 128 matrices, in cache."""
    a = np.full((128, 128), 0.5, dtype=np.float32)
    out = np.empty_like(a)
    for _ in range(num_loops):
        np.matmul(a, a, out=out)


def noise_floor(
    *,
    kernel_seconds: float,
    repeats: int,
    kernel: Callable[[int], None] = fixed_kernel,
    clock: Clock = time.perf_counter,
) -> float:
    """Coefficient of variation (std / mean) of a fixed kernel repeated.

    The kernel is first sized to last about `kernel_seconds`. Not robust on purpose: what disturbs
    the kernel now and then disturbs a training step as often.

    Returns:
        A fraction, at least 0.005: no shorter interval is believed.
    """
    loops, took = 16, 0.0
    while took < 0.02:
        loops *= 2
        start = clock()
        kernel(loops)
        took = clock() - start
    loops = max(1, round(loops * kernel_seconds / took))
    seconds: list[float] = []
    for _ in range(max(2, repeats)):
        start = clock()
        kernel(loops)
        seconds.append(clock() - start)
    return max(0.005, float(np.std(seconds) / np.mean(seconds)))


def noise_task(state: State, *, kernel_seconds: float, repeats: int) -> float:
    """Task: the noise floor of one process with one thread."""
    del state
    return noise_floor(kernel_seconds=kernel_seconds, repeats=repeats)


DISTURBED = 1.0
"""Level of a disturbance from which the machine is held to be in another state."""
PAUSE_SECONDS = 0.2
WAITED = 1.0
"""Most seconds a profile loses, over those that were timed."""
Found = TypeVar("Found")


class Patience:
    """Of one sitting, in which things are timed one after the other.

    found = patience.timed(time_something)
    """

    def __init__(
        self,
        level: Callable[[], float],
        *,
        seconds: float = 0.0,
        share: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Some patience.

        Args:
            level: of what disturbs the machine now, as `Disturbance.level`.
            seconds: to lose at most, and
            share: of the seconds that were timed so far, on top.
            clock: monotonic seconds.
            sleep: waits for so many.
        """
        self._level, self._clock, self._sleep = level, clock, sleep
        self._seconds, self._share = seconds, share
        self.lost_seconds = 0.0
        """Waited, or timed in vain."""
        self.timed_seconds = 0.0
        """Of timings that were kept: those in vain do not lengthen the patience with themselves."""
        self.num_disturbed = 0
        """Timings that were kept though they were disturbed."""
        self._begun, self._before = 0.0, 0.0

    @property
    def is_left(self) -> bool:
        """Whether there is any."""
        return self.lost_seconds < self._seconds + self._share * self.timed_seconds

    def begin(self) -> None:
        """Wait for the machine, as long as patience lasts; what follows is timed."""
        begun = self._clock()
        while (found := self._level()) >= DISTURBED and self.is_left:
            self._sleep(PAUSE_SECONDS)
            self.lost_seconds += self._clock() - begun
            begun = self._clock()
        self._before, self._begun = found, self._clock()

    def end(self) -> float:
        """What was timed is; the higher of the levels before and after it."""
        self._begun = self._clock() - self._begun
        self.timed_seconds += self._begun
        return max(self._before, self._level())

    def again(self, level: float) -> bool:
        """Whether what has just ended was disturbed, and patience for timing it again is left.

        Args:
            level: what `end` returned.
        """
        if level < DISTURBED:
            return False
        if not self.is_left:
            self.num_disturbed += 1
            return False
        self.lost_seconds += self._begun
        self.timed_seconds -= self._begun
        return True

    def timed(self, work: Callable[[], Found]) -> Found:
        """What `work` finds while the machine is as good as it gets; it may be called again.

        Args:
            work: times something.
        """
        return self.tried(work)[0]

    def tried(self, work: Callable[[], Found]) -> tuple[Found, bool]:
        """As `timed`, and whether the machine was disturbed all the same."""
        while True:
            self.begin()
            found, level = work(), self.end()
            if not self.again(level):
                return found, level >= DISTURBED


def undisturbed() -> Patience:
    """For a machine that nobody looks at: everything is timed once."""
    return Patience(lambda: 0.0)
