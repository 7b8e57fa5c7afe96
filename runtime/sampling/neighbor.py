"""Neighbour sampling on cores, equal to tests/reference bit for bit.

`NeighborSampler` draws uniformly without replacement, `WeightedSampler` by a law:

    replacement           k draws of law w / W, each independent of the others
    without-replacement   k different edges by successive sampling (an exponential race)
    poisson               each edge with probability min(1, c w), k on average

The law of a row is w_e = A_e (f if the source is local else 1), A_e the edge's weight or 1. The
estimator is chosen apart: the plain mean over what was drawn (no weights in the block), or weights
that estimate the mean over the row's edges of positive weight (Horvitz-Thompson, Hajek).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, no_type_check

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.sampling.checks import float32_weight, read_only
from gnnplan.runtime.sampling.choose.poisson import offer, unit, water_level
from gnnplan.runtime.sampling.choose.uniform import UniformRows, in_lanes
from gnnplan.runtime.sampling.compiled import inlined_kernel, kernel
from gnnplan.runtime.sampling.dependent import HopStreams, StreamPolicy
from gnnplan.runtime.sampling.frontier import HopSampler, HopwiseSampler, Weights, expand_hops
from gnnplan.runtime.sampling.minibatch import Dialect
from gnnplan.runtime.sampling.placed_indices import prefetch_read
from gnnplan.runtime.sampling.rng import Purpose, bounded_kernel, key_kernel, value_kernel
from gnnplan.runtime.sampling.statistics import Draws, Estimator
from gnnplan.runtime.sampling.workspace import HOP, SPARE, Workspace

WITHOUT, REPLACEMENT, POISSON = 0, 1, 2
"""Codes of `Draws` for the kernels."""
AHEAD = 24
"""Rows between asking for a row's bounds and reading them; at most the spare entries."""


class NeighborSampler(HopSampler):
    """Draws up to `fanouts[h]` in-neighbours of every vertex that hop h expands.

    Args (others as in `HopSampler`):
        seed: Run's seed.
        purpose: Stream of the draws; profiling uses another one than training.
    """

    def __init__(
        self,
        indptr: NDArray[np.integer],
        indices: NDArray[np.integer],
        fanouts: Sequence[int],
        *,
        seed: int = 0,
        purpose: Purpose = Purpose.NEIGHBOR,
        **settings: Any,
    ) -> None:
        streams = StreamPolicy(seed=seed, purpose=purpose)
        super().__init__(indptr, indices, fanouts, streams=streams, **settings)
        self.purpose = purpose
        self._rows = UniformRows(self.indptr, self.indices, np.array(self.fanouts, np.int64))

    @property
    def keeps_chosen(self) -> bool:
        """Whether a workspace holds the edges that were chosen: not where lanes hold them."""
        return self.edge_ids or not in_lanes(self.fanouts)

    def _rows_now(self) -> Any:
        """Return the rows that this thread's next batch expands, as `expand_hops` takes them."""
        return self._rows

    def _draw(self, w: Workspace, streams: HopStreams) -> None:
        rows, every_hop = self._rows_now(), self.dialect is Dialect.EVERY_HOP
        while not expand_hops(rows, streams.first, every_hop, self.edge_ids, w.buffers()):
            w.grow(int(w.state[HOP]))


class WeightedRows(NamedTuple):
    """Lists of neighbours that one hop draws from, its weights, and the way in which it draws."""

    indptr: NDArray[np.integer]
    indices: NDArray[np.integer]
    edge_weight: NDArray[np.float32]
    ring: NDArray[np.uint8]
    """Ring of each node; a source is local where it is at most `level`. Empty: none is."""
    level: int
    factor: float
    fanout: int
    draws: int
    """`WITHOUT`, `REPLACEMENT` or `POISSON`."""
    hajek: bool


class WeighedEdges(NamedTuple):
    """Edges chosen, with one weight each."""

    row_ptr: NDArray[np.int64]
    positions: NDArray[np.int64]
    weight: NDArray[np.float64]


@inlined_kernel
@no_type_check
def _fill_law(indices, edge_weight, ring, level, factor, start, degree, law):
    """Write the row's weights to law[0 .. degree-1]; return how many are positive."""
    positive = 0
    for j in range(degree):
        w = np.float64(edge_weight[start + j]) if edge_weight.shape[0] > 0 else 1.0
        if ring.shape[0] > 0 and ring[indices[start + j]] <= level:
            w *= factor
        law[j] = w
        positive += w > 0.0
    return positive


@kernel
@no_type_check
def _take_all(law, degree, positive, start, positions, weight, edge):
    for j in range(degree):
        if law[j] > 0.0:
            positions[edge] = start + j
            weight[edge] = 1.0 / positive
            edge += 1
    return edge


@kernel
@no_type_check
def _draw_uniform(indices, key, degree, fanout, start, positions, weight, edge):
    for i in range(fanout):
        offset = bounded_kernel(value_kernel(key, i), degree)
        positions[edge] = start + offset
        weight[edge] = 1.0 / fanout
        prefetch_read(indices, start + offset)
        edge += 1
    return edge


@kernel
@no_type_check
def _draw_replacement(key, law, sums, degree, positive, fanout, start, positions, weight, edge):
    """Draw independently by inverse transform on the row's running sums."""
    running, last = 0.0, 0
    for j in range(degree):
        running += law[j]
        sums[j] = running
        if law[j] > 0.0:
            last = j
    for i in range(fanout):
        target = unit(value_kernel(key, i)) * running
        low, high = 0, degree
        while low < high:
            middle = (low + high) >> 1
            if sums[middle] > target:
                high = middle
            else:
                low = middle + 1
        j = min(low, last)
        positions[edge] = start + j
        weight[edge] = running / (np.float64(positive) * fanout * law[j])
        edge += 1
    return edge


@kernel
@no_type_check
def _draw_race(key, law, times, places, degree, positive, start, positions, weight, edge):
    """Take the len(times) - 1 first arrivals of independent exponential times with rates `law`."""
    count = 0
    for j in range(degree):
        if law[j] > 0.0:
            time = -math.log1p(-unit(value_kernel(key, j))) / law[j]
            count = offer(times, places, count, time, j)
    # The root of the heap arrived last of these: it is not taken, it says what the others beat.
    taken = np.sort(places[1:])
    for i in range(taken.shape[0]):
        j = taken[i]
        positions[edge] = start + j
        weight[edge] = 1.0 / (-math.expm1(-law[j] * times[0]) * positive)
        edge += 1
    return edge


@kernel
@no_type_check
def _draw_poisson(key, law, degree, positive, fanout, start, positions, weight, edge):
    level = water_level(law[:degree], fanout)
    for j in range(degree):
        pi = min(1.0, level * law[j])
        if unit(value_kernel(key, j)) < pi:
            positions[edge] = start + j
            weight[edge] = 1.0 / (pi * positive)
            edge += 1
    return edge


@kernel
@no_type_check
def choose_weighted(rows, stream, node_ids, i, last, scratch, out, row, edge):
    """Choose the edges of nodes i .. last-1 while there is room; `row` is the row of node i.

    Return the first node whose row is left, and the edge end.
    """
    indptr, indices, edge_weight, ring, level, factor, fanout, draws, hajek = rows
    row_ptr, positions, weight = out
    law, sums, times, places = scratch
    times, places = times[: max(fanout, 0) + 1], places[: max(fanout, 0) + 1]
    plain = edge_weight.shape[0] == 0 and (ring.shape[0] == 0 or factor == 1.0)
    alike = plain and draws == REPLACEMENT and fanout > 0
    while i < last:
        prefetch_read(indptr, node_ids[i + AHEAD])
        node = node_ids[i]
        start = indptr[node]
        degree = indptr[node + 1] - start
        if edge + max(degree, fanout) + SPARE > positions.shape[0]:
            break
        key, before = key_kernel(stream, node), edge
        if alike and degree > 0:
            edge = _draw_uniform(indices, key, degree, fanout, start, positions, weight, edge)
        elif degree > 0:
            able = _fill_law(indices, edge_weight, ring, level, factor, start, degree, law)
            if fanout < 0 or (able <= fanout and (draws != REPLACEMENT or able == 0)):
                edge = _take_all(law, degree, able, start, positions, weight, edge)
            elif draws == REPLACEMENT:
                edge = _draw_replacement(
                    key, law, sums, degree, able, fanout, start, positions, weight, edge
                )
            elif draws == WITHOUT:
                edge = _draw_race(
                    key, law, times, places, degree, able, start, positions, weight, edge
                )
            else:
                edge = _draw_poisson(key, law, degree, able, fanout, start, positions, weight, edge)
        if hajek:
            _normalise(weight, before, edge)
        i += 1
        row += 1
        row_ptr[row] = edge
    return i, edge


@inlined_kernel
@no_type_check
def _normalise(weight, first, last):
    total = 0.0
    for e in range(first, last):
        total += weight[e]
    for e in range(first, last):
        weight[e] /= total


_CODES = {
    Draws.WITHOUT_REPLACEMENT: WITHOUT,
    Draws.REPLACEMENT: REPLACEMENT,
    Draws.POISSON: POISSON,
}


@dataclass(frozen=True, eq=False, slots=True)
class Boost:
    """A factor on the weight of sources with ring[v] <= L - 1 - hop, L the hops."""

    ring: NDArray[np.uint8]
    factor: float

    def of(self, ids: NDArray[np.integer], hops_left: int) -> NDArray[np.float64]:
        """Return each source's factor at a hop after which so many follow."""
        return np.where(self.ring[ids] <= hops_left, self.factor, 1.0)


class WeightedSampler(HopwiseSampler):
    """Draws about `fanouts[h]` in-neighbours of every vertex that hop h expands.

    Args (others as in `NeighborSampler`):
        edge_weight: Finite and not negative, float [E]; 0 is never drawn. None: all alike.
        draws: How the edges of a row are drawn. With replacement always `fanouts[h]` draws.
        estimator: Meaning of the blocks' weights; plain gives none.
        boost: Multiplies the weight of some sources (see `locality`).
    """

    def __init__(
        self,
        indptr: NDArray[np.integer],
        indices: NDArray[np.integer],
        fanouts: Sequence[int],
        *,
        edge_weight: NDArray[np.floating] | None = None,
        draws: Draws = Draws.WITHOUT_REPLACEMENT,
        estimator: Estimator = Estimator.PLAIN,
        boost: Boost | None = None,
        seed: int = 0,
        purpose: Purpose = Purpose.NEIGHBOR,
        **settings: Any,
    ) -> None:
        streams = StreamPolicy(seed=seed, purpose=purpose)
        super().__init__(indptr, indices, fanouts, streams=streams, **settings)
        self.edge_weight = float32_weight(edge_weight, self.indices.shape[0])
        self.draws, self.estimator = Draws(draws), Estimator(estimator)
        self.boost = Boost(_NOWHERE, 1.0) if boost is None else boost
        self._widest = int(np.diff(self.indptr).max(initial=0))

    def _choose(
        self, w: Workspace, streams: HopStreams, hop: int, first: int, last: int
    ) -> Weights | None:
        rows = WeightedRows(
            self.indptr, self.indices, self.edge_weight, read_only(self.boost.ring),
            self.num_hops - 1 - hop, self.boost.factor, self.fanouts[hop], _CODES[self.draws],
            self.estimator is Estimator.HAJEK,
        )  # fmt: skip
        scratch = self._of_thread("scratch", self._make_scratch)

        def choose(node: int, row: int, edge: int) -> tuple[int, int]:
            out = WeighedEdges(w.row_ptr, w.positions, self._edge_numbers(w, edge))
            return choose_weighted(
                rows, streams.first[hop], w.node_ids, node, last, scratch, out, row, edge
            )

        self._choose_rows(w, hop, first, last, choose)
        if self.estimator is Estimator.PLAIN:
            return None
        begin, end = int(w.edge_ends[hop]), int(w.edge_ends[hop + 1])
        return self._edge_numbers(w, end)[begin:end].astype(np.float32)

    def _make_scratch(self) -> tuple[NDArray[Any], ...]:
        """Make room for a row's law and running sums, and for times and places of the race."""
        longest = min(max(*self.fanouts, 0), self._widest) + 1
        law, sums = np.zeros((2, self._widest))
        return law, sums, np.zeros(longest), np.zeros(longest, dtype=np.int64)


_NOWHERE = read_only(np.zeros(0, dtype=np.uint8))
