"""Hit rates of caches in front of dependent LABOR-0 batches: counted, and by the LRU model [A7].

Formulas 8.7: vertex v is touched by a batch iff r_v <= q_v and a seed of the batch sees it, which
happens with probability a_v. A cache of C rows, one touch per distinct row and batch:

    independent   sum_v 1 - (1 - a q)^tau = C,  hit = sum_v a q (1 - (1 - a q)^tau) / sum_v a q
    any kappa     miss = E[(1 - a)^n | r <= q now], n of the last tau batches with r <= q along the
                  Gaussian path of 5.5, by Monte Carlo over paths in a random phase; tau from the
                  footprint sum_v 1 - E[(1 - a)^n] = C

The model (tests.reference.cache_hits) gives each vertex one threshold q. In truth it differs with
the seed that sees v and, over several hops, each hop has a number of its own; so the model promises
too much at large kappa (two hops on amazon-computers: within .01 at kappa 1 and 4, up to .16 above
at 256).

p = a q is counted over independent batches; a comes from frozen streams: with f the share of a
stream's batches that touch v, E f = a q and E f^2 = a^2 q over streams.
"""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.features.cache import Slots

Touch = Callable[[int, int], NDArray[np.int64]]
"""touch(stream, batch): the distinct vertices of a batch under a frozen stream."""


class Caches:
    """An LRU cache and a static one side by side, fed with the same batches."""

    def __init__(self, num_nodes: int, num_slots: int, held: NDArray[np.int64]) -> None:
        """`held` are the rows of the static cache."""
        self._slots = Slots(num_nodes, num_slots, clock=False)
        self._codes = np.zeros(num_nodes, np.uint32)
        self._bypass = np.zeros(256, np.bool_)
        self._held = np.zeros(num_nodes, np.bool_)
        self._held[held] = True
        self.touched = self.lru_hits = self.static_hits = 0

    def read(self, ids: NDArray[np.int64], *, count: bool) -> None:
        """Touch the rows of one batch; a batch that only warms up is not counted."""
        decision = self._slots.decide(ids, self._codes, self._bypass)
        if count:
            self.touched += decision.num_touched
            self.lru_hits += decision.num_hits
            self.static_hits += int(self._held[ids].sum())


def hottest(batches: Iterable[NDArray[np.int64]], num_nodes: int, count: int) -> NDArray[np.int64]:
    """The rows most often in batches of another stream than the counted ones; ties by id."""
    heat = np.zeros(num_nodes, np.int64)
    for ids in batches:
        heat[ids] += 1
    return np.argsort(-heat, kind="stable")[:count]


def estimate(
    reads: Iterable[NDArray[np.int64]], touch: Touch, degree: NDArray[np.int64], *,
    streams: int, batches: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:  # fmt: skip
    """a_v and q_v of every vertex: p = a q by counting, their split by moments over groups.

    Args:
        reads: Many independent batches: a probability counted in few is optimistic [A9].
        touch: Batches of frozen streams.
        degree: In-degree; vertices of like p and degree are taken to have one a.
        streams: Frozen streams.
        batches: Batches of each.
    """
    counts, total = np.zeros(len(degree)), 0
    for ids in reads:
        counts[ids] += 1
        total += 1
    p = counts / total
    first, second = np.zeros(len(degree)), np.zeros(len(degree))
    for stream in range(streams):
        times = np.zeros(len(degree))
        for batch in range(batches):
            times[touch(stream, batch)] += 1
        first += times / batches
        second += times * (times - 1) / (batches * (batches - 1))
    a = np.zeros(len(degree))
    for like_p in np.array_split(np.argsort(p, kind="stable"), 30):
        for group in np.array_split(like_p[np.argsort(degree[like_p], kind="stable")], 4):
            if first[group].sum() > 0:
                a[group] = min(second[group].sum() / first[group].sum(), 1.0)
    a = np.maximum(a, p)  # q <= 1
    q = np.divide(p, a, out=np.zeros(len(degree)), where=a > 0)
    return a, q
