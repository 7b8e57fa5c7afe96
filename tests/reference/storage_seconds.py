"""Published formulas of storage and pipelines that no plan uses: rates are measured instead."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.machine.routes import lines


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


def distinct_pages(p: NDArray[np.float32], rows_per_page: int) -> float:
    """Expected distinct pages a batch touches when rows lie packed in this order.

    sum over pages of 1 - prod_{v in page} (1 - p_v)

    Args:
        p: inclusion frequencies in the order in which rows lie on disk, shape (num_rows,).
        rows_per_page: whole rows in one page, at least 1.

    Source: docs/formulas.md 8.8 [A8].

    >>> round(distinct_pages(np.full(8000, 0.01, dtype=np.float32), 8), 1)
    77.3
    """
    if p.size == 0:
        return 0.0
    missed = np.log1p(-np.minimum(p.astype(np.float64), 1.0 - 1e-12))
    starts = np.arange(0, p.size, rows_per_page)
    return float(-np.expm1(np.add.reduceat(missed, starts)).sum())


def disk_seconds(
    pages: float,
    page_bytes: int,
    bytes_per_second: float,
    reads_per_second: float,
    latency_seconds: float,
    queue_depth: int,
) -> float:
    """Seconds to read pages from a disk of known limits.

    T = max(pages Z / BW, pages / IOPS, pages lat / QD)

    Args:
        pages: distinct pages read.
        page_bytes: Z.
        bytes_per_second: BW.
        reads_per_second: IOPS.
        latency_seconds: lat, of one read.
        queue_depth: QD, reads in flight.

    Source: docs/formulas.md 8.8 [A8].

    >>> round(disk_seconds(1e5, 4096, 3e9, 5e5, 1e-4, 64), 9)
    0.2
    """
    return pages * max(
        page_bytes / bytes_per_second, 1.0 / reads_per_second, latency_seconds / queue_depth
    )


def epoch_seconds(seconds: Sequence[float], period_seconds: float, steps: int) -> float:
    """A whole epoch: the pipeline fills once, then one item per period.

    T = sum_i t_i + (steps - 1) * period

    Source: docs/formulas.md 8.2 [A2].

    >>> epoch_seconds([4.0, 6.0, 10.0], 10.0, 50)
    510.0
    """
    return sum(seconds) + (steps - 1) * period_seconds if steps > 0 else 0.0
