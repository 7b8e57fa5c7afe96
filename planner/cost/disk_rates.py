"""What the machine's disk takes for a batch's rows, and how unevenly it serves its readers."""

from planner.candidate import Candidate, RankRows
from planner.cost.disk import PAGE_BYTES, reads_per_row
from planner.cost.rates import Rate, lookup, ranks_here
from planner.machine import MachineModel
from runtime.features.disk import DEFAULT_DEPTH

QUEUE_DEPTH = DEFAULT_DEPTH
"""Direct reads a rank keeps in flight."""


def disk_row_rate(
    machine: MachineModel, rows: RankRows, row_bytes: int, candidate: Candidate
) -> Rate:
    """Seconds of one rank per row, the disk shared by all ranks of its host.

    Without what a batch takes however few rows it reads (`disk_start`).
    """
    read_bytes, reads = _requests(rows, row_bytes)
    rate = disk_rate(machine, read_bytes, QUEUE_DEPTH, ranks_here(candidate))
    return Rate(seconds=rate.seconds * reads, spread=rate.spread, provenance=rate.provenance)


def disk_rate(machine: MachineModel, read_bytes: float, depth: int, ranks: int) -> Rate:
    """Seconds of one rank per read from disk, while all ranks of a host read.

    Where a single process was measured (presets, machines probed before), it stands for all ranks:
    as many reads in flight as they have together, and each rank has its share of the rate. More
    ranks than were measured share what most of those had.

    Args:
        machine: its table `disk_read`.
        read_bytes: of a read.
        depth: reads that each rank has in flight.
        ranks: on this host.
    """
    table = machine.table("disk_read")
    if "readers" not in table.axes:
        rate = lookup(machine, "disk_read", read_bytes=read_bytes, queue_depth=depth * ranks)
        sharing = float(ranks)
    else:
        most = table.points[table.axes.index("readers")][-1]
        rate = lookup(machine, "disk_read", read_bytes=read_bytes, queue_depth=depth, readers=ranks)
        sharing = max(1.0, ranks / most)
    return Rate(seconds=rate.seconds * sharing, spread=rate.spread, provenance=rate.provenance)


def disk_start(
    machine: MachineModel, rows: RankRows, row_bytes: int, measured_seconds: float = 0.0
) -> float:
    """Seconds that a batch takes at a disk however few rows it reads there; 0 where it reads none.

    Nothing hides the last read, and the threads that read are woken.

    Args:
        machine: its table `disk_read`, for one read alone.
        rows: what the rank reads.
        row_bytes: of a row as it is stored.
        measured_seconds: a batch of one row; 0: not measured, one read stands for it.
    """
    if rows.rows.get("disk", 0.0) <= 0.0:
        return 0.0
    return measured_seconds or disk_rate(machine, _requests(rows, row_bytes)[0], 1, 1).seconds


def disk_apart(
    machine: MachineModel, rows: RankRows, row_bytes: int, candidate: Candidate
) -> float:
    """Share of the last rank's reading by which the mean one has its rows earlier.

    0 where one rank reads, or it was not measured. More ranks than were measured are as far apart
    as most of those were.
    """
    ranks = ranks_here(candidate)
    if ranks == 1 or "disk_apart" not in machine.tables:
        return 0.0
    read_bytes = _requests(rows, row_bytes)[0]
    at = {"read_bytes": read_bytes, "queue_depth": QUEUE_DEPTH, "readers": ranks}
    return lookup(machine, "disk_apart", **at).seconds


def _requests(rows: RankRows, row_bytes: int) -> tuple[float, float]:
    """(bytes of a read, reads per row); where nothing is known, of a row's whole pages."""
    if rows.disk_request_bytes > 0:
        return rows.disk_request_bytes, rows.disk_requests
    read_bytes = max(PAGE_BYTES, -(-row_bytes // PAGE_BYTES) * PAGE_BYTES)
    return read_bytes, reads_per_row(row_bytes)
