"""Refine a partition for communication volume: what full-graph training sends per exchange.

    volume = sum_v |{parts p != part(v) that hold an out-neighbour of v}|      (formulas 3.1)

A cut edge costs a row only where it is the first between its source and that part, so the edge
cut is the wrong measure (BNS-GCN asks METIS for `vol`). count[v, p], the out-neighbours of v in p,
tells each move's gain exactly:

    moving u from a to b changes the volume by
        [count[u, a] > 0] - [count[u, b] > 0]                        u's own row, plus
        sum over v -> u, v != u: [count[v, b] = 0 and part(v) != b]
                               - [count[v, a] = 1 and part(v) != a]  rows that u reads

Only moves of negative change are made, and none past a limit, so the volume never rises.
"""

import typing

import numba
import numpy as np
from numpy.typing import NDArray

from planner.partition.balance import count_loads
from planner.partition.problem import Problem
from planner.partition.undirected import sort_rows

MAX_PASSES = 12
LEAST_GAIN = 0.001
"""A pass that saves less than this share of the volume is the last."""


def refine_bytes(
    num_nodes: int, num_edges: int, num_parts: int, *, ascending: bool, id_bytes: int = 4
) -> int:
    """Memory of `refine_volume`: counts, order, parts, in-degrees, and rows if they are sorted."""
    sorting = 0 if ascending else 2 * (id_bytes * num_edges + 8 * (num_nodes + 1))
    return num_nodes * (4 * num_parts + 8 + 4 + 16) + sorting


def refine_volume(problem: Problem, parts: NDArray[np.int32]) -> NDArray[np.int32]:
    """Move single nodes while that lowers the volume.

    Args:
        problem: graph, limits and seed (which orders the visits).
        parts: int32 [N], the start; not changed.

    Returns:
        int32 [N] of a volume at most the start's, and of loads at most the limit's or the start's.
    """
    indptr, indices = sort_rows(problem.indptr, problem.indices)
    moved = np.array(parts, np.int32)
    counts = _count_readers(indptr, indices, moved, problem.num_parts)
    limits, loads = problem.limits, count_loads(problem, moved)
    volume = int(_volume(counts, moved))
    rng = np.random.default_rng(problem.seed)
    for _ in range(MAX_PASSES):
        order = rng.permutation(problem.num_nodes)
        gain = int(_pass(indptr, indices, problem.training, order, moved, counts, loads, limits))
        volume -= gain
        if gain <= LEAST_GAIN * volume:
            break
    return moved


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _count_readers(
    indptr: np.ndarray, indices: np.ndarray, parts: np.ndarray, num_parts: int
) -> np.ndarray:
    """count[v, p]: distinct out-neighbours of v, other than v, in part p; int32 [N, parts]."""
    counts = np.zeros((parts.size, num_parts), np.int32)
    for u in range(parts.size):
        for e in range(indptr[u], indptr[u + 1]):
            v = indices[e]
            if v != u and (e == indptr[u] or indices[e - 1] != v):
                counts[v, parts[u]] += 1
    return counts


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _volume(counts: np.ndarray, parts: np.ndarray) -> int:
    volume = 0
    for v in range(counts.shape[0]):
        for p in range(counts.shape[1]):
            volume += counts[v, p] > 0 and p != parts[v]
    return volume


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _best_move(
    u: int,
    indptr: np.ndarray,
    indices: np.ndarray,
    parts: np.ndarray,
    counts: np.ndarray,
    fits: np.ndarray,
    change: np.ndarray,
) -> int:
    """Part whose change is least among those that fit, or u's own; change [parts] is filled."""
    own, num_parts = parts[u], change.size
    base = counts[u, own] > 0
    for p in range(num_parts):
        change[p] = base - (counts[u, p] > 0)
    for e in range(indptr[u], indptr[u + 1]):
        v = indices[e]
        if v == u or (e > indptr[u] and indices[e - 1] == v):
            continue
        freed = counts[v, own] == 1 and parts[v] != own
        for p in range(num_parts):
            change[p] += (counts[v, p] == 0 and parts[v] != p) - freed
    change[own] = 0
    best = own
    for p in range(num_parts):
        if fits[p] and change[p] < change[best]:
            best = p
    return best


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _pass(
    indptr: np.ndarray,
    indices: np.ndarray,
    training: np.ndarray,
    order: np.ndarray,
    parts: np.ndarray,
    counts: np.ndarray,
    loads: np.ndarray,
    limits: np.ndarray,
) -> int:
    """Visit every node once and make its best move; the rows saved."""
    num_parts = counts.shape[1]
    change = np.zeros(num_parts, np.int64)
    fits = np.zeros(num_parts, np.bool_)
    saved = 0
    for u in order:
        own, degree = parts[u], indptr[u + 1] - indptr[u]
        read_elsewhere = False
        for p in range(num_parts):
            fits[p] = (
                loads[0, p] + 1 <= limits[0, p]
                and (not training[u] or loads[1, p] + 1 <= limits[1, p])
                and loads[2, p] + degree <= limits[2, p]
            )
            read_elsewhere |= p != own and counts[u, p] > 0
        reads_elsewhere = False
        for e in range(indptr[u], indptr[u + 1]):
            reads_elsewhere |= parts[indices[e]] != own
        if (not read_elsewhere and not reads_elsewhere) or loads[0, own] <= 1:
            continue
        best = _best_move(u, indptr, indices, parts, counts, fits, change)
        if best == own:
            continue
        saved -= change[best]
        for e in range(indptr[u], indptr[u + 1]):
            v = indices[e]
            if v != u and (e == indptr[u] or indices[e - 1] != v):
                counts[v, own] -= 1
                counts[v, best] += 1
        for which, amount in ((0, 1), (1, 1 if training[u] else 0), (2, degree)):
            loads[which, own] -= amount
            loads[which, best] += amount
        parts[u] = best
    return saved
