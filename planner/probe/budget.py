"""The probe's time, shared out over points before they are measured.

    with budget.within(0.3):                        # of the time that is left
        found = budget.walk(ordered(axes, cores), measure)

A point may use its share of what is left and leaves the rest to those after it. When time is over,
the points that are left are not measured; `filled` takes their values from their neighbours.
"""

import itertools
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

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


def ordered(axes: Mapping[str, Sequence[int]], cores: int) -> list[Point]:
    """List a grid's points: a coarse grid first, then what lies between; crowded ranks last.

    >>> ordered({"bytes": [1, 2, 3], "ranks": [2, 4]}, cores=2)
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


def filled(axes: Sequence[Sequence[int]], found: Mapping[Point, float]) -> NDArray[np.float64]:
    """Return values on the whole grid; missing ones are interpolated axis by axis in log space.

    `axes` are rising and positive. Beyond the known values the nearest holds, as in `Table.at`.

    >>> filled([[1, 10, 100], [1, 2]], {(1, 1): 1.0, (100, 1): 100.0}).round(6).tolist()
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
