"""Requests that read from disk what an LRU cache misses, counted on successive batches.

Rows that a cache misses lie neither as far apart as if each were missed by chance nor as near as
a whole batch's do: which neighbours of a row were touched lately is told by the batches alone. On
dblp-citation .62 requests a row were expected of rows missed by chance, corrected by how whole
batches lie; counted on the batches .505, and .505 in a run.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.disk import HEADER_BYTES, counted_runs

COUNTED = 32
"""Batches that are counted, the last of the sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MissedRuns:
    """Means over batches."""

    rows: float
    requests: float
    moved_bytes: float


def missed_runs(
    batches: Sequence[NDArray[np.integer]],
    far: NDArray[np.bool_],
    stay: float,
    row_bytes: int,
    data_offset: int = HEADER_BYTES,
) -> MissedRuns:
    """Rows on disk that were not touched for so long, and the requests that read them.

    Args:
        batches: distinct ids of each, in the order in which they are read.
        far: rows that lie on disk, shape (num_nodes,).
        stay: batches without a touch after which the cache has lost a row (`Reuse.stay`); between
            two whole numbers the counts are taken in proportion.
        row_bytes: of a stored row.
        data_offset: bytes before row 0.

    Source: `planner.cost.reuse` for what is missed, `runtime.features.direct` for requests.

    >>> batches = [np.array([0, 1, 8]), np.array([0, 8]), np.array([0, 1, 8])]
    >>> missed_runs(batches, np.ones(9, np.bool_), 1.0, 4096, 0)  # row 1 alone was away
    MissedRuns(rows=0.5, requests=0.5, moved_bytes=2048.0)
    """
    less = math.floor(stay)
    part = stay - less
    found = _counts(batches, far, less, row_bytes, data_offset)
    if part > 0:
        more = _counts(batches, far, less + 1, row_bytes, data_offset)
        found = (1.0 - part) * found + part * more
    rows, requests, moved = found.tolist()
    return MissedRuns(rows=rows, requests=requests, moved_bytes=moved)


def _counts(
    batches: Sequence[NDArray[np.integer]],
    far: NDArray[np.bool_],
    stay: int,
    row_bytes: int,
    data_offset: int,
) -> NDArray[np.float64]:
    """Mean rows, requests and bytes where rows stay a whole number of batches; shape (3,)."""
    counts = [
        (float(ids.size), *counted_runs(np.sort(ids), row_bytes, data_offset))
        for ids in _missed(batches, far, stay)
    ]
    return np.mean(counts, axis=0) if counts else np.zeros(3)


def _missed(
    batches: Sequence[NDArray[np.integer]], far: NDArray[np.bool_], stay: int
) -> Iterator[NDArray[np.integer]]:
    """Rows of the last batches that none of the `stay` before touched, as far as those go."""
    first = max(min(stay, len(batches) - 1), len(batches) - COUNTED)
    begin = max(0, first - stay)
    last = np.full(far.size, -1 - stay, np.int64)  # longer ago than the first batch can see
    for step in range(begin, len(batches)):
        ids = batches[step]
        if step >= first:
            yield ids[far[ids] & (step - last[ids] > stay)]
        last[ids] = step
