"""What every subject of the probe works with, and how its points become a table."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from planner.machine import Table
from planner.probe.fit import monotone
from planner.probe.patience import Patience, undisturbed
from planner.probe.sizes import ProbeSizes, powers_up_to
from planner.probe.team import Team
from planner.probe.timing import Measurement, NoisePolicy, settled

ProgressCallback = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done, 0 to 1."""


@dataclass(slots=True)
class ProbeContext:
    """One probe under way."""

    team: Team
    sizes: ProbeSizes
    cores: int
    scratch: Path
    """A folder for temporary files, on a disk if there is one; removed after the probe."""
    deadline: float = float("inf")
    """Reading of time.perf_counter after which noisy points are not repeated."""
    patience: Patience = field(default_factory=undisturbed)
    """With cores that are far apart for a while; tables are of cores as near as they get."""
    notes: list[str] = field(default_factory=list[str])

    def readers(self) -> list[int]:
        """Concurrent readers to measure: 1, 2, 4 ... up to the cores (and the team)."""
        return powers_up_to(1, min(self.cores, self.team.size))

    def ranks(self, *, least: int = 1) -> list[int]:
        """Process counts to measure, up to the team (twice the cores where oversubscribing)."""
        return powers_up_to(least, self.team.size)

    def settle(self, sample: Callable[[], Sequence[float]], *, limit: float = 0.15) -> Measurement:
        """Measure one point, again where its spread is above `limit`."""
        policy = NoisePolicy(limit=limit, deadline=self.deadline, clock=time.perf_counter)
        return settled(lambda: self.patience.timed(sample), policy)

    def table(
        self,
        name: str,
        unit: str,
        axes: Mapping[str, Sequence[float | int]],
        points: Sequence[Measurement],
        *,
        rising: Sequence[str] = (),
    ) -> dict[str, Table]:
        """A table from its measured points (row-major over the axes), noted where uncertain.

        Args:
            name: of the table.
            unit: of the values.
            axes: grid points by axis name, in order.
            points: one measurement per grid point.
            rising: axes along which the value cannot truly fall; the grid is made monotone there
                and what that moved enters the spread.
        """
        shape = [len(axis) for axis in axes.values()]
        values = np.array([point.value for point in points], dtype=np.float64).reshape(shape)
        values, moved = monotone(values, [list(axes).index(axis) for axis in rising])
        noisy = sum(point.uncertain for point in points)
        if noisy:
            worst = max(point.spread for point in points)
            self.notes.append(
                f"{name}: {noisy} of {len(points)} points uncertain after repeats, "
                f"worst spread {worst:.0%}"
            )
        spread = float(np.percentile([point.spread for point in points], 75))
        table = Table(
            unit=unit,
            axes=list(axes),
            points=[[float(p) for p in axis] for axis in axes.values()],
            values=[float(v) for v in values.ravel()],
            spread=float(np.hypot(spread, moved)),
            uncertain=bool(noisy),
        )
        return {name: table}
