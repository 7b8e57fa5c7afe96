"""Bring a partition within its limits: several loads at once, which one weight per node cannot.

A part above a limit gives nodes that count towards that load to parts with room for them, those
first whose move raises the edge cut least. Loads are taken in the order training nodes, edges,
nodes: each may pass the limits of those after it, which are then repaired by nodes that weigh
little in it, and no limit repaired before is broken again.
"""

import typing

import numba
import numpy as np
from numpy.typing import NDArray

from planner.partition.problem import Problem

MAX_ROUNDS = 6
REPAIR_ORDER = (1, 2, 0)
"""Rows of the limits: training nodes are few, edges are uneven, nodes the easiest to place."""


def repair_balance(problem: Problem, parts: NDArray[np.int32]) -> NDArray[np.int32]:
    """Move nodes out of overfull parts; as near to the limits as single moves lead.

    Args:
        problem: graph and limits.
        parts: int32 [N]; not changed.

    Returns:
        int32 [N] whose excess over the limits, summed in shares of the totals, is not above the
        start's; the start itself where all loads are within their limits.
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
    """Memory of a repair: cost, chosen ids, their order, the result."""
    return num_nodes * (3 * 8 + 4)


def _excess(problem: Problem, loads: NDArray[np.float64]) -> float:
    over = np.maximum(loads - problem.limits, 0).sum(axis=1)
    return float((over / np.maximum(problem.totals, 1)).sum())


def count_loads(problem: Problem, parts: NDArray[np.int32]) -> NDArray[np.float64]:
    """Nodes, training nodes and edges of each part; shape [3, parts]."""
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
    """Edges within the own part less those to the best other one; the largest integer: stays."""
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
