"""PaGraph's partition: training nodes go where their L-hop in-neighbourhood already is.

    score_i = (1 + |IN(v) in part i|) * (TV / P - TV_i) / (PV_i + 1)        (formulas 1.7, [S7])

TV are the training nodes, TV_i those of part i, PV_i all nodes of part i, redundant ones included:
PaGraph's parts hold the whole neighbourhoods of their training nodes and so overlap. Here a node
that is not a training node belongs to the part that took it first, one that none took to v mod P.
"""

import typing

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.partition.problem import Problem

HOPS = 1
"""L: neighbourhoods of more hops soon are the whole graph (Products took PaGraph 4753 s)."""
MAX_PAGRAPH_PARTS = 64
"""Membership is one bit per part in a 64-bit word."""


def pagraph_bytes(num_nodes: int) -> int:
    """Memory: membership word, stamp, queue, result."""
    return num_nodes * (8 + 4 + 8 + 4)


def pagraph_parts(problem: Problem, *, hops: int = HOPS) -> NDArray[np.int32]:
    """Assign by PaGraph's score, in order of id; int32 [N].

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
