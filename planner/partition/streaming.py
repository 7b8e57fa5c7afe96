"""Streaming partitioners: LDG and Fennel for graphs too large for multilevel ones, and PaGraph's.

Nodes are visited in order of id, so a memory-mapped CSC is read from front to back. Only one small
integer per node and the parts' loads are kept. LDG and Fennel put a node where most of its
in-neighbours are, less a penalty for full parts:

    LDG     n_p * (1 - l_p)                 Stanton and Kliot, KDD 2012
    Fennel  n_p - 1.5 a * sqrt(l_p N / P)   Tsourakakis et al., WSDM 2014; a = sqrt(P) m / N^1.5

n_p are the in-neighbours in p; l_p is the largest of p's balanced loads over its share (over its
limit for LDG). Later passes take a node out and place it again, when all its neighbours have a
place (Nishimura and Ugander, KDD 2013). The seed has no effect.

PaGraph puts training nodes where their L-hop in-neighbourhood already is:

    score_i = (1 + |IN(v) in part i|) * (TV / P - TV_i) / (PV_i + 1)        (formulas 1.7, [S7])

TV are the training nodes, TV_i those of part i, PV_i all nodes of part i. PaGraph's parts hold
whole neighbourhoods and overlap; here another node belongs to the part that took it first, and one
that none took to v mod P.
"""

import typing
from typing import Literal

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.partition.problem import PartitionProblem

PASSES = 3
SMALL_PARTS = 127
"""Most parts whose number fits one byte: random reads of bytes miss the cache less often."""


def streaming_bytes(num_nodes: int, num_parts: int) -> int:
    """Count the bytes of working parts and the result, without the mapped graph and mask."""
    return num_nodes * ((1 if num_parts <= SMALL_PARTS else 2) + 4)


def ldg_parts(problem: PartitionProblem) -> NDArray[np.int32]:
    """Partition by linear deterministic greedy; int32 [N]."""
    return _stream(problem, "ldg")


def fennel_parts(problem: PartitionProblem) -> NDArray[np.int32]:
    """Partition by Fennel with exponent 1.5; int32 [N]."""
    return _stream(problem, "fennel")


def _stream(problem: PartitionProblem, rule: Literal["ldg", "fennel"]) -> NDArray[np.int32]:
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
    """Place every node once, a price of 0 meaning LDG, and count those that moved."""
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


HOPS = 1
"""Hops L of a neighbourhood; those of more hops soon are the whole graph."""
MAX_PAGRAPH_PARTS = 64
"""Bits of the word that says which parts a node is a member of."""


def pagraph_bytes(num_nodes: int) -> int:
    """Count the bytes of membership word, stamp, queue and result."""
    return num_nodes * (8 + 4 + 8 + 4)


def pagraph_parts(problem: PartitionProblem, *, hops: int = HOPS) -> NDArray[np.int32]:
    """Partition by PaGraph's score, in order of id; int32 [N].

    Raises:
        SettingsError: there are no training nodes, or more than 64 parts.
    """
    if problem.num_parts > MAX_PAGRAPH_PARTS:
        raise SettingsError(
            f"partitioner pagraph: expected at most {MAX_PAGRAPH_PARTS} parts, "
            f"found {problem.num_parts}; choose ldg"
        )
    if not problem.training.any():
        raise SettingsError("partitioner pagraph: expected training nodes, found none; choose ldg")
    shares = problem.shares * np.count_nonzero(problem.training)
    parts = _assign(problem.indptr, problem.indices, problem.training, shares, hops)
    missing = np.flatnonzero(parts < 0)
    parts[missing] = missing % problem.num_parts
    return parts


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _assign(
    indptr: np.ndarray, indices: np.ndarray, training: np.ndarray, shares: np.ndarray, hops: int
) -> np.ndarray:
    num_nodes, size = indptr.size - 1, shares.size
    member = np.zeros(num_nodes, np.uint64)
    stamp = np.full(num_nodes, -1, np.int32)
    queue = np.empty(num_nodes, np.int64)
    parts = np.full(num_nodes, -1, np.int32)
    num_training, num_members = np.zeros(size, np.int64), np.zeros(size, np.int64)
    common = np.zeros(size, np.int64)
    one = np.uint64(1)
    for v in range(num_nodes):
        if not training[v]:
            continue
        stamp[v] = v
        queue[0] = v
        start, end = 0, 1
        for _ in range(hops):
            last = end
            for i in range(start, last):
                u = queue[i]
                for e in range(indptr[u], indptr[u + 1]):
                    w = indices[e]
                    if stamp[w] != v:
                        stamp[w] = v
                        queue[end] = w
                        end += 1
            start = last
        common[:] = 0
        for i in range(1, end):
            bits = member[queue[i]]
            p = 0
            while bits:
                common[p] += bits & one
                bits >>= one
                p += 1
        best, best_score = 0, -np.inf
        for p in range(size):
            score = (1 + common[p]) * (shares[p] - num_training[p]) / (num_members[p] + 1)
            if score > best_score or (score == best_score and num_training[p] < num_training[best]):
                best, best_score = p, score
        num_training[best] += 1
        bit = one << np.uint64(best)
        for i in range(end):
            u = queue[i]
            if not member[u] & bit:
                member[u] |= bit
                num_members[best] += 1
            if parts[u] < 0 and (not training[u] or u == v):
                parts[u] = best
    return parts
