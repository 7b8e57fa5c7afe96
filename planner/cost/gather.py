"""Stage `gather`: reading feature rows from the tiers, elapsed seconds per batch.

Rates come from the probe's tables; where a preset has none, [A6] derives them from memory latency
and bandwidth.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from planner.machine_routes import lines


def gather_seconds(
    rows: Mapping[str, float], seconds_per_row: Mapping[str, float], threads: int = 1
) -> float:
    """Seconds one gather takes, over all sources in turn.

    T = sum_s rows_s * c_s / W

    Args:
        rows: rows_s, rows read from source s per batch (own, host, peer, disk).
        seconds_per_row: c_s, one thread's seconds per row while all readers read.
        threads: W, threads one gather uses.

    Source: docs/formulas.md 1.1 with measured C_loc, C_gpu, C_cpu; rates fall with concurrent
    readers (docs/modelling.md 7), which the caller looks up.

    >>> gather_seconds({"own": 1e5, "host": 5e4}, {"own": 1e-7, "host": 4e-7})
    0.03
    >>> gather_seconds({"host": 5e4}, {"host": 4e-7}, threads=2)
    0.01
    """
    return sum(rows[s] * seconds_per_row[s] for s in sorted(rows) if rows[s] > 0) / threads


def touched_rows(p: NDArray[np.float32]) -> float:
    """Rows that are ever read: the span over which a batch's reads are spread.

    #{v : p_v > 0}

    Args:
        p: inclusion frequencies of the rows of one source, shape (num_rows,).

    Returns:
        Rows; the table of gather rates, measured with cold caches, is read at this times row_bytes.

    Source: derived: within a batch each row is read once, and between batches the model's own
    memory traffic empties the caches, so hot rows are not faster than cold ones.

    >>> touched_rows(np.array([0.5, 0.0, 0.25], dtype=np.float32))
    2.0
    """
    return float(np.count_nonzero(p))


def random_gather_seconds(
    rows: float,
    row_bytes: int,
    threads: int,
    latency_seconds: float,
    stream_bytes_per_second: float,
    memory_bytes_per_second: float,
) -> float:
    """Gather from host memory where only latency and bandwidths are known.

    T = rows * max((tau + 64 lines / b1) / W, 64 lines / BW)

    Args:
        rows: rows read.
        row_bytes: L.
        threads: W.
        latency_seconds: tau, exposed miss latency per row and thread.
        stream_bytes_per_second: b1, streaming rate of one thread within a row.
        memory_bytes_per_second: BW, DRAM random bandwidth of the ranks' share.

    Source: docs/formulas.md 8.6 [A6].

    >>> round(1e3 * random_gather_seconds(1e6, 512, 8, 60e-9, 12e9, 50e9), 1)
    12.8
    >>> round(1e3 * random_gather_seconds(1e6, 4096, 8, 60e-9, 12e9, 50e9), 1)
    81.9
    """
    moved = 64 * lines(row_bytes)
    alone = (latency_seconds + moved / stream_bytes_per_second) / threads
    return rows * max(alone, moved / memory_bytes_per_second)
