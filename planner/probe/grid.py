"""A grid of measurements: its points within a time, and a whole, smooth table from those reached.

    with budget.within(0.3):                        # of the time that is left
        found = budget.walk(order_points(axes, cores), measure)
    values, moved = make_monotone(fill_grid(axes, found), rising)

Time is shared out over points before they are measured. A point may use its share of what is left
and leaves the rest to those after it; points for which no time is left take their neighbours'
values. Fits, with their residuals, turn points into latencies, bandwidths and costs.
"""

import itertools
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Point = tuple[int, ...]
"""Coordinates in a grid."""
Found = TypeVar("Found")


class Budget:
    """Time until an end, `seconds` from now, which inner parts bring nearer for a while."""

    def __init__(
        self, seconds: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock, self.end = clock, clock() + seconds

    @property
    def left(self) -> float:
        """Seconds until the end of the part under way; 0 where it has passed."""
        return max(0.0, self.end - self.clock())

    @contextmanager
    def within(self, share: float) -> Generator[None]:
        """Give what runs inside a share, 0 to 1, of the time that is left."""
        outer = self.end
        self.end = self.clock() + share * self.left
        try:
            yield
        finally:
            self.end = outer

    def walk(
        self,
        points: Sequence[Point],
        measure: Callable[[Point], Found],
        *,
        least: int = 1,
        is_affordable: Callable[[Point], bool] = lambda _: True,
    ) -> dict[Point, Found]:
        """Measure points in turn, the most important first, each within its share of the time.

        At least `least` points are measured however late it is. Of the others, those that are not
        affordable, or come when time is over, are left out.
        """
        found: dict[Point, Found] = {}
        for number, point in enumerate(points):
            if len(found) >= least and (self.left <= 0 or not is_affordable(point)):
                continue
            with self.within(1 / (len(points) - number)):
                found[point] = measure(point)
        return found


def order_points(axes: Mapping[str, Sequence[int]], cores: int) -> list[Point]:
    """List a grid's points: a coarse grid first, then what lies between; crowded ranks last.

    >>> order_points({"bytes": [1, 2, 3], "ranks": [2, 4]}, cores=2)
    [(1, 2), (3, 2), (2, 2), (1, 4), (3, 4), (2, 4)]
    """
    levels = {name: dict(zip(axis, _levels(len(axis)), strict=True)) for name, axis in axes.items()}

    def key(point: Point) -> tuple[bool, int]:
        named = dict(zip(axes, point, strict=True))
        return named.get("ranks", 0) > cores, sum(levels[name][x] for name, x in named.items())

    return sorted(itertools.product(*axes.values()), key=key)


def _levels(count: int) -> list[int]:
    """Return the halvings after which each of so many places is met: 0 for both ends.

    >>> _levels(5), _levels(1)
    ([0, 2, 1, 2, 0], [0])
    """
    levels, spans = [0] * count, [(0, count - 1, 1)]
    while spans:
        low, high, level = spans.pop()
        if high - low > 1:
            middle = (low + high) // 2
            levels[middle] = level
            spans += [(low, middle, level + 1), (middle, high, level + 1)]
    return levels


def fill_grid(axes: Sequence[Sequence[int]], found: Mapping[Point, float]) -> NDArray[np.float64]:
    """Return values on the whole grid; missing ones are interpolated axis by axis in log space.

    `axes` are rising and positive. Beyond the known values the nearest holds, as in `Table.at`.

    >>> fill_grid([[1, 10, 100], [1, 2]], {(1, 1): 1.0, (100, 1): 100.0}).round(6).tolist()
    [[1.0, 1.0], [10.0, 10.0], [100.0, 100.0]]
    """
    known = np.array([found.get(point, math.nan) for point in itertools.product(*axes)])
    known = known.reshape([len(axis) for axis in axes])
    logs = np.log(known)
    for number, axis in enumerate(axes):
        logs = np.apply_along_axis(_filled_line, number, logs, np.log(axis))
    return np.where(np.isnan(known), np.exp(logs), known)


def _filled_line(values: NDArray[np.float64], places: NDArray[np.float64]) -> NDArray[np.float64]:
    known = ~np.isnan(values)
    return np.interp(places, places[known], values[known]) if known.any() else values


@dataclass(frozen=True, kw_only=True, slots=True)
class AlphaBeta:
    """T(bytes) = latency_seconds + bytes / bandwidth_bytes_per_second."""

    latency_seconds: float
    bandwidth_bytes_per_second: float
    residual: float
    """Root mean square of the relative errors of the fit."""


def fit_non_negative(
    quantities: NDArray[np.float64], seconds: NDArray[np.float64]
) -> tuple[list[float], float]:
    """Fit costs per unit of each quantity, by least squares on relative errors.

    Equation: minimise sum_i ((sum_k c_k x_ik - y_i) / y_i)^2 over c >= 0 (Lawson-Hanson): rows are
    divided by their seconds, so that small cases weigh as much as large ones.

    Args:
        quantities: x, shape (num_cases, num_quantities), non-negative.
        seconds: y, shape (num_cases,), positive.

    Returns:
        c, and the root mean square of the relative errors.
    """
    from scipy import optimize  # pyright: ignore[reportMissingTypeStubs]

    if len(seconds) == 0 or not np.all(seconds > 0):
        raise ValueError("expected positive seconds of at least one case")
    scale = quantities.max(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    design = quantities / scale / seconds[:, None]
    solved: tuple[Any, float] = optimize.nnls(design, np.ones(len(seconds)))  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    solution = np.asarray(solved[0], dtype=np.float64)
    errors = design @ solution - 1.0
    return [float(c) for c in solution / scale], float(np.sqrt(np.mean(errors**2)))


def fit_alpha_beta(num_bytes: Sequence[float | int], seconds: Sequence[float]) -> AlphaBeta:
    """Fit latency and bandwidth (the largest seen, where time is flat) to timed messages."""
    sizes = np.asarray(num_bytes, dtype=np.float64)
    times = np.asarray(seconds, dtype=np.float64)
    (alpha, per_byte), residual = fit_non_negative(
        np.stack([np.ones_like(sizes), sizes], axis=1), times
    )
    bandwidth = 1.0 / per_byte if per_byte > 0 else float(np.max(sizes / times))
    return AlphaBeta(latency_seconds=alpha, bandwidth_bytes_per_second=bandwidth, residual=residual)


def rising(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the nearest non-decreasing sequence in log space (pool adjacent violators)."""
    logs = np.log(values)
    means: list[float] = []
    counts: list[int] = []
    for x in logs:
        means.append(float(x))
        counts.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            count = counts[-2] + counts[-1]
            mean = (means[-2] * counts[-2] + means[-1] * counts[-1]) / count
            means[-2:], counts[-2:] = [mean], [count]
    return np.exp(np.repeat(means, counts))


def make_monotone(
    values: NDArray[np.float64], axes: Sequence[int], sweeps: int = 50
) -> tuple[NDArray[np.float64], float]:
    """Make a positive grid non-decreasing along some axes, moving it as little as that takes.

    Noise can make a larger message look faster than a smaller one; a cost that falls with size
    would mislead the solver. Axes are swept in turn, `sweeps` times at most.

    Returns:
        The grid, and the root mean square of the relative change.
    """
    out = values.astype(np.float64)
    for _ in range(sweeps):
        before = out.copy()
        for axis in axes:
            out = np.apply_along_axis(rising, axis, out)
        if np.allclose(before, out, rtol=1e-12):
            break
    for axis in axes:
        out = np.maximum.accumulate(out, axis=axis)
    return out, float(np.sqrt(np.mean((out / values - 1.0) ** 2)))
