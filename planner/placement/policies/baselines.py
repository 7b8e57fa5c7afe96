"""Placements to be compared with: each is one short function (formulas 1.7).

They run unchanged on the one evaluator and in the runtime, so a difference is the placement's.
"""

import functools
import typing
from collections.abc import Sequence

import numba
import numpy as np
from numpy.typing import NDArray

from planner.parallel import LONG, side_by_side
from planner.placement.order import Probabilities, degree_order, hotness_order

DEALS = 4
"""Random dealings that are kept, a byte for each node: one for each number of GPUs."""


def naive(hotness: Probabilities, capacity_rows: Sequence[int]) -> list[NDArray[np.int64]]:
    """GPU i owns the ids [i * ceil(N/n), ...) and stores the hottest of them.

    Args:
        hotness: p(v), shape [N] or [n, N].
        capacity_rows: Rows each of the n GPUs may hold.

    Returns:
        Ids each GPU stores, hottest first.

    Example:
        >>> [ids.tolist() for ids in naive(np.array([0.1, 0.2, 0.3, 0.4]), [1, 1])]
        [[1], [3]]
    """
    size = -(-hotness.shape[-1] // len(capacity_rows))
    own: list[NDArray[np.int64]] = []
    for g, rows in enumerate(capacity_rows):
        first = g * size
        p = hotness[g] if hotness.ndim == 2 else hotness
        own.append(first + hotness_order(p[first : first + size])[:rows])
    return own


def random(
    hotness: Probabilities, capacity_rows: Sequence[int], *, seed: int
) -> list[NDArray[np.int64]]:
    """As `naive`, after a random permutation of the ids."""
    dealt = _dealt(hotness.shape[-1], len(capacity_rows), seed)
    if hotness.ndim == 1:
        # One order serves all: what is dealt to a GPU stands in it from hot to cold already.
        order = hotness_order(hotness)
        owners = dealt[order]
        return [order[owners == g][:rows] for g, rows in enumerate(capacity_rows)]
    blocks = [np.flatnonzero(dealt == g) for g in range(len(capacity_rows))]
    return [
        block[hotness_order(p[block])[:rows]]
        for block, p, rows in zip(blocks, hotness, capacity_rows, strict=True)
    ]


@functools.lru_cache(maxsize=DEALS)
def _dealt(num_nodes: int, num_gpus: int, seed: int) -> NDArray[np.integer]:
    """The GPU of each id: shuffled, then cut into blocks of equal size. Not to be written to."""
    # Half the bytes are half the time; the same places change hands whatever lies there.
    ids = np.arange(num_nodes, dtype=np.int32 if num_nodes < 2**31 else np.int64)
    np.random.default_rng(seed).shuffle(ids)
    size = -(-num_nodes // num_gpus)
    dealt = np.empty(num_nodes, np.uint8 if num_gpus <= 256 else np.uint16)
    for g in range(num_gpus):
        dealt[ids[g * size : (g + 1) * size]] = g
    return dealt


def degree(out_degree: NDArray[np.int64], capacity_rows: Sequence[int]) -> list[NDArray[np.int64]]:
    """Every GPU stores the rows of highest out-degree: PaGraph's cache, without its partition."""
    order = degree_order(out_degree)
    return [order[:rows] for rows in capacity_rows]


def count_out_degree(
    indices: NDArray[np.int32] | NDArray[np.int64], num_nodes: int
) -> NDArray[np.int64]:
    """Number of lists each vertex stands in, shape [num_nodes]."""
    narrow = indices.size < 2**31  # half the memory that is written to at random

    def counted(part: NDArray[np.integer]) -> NDArray[np.integer]:
        total = np.zeros(num_nodes, np.int32 if narrow else np.int64)
        _count(part, total)
        return total

    parts = np.array_split(indices, 2 if indices.size >= LONG else 1)
    first, *rest = side_by_side(counted, parts, items=indices.size)
    total = first.astype(np.int64)
    for part in rest:
        total += part
    return total


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _count(indices: np.ndarray, total: np.ndarray) -> None:
    """Add to total [N] how often each of its places stands in indices [E]."""
    for e in range(indices.size):
        total[indices[e]] += 1


def pagraph_score(
    *, common: int, part_training: int, part_nodes: int, num_training: float, num_parts: int
) -> float:
    """PaGraph's score of giving a training vertex to a part, in its public form.

        (1 + common) * (TV_avg - part_training) / (part_nodes + 1)

    Args:
        common: Vertices of the training vertex's L-hop in-neighbourhood already in the part.
        part_training: Training vertices of the part.
        part_nodes: All vertices of the part, redundant ones included.
        num_training: Training vertices of the graph; TV_avg is this by num_parts.
        num_parts: Number of parts.

    References:
        PaGraph, SoCC 2020; formulas 1.7.

    Example:
        >>> pagraph_score(
        ...     common=3, part_training=10, part_nodes=49, num_training=65.0, num_parts=2
        ... )
        1.8
    """
    return (1 + common) * (num_training / num_parts - part_training) / (part_nodes + 1)
