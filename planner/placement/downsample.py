"""Place few vertices that stand for all: of each run of equally hot ones, the one in the middle.

A placement depends on how hot vertices are, not on which they are. In the order from hot to cold
one of every `stride` vertices stands for the run around it, so sums over them are those over all to
a run's worth of the hottest (DEC-57). `VertexRuns` goes back to all vertices.
"""

import functools

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.placement.order import hotness_order
from gnnplan.planner.workload import Hotness
from gnnplan.runtime.npy import release_pages

ENOUGH = 1 << 21
"""Vertices that are told apart at least: graphs of fewer than twice as many are placed whole."""
STEEP = 1.1
"""Heat of a run's hottest vertex over its coldest's from which the mean stands for the run. In
others the middle does: its two halves differ as one vertex's do, where a mean's agree too well.
"""


def downsample_hotness(hotness: Hotness, enough: int = ENOUGH) -> Hotness:
    """Select the hotness of vertices that stand for all; itself where there are few.

    At least `enough` vertices are told apart.

    >>> p = np.linspace(1, 0, 12, dtype=np.float32)
    >>> few = downsample_hotness(Hotness(
    ...     seeds_per_rank=1, first_half=p, second_half=p, num_batches=2, topology=p), enough=4)
    >>> few.stride, few.ids.tolist()
    (3, [1, 4, 7, 10])
    """
    stride = hotness.first_half.size // max(1, enough)
    if stride < 2:
        return hotness

    def order() -> NDArray[np.int32]:
        return hotness_order(hotness.features).astype(np.int32)

    hot_to_cold = order()
    middles = _middles(hot_to_cold, stride)
    at = np.argsort(middles)
    ids = middles[at].astype(np.int64)
    steep = _steep_runs(hotness.features, hot_to_cold, stride)
    halves: list[NDArray[np.float32]] = []
    for half in (hotness.first_half, hotness.second_half):
        by_run = half[middles]
        runs = hot_to_cold[steep[:, None] * stride + np.arange(stride)]
        by_run[steep] = half[runs].mean(axis=1)
        halves.append(by_run[at])
        release_pages(half)
    found = Hotness(
        seeds_per_rank=hotness.seeds_per_rank,
        first_half=halves[0],
        second_half=halves[1],
        num_batches=hotness.num_batches,
        topology=np.zeros(0, np.float32),
        whole=hotness,
        ids=ids,
        stride=stride,
        order=functools.cache(order),  # sorted again for the few plans that ask
    )
    return found.finished()


def _steep_runs(p: NDArray[np.float32], order: NDArray[np.int32], stride: int) -> NDArray[np.int64]:
    """Find whole runs whose hottest vertex and coldest differ: no vertex is like all of them."""
    whole = order.size // stride
    first, last = (p[order[k : whole * stride : stride]] for k in (0, stride - 1))
    return np.flatnonzero(first > STEEP * last)


def _middles(order: NDArray[np.int32], stride: int) -> NDArray[np.int32]:
    """Select the middle of each run of `stride`, shape [ceil(N / stride)]."""
    at = np.arange(0, order.size, stride) + stride // 2
    return order[np.minimum(at, order.size - 1)]


class VertexRuns:
    """Maps vertices that stand for others to all of them."""

    def __init__(self, hotness: Hotness) -> None:
        self._stride, self._num = hotness.stride, hotness.num_vertices
        self._order = np.zeros(0, np.int32) if hotness.order is None else hotness.order()
        middles = _middles(self._order, self._stride)
        self._run = np.empty(middles.size, np.int64)
        self._run[np.searchsorted(hotness.ids, middles)] = np.arange(middles.size)

    def ids(self, few: NDArray[np.int64]) -> NDArray[np.int64]:
        """List all vertices that some of those stand for, ascending, as memory is gone through."""
        return few if self._stride == 1 else np.flatnonzero(self._marked(few))

    def mask(self, few: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Copy to every vertex what holds for the one that stands for it, shape [N]."""
        return few if self._stride == 1 else self._marked(np.flatnonzero(few))

    def _marked(self, few: NDArray[np.int64]) -> NDArray[np.bool_]:
        runs, whole = self._run[few], self._num // self._stride
        table = self._order[: whole * self._stride].reshape(whole, self._stride)
        out = np.zeros(self._num, np.bool_)
        out[table[runs[runs < whole]].reshape(-1)] = True
        if (runs >= whole).any():  # the short last run
            out[self._order[whole * self._stride :]] = True
        return out
