"""Tables: quantities measured on a grid of what they depend on, such as row size or readers."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Provenance = Literal["measured", "preset", "derived"]
"""measured: on this machine; preset: by others, source named; derived: from such numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A measured quantity on a grid; between points it is interpolated in log-log space.

    Outside the grid the nearest edge holds: nothing is extrapolated.
    """

    unit: str
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
    """Whether the repeats stayed noisier than the probe accepts."""

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
        """Return the value at the coordinates, one for each axis; other names raise KeyError."""
        import numpy as np  # on use: the command line starts without it

        if coordinates.keys() != set(self.axes):
            raise KeyError(f"expected coordinates {self.axes}, found {sorted(coordinates)}")
        grid = np.log(np.asarray(self.values, dtype=np.float64)).reshape(
            [len(p) for p in self.points]
        )
        for name, axis in zip(self.axes, self.points, strict=True):
            if len(axis) == 1:
                grid = grid[0]
                continue
            p = np.log(np.asarray(axis))
            x = min(max(float(np.log(max(float(coordinates[name]), 1e-300))), p[0]), p[-1])
            hi = min(max(int(p.searchsorted(x)), 1), len(p) - 1)
            weight = (x - p[hi - 1]) / (p[hi] - p[hi - 1])
            grid = grid[hi - 1] * (1 - weight) + grid[hi] * weight
        return float(np.exp(grid))


def make_table(
    unit: str,
    axes: Mapping[str, Sequence[float | int]],
    values: Iterable[float],
    spread: float,
    *,
    provenance: Provenance = "measured",
    uncertain: bool = False,
) -> Table:
    """Make a table of values, row-major over axes whose points stand under their names."""
    return Table(
        unit=unit,
        axes=list(axes),
        points=[[float(point) for point in points] for points in axes.values()],
        values=[float(value) for value in values],
        spread=spread,
        provenance=provenance,
        uncertain=uncertain,
    )
