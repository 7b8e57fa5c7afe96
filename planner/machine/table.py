"""Tables: quantities measured on a grid of what they depend on, such as row size or readers.

Units, axes and how each table is measured: planner/probe/README.md.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Literal, Self

from gnnplan.planner.errors import MachineError

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
    MOST: ClassVar[float] = 1e30
    """Largest number of a table or a link, far above any machine's: sums of them stay finite."""

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
        largest = max(*map(max, self.points), *self.values)
        if min(map(min, self.points)) <= 0 or not min(self.values) > 0 or largest > self.MOST:
            raise ValueError(f"expected positive axis points and values up to {self.MOST:g}")
        if not 0 <= self.spread <= self.MOST:
            raise ValueError(f"expected a spread from 0 to {self.MOST:g}, found {self.spread}")

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


class TableName(str):
    """Name of a table that a price reads, with its axes, unit and processor.

    `MachineTable` lists what several prices read; a rate of one cost term stands beside the term:

        CLERK = TableName("label_clerk", "ranks", "seconds_per_seed")
    """

    axes: tuple[str, ...]
    """Axes by name; one that ends in `?` may be missing."""
    unit: str
    processor: Literal["cpu", "cuda"]
    declared: ClassVar[dict[str, "TableName"]] = {}
    """All such names; in every machine their tables have these axes and this unit."""

    def __new__(
        cls,
        name: str,
        axes: str = "bytes ranks",
        unit: str = "seconds",
        processor: Literal["cpu", "cuda"] = "cpu",
    ) -> Self:
        """Declare a table; ValueError where it is declared otherwise elsewhere."""
        made = str.__new__(cls, name)
        made.axes, made.unit, made.processor = tuple(axes.split()), unit, processor
        first = cls.declared.setdefault(name, made)
        if (first.axes, first.unit) != (made.axes, unit):
            raise ValueError(f"table {name}: expected one declaration, found two that differ")
        return made

    def find_fault(self, table: Table) -> str:
        """Say in which unit or axes a table differs from this declaration; empty where in none."""
        if table.unit != self.unit:
            return f"expected the unit {self.unit}, found {table.unit!r:.80}"
        needed = {axis for axis in self.axes if not axis.endswith("?")}
        known = {axis.removesuffix("?") for axis in self.axes}
        if needed <= set(table.axes) <= known and len(set(table.axes)) == len(table.axes):
            return ""
        return f"expected the axes {', '.join(self.axes)}, found {', '.join(table.axes)!s:.80}"


def check_tables(tables: Mapping[str, Table]) -> None:
    """Refuse a table whose unit or axes are not those that prices read.

    Raises:
        MachineError: the line names the table, what was expected and what was found.
    """
    for name, table in tables.items():
        wanted = TableName.declared.get(name)
        if wanted is not None and (fault := wanted.find_fault(table)):
            raise MachineError(f"table {name}: {fault}; correct the file or probe again")


class MachineTable(TableName, Enum):
    """Measured table that several prices read."""

    __str__, __repr__, __format__ = str.__str__, str.__repr__, str.__format__

    COPY = "copy", "readers", "bytes_per_second"
    """Copies by one reader while all readers copy."""
    GATHER = "gather", "rows? row_bytes working_set_bytes readers", "seconds_per_row"
    """Seconds in which a reader copies a row at a random place of its own memory."""
    MAPPED_GATHER = "mapped_gather", "rows? row_bytes working_set_bytes readers", "seconds_per_row"
    """Seconds in which a reader copies a row at a random place of a mapping that all share."""
    DISK_READ = "disk_read", "read_bytes queue_depth readers?", "seconds_per_read"
    """Aligned direct reads of a disk."""
    DISK_APART = "disk_apart", "read_bytes queue_depth readers", "share"
    """Lead of the mean reader over the last one, as a share of the reading time."""
    SAMPLE_EDGE = "sample_edge", "topology_bytes readers", "seconds_per_edge"
    SAMPLE_VERTEX = "sample_vertex", "table_bytes readers", "seconds_per_vertex"
    BULK_SAMPLE = "bulk_sample", "batches", "ratio"
    """A stacked batch's seconds over a single one's."""
    DEPENDENT_SAMPLE = "dependent_sample", "kappa", "ratio"
    """A dependent batch's seconds over an independent one's."""
    ALL_REDUCE = "all_reduce"
    """All-reduce over ranks of one host while all compute."""
    ALL_REDUCE_STEPPED = "all_reduce_stepped"
    """All-reduce within the loop of a step that loads synchronously."""
    ALL_REDUCE_CORE_SECONDS = "all_reduce_core_seconds", "bytes ranks", "core_seconds"
    """Processor time of all ranks' threads in an all-reduce."""
    ALL_TO_ALL = "all_to_all"
    """All-to-all in equal shares over ranks of one host while all compute."""
    ALL_TO_ALL_STEPPED = "all_to_all_stepped"
    """All-to-all within the loop of a step that loads synchronously."""
    ALL_TO_ALL_ASKED = "all_to_all_asked"
    """In that loop: the exchange of counts and ids before one of rows."""
    ALL_TO_ALL_EARLY = "all_to_all_early"
    """In that loop: lead of the mean rank over the last one at the end of an exchange of rows."""
    ALL_TO_ALL_AFTER = "all_to_all_after"
    """In that loop: extra compute after an exchange of rows."""
    ALL_TO_ALL_AROUND_IDS = "all_to_all_around_ids"
    """In that loop: overhead around an exchange of ids that no stage meters."""
    ALL_TO_ALL_AROUND_ROWS = "all_to_all_around_rows"
    """In that loop: overhead around an exchange of rows that no stage meters."""
    ALL_TO_ALL_HIDDEN = "all_to_all_hidden"
    """Two exchanges: one long after the ranks met, and one soon after that."""
    HOSTS_ALL_REDUCE = "hosts_all_reduce", "bytes hosts"
    """As without `hosts_`, between hosts with one process each; so are the tables that follow."""
    HOSTS_ALL_REDUCE_STEPPED = "hosts_all_reduce_stepped", "bytes hosts"
    HOSTS_ALL_TO_ALL = "hosts_all_to_all", "bytes hosts"
    HOSTS_ALL_TO_ALL_STEPPED = "hosts_all_to_all_stepped", "bytes hosts"
    HOSTS_ALL_TO_ALL_ASKED = "hosts_all_to_all_asked", "bytes hosts"
    HOSTS_ALL_TO_ALL_EARLY = "hosts_all_to_all_early", "bytes hosts"
    HOSTS_ALL_TO_ALL_AFTER = "hosts_all_to_all_after", "bytes hosts"
    HOSTS_ALL_TO_ALL_AROUND_IDS = "hosts_all_to_all_around_ids", "bytes hosts"
    HOSTS_ALL_TO_ALL_AROUND_ROWS = "hosts_all_to_all_around_rows", "bytes hosts"
    HOSTS_ALL_TO_ALL_HIDDEN = "hosts_all_to_all_hidden", "bytes hosts"
    STEP_JITTER = "step_jitter", "ranks", "ratio"
    """Deviation of ranks' equal work from step to step."""
    OVERLAP_ETA = "overlap_eta", "ranks? threads?", "ratio"
    """Share of an all-reduce that compute hides."""
    BESIDE = "beside", "ranks? threads?", "ratio"
    """Slowdown of compute while a loader thread gathers; `BESIDE_LOADER`: of that thread."""
    BESIDE_LOADER = "beside_loader", "ranks? threads?", "ratio"
    PROCESS_START = "process_start", "ranks"
    CORE_START = "core_start", "threads"
    """Start of an operation of the model on cores; solved for together with the two rates."""
    CORE_FLOPS = "core_flops", "threads", "flops_per_second"
    CORE_BYTES = "core_bytes", "threads", "bytes_per_second"
    COMPUTE_SLOWDOWN = "compute_slowdown", "ranks", "ratio"
    """Seconds of equal work by so many ranks at once over those of one."""
    GPU_FLOPS = "gpu_flops", "ranks", "flops_per_second", "cuda"
    """Rate of a product in float32; `GPU_FLOPS_TF32`: of one whose factors are rounded."""
    GPU_FLOPS_TF32 = "gpu_flops_tf32", "ranks", "flops_per_second", "cuda"
    GPU_KERNEL = "gpu_kernel", "ranks", "seconds", "cuda"
    GPU_START = "gpu_start", "ranks", "seconds", "cuda"
    """Host's seconds of starting a kernel of the runtime, Python included."""
    GPU_MESSAGE = "gpu_message", "ranks", "seconds", "cuda"
    HOST_MESSAGE = "host_message", "ranks", "seconds", "cuda"
    GPU_CONTEXT = "gpu_context", "ranks", "bytes", "cuda"
    """GPU memory of a process before any data."""
    GPU_PROCESS = "gpu_process", "ranks", "bytes", "cuda"
    """Host memory of a process with CUDA."""
    GPU_UVA_PROGRAMS = "gpu_uva_programs", "ranks", "programs", "cuda"
    """Smallest grid that gathers from the host at its best rate."""
    GPU_BESIDE = "gpu_beside", "programs", "ratio", "cuda"
    """Slowdown of compute beside such a gather; `GPU_BESIDE_GATHER`: of that gather."""
    GPU_BESIDE_GATHER = "gpu_beside_gather", "programs", "ratio", "cuda"
    GPU_OVERLAP_ETA = "gpu_overlap_eta", "ranks", "ratio", "cuda"
    NCCL_ALL_REDUCE = "nccl_all_reduce", "bytes ranks", "seconds", "cuda"
    """All-reduce of a host's ranks on GPUs, host's start and wait included."""
    NCCL_ALL_TO_ALL = "nccl_all_to_all", "bytes ranks", "seconds", "cuda"
    """Their all-to-all of rows, by the bytes that a rank sends to others."""
    NCCL_ASKED = "nccl_asked", "ranks", "seconds", "cuda"
    """Their all-to-all of counts, then a few ids."""

    @property
    def between_hosts(self) -> "MachineTable":
        """Return the table of the same measurement between hosts."""
        return MachineTable(f"hosts_{self}")

    @property
    def stepped(self) -> "MachineTable":
        """Return the table of the same measurement within the loop of a step."""
        return MachineTable(f"{self}_stepped")
