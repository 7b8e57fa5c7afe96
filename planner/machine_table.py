"""A measured quantity on a grid: the machine's curves over sizes, readers and ranks."""

import itertools
from dataclasses import dataclass
from typing import Literal

import numpy as np

Provenance = Literal["measured", "preset", "derived"]
"""measured: here; preset: by others, source named; derived: computed from such numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A measured quantity on a grid; between points it is interpolated in log-log space.

    Outside the grid the nearest edge holds: nothing is extrapolated.
    """

    unit: str
    """Unit of the values, e.g. seconds_per_row."""
    axes: list[str]
    """Names of the coordinates, e.g. row_bytes."""
    points: list[list[float]]
    """Grid points of each axis, rising and positive."""
    values: list[float]
    """Positive values, row-major over the axes."""
    spread: float
    """Relative half-width of the repeats (robust), the residual of a fit included."""
    provenance: Provenance = "measured"
    uncertain: bool = False
    """True where the repeats stayed noisier than the probe accepts."""

    def __post_init__(self) -> None:
        size = 1
        if not self.axes or len(self.points) != len(self.axes):
            raise ValueError(f"expected one list of points for each of {len(self.axes)} axes")
        for axis in self.points:
            size *= len(axis)
            if not axis or any(b <= a for a, b in itertools.pairwise(axis)):
                raise ValueError("axis points must rise")
        if size != len(self.values):
            raise ValueError(f"expected {size} values, found {len(self.values)}")
        if min(map(min, self.points)) <= 0 or not min(self.values) > 0:
            raise ValueError("expected positive axis points and values")

    def at(self, **coordinates: float | int) -> float:
        """The value at the named coordinates.

        Raises:
            KeyError: the names given are not those of the axes, each once.
        """
        if set(coordinates) != set(self.axes):
            raise KeyError(f"expected coordinates {self.axes}, found {sorted(coordinates)}")
        grid = np.log(np.asarray(self.values, dtype=np.float64)).reshape(
            [len(p) for p in self.points]
        )
        for name, axis in zip(self.axes, self.points, strict=True):
            x, p = np.log(max(float(coordinates[name]), 1e-300)), np.log(np.asarray(axis))
            x = float(np.clip(x, p[0], p[-1]))
            hi = int(np.clip(np.searchsorted(p, x), 1, max(len(p) - 1, 1))) if len(p) > 1 else 0
            if hi == 0:
                grid = grid[0]
                continue
            weight = (x - p[hi - 1]) / (p[hi] - p[hi - 1])
            grid = grid[hi - 1] * (1 - weight) + grid[hi] * weight
        return float(np.exp(grid))
