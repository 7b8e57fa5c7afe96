"""What every subject of the probe works with: how much to measure, the team, time, and tables.

Sizes are data, the code is the same for quick and full. Lists are grids of the tables they feed;
`fit_to` cuts them to the machine at hand.
"""

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from gnnplan.planner.machine.model import Table, make_table
from gnnplan.planner.probe.grid import Budget, Point, fill_grid, make_monotone, order_points
from gnnplan.planner.probe.team import Team
from gnnplan.planner.probe.timing import Measurement, Patience

MIB = 2**20
SMALL_COPY_BYTES = 16 * MIB
NAMED = 4
Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeSizes:
    """One extent of probing."""

    name: str
    """quick or full; kept in the machine file."""
    noise_kernel_seconds: float
    noise_repeats: int
    """Calls of a fixed kernel whose coefficient of variation is the noise floor."""
    point_seconds: float
    """Seconds for one grid point of a memory or collective table, while there is time."""
    least_repeats: int
    """Fewest calls of a grid point, however long each is."""
    max_team: int
    oversubscribe: bool
    """Whether compute and collectives also run in twice as many processes as cores."""
    copy_bytes: int
    row_bytes: tuple[int, ...]
    working_set_bytes: tuple[int, ...]
    gather_rows: tuple[int, ...]
    """Rows of one gather call; a small batch pays for cold caches over fewer rows."""
    disk_file_bytes: int
    disk_read_bytes: tuple[int, ...]
    disk_queue_depths: tuple[int, ...]
    disk_rounds: int
    """Times that all points are read, one after the other, since disks of virtual machines swing
    within seconds."""
    message_bytes: tuple[int, ...]
    """Bytes of an all-reduce's tensor, or that each rank sends in an all-to-all, its own share too.
    """
    exchange_bytes: tuple[int, ...]
    """As `message_bytes`, where ranks compute between exchanges; finer about the size of gradients,
    where the seconds of a call rise tenfold."""
    exchange_steps: int
    """Steps of each point where ranks compute between exchanges."""
    exchange_burst_rows: int
    """Rows of the compute burst between exchanges, which lasts as a short step does."""
    graph_nodes: tuple[int, ...]
    graph_degree: int
    sample_cases: tuple[tuple[int, tuple[int, ...]], ...]
    """(seeds, fan-outs) of the calibration batches of each graph."""
    sample_seconds: float
    threads: tuple[int, ...]
    """Compute threads per rank in the overlap measurements."""
    burst_rows: int
    """Rows of the compute burst beside other work."""
    overlap_repeats: int
    corners_only: bool = False
    """Whether only the least and the most processes are measured, all points being uncertain."""


FULL = ProbeSizes(
    name="full",
    noise_kernel_seconds=1.0,
    noise_repeats=10,
    point_seconds=0.1,
    least_repeats=5,
    max_team=16,
    oversubscribe=True,
    copy_bytes=128 * MIB,
    row_bytes=(64, 256, 1024, 2048),
    working_set_bytes=(4 * MIB, 32 * MIB, 256 * MIB, 1024 * MIB),
    gather_rows=(1_000, 5_000, 40_000),
    disk_file_bytes=256 * MIB,
    disk_read_bytes=(4096, 16384, 65536),
    disk_queue_depths=(1, 4, 16, 32),
    disk_rounds=8,
    message_bytes=(256, 16384, 262144, MIB, 4 * MIB, 16 * MIB),
    exchange_bytes=(256, 16384, 131072, 262144, 524288, MIB, 4 * MIB, 8 * MIB, 16 * MIB),
    exchange_steps=40,
    exchange_burst_rows=3072,
    graph_nodes=(2**14, 2**16, 2**18, 2**20),
    graph_degree=16,
    sample_cases=(
        (512, (15, 10)),
        (1024, (15, 10)),
        (1024, (5, 5)),
        (512, (15, 10, 5)),
        (1024, (20,)),
    ),
    sample_seconds=0.1,
    threads=(1, 2),
    burst_rows=8192,
    overlap_repeats=8,
)

QUICK = ProbeSizes(
    name="quick",
    noise_kernel_seconds=0.05,
    noise_repeats=10,
    point_seconds=0.03,
    least_repeats=3,
    max_team=4,
    oversubscribe=False,
    copy_bytes=64 * MIB,
    row_bytes=(64, 512, 2048),
    working_set_bytes=(8 * MIB, 256 * MIB),
    gather_rows=(1_000, 30_000),
    disk_file_bytes=64 * MIB,
    disk_read_bytes=(4096, 65536),
    disk_queue_depths=(1, 16),
    disk_rounds=4,
    message_bytes=(256, 262144, 4 * MIB),
    exchange_bytes=(256, 131072, 524288, 4 * MIB),
    exchange_steps=8,
    exchange_burst_rows=2048,
    graph_nodes=(2**14, 2**18),
    graph_degree=12,
    sample_cases=((512, (15, 10)), (1024, (20,))),
    sample_seconds=0.05,
    threads=(1,),
    burst_rows=8192,
    overlap_repeats=4,
)


def fit_to(sizes: ProbeSizes, *, cores: int, available_ram_bytes: int) -> ProbeSizes:
    """Cut the sizes to what the machine can hold.

    Every reader has a table of its own, so the largest working set is held to an eighth of the free
    memory over the readers; the smallest always stays.
    """
    readers = min(sizes.max_team, 2 * cores if sizes.oversubscribe else cores)
    largest = available_ram_bytes // 8 // max(1, readers)
    kept = tuple(b for b in sizes.working_set_bytes if b <= largest)
    return replace(
        sizes,
        working_set_bytes=kept or sizes.working_set_bytes[:1],
        copy_bytes=max(MIB, min(sizes.copy_bytes, largest)),
        threads=tuple(t for t in sizes.threads if t <= cores) or (1,),
    )


def smallest(sizes: ProbeSizes) -> ProbeSizes:
    """Keep what plans cannot do without: each grid's ends, read once, and small preparations."""

    def ends(values: tuple[Found, ...]) -> tuple[Found, ...]:
        return values if len(values) < 2 else (values[0], values[-1])

    return replace(
        sizes,
        noise_kernel_seconds=0.02,
        noise_repeats=3,
        point_seconds=0.0,
        least_repeats=1,
        copy_bytes=min(sizes.copy_bytes, SMALL_COPY_BYTES),
        row_bytes=ends(sizes.row_bytes),
        working_set_bytes=sizes.working_set_bytes[:1],
        gather_rows=ends(sizes.gather_rows),
        message_bytes=ends(sizes.message_bytes),
        exchange_bytes=ends(sizes.exchange_bytes),
        exchange_steps=2,
        graph_nodes=sizes.graph_nodes[:1],
        sample_cases=ends(sizes.sample_cases),
        sample_seconds=0.0,
        corners_only=True,
    )


def powers_up_to(least: int, most: int) -> list[int]:
    """List least, 2 least, 4 least ... up to most, and most itself."""
    out: list[int] = []
    value = least
    while value < most:
        out.append(value)
        value *= 2
    return [*out, max(least, most)]


ProgressCallback = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done, 0 to 1."""


class ProbeContext:
    """One probe under way."""

    def __init__(
        self,
        *,
        team: Team,
        sizes: ProbeSizes,
        cores: int,
        scratch: Path,
        budget: Budget | None = None,
        level: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Begin to measure with a team; `scratch` is a folder, on a disk if there is one.

        Without a budget it takes as long as it takes. `level` is as `Disturbance.level`.
        """
        self.team, self.cores, self.scratch = team, cores, scratch
        self._points = dict[str, dict[Point, Measurement]]()
        self._pace = dict[str, float]()
        """Seconds per unit of size that the last preparation of a kind took."""
        self.begin(sizes, budget or Budget(), level)

    def begin(self, sizes: ProbeSizes, budget: Budget, level: Callable[[], float]) -> None:
        """Go on with other sizes and time; points found before stand in for others."""
        self.sizes, self.budget = sizes, budget
        self.patience = Patience(level, left=lambda: self.budget.left)
        self.notes = list[str]()

    def readers(self) -> list[int]:
        """List the concurrent readers to measure: 1, 2, 4 ... up to the cores (and the team)."""
        return self._counts(1, min(self.cores, self.team.size))

    def ranks(self, *, least: int = 1) -> list[int]:
        """List the process counts to measure, up to the team."""
        return self._counts(least, self.team.size)

    def _counts(self, least: int, most: int) -> list[int]:
        if self.sizes.corners_only:
            return sorted({least, max(least, most)})
        return powers_up_to(least, most)

    @contextmanager
    def preparing(self, what: str, size: int) -> Generator[None]:
        """Time a preparation of that size, for `has_time_for` larger ones."""
        begun = self.budget.clock()
        yield
        self._pace[what] = (self.budget.clock() - begun) / size

    def has_time_for(self, what: str, size: int) -> bool:
        """Tell whether a preparation of that size, at the pace of the last one, ends in time."""
        return self._pace.get(what, 0.0) * size <= self.budget.left

    def settle(self, sample: Callable[[], Sequence[float]], *, limit: float = 0.15) -> Measurement:
        """Measure one point, once more where its spread is above `limit` or it was disturbed."""
        return self.patience.settle(sample, limit=limit)

    def walk(
        self,
        axes: Mapping[str, Sequence[int]],
        measure: Callable[[Point], Found],
        *,
        share: float = 1.0,
        is_affordable: Callable[[Point], bool] = lambda _: True,
    ) -> dict[Point, Found]:
        """Measure a grid's points, as many as a share of the time left allows."""
        with self.budget.within(share):
            points = order_points(axes, self.cores)
            return self.budget.walk(points, measure, is_affordable=is_affordable)

    def rounds(self, most: int, measure: Callable[[int], object]) -> int:
        """Measure up to `most` rounds, while another one fits; return how many there were."""
        longest = 0.0
        for number in range(most):
            begun = self.budget.clock()
            measure(number)
            longest = max(longest, self.budget.clock() - begun)
            if longest > self.budget.left:
                return number + 1
        return most

    def table(
        self,
        name: str,
        unit: str,
        axes: Mapping[str, Sequence[int]],
        points: Mapping[Point, Measurement],
        *,
        rising: Sequence[str] = (),
    ) -> dict[str, Table]:
        """Make a table of measured points, noted where some are uncertain or missing.

        Along the axes in `rising` the value cannot truly fall: the grid is made monotone there, and
        the change enters the spread.
        """
        grid = list(axes.values())
        before = self._points.get(name, {})
        points = {p: before[p] for p in itertools.product(*grid) if p in before} | dict(points)
        if self.sizes.corners_only:
            points = {p: replace(found, uncertain=True) for p, found in points.items()}
        self._points[name] = points
        values = fill_grid(grid, {point: found.value for point, found in points.items()})
        values, moved = make_monotone(values, [list(axes).index(axis) for axis in rising])
        noisy = sum(found.uncertain for found in points.values())
        if noisy:
            worst = max(found.spread for found in points.values())
            self.notes.append(
                f"{name}: {noisy} of {values.size} points uncertain: noisy, disturbed or read "
                f"in haste, worst spread {worst:.0%}"
            )
        left = [point for point in order_points(axes, self.cores) if point not in points]
        if left:
            self.notes.append(f"time: {name}: {_not_reached(list(axes), left)}")
        spread = float(np.percentile([found.spread for found in points.values()], 75))
        spread, uncertain = float(np.hypot(spread, moved)), bool(noisy or left)
        return {name: make_table(unit, axes, values.ravel(), spread, uncertain=uncertain)}


AGAIN = "run gnnplan probe again when nothing else runs here, or with more --seconds"


def _not_reached(axes: Sequence[str], left: Sequence[Point]) -> str:
    """Say which points were not reached in time, and how to get them.

    >>> _not_reached(["bytes", "ranks"], [(256, 4)]).partition(";")[0]
    'not reached in time, so taken from neighbours: bytes x ranks 256 x 4'
    """
    named = ", ".join(" x ".join(f"{x:g}" for x in point) for point in left[:NAMED])
    more = f" and {len(left) - NAMED} more" if len(left) > NAMED else ""
    return (
        f"not reached in time, so taken from neighbours: {' x '.join(axes)} {named}{more}; {AGAIN}"
    )
