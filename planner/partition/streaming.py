"""Streaming partitioners for graphs too large for the multilevel ones: LDG and Fennel.

Nodes are visited in order of id, so a memory-mapped CSC is read from front to back; only one small
integer per node and the parts' loads are kept. Each node goes where most of its in-neighbours are,
less a penalty for full parts:

    LDG     n_p * (1 - l_p)                 Stanton and Kliot, KDD 2012
    Fennel  n_p - 1.5 a * sqrt(l_p N / P)   Tsourakakis et al., WSDM 2014; a = sqrt(P) m / N^1.5

with n_p the in-neighbours in p and l_p the largest of p's balanced loads over its share (over its
limit for LDG). Later passes take a node out and place it again (Nishimura and Ugander, KDD 2013):
then all of its neighbours have a place, which one pass over low ids lacks. The seed has no effect.
"""

import typing
from typing import Literal

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.partition.problem import Problem

PASSES = 3
SMALL_PARTS = 127
"""Up to here a node's part fits one byte: the random reads of it miss the cache less often."""


def streaming_bytes(num_nodes: int, num_parts: int) -> int:
    """Memory of a stream beyond the mapped graph and mask: working parts and the result."""
    return num_nodes * ((1 if num_parts <= SMALL_PARTS else 2) + 4)


def ldg_parts(problem: Problem) -> NDArray[np.int32]:
    """Linear deterministic greedy, `PASSES` passes; int32 [N]."""
    return _stream(problem, "ldg")


def fennel_parts(problem: Problem) -> NDArray[np.int32]:
    """Fennel with exponent 1.5, `PASSES` passes; int32 [N]."""
    return _stream(problem, "fennel")


def _stream(problem: Problem, rule: Literal["ldg", "fennel"]) -> NDArray[np.int32]:
    size, num_nodes = problem.num_parts, problem.num_nodes
    kind = np.int8 if size <= SMALL_PARTS else np.int16
    parts = np.full(num_nodes, -1, kind)
    loads = np.zeros((3, size))
    totals = np.where(np.isfinite(problem.balance.tolerances), problem.totals, 0.0)
    shares = totals[:, None] * problem.shares[None, :]
    # A load that is not balanced, or of which there is none, counts for nothing.
    per_load = np.divide(1.0, shares, out=np.zeros_like(shares), where=shares > 0)
    if rule == "ldg":
        tolerances = np.array(problem.balance.tolerances)
        per_load /= np.where(np.isfinite(tolerances), 1 + tolerances, 1.0)[:, None]
    price = 0.0
    if rule == "fennel":
        # The list of an undirected edge stands in both ends' lists: m is half the stored edges.
        price = 1.5 * np.sqrt(size) * problem.num_edges / 2 / num_nodes**1.5
        price *= np.sqrt(num_nodes / size)
    graph = (problem.indptr, problem.indices, problem.training)
    for _ in range(PASSES):
        changed = _pass(*graph, parts, loads, problem.limits, per_load, price)
        if not changed:
            break
    return parts.astype(np.int32)


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _pass(
    indptr: np.ndarray,
    indices: np.ndarray,
    training: np.ndarray,
    parts: np.ndarray,
    loads: np.ndarray,
    limits: np.ndarray,
    per_load: np.ndarray,
    price: float,
) -> int:
    """Place every node once, a price of 0 meaning LDG; the number of nodes that moved."""
    size = loads.shape[1]
    near = np.zeros(size, np.int64)
    filled = np.zeros(size)
    fits = np.zeros(size, np.bool_)
    changed = 0
    for v in range(parts.size):
        old = parts[v]
        amounts = (1.0, 1.0 if training[v] else 0.0, float(indptr[v + 1] - indptr[v]))
        near[:] = 0
        for e in range(indptr[v], indptr[v + 1]):
            p = parts[indices[e]]
            if p >= 0:
                near[p] += 1
        if old >= 0:
            for c in range(3):
                loads[c, old] -= amounts[c]
        any_fits = False
        for p in range(size):
            filled[p] = 0.0
            fits[p] = True
            for c in range(3):
                filled[p] = max(filled[p], loads[c, p] * per_load[c, p])
                # A node that does not count towards a load may join a part that is full of it.
                if amounts[c] > 0 and loads[c, p] + amounts[c] > limits[c, p]:
                    fits[p] = False
            any_fits |= fits[p]
        best = -1
        best_score = 0.0
        for p in range(size):
            if any_fits and not fits[p]:
                continue
            if not any_fits:
                score = -filled[p]
            elif price > 0:
                score = near[p] - price * np.sqrt(filled[p])
            else:
                score = near[p] * (1 - filled[p])
            if best < 0 or score > best_score or (score == best_score and filled[p] < filled[best]):
                best, best_score = p, score
        for c in range(3):
            loads[c, best] += amounts[c]
        changed += best != old
        parts[v] = best
    return changed
