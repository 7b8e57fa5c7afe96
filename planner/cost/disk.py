"""The disk tier of stage `gather`: distinct pages, queue depth, bandwidth [A8]."""

import numpy as np
from numpy.typing import NDArray

from planner.cost.gather import lines

PAGE_BYTES = 4096
"""Unit of an aligned direct read."""


def distinct_pages(p: NDArray[np.float32], rows_per_page: int) -> float:
    """Expected distinct pages a batch touches when rows lie packed in this order.

    sum over pages of 1 - prod_{v in page} (1 - p_v)

    Args:
        p: inclusion frequencies in the order in which rows lie on disk, shape (num_rows,).
        rows_per_page: whole rows in one page, at least 1.

    Source: formulas.md 8.8 [A8].

    >>> round(distinct_pages(np.full(8000, 0.01, dtype=np.float32), 8), 1)
    77.3
    """
    if p.size == 0:
        return 0.0
    missed = np.log1p(-np.minimum(p.astype(np.float64), 1.0 - 1e-12))
    starts = np.arange(0, p.size, rows_per_page)
    return float(-np.expm1(np.add.reduceat(missed, starts)).sum())


def reads_per_row(row_bytes: int, page_bytes: int = PAGE_BYTES) -> float:
    """Pages an aligned read of one row moves when rows are not merged.

    >>> reads_per_row(4096), reads_per_row(512)
    (1.0, 1.0)
    """
    return lines(row_bytes, page_bytes)


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

    Source: formulas.md 8.8 [A8].

    >>> round(disk_seconds(1e5, 4096, 3e9, 5e5, 1e-4, 64), 9)
    0.2
    """
    return pages * max(
        page_bytes / bytes_per_second, 1.0 / reads_per_second, latency_seconds / queue_depth
    )
