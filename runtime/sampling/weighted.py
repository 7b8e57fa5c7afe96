"""Neighbour sampling with replacement, by weight, or edge by edge (see `reference_weighted`).

    replacement           k draws of law w / W, each independent of the others
    without-replacement   k different edges by successive sampling (an exponential race)
    poisson               each edge with probability min(1, c w), k on average

The estimator is chosen apart: the plain mean over what was drawn (no weights in the block), or
weights that estimate the mean over the row's edges of positive weight (Horvitz-Thompson, Hajek).

Kernels of weighted neighbour sampling: a row's law, its draws, and the relabelling of a hop.

The law of a row is w_e = A_e (f if the source is local else 1), A_e the edge's weight or 1. The
three ways of drawing from it, and the inclusion probabilities they report, are defined in
`reference_weighted`, which these equal bit for bit.
"""

import copy
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import no_type_check

import numpy as np
from numpy.typing import NDArray

from runtime.sampling.checks import (
    RELABEL_BUDGET_BYTES,
    bad_seed,
    check_fanouts,
    check_graph,
    check_seeds,
    fits_densely,
    float32_weight,
    read_only,
)
from runtime.sampling.choose.poisson import offer, unit
from runtime.sampling.compiled import inlined_kernel, kernel
from runtime.sampling.minibatch import Dialect, MiniBatch, assemble
from runtime.sampling.placed_indices import prefetch_read
from runtime.sampling.relabel import add_seeds, gather, relabel_dense, relabel_hashed
from runtime.sampling.rng import Purpose, bounded_kernel, key_kernel, stream, value_kernel
from runtime.sampling.statistics import Draws, Estimator
from runtime.sampling.workspace import EDGES_NEEDED, NODES_NEEDED, ROWS_NEEDED, SPARE, Workspace

WITHOUT, REPLACEMENT, POISSON = 0, 1, 2
"""How a row is drawn, as the kernels are told."""
CHUNK = 256
AHEAD = 24
"""Rows between asking for a row's bounds and reading them; at most the spare entries."""


@inlined_kernel
@no_type_check
def _fill_law(indices, edge_weight, ring, level, factor, start, degree, law):
    """Write the row's weights to law[0 .. degree-1]; return how many are positive, and the sum."""
    positive, total = 0, 0.0
    for j in range(degree):
        w = np.float64(edge_weight[start + j]) if edge_weight.shape[0] > 0 else 1.0
        if ring.shape[0] > 0 and ring[indices[start + j]] <= level:
            w *= factor
        law[j] = w
        total += w
        positive += w > 0.0
    return positive, total


@kernel
@no_type_check
def _take_all(law, degree, positive, start, positions, weight, edge):
    """All edges that can be drawn, each with probability 1."""
    for j in range(degree):
        if law[j] > 0.0:
            positions[edge] = start + j
            weight[edge] = 1.0 / positive
            edge += 1
    return edge


@kernel
@no_type_check
def _draw_uniform(key, degree, fanout, start, indices, positions, weight, edge):
    """Independent draws, all edges alike."""
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
    """Independent draws by inverse transform on the row's running sums."""
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
def _draw_race(key, law, first, places, degree, positive, fanout, start, positions, weight, edge):
    """The `fanout` first arrivals of independent exponential times with rates `law`."""
    count = 0
    first, places = first[: fanout + 1], places[: fanout + 1]
    for j in range(degree):
        if law[j] > 0.0:
            time = -math.log1p(-unit(value_kernel(key, j))) / law[j]
            count = offer(first, places, count, time, j)
    # The root of the heap arrived last of these: it is not taken, it says what the others beat.
    taken = np.sort(places[1:])
    for i in range(fanout):
        j = taken[i]
        positions[edge] = start + j
        weight[edge] = 1.0 / (-math.expm1(-law[j] * first[0]) * positive)
        edge += 1
    return edge


@inlined_kernel
@no_type_check
def _water_level(law, degree, fanout, total):
    """The c with sum min(1, c w) = fanout; needs more positive weights than `fanout`."""
    level, clipped = fanout / total, -1
    while True:
        count, mass = 0, 0.0
        for j in range(degree):
            if level * law[j] >= 1.0:
                count += 1
            else:
                mass += law[j]
        if count <= clipped or count >= fanout:
            return level
        clipped = count
        level = (fanout - count) / mass


@kernel
@no_type_check
def _draw_poisson(key, law, degree, positive, total, fanout, start, positions, weight, edge):
    """Each edge by itself with probability min(1, c w)."""
    level = _water_level(law, degree, fanout, total)
    for j in range(degree):
        pi = min(1.0, level * law[j])
        if unit(value_kernel(key, j)) < pi:
            positions[edge] = start + j
            weight[edge] = 1.0 / (pi * positive)
            edge += 1
    return edge


@kernel
@no_type_check
def choose_hop(
    indptr, indices, edge_weight, ring, level, factor, stream, fanout, draws, hajek, node_ids,
    first, last, row, edge, row_ptr, positions, weight, law, sums, first_times, places,
):  # fmt: skip
    """Choose the edges of nodes first .. last-1; return the edge end, or minus the room needed.

    `law` and `sums` are float64 scratch of the graph's largest degree, `first_times` (float64) and
    `places` (int64) of the fan-out and one more. Empty `edge_weight` or `ring` stand for all ones
    and for no local set; a source is local where its `ring` is at most `level`.
    """
    plain = edge_weight.shape[0] == 0 and (ring.shape[0] == 0 or factor == 1.0)
    row_ptr[row] = edge
    for i in range(first, last):
        prefetch_read(indptr, node_ids[i + AHEAD])
        node = node_ids[i]
        start = indptr[node]
        degree = indptr[node + 1] - start
        room = edge + max(degree, fanout)
        if room > positions.shape[0]:
            return -room
        key, before = key_kernel(stream, node), edge
        if plain and draws == REPLACEMENT and fanout > 0 and degree > 0:
            edge = _draw_uniform(key, degree, fanout, start, indices, positions, weight, edge)
        elif degree > 0:
            positive, total = _fill_law(
                indices, edge_weight, ring, level, factor, start, degree, law
            )
            if fanout < 0 or (positive <= fanout and (draws != REPLACEMENT or positive == 0)):
                edge = _take_all(law, degree, positive, start, positions, weight, edge)
            elif draws == REPLACEMENT:
                edge = _draw_replacement(
                    key, law, sums, degree, positive, fanout, start, positions, weight, edge
                )
            elif draws == WITHOUT:
                edge = _draw_race(
                    key,
                    law,
                    first_times,
                    places,
                    degree,
                    positive,
                    fanout,
                    start,
                    positions,
                    weight,
                    edge,
                )
            else:
                edge = _draw_poisson(
                    key, law, degree, positive, total, fanout, start, positions, weight, edge
                )
        if hajek:
            _normalise(weight, before, edge)
        row += 1
        row_ptr[row] = edge
    return edge


@inlined_kernel
@no_type_check
def _normalise(weight, first, last):
    total = 0.0
    for e in range(first, last):
        total += weight[e]
    for e in range(first, last):
        weight[e] /= total


@kernel
@no_type_check
def relabel_hop(indices, positions, values, local, edge, end, node_ids, known, table, shift, base):
    """Local ids of edges edge .. end-1; return the number of nodes known then."""
    known = np.uint64(known)
    done, gathered = edge, edge
    while done < end:
        until = min(gathered + CHUNK, end)
        gather(indices, positions, values, gathered, until, table, shift)
        if shift == 0:
            known = relabel_dense(values, local, done, gathered, node_ids, known, table, base)
        else:
            known = relabel_hashed(
                values, local, done, gathered, node_ids, known, table, shift, base
            )
        done, gathered = gathered, until
    return np.int64(known)


_CODES = {
    Draws.WITHOUT_REPLACEMENT: WITHOUT,
    Draws.REPLACEMENT: REPLACEMENT,
    Draws.POISSON: POISSON,
}


@dataclass(frozen=True, eq=False, slots=True)
class Boost:
    """Sources whose weight is multiplied: those with ring[v] <= L - 1 - hop, L the hops."""

    ring: NDArray[np.uint8]
    """Shape (num_nodes,)."""
    factor: float

    def of(self, ids: NDArray[np.integer], hop: int, num_hops: int) -> NDArray[np.float64]:
        """What the weight of each source is multiplied by at a hop (0 is next to the seeds)."""
        return np.where(self.ring[ids] <= num_hops - 1 - hop, self.factor, 1.0)


class _Scratch:
    """Buffers of one thread."""

    def __init__(self, workspace: Workspace, widest: int, fanout: int) -> None:
        self.workspace = workspace
        self.weight = np.zeros(0, dtype=np.float64)
        self.law = np.zeros(widest, dtype=np.float64)
        self.sums = np.zeros(widest, dtype=np.float64)
        self.first_times = np.zeros(min(fanout, widest) + 1, dtype=np.float64)
        self.places = np.zeros(min(fanout, widest) + 1, dtype=np.int64)

    def grow(self, hop: int) -> None:
        """As the workspace's, with a weight per edge."""
        self.workspace.grow(hop)
        if self.weight.shape[0] < self.workspace.local.shape[0]:
            larger = np.zeros(self.workspace.local.shape[0], dtype=np.float64)
            larger[: self.weight.shape[0]] = self.weight
            self.weight = larger


class WeightedSampler:
    """Draws about `fanouts[h]` in-neighbours of every vertex that hop h expands.

    Args:
        indptr: int64 [N + 1], non-decreasing.
        indices: int32 or int64 [E], C-contiguous; may be memory-mapped.
        fanouts: Neighbours per hop, the hop next to the seeds first; -1 takes all.
        edge_weight: float [E], not negative and finite; 0 is never drawn. None: all alike.
        draws: How the edges of a row are drawn. With replacement always `fanouts[h]` draws.
        estimator: Of the blocks' weights; plain gives none.
        boost: Multiplies the weight of some sources (see `locality`).
        dialect: Which vertices a hop expands.
        seed: The run's seed.
        edge_ids: Fill each block's `e_id` with positions in `indices`.
        purpose: Stream of the draws.
        relabel_budget_bytes: As in `NeighborSampler`.

    Raises:
        SamplerError: fan-outs, weights or arrays that cannot be used.
    """

    first_hop: int = 0
    """Number of the first hop in the streams, as in `NeighborSampler`."""

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
        dialect: Dialect = Dialect.FIRST_SEEN,
        seed: int = 0,
        edge_ids: bool = False,
        purpose: Purpose = Purpose.NEIGHBOR,
        relabel_budget_bytes: int = RELABEL_BUDGET_BYTES,
    ) -> None:
        self.fanouts = check_fanouts(fanouts)
        self.indptr, self.indices = check_graph(indptr, indices)
        self.num_nodes = int(self.indptr.shape[0]) - 1
        self.edge_weight = float32_weight(edge_weight, self.indices.shape[0])
        self.draws, self.estimator = Draws(draws), Estimator(estimator)
        self.dialect = Dialect(dialect)
        self.seed = seed
        self.edge_ids = edge_ids
        self.purpose = purpose
        self.dense_table = fits_densely(self.num_nodes, relabel_budget_bytes)
        self._boost = boost
        self._widest = int(np.diff(self.indptr).max(initial=0))
        self._threads = threading.local()

    @property
    def num_hops(self) -> int:
        """Number of hops, and of blocks."""
        return len(self.fanouts)

    def boosted(self, boost: Boost | None) -> "WeightedSampler":
        """The same sampler with another boost; they share each thread's buffers."""
        other = copy.copy(self)
        other._boost = boost
        return other

    def sample(
        self,
        seeds: NDArray[np.int64],
        *,
        epoch: int,
        step: int,
        input_id: NDArray[np.int64] | None = None,
        global_num_seeds: int | None = None,
    ) -> MiniBatch:
        """Sample the blocks of one batch; any thread may call it.

        Arguments and errors as in `NeighborSampler.sample`.
        """
        seeds = check_seeds(seeds)
        scratch = self._scratch()
        w = scratch.workspace
        self._fill(scratch, seeds, epoch, step)
        weight = None
        if self.estimator is not Estimator.PLAIN:
            weight = scratch.weight[: w.edge_ends[-1]].astype(np.float32)
        num_seeds = int(seeds.shape[0])
        return MiniBatch(
            blocks=assemble(w, self.dialect, edge_ids=self.edge_ids, weight=weight),
            n_id=w.node_ids[: w.node_ends[-1]].copy(),
            seeds=seeds,
            input_id=np.arange(num_seeds, dtype=np.int64) if input_id is None else input_id,
            dialect=self.dialect,
            num_sampled_nodes=[num_seeds, *np.diff(w.node_ends).tolist()],
            num_sampled_edges=np.diff(w.edge_ends).tolist(),
            global_num_seeds=num_seeds if global_num_seeds is None else global_num_seeds,
            epoch=epoch,
            step=step,
        )

    def _scratch(self) -> _Scratch:
        scratch = getattr(self._threads, "scratch", None)
        if scratch is None:
            workspace = Workspace(
                self.num_nodes, self.num_hops, self.indices.dtype, dense=self.dense_table
            )
            scratch = _Scratch(workspace, self._widest, max(*self.fanouts, 0))
            self._threads.scratch = scratch
        return scratch

    def _fill(self, scratch: _Scratch, seeds: NDArray[np.int64], epoch: int, step: int) -> None:
        w = scratch.workspace
        w.begin(int(seeds.shape[0]))
        bad = add_seeds(seeds, self.num_nodes, w.node_ids, w.table, w.shift, np.uint64(w.base))
        if bad >= 0:
            raise bad_seed(seeds, bad, self.num_nodes)
        for hop in range(self.num_hops):
            number = self.first_hop + hop
            self._expand(scratch, hop, stream(self.seed, epoch, step, number, self.purpose))
        w.finish()

    def _expand(self, scratch: _Scratch, hop: int, source: np.uint64) -> None:
        """One hop: choose all edges, growing the buffers as often as needed, then relabel."""
        w = scratch.workspace
        nested = self.dialect is Dialect.FIRST_SEEN and hop > 0
        first, last = int(w.node_ends[hop - 1]) if nested else 0, int(w.node_ends[hop])
        row, edge = int(w.row_ends[hop]), int(w.edge_ends[hop])
        w.state[ROWS_NEEDED] = row + last - first + 1
        w.state[EDGES_NEEDED] = edge + SPARE
        w.state[NODES_NEEDED] = last + SPARE
        scratch.grow(hop)
        while (end := self._choose(scratch, hop, source, first, last, row, edge)) < 0:
            w.state[EDGES_NEEDED] = max(-end + SPARE, 2 * w.local.shape[0])
            scratch.grow(hop)
        w.state[NODES_NEEDED] = min(last + end - edge, self.num_nodes) + SPARE
        scratch.grow(hop)
        w.row_ends[hop + 1], w.edge_ends[hop + 1] = row + last - first, end
        w.node_ends[hop + 1] = relabel_hop(
            self.indices, w.positions, w.values, w.local, edge, end, w.node_ids, last, w.table,
            w.shift, np.uint64(w.base),
        )  # fmt: skip

    def _choose(
        self, s: _Scratch, hop: int, source: np.uint64, first: int, last: int, row: int, edge: int
    ) -> int:
        """The edge end, or minus the room needed."""
        w, boost = s.workspace, self._boost
        return choose_hop(
            self.indptr, self.indices, self.edge_weight, _NOWHERE if boost is None else boost.ring,
            self.num_hops - 1 - hop, 1.0 if boost is None else boost.factor, source,
            self.fanouts[hop], _CODES[self.draws], self.estimator is Estimator.HAJEK, w.node_ids,
            first, last, row, edge, w.row_ptr, w.positions, s.weight, s.law, s.sums,
            s.first_times, s.places,
        )  # fmt: skip


_NOWHERE = read_only(np.zeros(0, dtype=np.uint8))
