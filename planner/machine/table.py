"""Tables: quantities measured on a grid of what they depend on, such as row size or readers.

Units, axes and how each table is measured: planner/probe/README.md.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
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


class MachineTable(StrEnum):
    """Measured table that a price reads: its name, unit and processor."""

    unit: str
    processor: Literal["cpu", "cuda"]

    def __new__(
        cls, name: str, unit: str = "seconds", processor: Literal["cpu", "cuda"] = "cpu"
    ) -> "MachineTable":
        """Make a member that equals its name."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.unit, member.processor = unit, processor
        return member

    COPY = "copy", "bytes_per_second"
    """Copies by one reader while all readers copy."""
    GATHER = "gather", "seconds_per_row"
    """Seconds in which a reader copies a row at a random place of its own memory."""
    MAPPED_GATHER = "mapped_gather", "seconds_per_row"
    """Seconds in which a reader copies a row at a random place of a mapping that all share."""
    DISK_READ = "disk_read", "seconds_per_read"
    """Aligned direct reads of a disk."""
    DISK_APART = "disk_apart", "share"
    """Lead of the mean reader over the last one, as a share of the reading time."""
    SAMPLE_EDGE = "sample_edge", "seconds_per_edge"
    SAMPLE_VERTEX = "sample_vertex", "seconds_per_vertex"
    BULK_SAMPLE = "bulk_sample", "ratio"
    """A stacked batch's seconds over a single one's."""
    DEPENDENT_SAMPLE = "dependent_sample", "ratio"
    """A dependent batch's seconds over an independent one's."""
    ALL_REDUCE = "all_reduce"
    """All-reduce over ranks of one host while all compute."""
    ALL_REDUCE_STEPPED = "all_reduce_stepped"
    """All-reduce within the loop of a step that loads synchronously."""
    ALL_REDUCE_CORE_SECONDS = "all_reduce_core_seconds", "core_seconds"
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
    HOSTS_ALL_REDUCE = "hosts_all_reduce"
    """As without `hosts_`, between hosts with one process each; so are the tables that follow."""
    HOSTS_ALL_REDUCE_STEPPED = "hosts_all_reduce_stepped"
    HOSTS_ALL_TO_ALL = "hosts_all_to_all"
    HOSTS_ALL_TO_ALL_STEPPED = "hosts_all_to_all_stepped"
    HOSTS_ALL_TO_ALL_ASKED = "hosts_all_to_all_asked"
    HOSTS_ALL_TO_ALL_EARLY = "hosts_all_to_all_early"
    HOSTS_ALL_TO_ALL_AFTER = "hosts_all_to_all_after"
    HOSTS_ALL_TO_ALL_AROUND_IDS = "hosts_all_to_all_around_ids"
    HOSTS_ALL_TO_ALL_AROUND_ROWS = "hosts_all_to_all_around_rows"
    HOSTS_ALL_TO_ALL_HIDDEN = "hosts_all_to_all_hidden"
    STEP_JITTER = "step_jitter", "ratio"
    """Deviation of ranks' equal work from step to step."""
    OVERLAP_ETA = "overlap_eta", "ratio"
    """Share of an all-reduce that compute hides."""
    BESIDE = "beside", "ratio"
    """Slowdown of compute while a loader thread gathers; `BESIDE_LOADER`: of that thread."""
    BESIDE_LOADER = "beside_loader", "ratio"
    PROCESS_START = "process_start"
    CORE_START = "core_start"
    """Start of an operation of the model on cores; solved for together with the two rates."""
    CORE_FLOPS = "core_flops", "flops_per_second"
    CORE_BYTES = "core_bytes", "bytes_per_second"
    GPU_KERNEL = "gpu_kernel", "seconds", "cuda"
    GPU_START = "gpu_start", "seconds", "cuda"
    """Host's seconds of starting a kernel of the runtime, Python included."""
    GPU_MESSAGE = "gpu_message", "seconds", "cuda"
    HOST_MESSAGE = "host_message", "seconds", "cuda"
    GPU_CONTEXT = "gpu_context", "bytes", "cuda"
    """GPU memory of a process before any data."""
    GPU_PROCESS = "gpu_process", "bytes", "cuda"
    """Host memory of a process with CUDA."""
    GPU_UVA_PROGRAMS = "gpu_uva_programs", "programs", "cuda"
    """Smallest grid that gathers from the host at its best rate."""
    GPU_BESIDE = "gpu_beside", "ratio", "cuda"
    """Slowdown of compute beside such a gather; `GPU_BESIDE_GATHER`: of that gather."""
    GPU_BESIDE_GATHER = "gpu_beside_gather", "ratio", "cuda"
    GPU_OVERLAP_ETA = "gpu_overlap_eta", "ratio", "cuda"
    NCCL_ALL_REDUCE = "nccl_all_reduce", "seconds", "cuda"
    """All-reduce of a host's ranks on GPUs, host's start and wait included."""
    NCCL_ALL_TO_ALL = "nccl_all_to_all", "seconds", "cuda"
    """Their all-to-all of rows, by the bytes that a rank sends to others."""
    NCCL_ASKED = "nccl_asked", "seconds", "cuda"
    """Their all-to-all of counts, then a few ids."""

    @property
    def between_hosts(self) -> "MachineTable":
        """Return the table of the same measurement between hosts."""
        return MachineTable(f"hosts_{self}")

    @property
    def stepped(self) -> "MachineTable":
        """Return the table of the same measurement within the loop of a step."""
        return MachineTable(f"{self}_stepped")
