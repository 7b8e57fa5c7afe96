"""Hotness without sampling: one pass over the edges per hop.

P_l(u), the probability that u is among the vertices drawn up to hop l, follows from hop to hop as
if all vertices were drawn independently (formulas 1.4 b). It is exact for one hop from independent
seeds, under neighbour sampling or Poisson LABOR-0. Otherwise it ranks and does not measure [C5]:

* batches of fixed size draw seeds without replacement, and the formula is low by O(b / |train|);
* for exact-k LABOR the joint hits of two seeds differ from the Poisson ones;
* deeper hops share vertices, and for neighbour sampling the formula is high [C26].
"""

import typing
from collections.abc import Sequence
from typing import Literal

import numba
import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int32] | NDArray[np.int64]
Chances = NDArray[np.float32] | NDArray[np.float64]
"""Probabilities of being hit, shape [N]; those of being missed would lose the digits near 0."""


def seed_probability(
    num_train: int, batch_size: int, *, num_ranks: int = 1, drop_last: bool = False
) -> float:
    """Return P_0 of a training vertex: its chance of being a seed of one rank's batch.

        1 / (ceil(T / B) * ranks), or B / (T * ranks) where a last partial batch is dropped

    T are training vertices, B is the global batch (formulas 1.4 b).

    >>> seed_probability(1000, 512), seed_probability(1000, 512, drop_last=True)
    (0.5, 0.512)
    """
    if drop_last:
        return min(1.0, batch_size / num_train) / num_ranks
    return 1 / (-(-num_train // batch_size) * num_ranks)


def neighbor_hotness(
    indptr: NDArray[np.int64],
    indices: Indices,
    seeds: Chances,
    fanouts: Sequence[int],
    *,
    dialect: Literal["first_seen", "every_hop"] = "every_hop",
) -> Chances:
    """Return P_L under neighbour sampling without replacement (formulas 1.4 b).

        P_{l+1}(u) = 1 - (1 - P_l(u)) * prod over s != u that list u of (1 - E_l(s) * q_s(u))
        q_s(u)     = min(1, k / d_s); 1 - C(d-m, k) / C(d, k) where s lists u m times

    E_l(s) is the chance that s is expanded at hop l: P_l(s) in dialect every_hop, and
    P_l(s) - P_{l-1}(s) in first_seen, where a vertex is expanded only where it first appears.

    Args:
        indptr: shape [N + 1].
        indices: shape [E]; the list of s is `indices[indptr[s]:indptr[s+1]]`.
        seeds: P_0, shape [N]; float32 halves the memory.
        fanouts: k by hop, the hop next to the seeds first; -1 takes all.
        dialect: which vertices are expanded at each hop.

    Returns:
        P_L, shape [N], in the type of the seeds; O(L * E) time.
    """
    # Many small terms may meet in one sum: float32 would lose them.
    p, hit = seeds.copy(), np.zeros(len(seeds))
    expanded = seeds.copy() if dialect == "first_seen" else p
    seen = np.zeros(len(seeds), np.int32)
    for k in fanouts:
        _spread_neighbor(indptr, indices, expanded, k, hit, seen)
        _advance(p, expanded, hit, dialect == "first_seen")
    return p


def labor_hotness(
    indptr: NDArray[np.int64],
    indices: Indices,
    seeds: NDArray[np.float64],
    fanouts: Sequence[int],
) -> NDArray[np.float64]:
    """Return P_L under Poisson LABOR-0, which expands all vertices so far at every hop.

        P_hit(u) = sum_j q_j P_l(s_j) prod_{i<j} (1 - P_l(s_i)),   q_s = min(1, k/d_s) descending

    All s share u's random number, so the s of largest q that is present decides, and parallel
    edges count once. Arguments and shapes as `neighbor_hotness`; formulas 1.4 b.
    """
    degree_order = np.argsort(np.diff(indptr), kind="stable")  # q descending for every k at once
    p = seeds.copy()
    for k in fanouts:
        hit, absent = np.zeros_like(p), np.ones_like(p)
        last = np.full(len(p), -1, np.int64)
        _spread_labor(indptr, indices, degree_order, p, k, hit, absent, last)
        p = 1 - (1 - p) * (1 - hit)
    return p


def smooth(measured: Chances, analytic: Chances, num_batches: int) -> None:
    """Replace zeros of measured hotness [N] by 0.5 / m times `analytic` [N] (formulas 1.4 c).

    `measured` is the share of m = `num_batches` batches whose inputs hold the vertex; changed in
    place.
    """
    _order_zeros(measured, analytic, 0.5 / num_batches)


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _order_zeros(measured: np.ndarray, analytic: np.ndarray, factor: float) -> None:
    for v in range(measured.size):
        if not measured[v] > 0:
            measured[v] = factor * analytic[v]


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _advance(p: np.ndarray, expanded: np.ndarray, hit: np.ndarray, first_seen: bool) -> None:
    """Advance P [N] by the new hits and clear `hit`; in first_seen `expanded` [N] keeps them."""
    for v in range(p.size):
        new = (1.0 - p[v]) * hit[v]
        hit[v] = 0.0
        p[v] += new
        if first_seen:
            expanded[v] = new


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _miss_draws(degree: int, multiplicity: int, k: int) -> float:
    """Return C(d-m, k) / C(d, k), the chance that k of d places miss all of m given ones."""
    miss = 1.0
    for i in range(multiplicity):
        miss *= max(0.0, (degree - k - i) / (degree - i))
    return miss


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _spread_neighbor(
    indptr: np.ndarray,
    indices: np.ndarray,
    expanded: np.ndarray,
    k: int,
    hit: np.ndarray,
    seen: np.ndarray,
) -> None:
    """Add to hit [N] the chance that each s draws u; `seen` [N] is zero before and after."""
    for s in range(expanded.size):
        if expanded[s] <= 0.0:
            continue
        start, end = indptr[s], indptr[s + 1]
        degree = end - start
        for e in range(start, end):
            seen[indices[e]] += 1
        for e in range(start, end):
            u = indices[e]
            m = seen[u]
            seen[u] = 0
            if m == 0 or u == s:
                continue
            q = 1.0 if k < 0 or k >= degree else 1.0 - _miss_draws(degree, m, k)
            hit[u] += (1.0 - hit[u]) * (expanded[s] * q)


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _spread_labor(
    indptr: np.ndarray,
    indices: np.ndarray,
    order: np.ndarray,
    p: np.ndarray,
    k: int,
    hit: np.ndarray,
    absent: np.ndarray,
    last: np.ndarray,
) -> None:
    """Add to hit [N] the chance that each s draws u, s by q descending; `last` [N] starts at -1."""
    for s in order:
        if p[s] <= 0.0:
            continue
        degree = indptr[s + 1] - indptr[s]
        q = 1.0 if k < 0 or k >= degree else k / degree
        for e in range(indptr[s], indptr[s + 1]):
            u = indices[e]
            if u == s or last[u] == s:
                continue
            last[u] = s
            hit[u] += q * p[s] * absent[u]
            absent[u] *= 1.0 - p[s]
