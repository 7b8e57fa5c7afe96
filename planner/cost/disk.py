"""The disk tier of stage `gather`: distinct pages, queue depth, bandwidth [A8]."""

import typing

import numba
import numpy as np
from numpy.typing import NDArray

from planner.cost.gather import lines
from runtime.features.direct import BLOCK_BYTES, GAP_BYTES
from runtime.features.disk import MOST_REQUEST_BYTES

PAGE_BYTES = 4096
"""Unit of an aligned direct read."""
SUREST = 1.0 - 1e-12
"""A chance of 1 counts as this: what lies behind a row that is always read is not quite nothing."""


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


def expected_runs(p: NDArray[np.float32], row_bytes: int) -> tuple[float, float]:
    """Requests of a batch, and their bytes together, when rows near each other are read as one.

    The tier sorts the rows of a batch and lets a request run on over the next row where no more
    than a gap of blocks lies between. A request ends at v if v is read and none of the next K rows:

        requests = sum_v p_v prod_{u = v+1 .. v+K} (1 - p_u),    K = (gap + block) // L + 1

    and a row that is not the last of its request moves the distance to the next one, for which the
    mean distance at the density that a read row sees stands in.

    Args:
        p: chance that a batch reads each row from disk, in file order, shape (num_rows,).
        row_bytes: L.

    Returns:
        Requests and bytes; both 0 where nothing is read. Requests are no fewer than their longest
        length allows. One pass over p, with K numbers beside it.

    Source: derived from `runtime.features.direct`, rows being read independently (formulas 1.4).

    >>> expected_runs(np.array([1.0, 0.0, 0.0, 0.0, 1.0], dtype=np.float32), 8192)
    (2.0, 24576.0)
    >>> requests, moved = expected_runs(np.ones(8, dtype=np.float32), 4096)
    >>> round(requests, 6), round(moved)
    (1.0, 36864)
    """
    reach = (GAP_BYTES + BLOCK_BYTES) // row_bytes + 1
    total, squares, requests = _run_sums(np.ascontiguousarray(p), np.ones(reach))
    if total <= 0.0:
        return 0.0, 0.0
    density = min(squares / total, SUREST)
    distance = np.arange(1, reach + 1)
    weight = density * (1.0 - density) ** (distance - 1)
    apart = float((distance * weight).sum() / weight.sum()) * row_bytes
    # A request starts and ends within blocks: one block more than its rows, on the mean.
    moved = requests * (row_bytes + BLOCK_BYTES) + (total - requests) * apart
    return max(requests, moved / MOST_REQUEST_BYTES), moved


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _run_sums(p: np.ndarray, ahead: np.ndarray) -> tuple[float, float, float]:
    """Sums over p [N] of p_v, of p_v^2, and of p_v prod_{u = v+1 .. v+K} (1 - p_u).

    The rows are taken in blocks of K from the last to the first. The K rows behind one reach to the
    end of its block and as far into the next block, so two running products serve every row.

    Args:
        p: chances, shape [N].
        ahead: K ones; holds the products from the start of the block after the one under way.
    """
    reach = ahead.size
    total = squares = requests = 0.0
    for block in range((p.size + reach - 1) // reach - 1, -1, -1):
        start = block * reach
        stop = min(start + reach, p.size)
        block_total = block_squares = block_requests = 0.0
        behind = 1.0  # of the rows from v + 1 to the end of the block
        for v in range(stop - 1, start - 1, -1):
            chance = float(p[v])
            if chance > 0.0:
                block_total += chance
                block_squares += chance * chance
                block_requests += chance * behind * ahead[v - start]
                behind *= 1.0 - min(chance, SUREST)
        total += block_total
        squares += block_squares
        requests += block_requests
        here = 1.0
        for j in range(reach):
            if start + j < stop:
                here *= 1.0 - min(float(p[start + j]), SUREST)
            ahead[j] = here
    return total, squares, requests


def counted_runs(ids: NDArray[np.integer], row_bytes: int, data_offset: int) -> tuple[float, float]:
    """Requests, and their bytes, that read these rows of a file: what `expected_runs` expects.

    Args:
        ids: rows, int, ascending and distinct, shape (n,).
        row_bytes: L.
        data_offset: bytes before row 0: behind a header of 128 bytes every other row of 2 KiB lies
            in two blocks, so that more bytes are read, by fewer requests.

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
