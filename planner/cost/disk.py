"""The disk tier of stage `gather`: distinct pages, queue depth, bandwidth [A8]."""

import functools
import math
import typing

import numba
import numpy as np
from numpy.typing import NDArray

from planner.cost.gather import lines
from runtime.features.direct import BLOCK_BYTES, GAP_BYTES, round_down, round_up
from runtime.features.disk import MOST_REQUEST_BYTES

PAGE_BYTES = 4096
"""Unit of an aligned direct read."""
HEADER_BYTES = 128
"""Of a .npy file of rows, before the first of them."""
SUREST = 1.0 - 1e-12
"""A chance of 1 counts as this: what lies behind a row that is always read is not quite nothing."""


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


def reads_per_row(row_bytes: int, page_bytes: int = PAGE_BYTES) -> float:
    """Pages an aligned read of one row moves when rows are not merged.

    >>> reads_per_row(4096), reads_per_row(512)
    (1.0, 1.0)
    """
    return lines(row_bytes, page_bytes)


def expected_runs(
    p: NDArray[np.float32], row_bytes: int, data_offset: int = HEADER_BYTES
) -> tuple[float, float]:
    """Requests of a batch, and their bytes together, when rows near each other are read as one.

    The tier sorts the rows of a batch and lets a request run on over the next row where no more
    than a gap of blocks lies between. A request ends at v if v is read and none of the next K rows:

        requests = sum_v p_v prod_{u = v+1 .. v+K} (1 - p_u)

    and a row v that is not the last of its request moves the distance to the next one:

        bytes = requests (L + edge)
                + L sum_v p_v sum_{d = 1 .. K} d p_{v+d} prod_{u = v+1 .. v+d-1} (1 - p_u)

    K and the edge, what lies in a request's first and last block beside its rows, differ with where
    in its block a row begins. Their means stand for them; between two whole K both sums are taken
    in proportion. A run longer than one request may be takes several: of runs whose lengths fall
    off exponentially around the mean m, 1 / (1 - exp(-M / m)) each, M the longest request.

    Args:
        p: chance that a batch reads each row from disk, in file order, shape (num_rows,).
        row_bytes: L.
        data_offset: bytes before row 0.

    Returns:
        Requests and bytes; both 0 where nothing is read. One pass over p, with K numbers beside
        it.

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
    """Rows over which a request runs on, and bytes of its blocks beside its rows: means.

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

    The rows are taken in blocks of k from the last to the first. The k rows behind one reach to the
    end of its block and as far into the next block, so two running products serve every row.

    Args:
        p: chances, shape [N].
        ahead: k ones; holds the products from the start of the block after the one under way.
        share: of the requests that run on over k rows; the others do over k - 1.
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

    Source: docs/formulas.md 8.8 [A8].

    >>> round(disk_seconds(1e5, 4096, 3e9, 5e5, 1e-4, 64), 9)
    0.2
    """
    return pages * max(
        page_bytes / bytes_per_second, 1.0 / reads_per_second, latency_seconds / queue_depth
    )
