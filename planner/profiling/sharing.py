"""What a profile counts for ranks that share work: a batch over its owners, rows over a stack.

Cooperative batches: P ranks deal the vertices of one global batch by a hash, and each asks the
owners for what its own vertices drew. How much that is follows, for every P at once, from how many
rows of the batch draw each vertex.

    requests of a rank = (1 - 1/P) sum_t 1 - (1 - 1/P)^(m_t)

1.5D topology: a process row fetches every adjacency row that a stack of batches expands once.
"""

from collections.abc import Sequence
from typing import no_type_check

import numba
import numpy as np
from numpy.typing import NDArray

from planner.profiling.draw import Draw
from planner.workload import SharedBatch, StackProfile
from runtime.sampling.minibatch import Block, Dialect, MiniBatch

SHARED_BATCHES = 8
"""Global batches whose sources are counted; their number varies little from batch to batch."""
STACK_SIZES = (1, 2, 4, 8, 16, 32)
"""Numbers of batches whose union of expanded vertices is counted."""
EXACT = 16
"""Sources drawn by up to so many rows are counted one by one, the others in classes."""
CLASS_RATIO = 1.2
"""Largest over smallest number of rows within a class."""


@numba.njit(cache=True, nogil=True)
@no_type_check
def _draws(indptr, indices, last, out):
    """out[t] = rows that drew source t; a row that drew itself asks nobody. `last` starts at -1."""
    for row in range(indptr.shape[0] - 1):
        for e in range(indptr[row], indptr[row + 1]):
            source = indices[e]
            if source != row and last[source] != row:
                out[source] += 1
                last[source] = row


def shared_batch(draw: Draw, *, steps: int) -> SharedBatch:
    """Count, per hop, by how many rows of a global batch each source is drawn.

    Args:
        draw: batches of one rank that has the whole global batch to itself.
        steps: whole batches of an epoch; at most `SHARED_BATCHES` are drawn.
    """
    counted: list[dict[int, int]] = []
    number = max(1, min(SHARED_BATCHES, steps))
    seeds = 0
    for step in range(number):
        batch = draw(0, step)
        seeds += batch.num_seeds
        for hop, block in enumerate(reversed(batch.blocks)):
            if hop == len(counted):
                counted.append({})
            _add(counted[hop], block)
    classes = [_classes(each, number) for each in counted]
    return SharedBatch(
        num_seeds=seeds / number,
        rows=[[rows for rows, _ in each] for each in classes],
        sources=[[sources for _, sources in each] for each in classes],
    )


def _add(counts: dict[int, int], block: Block) -> None:
    draws = np.zeros(block.num_src, np.int64)
    _draws(block.indptr, block.indices, np.full(block.num_src, -1, np.int64), draws)
    values, numbers = np.unique(draws[draws > 0], return_counts=True)
    for value, count in zip(values.tolist(), numbers.tolist(), strict=True):
        counts[value] = counts.get(value, 0) + count


def _classes(counts: dict[int, int], batches: int) -> list[tuple[float, float]]:
    """(mean rows, sources per batch) of each class of sources, the rarest drawn first."""
    found: list[tuple[float, float]] = []
    low = sources = total = 0
    for rows in sorted(counts):
        if sources and (rows <= EXACT or rows > low * CLASS_RATIO):
            found.append((total / sources, sources / batches))
            sources = total = 0
        if not sources:
            low = rows
        sources += counts[rows]
        total += rows * counts[rows]
    if sources:
        found.append((total / sources, sources / batches))
    return found


def stack_profile(
    draw: Draw,
    degrees: NDArray[np.integer],
    *,
    seeds_per_rank: int,
    num_ranks: int,
    steps: int,
    sizes: Sequence[int] = STACK_SIZES,
) -> StackProfile:
    """Distinct vertices, and entries of their adjacency rows, that stacks of batches expand.

    Args:
        draw: batches by rank and step.
        degrees: entries of every adjacency row, shape (num_nodes,).
        seeds_per_rank: of a batch.
        num_ranks: ranks that `draw` knows.
        steps: whole batches of an epoch.
        sizes: numbers of batches, ascending; those beyond an epoch are left out.

    Returns:
        Means of one stack of each size.
    """
    most = max(1, min(max(sizes), steps * num_ranks))
    used = [size for size in sizes if size <= most] or [1]
    batches = [draw(i % num_ranks, i // num_ranks) for i in range(max(used))]
    expanded = [_expanded(batch) for batch in batches]
    hops = len(batches[0].blocks)
    rows: list[list[float]] = [[] for _ in range(hops)]
    entries: list[list[float]] = [[] for _ in range(hops)]
    for hop in range(hops):
        for size in used:
            ids = np.unique(np.concatenate([each[hop] for each in expanded[:size]]))
            rows[hop].append(float(ids.size))
            entries[hop].append(float(degrees[ids].sum(dtype=np.int64)))
    return StackProfile(
        seeds_per_rank=seeds_per_rank, sizes=[float(s) for s in used], rows=rows, entries=entries
    )


def _expanded(batch: MiniBatch) -> list[NDArray[np.int64]]:
    """Vertices whose rows each hop draws from."""
    ends = np.cumsum(batch.num_sampled_nodes).tolist()
    first_seen = batch.dialect is Dialect.FIRST_SEEN
    found: list[NDArray[np.int64]] = []
    for hop in range(len(batch.blocks)):
        start = ends[hop - 1] if hop and first_seen else 0
        found.append(batch.n_id[start : ends[hop]])
    return found
