"""Price stage `gather`: the elapsed seconds per batch of reading feature rows from the tiers.

Rates come from the probe's tables. A disk that others use too changes its speed, so the geometric
mean of the probe's and the profile's reading stands for a run (DEC-49). A loader thread reads
beside steps as fast as between them (DEC-50).
"""

import functools
import math
import typing
from collections.abc import Mapping
from dataclasses import replace

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.candidate import Candidate, RankRows
from gnnplan.planner.cost.rates import MachineTable, Rate, lookup, ranks_here, readers
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.machine.routes import lines
from gnnplan.runtime.features.direct import BLOCK_BYTES, GAP_BYTES, round_down, round_up
from gnnplan.runtime.features.disk import DEFAULT_DEPTH, MOST_REQUEST_BYTES


def gather_seconds(
    rows: Mapping[str, float], seconds_per_row: Mapping[str, float], threads: int = 1
) -> float:
    """Return the seconds of one gather, over all sources in turn.

    T = sum_s rows_s c_s / W: rows_s read from source s, c_s one thread's seconds per row while all
    readers read, W threads of one gather.

    Source: docs/formulas.md 1.1 with measured C_loc, C_gpu, C_cpu; docs/modelling.md 7.

    >>> gather_seconds({"own": 1e5, "host": 5e4}, {"own": 1e-7, "host": 4e-7})
    0.03
    >>> gather_seconds({"host": 5e4}, {"host": 4e-7}, threads=2)
    0.01
    """
    return sum(rows[s] * seconds_per_row[s] for s in sorted(rows) if rows[s] > 0) / threads


def touched_rows(p: NDArray[np.float32]) -> float:
    """Return the rows that are ever read, #{v : p_v > 0}, over which a batch's reads are spread.

    Hot rows are not faster than cold ones: a batch reads each row once, and the model's own memory
    traffic empties the caches between batches.

    >>> touched_rows(np.array([0.5, 0.0, 0.25], dtype=np.float32))
    2.0
    """
    return float(np.count_nonzero(p))


PAGE_BYTES = 4096
"""Unit of an aligned direct read."""
HEADER_BYTES = 128
"""Bytes of a .npy file of rows before the first row."""
SUREST = 1.0 - 1e-12
"""Largest probability used, so that 1 - p stays above 0."""


def expected_runs(
    p: NDArray[np.float32], row_bytes: int, data_offset: int = HEADER_BYTES
) -> tuple[float, float]:
    """Return a batch's expected requests and their bytes, with nearby rows read as one.

    The tier sorts the rows of a batch and lets a request run on over the next row where no more
    than a gap of blocks lies between. A request ends at v if v is read and none of the next K rows:

        requests = sum_v p_v prod_{u = v+1 .. v+K} (1 - p_u)

    and a row v that is not the last of its request moves the distance to the next one:

        bytes = requests (L + edge)
                + L sum_v p_v sum_{d = 1 .. K} d p_{v+d} prod_{u = v+1 .. v+d-1} (1 - p_u)

    K and the edge (the rest of a request's first and last block) depend on where in its block a row
    begins: their means are used, and both sums are interpolated between whole K. A run longer than
    a request may be takes several: of runs whose lengths fall off exponentially around the mean m,
    1 / (1 - exp(-M / m)) each, with M the longest request.

    Args:
        p: chance that a batch reads each row from disk, in file order, shape (num_rows,).
        row_bytes: L.
        data_offset: bytes before row 0.

    Source: derived from `runtime.features.direct`, rows being read independently (formulas 1.4).

    >>> requests, moved = expected_runs(np.array([1, 0, 0, 0, 1], dtype=np.float32), 8192)
    >>> round(requests, 2), round(moved)
    (2.0, 24576)
    >>> requests, moved = expected_runs(np.ones(8, dtype=np.float32), 4096)
    >>> round(requests, 2), round(moved)
    (1.03, 36864)
    """
    reach, edge = _reach_and_edge(row_bytes, data_offset)
    least = math.floor(reach)
    runs, apart = _run_sums(np.ascontiguousarray(p), np.ones(least + 1), reach - least)
    if runs <= 0.0:
        return 0.0, 0.0
    moved = runs * (row_bytes + edge) + apart * row_bytes
    return runs / -math.expm1(-MOST_REQUEST_BYTES * runs / moved), moved


@functools.cache
def _reach_and_edge(row_bytes: int, data_offset: int) -> tuple[float, float]:
    """Return the mean rows over which a request runs on, and the mean bytes beside its rows.

    >>> _reach_and_edge(2048, 128)  # 5 rows on from a block's first row, 6 from its second
    (5.5, 4096.0)
    """
    reach = edge = 0
    rows = BLOCK_BYTES // math.gcd(row_bytes, BLOCK_BYTES)
    for row in range(rows):
        begin = data_offset + row * row_bytes
        end = round_up(begin + row_bytes)
        reach += (end + GAP_BYTES + BLOCK_BYTES - 1 - data_offset) // row_bytes - row
        edge += end - round_down(begin) - row_bytes
    return reach / rows, edge / rows


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _run_sums(p: np.ndarray, ahead: np.ndarray, share: float) -> tuple[float, float]:
    """Expected requests, and rows from each read one to the next of its request, over p [N].

    With Q_v(k) the chance that none of the k rows behind v is read, A_v(k) = sum_{j<k} Q_v(j) is
    the mean of the distance to the next read row, or of k where that is nearer; the rows to the
    next one, where that is within k, are A_v(k) - k Q_v(k), and

        A_v(k) = 1 + (1 - p_{v+1}) (A_{v+1}(k) - Q_{v+1}(k - 1))

    Rows are taken in blocks of k from the last to the first: the k rows behind one reach to the end
    of its block and as far into the next, whose products `ahead` (k ones) holds, so two running
    products serve every row. `share` of the requests run on over k rows, the others over k - 1.
    """
    k = ahead.size
    requests = apart = 0.0
    mean, none_nearer, absent = float(k), 1.0, 1.0  # A, Q(k - 1) and 1 - p of the row behind
    for block in range((p.size + k - 1) // k - 1, -1, -1):
        start = block * k
        stop = min(start + k, p.size)
        block_requests = block_apart = 0.0
        behind = 1.0  # none of the rows from v + 1 to the end of the block
        for v in range(stop - 1, start - 1, -1):
            i = v - start
            mean = 1.0 + absent * (mean - none_nearer)
            none_nearer = behind * ahead[i - 1] if i > 0 else behind
            chance = float(p[v])
            absent = 1.0
            if chance > 0.0:
                none = behind * ahead[i]
                block_requests += chance * ((1.0 - share) * none_nearer + share * none)
                block_apart += chance * (
                    (1.0 - share) * (mean - k * none_nearer) + share * (mean - k * none)
                )
                absent = 1.0 - min(chance, SUREST)
                behind *= absent
        requests += block_requests
        apart += block_apart
        here = 1.0
        for j in range(k):
            if start + j < stop:
                here *= 1.0 - min(float(p[start + j]), SUREST)
            ahead[j] = here
    return requests, apart


def counted_runs(ids: NDArray[np.integer], row_bytes: int, data_offset: int) -> tuple[float, float]:
    """Count the requests, and their bytes, that read these rows of a file (`expected_runs`).

    `ids` are ascending and distinct, int, shape (n,); row 0 lies `data_offset` bytes into the file.

    Source: `runtime.features.direct`.
    """
    requests, moved = _counted_runs(ids, row_bytes, data_offset)
    return float(requests), float(moved)


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _counted_runs(ids: np.ndarray, row_bytes: int, data_offset: int) -> tuple[int, int]:
    requests = moved = 0
    begun, ended = 0, -1
    for i in range(ids.size):
        first = data_offset + ids[i] * row_bytes
        begin = first // BLOCK_BYTES * BLOCK_BYTES
        end = -(-(first + row_bytes) // BLOCK_BYTES) * BLOCK_BYTES
        if ended < 0 or begin > ended + GAP_BYTES or end - begun > MOST_REQUEST_BYTES:
            moved += ended - begun if requests else 0
            requests += 1
            begun = begin
        ended = end
    if requests:
        moved += ended - begun
    return requests, moved


QUEUE_DEPTH = DEFAULT_DEPTH
"""Direct reads that a rank keeps in flight."""


def disk_row_rate(
    machine: MachineModel, rows: RankRows, row_bytes: int, candidate: Candidate
) -> Rate:
    """Look up a rank's seconds per row from disk while all ranks read, without `disk_start`."""
    read_bytes, reads = _requests(rows, row_bytes)
    rate = disk_rate(machine, read_bytes, QUEUE_DEPTH, ranks_here(candidate))
    return replace(rate, seconds=rate.seconds * reads)


def disk_rate(machine: MachineModel, read_bytes: float, depth: int, ranks: int) -> Rate:
    """Look up one rank's seconds per disk read while all ranks of a host read.

    Where one process was measured (presets, old probes), it stands for all ranks: it has as many
    reads in flight as they have together, and each rank gets its share of the rate. More ranks than
    were measured share the rate of the most that were.
    """
    table = machine.table(MachineTable.DISK_READ)
    if "readers" not in table.axes:
        rate = lookup(
            machine, MachineTable.DISK_READ, read_bytes=read_bytes, queue_depth=depth * ranks
        )
        sharing = float(ranks)
    else:
        most = table.points[table.axes.index("readers")][-1]
        rate = lookup(
            machine, MachineTable.DISK_READ, read_bytes=read_bytes, queue_depth=depth, readers=ranks
        )
        sharing = max(1.0, ranks / most)
    return replace(rate, seconds=rate.seconds * sharing)


def disk_start(
    machine: MachineModel, rows: RankRows, row_bytes: int, measured_seconds: float = 0.0
) -> float:
    """Return the seconds that a batch takes at a disk however few rows it reads; 0 for none.

    Nothing hides the last read. `measured_seconds` are those of a batch of one row; without (0),
    one read alone stands for it.
    """
    if rows.rows.get("disk", 0.0) <= 0.0:
        return 0.0
    return measured_seconds or disk_rate(machine, _requests(rows, row_bytes)[0], 1, 1).seconds


def disk_skew(machine: MachineModel, rows: RankRows, row_bytes: int, candidate: Candidate) -> float:
    """Return how much earlier the mean rank has its rows than the last, as a share of its reading.

    0 where one rank reads or it was not measured; beyond the ranks measured, the value of the most.
    """
    ranks = ranks_here(candidate)
    if ranks == 1 or MachineTable.DISK_APART not in machine.tables:
        return 0.0
    read_bytes = _requests(rows, row_bytes)[0]
    at = {"read_bytes": read_bytes, "queue_depth": QUEUE_DEPTH, "readers": ranks}
    return lookup(machine, MachineTable.DISK_APART, **at).seconds


def _requests(rows: RankRows, row_bytes: int) -> tuple[float, float]:
    """Return bytes of a read and reads per row; a row's whole pages where nothing else is known."""
    if rows.disk_request_bytes > 0:
        return rows.disk_request_bytes, rows.disk_requests
    read_bytes = max(PAGE_BYTES, -(-row_bytes // PAGE_BYTES) * PAGE_BYTES)
    return read_bytes, lines(row_bytes, PAGE_BYTES)


EXCHANGED_COPIES = 2
"""Copies of a row from another rank: one by its owner, one by its reader."""


def row_rate(
    machine: MachineModel, kind: str, rows: RankRows, row_bytes: int, candidate: Candidate
) -> Rate:
    """Return one thread's seconds per feature row from one kind of source.

    own: private memory; host: the shared mapping; disk: aligned direct reads, without `disk_start`;
    peer: two copies, by owner and reader; remote: those of a rank on the row's host. Exchanges are
    priced apart.
    """
    threads = candidate.threads.gather
    if kind == "disk":
        rate = disk_row_rate(machine, rows, row_bytes, candidate)
        return replace(rate, seconds=rate.seconds * threads)
    rate = lookup(
        machine,
        gather_table(kind),
        rows=rows.rows.get(kind),
        row_bytes=row_bytes,
        working_set_bytes=max(1.0, rows.working_rows.get(kind, 0.0)) * row_bytes,
        readers=readers(candidate) * threads,
    )
    if kind not in ("peer", "remote"):
        return rate
    return replace(rate, seconds=rate.seconds * EXCHANGED_COPIES)


def gather_table(kind: str) -> MachineTable:
    """Return the machine's table for rows from one kind of memory."""
    if kind == "disk":
        return MachineTable.DISK_READ
    mapped = kind in ("host", "remote")
    return MachineTable.MAPPED_GATHER if mapped else MachineTable.GATHER


SWING = 0.3
"""Largest |log| of the factor between two readings of one disk that its varying speed explains."""


def expected_factor(factor: float) -> float:
    """Return the factor expected of a disk that took `factor` times as long at its second reading.

    Half of the way on the log scale; what exceeds a disk's swing counts in full, since the graph
    may lie on another disk than the probe's file.

    >>> [round(expected_factor(f), 3) for f in (1.0, 1.21, 0.81, 4.0)]
    [1.0, 1.1, 0.9, 3.872]
    """
    return math.sqrt(factor * exceed_swing(factor))


def exceed_swing(factor: float) -> float:
    """Return the part of a factor between two readings that a disk's swing does not explain.

    >>> [round(exceed_swing(f), 3) for f in (1.3, 0.8, 2.0, 4.0)]
    [1.0, 1.0, 1.756, 3.749]
    """
    apart = math.log(factor)
    if abs(apart) <= SWING:
        return 1.0
    return math.exp(apart * (1.0 - (SWING / apart) ** 2))
