"""Timing: repeats and their spread, the compute around them, and one second try where disturbed."""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.probe.team import State

Clock = Callable[[], float]
LEAST_SECONDS = 1e-6
"""Least seconds of an exchange or of a wait, since tables hold positive values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Summary of a measurement's repeats."""

    value: float
    """Median of the repeats, in the unit that was sampled."""
    p90: float
    spread: float
    """Relative half-width: `robust_spread` of the repeats."""
    uncertain: bool
    """Whether the repeats are noisier than the limit, or the machine was disturbed."""


def robust_spread(samples: Sequence[float]) -> float:
    """Return a robust coefficient of variation: interquartile range / 1.349 / median.

    For normal samples it equals the standard deviation over the mean; below two samples it is 0.

    >>> robust_spread([1.0, 1.0, 1.0, 1.0, 50.0])
    0.0
    """
    if len(samples) < 2:
        return 0.0
    low, middle, high = np.percentile(np.asarray(samples, dtype=np.float64), [25, 50, 75])
    return float((high - low) / 1.349 / middle) if middle > 0 else float("inf")


def summarize(samples: Sequence[float], *, limit: float = np.inf) -> Measurement:
    """Return median, p90 and spread; above a finite `limit` the spread makes them uncertain."""
    if not samples:
        raise ValueError("expected at least one sample, found none")
    spread = robust_spread(samples)
    return Measurement(
        value=float(np.median(samples)),
        p90=float(np.percentile(samples, 90)),
        spread=spread,
        uncertain=limit < np.inf and not (spread <= limit and len(samples) > 1),
    )


def middle_mean(samples: Sequence[float] | NDArray[np.float64]) -> float:
    """Average the middle half: like the median where samples gather, between two humps else.

    >>> middle_mean([1.0, 1.0, 1.0, 9.0]), middle_mean([1.0, 1.0, 3.0, 3.0])
    (1.0, 2.0)
    """
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def settle_middle(samples: NDArray[np.float64]) -> Measurement:
    """Make the middle mean a measurement; its spread is that of such a mean, not of one call."""
    kept = np.maximum(samples, LEAST_SECONDS)
    return Measurement(
        value=middle_mean(kept),
        p90=float(np.percentile(kept, 90)),
        spread=min(1.0, robust_spread(list(kept)) / max(1, len(kept)) ** 0.5),
        uncertain=False,
    )


def timed(
    kernel: Callable[[], object],
    *,
    seconds: float,
    least: int,
    most: float = float("inf"),
    clock: Clock = time.perf_counter,
    before: Callable[[], object] | None = None,
) -> list[float]:
    """Call a kernel again and again, and time each call.

    It goes on for some seconds and at least so many calls; after `most` seconds one call is enough.
    `before` runs before each call, untimed. The first call counts: callers warm up.
    """
    out: list[float] = []
    begun = clock()
    while is_wanting(len(out), clock() - begun, seconds=seconds, least=least, most=most):
        if before is not None:
            before()
        start = clock()
        kernel()
        out.append(clock() - start)
    return out


def is_wanting(count: int, passed: float, *, seconds: float, least: int, most: float) -> bool:
    """Tell whether another call is to be timed after so many in the seconds that passed.

    >>> [is_wanting(n, 0.2, seconds=0.1, least=3, most=0.5) for n in (0, 2, 3)]
    [True, True, False]
    >>> [is_wanting(n, 0.6, seconds=0.1, least=3, most=0.5) for n in (0, 2, 3)]
    [True, False, False]
    """
    return count == 0 or passed < min(seconds, most) or (count < least and passed < most)


def wait_until(moment: float, clock: Clock = time.perf_counter) -> None:
    """Wait, without sleeping past it, for a moment that several processes start at."""
    while (left := moment - clock()) > 0:
        if left > 0.002:
            time.sleep(left - 0.002)


def fixed_kernel(num_loops: int) -> None:
    """Do a fixed amount of one core's work: products of 128 x 128 matrices, in cache."""
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
    """Return the coefficient of variation (std / mean) of a fixed kernel, at least 0.005.

    The kernel is first sized to last about `kernel_seconds`. Not robust on purpose: what disturbs
    the kernel now and then disturbs a training step as often.
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


BURST_WIDTH, BURST_CLASSES, INTERLUDE_ROWS = 256, 32, 8192


def make_burst(rows: int) -> Any:
    """Make a function that runs one burst of compute, in a training step's proportions.

    A burst is a forward and backward of a two-layer perceptron of width 256 on `rows` rows: matrix
    products, element-wise work, Python dispatch and the interpreter lock.
    """
    import torch as torch_module

    torch: Any = torch_module  # its stubs are partial
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(BURST_WIDTH, BURST_WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(BURST_WIDTH, BURST_CLASSES),
    )
    x = torch.randn(rows, BURST_WIDTH)
    y = torch.randint(0, BURST_CLASSES, (rows,))

    def burst() -> None:
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()

    return burst


@contextmanager
def background_load() -> Generator[None]:
    """Let a thread of this process multiply matrices for as long as the block runs."""
    stop = threading.Event()

    def work() -> None:
        a = np.full((512, 512), 0.5, dtype=np.float32)
        out = np.empty_like(a)
        while not stop.is_set():
            np.matmul(a, a, out=out)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Interlude:
    """About a layer's work, called between two timed gathers or samplings (DEC-25)."""

    def __init__(self, rows: int = INTERLUDE_ROWS, columns: int = BURST_WIDTH) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        self._x = torch.randn(rows, columns, generator=generator)
        self._weight = torch.randn(columns, columns, generator=generator)

    def __call__(self) -> None:
        """Multiply and rectify into fresh memory, as in a training step."""
        import torch

        torch.mm(self._x, self._weight).relu_()


DISTURBED = 1.0
"""Level of a disturbance from which a reading counts as disturbed."""
WAITED = 1.0
"""Seconds of second tries that a profile allows, over those that were timed."""
Found = TypeVar("Found")


class Patience:
    """Times work, and once more where the machine was disturbed, while a bound allows it."""

    def __init__(
        self,
        level: Callable[[], float],
        *,
        seconds: float = 0.0,
        share: float = 0.0,
        left: Callable[[], float] | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        """Begin with nothing timed; `level` is as `Disturbance.level`.

        Second tries may take `left()` seconds; without it, `seconds` in all, and `share` of those
        that were timed so far.
        """
        self._level, self._clock = level, clock
        self._seconds, self._share, self._left = seconds, share, left
        self.lost_seconds = 0.0
        """Seconds of second tries."""
        self.timed_seconds = 0.0
        """Seconds of first tries."""
        self.num_disturbed = 0
        """Readings that were kept though they were disturbed."""

    def timed(self, work: Callable[[], Found]) -> Found:
        """Time work as `tried` does."""
        return self.tried(work)[0]

    def tried(
        self, work: Callable[[], Found], noise: Callable[[Found], float] = lambda _: 0.0
    ) -> tuple[Found, bool]:
        """Time work, once more where the reading is disturbed or noisy; keep the better one.

        `noise` of a reading is 0 where it does not matter. Returns the reading, and whether it was
        disturbed.
        """
        begun = self._clock()
        found, disturbed = self._once(work)
        took = self._clock() - begun
        self.timed_seconds += took
        if (disturbed or noise(found) > 0) and took < self._bound():
            again, still = self._once(work)
            self.lost_seconds += self._clock() - begun - took
            if (still, noise(again)) < (disturbed, noise(found)):
                found, disturbed = again, still
        self.num_disturbed += disturbed
        return found, disturbed

    def settle(self, sample: Callable[[], Sequence[float]], *, limit: float) -> Measurement:
        """Summarize repeats, taken once more where disturbed or of a spread above the limit.

        They are uncertain where the second try is so too.
        """
        found, disturbed = self.tried(
            lambda: summarize(sample(), limit=limit),
            noise=lambda m: m.spread if m.uncertain else 0.0,
        )
        return replace(found, uncertain=found.uncertain or disturbed)

    def _once(self, work: Callable[[], Found]) -> tuple[Found, bool]:
        before = self._level()
        found = work()
        return found, max(before, self._level()) >= DISTURBED

    def _bound(self) -> float:
        if self._left is not None:
            return self._left()
        return self._seconds + self._share * self.timed_seconds - self.lost_seconds
