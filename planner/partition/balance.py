"""Improve a partition by moving single nodes: into its limits, and to a lower exchange volume.

Balance: a part above a limit gives nodes that count towards that load to parts with room for them,
those first whose move raises the edge cut least. Loads are repaired in the order training nodes,
edges, nodes; a repair may pass the limits of later ones, and never breaks those repaired before.

Volume, the rows that full-graph training sends per exchange:

    volume = sum_v |{parts p != part(v) that hold an out-neighbour of v}|      (formulas 3.1)

A cut edge costs a row only where it is the first between its source and that part, so the edge cut
is the wrong measure. count[v, p], the out-neighbours of v in p, tells each move's gain exactly:

    moving u from a to b changes the volume by
        [count[u, a] > 0] - [count[u, b] > 0]                        u's own row, plus
        sum over v -> u, v != u: [count[v, b] = 0 and part(v) != b]
                               - [count[v, a] = 1 and part(v) != a]  rows that u reads

Only moves that lower the volume and keep every limit are made.
"""

import typing

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.partition.multilevel import sort_rows
from gnnplan.planner.partition.problem import PartitionProblem

MAX_ROUNDS = 6
REPAIR_ORDER = (1, 2, 0)
"""Rows of the limits: training nodes are few, edges are uneven, nodes the easiest to place."""


def repair_balance(problem: PartitionProblem, parts: NDArray[np.int32]) -> NDArray[np.int32]:
    """Move nodes out of overfull parts, as near to the limits as single moves lead.

    Returns:
        Part of each node, int32 [N], whose excess over the limits, in shares of the totals, is not
        above that of `parts`, which is not changed.
    """
    limits = problem.limits
    loads = count_loads(problem, parts)
    if not (loads > limits).any():
        return parts
    start_excess = _excess(problem, loads)
    moved = np.array(parts, np.int32)
    graph = (problem.indptr, problem.indices, problem.training)
    for _ in range(MAX_ROUNDS):
        held = np.zeros(3, np.bool_)
        for which in REPAIR_ORDER:
            held[which] = True
            over = loads[which] > limits[which]
            if over.any():
                cost = np.asarray(_costs(*graph, moved, over, which))
                leaving = np.flatnonzero(cost < np.iinfo(np.int64).max)
                order = leaving[np.argsort(cost[leaving], kind="stable")]
                _move(*graph, order, moved, loads, limits, which, held)
        if not (loads > limits).any():
            break
    return moved if _excess(problem, loads) <= start_excess else parts


def repair_bytes(num_nodes: int) -> int:
    """Count the bytes of a repair: cost, chosen ids, their order, the result."""
    return num_nodes * (3 * 8 + 4)


def _excess(problem: PartitionProblem, loads: NDArray[np.float64]) -> float:
    over = np.maximum(loads - problem.limits, 0).sum(axis=1)
    return float((over / np.maximum(problem.totals, 1)).sum())


def count_loads(problem: PartitionProblem, parts: NDArray[np.int32]) -> NDArray[np.float64]:
    """Count nodes, training nodes and edges of each part; shape [3, parts]."""
    size = problem.num_parts
    loads = np.zeros((3, size), np.float64)
    loads[0] = np.bincount(parts, minlength=size)
    loads[1] = np.bincount(parts[problem.training], minlength=size)
    loads[2] = np.bincount(parts, weights=np.diff(problem.indptr), minlength=size)
    return loads


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _costs(
    indptr: np.ndarray,
    indices: np.ndarray,
    training: np.ndarray,
    parts: np.ndarray,
    over: np.ndarray,
    which: int,
) -> np.ndarray:
    """Count edges within the own part less those to the best other; the largest integer stays."""
    num_parts = over.size
    cost = np.full(parts.size, np.iinfo(np.int64).max, np.int64)
    near = np.zeros(num_parts, np.int64)
    for v in range(parts.size):
        own = parts[v]
        counts = which == 0 or (which == 1 and training[v])
        counts |= which == 2 and indptr[v + 1] > indptr[v]
        if not over[own] or not counts:
            continue
        near[:] = 0
        for e in range(indptr[v], indptr[v + 1]):
            near[parts[indices[e]]] += 1
        away = 0
        for p in range(num_parts):
            if p != own and near[p] > away:
                away = near[p]
        cost[v] = near[own] - away
    return cost


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _move(
    indptr: np.ndarray,
    indices: np.ndarray,
    training: np.ndarray,
    order: np.ndarray,
    parts: np.ndarray,
    loads: np.ndarray,
    limits: np.ndarray,
    which: int,
    held: np.ndarray,
) -> None:
    """Move nodes in order, each while its part is above limit `which`; `held` limits are kept."""
    num_parts = loads.shape[1]
    near = np.zeros(num_parts, np.int64)
    for v in order:
        own = parts[v]
        if loads[which, own] <= limits[which, own]:
            continue
        amounts = (1.0, 1.0 if training[v] else 0.0, float(indptr[v + 1] - indptr[v]))
        near[:] = 0
        for e in range(indptr[v], indptr[v + 1]):
            near[parts[indices[e]]] += 1
        best = -1
        for p in range(num_parts):
            fits = p != own
            for c in range(3):
                if held[c] and amounts[c] > 0 and loads[c, p] + amounts[c] > limits[c, p]:
                    fits = False
            if fits and (best < 0 or near[p] > near[best]):
                best = p
        if best < 0:
            continue
        for c in range(3):
            loads[c, own] -= amounts[c]
            loads[c, best] += amounts[c]
        parts[v] = best


MAX_PASSES = 12
LEAST_GAIN = 0.001
"""Share of the volume that a pass must save for another one to follow."""


def refine_bytes(
    num_nodes: int, num_edges: int, num_parts: int, *, ascending: bool, id_bytes: int = 4
) -> int:
    """Count the bytes of `refine_volume`: counts, order, parts, in-degrees, and rows if sorted."""
    sorting = 0 if ascending else 2 * (id_bytes * num_edges + 8 * (num_nodes + 1))
    return num_nodes * (4 * num_parts + 8 + 4 + 16) + sorting


def refine_volume(problem: PartitionProblem, parts: NDArray[np.int32]) -> NDArray[np.int32]:
    """Move single nodes while that lowers the volume; the seed orders the visits.

    Returns:
        Part of each node, int32 [N], of a volume at most that of `parts` (not changed), and of
        loads at most the limit's or the start's.
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
    """Count distinct out-neighbours of v, other than v, by part; int32 [N, parts]."""
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
    """Return the fitting part of least change, or u's own; change [parts] is filled."""
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
    """Visit every node once, make its best move, and count the rows saved."""
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
