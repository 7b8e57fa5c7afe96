"""What every subject of the probe works with, and how its points become a table.

How much the probe measures: sizes are data, the code is the same for quick and full.

Lists are grids of the tables they feed. `fit_to` cuts them to the machine at hand.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from planner.machine.model import Table
from planner.probe.fit import monotone
from planner.probe.team import Team
from planner.probe.timing import Measurement, NoisePolicy, Patience, settled, undisturbed

MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeSizes:
    """One extent of probing."""

    name: str
    """quick | full; kept in the machine file."""
    idle_seconds: float
    """The whole probe's on an idle 2-core machine."""
    retry_seconds: float
    """Seconds after the start up to which a noisy point is measured again."""
    noise_kernel_seconds: float
    noise_repeats: int
    """A fixed kernel of that length, repeated: its coefficient of variation is the noise floor."""
    pace_seconds: float
    """For which equal work is done before and after all else, to see what slows it down."""
    point_seconds: float
    """Time given to one grid point of a memory or collective table."""
    least_repeats: int
    """Fewest calls of a grid point, however long each is."""
    max_team: int
    """Most processes at once."""
    oversubscribe: bool
    """Also measure compute and collectives with twice as many processes as cores."""
    copy_bytes: int
    row_bytes: tuple[int, ...]
    working_set_bytes: tuple[int, ...]
    gather_rows: tuple[int, ...]
    """Rows of one gather call: a small batch pays for cold caches and page tables as a large one
    does, over fewer rows."""
    disk_file_bytes: int
    disk_read_bytes: tuple[int, ...]
    disk_queue_depths: tuple[int, ...]
    message_bytes: tuple[int, ...]
    """All-reduce: bytes of the tensor; all-to-all: bytes each rank sends, its own share too."""
    exchange_bytes: tuple[int, ...]
    """As `message_bytes`, where ranks compute between exchanges; finer about the size of gradients,
    where the seconds of a call rise tenfold."""
    exchange_steps: int
    """Steps of each point where ranks compute between exchanges."""
    exchange_burst_rows: int
    """Rows of the compute burst between them: a short step's."""
    graph_nodes: tuple[int, ...]
    """Vertices of the calibration graphs."""
    graph_degree: int
    sample_cases: tuple[tuple[int, tuple[int, ...]], ...]
    """(seeds, fan-outs) of the calibration batches of each graph."""
    sample_seconds: float
    """Time given to one case."""
    threads: tuple[int, ...]
    """Compute threads per rank in the overlap measurements."""
    burst_rows: int
    """Rows of the compute burst (a two-layer perceptron of width 256) beside other work."""
    overlap_repeats: int


FULL = ProbeSizes(
    name="full",
    idle_seconds=150.0,
    retry_seconds=60.0,
    noise_kernel_seconds=1.0,
    noise_repeats=10,
    pace_seconds=2.0,
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
    idle_seconds=20.0,
    retry_seconds=5.0,
    noise_kernel_seconds=0.05,
    noise_repeats=10,
    pace_seconds=0.4,
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


HASTY = replace(
    QUICK,
    idle_seconds=8.0,
    retry_seconds=0.0,
    noise_kernel_seconds=0.02,
    noise_repeats=5,
    pace_seconds=0.2,
    point_seconds=0.005,
    least_repeats=2,
    max_team=2,
    copy_bytes=16 * MIB,
    disk_file_bytes=16 * MIB,
    exchange_steps=3,
    graph_nodes=(2**14, 2**16),
    sample_seconds=0.01,
    overlap_repeats=2,
)
"""What is left on a machine so busy that a quick probe would not end in time."""


def ladder_from(sizes: ProbeSizes) -> list[ProbeSizes]:
    """These sizes and the coarser ones, the finest first."""
    coarser = [each for each in (QUICK, HASTY) if each.idle_seconds < sizes.idle_seconds]
    return [sizes, *coarser]


def fit_to(sizes: ProbeSizes, *, cores: int, available_ram_bytes: int) -> ProbeSizes:
    """Cut the sizes to what the machine can hold.

    Every reader has a table of its own, so the largest working set is held to an eighth of the
    free memory over the readers; the smallest always stays.
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


def powers_up_to(least: int, most: int) -> list[int]:
    """Least, 2 least, 4 least ... up to most, and most itself."""
    out: list[int] = []
    value = least
    while value < most:
        out.append(value)
        value *= 2
    return [*out, max(least, most)]


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
