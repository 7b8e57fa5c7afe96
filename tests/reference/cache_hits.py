"""Hit rates of caches of C rows in front of a batch's reads: LRU, frozen, static [A7].

A batch touches each of its distinct rows once. Under dependent LABOR-0 batches vertex v is touched
iff its number r_v is at most q_v and a seed of the batch sees it, with probability a_v; p_v = a_v
q_v. A row leaves an LRU cache after tau batches without a touch (the characteristic time), where
tau makes the expected footprint equal to C.

The model gives each vertex one threshold q. In truth it differs with the seed that sees v and, over
several hops, each hop has a number of its own, so it promises too much at large kappa (up to .16 at
256 over two hops). Plans are therefore priced by `planner.cost.cache_model`, which counts the same
characteristic time over batches as they are drawn; this model stays for what was not drawn.
"""

from collections.abc import Callable
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

BUCKETS, PATHS = 10, 3000
"""Buckets of vertices by q, and in each by a; Gaussian paths drawn."""
LONGEST = 1 << 14
"""Batches beyond which a row that was not touched is taken to stay out."""

Rates = NDArray[np.float64]
"""One number in [0, 1] per vertex."""
Curve = Callable[[int], tuple[float, float]]
"""Expected footprint (rows) and hit rate at a characteristic time, in batches."""


def static_hit_rate(p: Rates, num_slots: int) -> float:
    """Share of reads served by the C hottest rows, whatever the dependence between batches.

    sum of the C largest p / sum p

    Source: docs/formulas.md 8.7 [A7].

    >>> static_hit_rate(np.array([0.5, 0.25, 0.25]), 1)
    0.5
    """
    total = float(p.sum())
    return float(np.sort(p)[::-1][:num_slots].sum()) / total if total > 0 else 0.0


def lru_hit_rate(p: Rates, num_slots: int) -> float:
    """Hit rate of an LRU cache in front of independent batches.

    sum_v 1 - (1 - p_v)^tau = C,  hit = sum_v p_v (1 - (1 - p_v)^tau) / sum_v p_v

    Args:
        p: probability that a batch touches the row.
        num_slots: C.

    Source: docs/formulas.md 8.7 [A7].

    >>> lru_hit_rate(np.full(10, 0.5), 10)
    1.0
    """
    return frozen_hit_rate(p, np.ones_like(p), num_slots)


def frozen_hit_rate(a: Rates, q: Rates, num_slots: int) -> float:
    """Hit rate under frozen numbers r (kappa -> infinity); with q = 1, of independent batches.

    sum_v q_v (1 - (1 - a_v)^tau) = C,  hit = sum_v a_v q_v (1 - (1 - a_v)^tau) / sum_v a_v q_v

    Args:
        a: probability that a seed of the batch sees the vertex.
        q: probability that its number passes.
        num_slots: C.

    Source: docs/formulas.md 8.7 [A7].
    """
    seen = (a > 0) & (q > 0)
    a, q = a[seen].astype(np.float64), q[seen].astype(np.float64)
    total = float((a * q).sum())
    if total == 0.0:
        return 0.0
    if num_slots >= float(q.sum()):
        return 1.0

    def at(tau: float) -> tuple[float, float]:
        kept = q * (1 - (1 - a) ** tau)
        return float(kept.sum()), float((a * kept).sum()) / total

    low, high = 0.0, 1.0
    while at(high)[0] < num_slots and high < 1e9:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle)[0] < num_slots else (low, middle)
    return at(high)[1]


def dependent_hit_rate(a: Rates, q: Rates, num_slots: int, kappa: int) -> float:
    """Hit rate of an LRU cache in front of dependent batches, any kappa.

    miss = E[(1 - a_v)^n | r_v <= q_v now], n the number of the last tau batches with r_v <= q_v
    along the Gaussian path of formulas 5.5 in a random phase; footprint sum_v 1 - E[(1 - a_v)^n].

    Args:
        a: probability that a seed of the batch sees the vertex.
        q: probability that its number passes.
        num_slots: C.
        kappa: batches over which the numbers change wholly; 1 means independent batches.

    Source: docs/formulas.md 8.7 [A7]; Monte Carlo over paths per bucket of (a, q), seeded.
    """
    seen = (a > 0) & (q > 0)
    a, q = a[seen], q[seen]
    if num_slots >= a.size:
        return 1.0 if a.size else 0.0
    if kappa <= 1:
        return lru_hit_rate(a * q, num_slots)
    # Drawn paths may pass more often than q says: then a cache of nearly all rows seems to serve
    # more than is read.
    return min(_at_footprint(_dependent(a, q, kappa), num_slots), 1.0)


def _buckets(a: Rates, q: Rates) -> list[tuple[float, float, int]]:
    """Vertices with like q and a: their mean a, mean q and number."""
    found: list[tuple[float, float, int]] = []
    order = np.argsort(q, kind="stable")
    for part in np.array_split(order, min(BUCKETS, order.size)):
        inner = part[np.argsort(a[part], kind="stable")]
        for bucket in np.array_split(inner, min(BUCKETS, inner.size)):
            found.append((float(a[bucket].mean()), float(q[bucket].mean()), bucket.size))
    return found


def _dependent(a: Rates, q: Rates, kappa: int) -> Curve:
    groups = _buckets(a, q)
    total = sum(one * other * count for one, other, count in groups)

    def at(tau: int) -> tuple[float, float]:
        path = _paths(tau + 1, kappa)
        footprint = hits = 0.0
        occupied: dict[float, tuple[NDArray[np.int64], NDArray[np.bool_]]] = {}
        for one, other, count in groups:
            if other not in occupied:
                below = path <= NormalDist().inv_cdf(min(other, 1 - 1e-12))
                occupied[other] = (below[:, :-1].sum(1), below[:, -1])
            earlier, now = occupied[other]
            missing = (1 - one) ** earlier
            footprint += count * (1 - float(missing.mean()))
            hits += count * one * float((now * (1 - missing)).mean())
        return footprint, hits / total

    return at


def _paths(length: int, kappa: int) -> Rates:
    """Gaussian numbers of one vertex over `length` batches, in random phases; [PATHS, length]."""
    rng = np.random.default_rng(9)
    z = rng.standard_normal((PATHS, length // kappa + 3))
    index = rng.integers(0, kappa, PATHS)[:, None] + np.arange(length)[None]
    segment, angle = index // kappa, (index % kappa) / kappa * (np.pi / 2)
    return np.cos(angle) * np.take_along_axis(z, segment, 1) + np.sin(angle) * np.take_along_axis(
        z, segment + 1, 1
    )


def _at_footprint(curve: Curve, num_slots: int) -> float:
    """The hit rate at the characteristic time whose footprint is the number of slots."""
    high = 1
    while curve(high)[0] < num_slots:
        if high > LONGEST:
            return curve(high)[1]
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if curve(middle)[0] < num_slots else (low, middle)
    below, above = curve(low) if low else (0.0, 0.0), curve(high)
    share = (num_slots - below[0]) / max(above[0] - below[0], 1e-12)
    return below[1] + share * (above[1] - below[1])
