"""Choosing a hop's edges from the candidates' words and probabilities, and weighting them.

`chances` receives pi_ts of every chosen edge. Three rules give pi_ts: k/d (LABOR-0 without weights,
compared in integers like the scan), c_s A_ts (LABOR-0 with weights), c_s p_t (after passes).

The candidates of a hop: every vertex that a row of the hop may draw, numbered once.

What LABOR-i needs beyond a scan: one random number and one probability per candidate, and for every
edge of the hop the number of its candidate. Vertices known before the hop come first, whether they
are candidates or not, so that new ones are told apart by their number.
"""

from typing import no_type_check

import numpy as np
from numpy.typing import NDArray

from runtime.sampling.choose.labor_scan import read_chosen
from runtime.sampling.choose.poisson import offer, share_word, unit
from runtime.sampling.compiled import inlined_kernel, kernel
from runtime.sampling.dependent import HopStreams, words_kernel
from runtime.sampling.neighbor import CHUNK
from runtime.sampling.placed_indices import prefetch_read, prefetch_write
from runtime.sampling.relabel import add_seeds, relabel_dense, relabel_hashed
from runtime.sampling.rng import ODD
from runtime.sampling.workspace import EDGES_NEEDED, NODES_NEEDED, ROWS_NEEDED, SPARE, Workspace

AHEAD = 16
"""Rows between asking for a row's bounds and reading them."""
UNIFORM, PER_EDGE, PER_VERTEX = 0, 1, 2
"""The three rules."""


@inlined_kernel
@no_type_check
def _chance(rule, edge_weight, place, scale, pi, t, everything, share):
    """pi_ts of an edge, at most 1; 0 where its weight is 0."""
    weight = np.float64(edge_weight[place]) if edge_weight.shape[0] > 0 else 1.0
    if weight == 0.0:
        return 0.0
    if everything:
        return 1.0
    if rule == UNIFORM:
        return share
    return min(1.0, scale * (weight if rule == PER_EDGE else pi[t]))


@kernel
@no_type_check
def _row_below(
    start, degree, begin, numbers, words, pi, edge_weight, rule, scale, everything, share,
    threshold, positions, chances, edge,
):  # fmt: skip
    """Poisson: the edges of a row whose number is below their chance; return the edge end."""
    for i in range(degree):
        t = numbers[begin + i]
        chance = _chance(rule, edge_weight, start + i, scale, pi, t, everything, share)
        if rule == UNIFORM and not everything:
            keep = words[t] < threshold and chance > 0
        else:
            keep = unit(words[t]) < chance
        if keep:
            positions[edge], chances[edge] = start + i, chance
            edge += 1
    return edge


@kernel
@no_type_check
def _row_smallest(
    start, degree, begin, numbers, words, pi, edge_weight, rule, scale, share, keys, places,
    positions, chances, edge,
):  # fmt: skip
    """Order sampling: the len(keys) edges with the smallest r_t / pi_ts; return the edge end.

    Only edges of positive chance are candidates; without weights and passes the words are keys.
    """
    count = 0
    for i in range(degree):
        t = numbers[begin + i]
        chance = _chance(rule, edge_weight, start + i, scale, pi, t, False, share)
        if chance > 0:
            key = np.float64(words[t] >> np.uint64(11)) / chance
            count = offer(keys, places, count, key, i)
    for i in range(degree):
        t = numbers[begin + i]
        chance = _chance(rule, edge_weight, start + i, scale, pi, t, False, share)
        if chance > 0:
            key = np.float64(words[t] >> np.uint64(11)) / chance
            if key < keys[0] or (key == keys[0] and i <= places[0]):
                positions[edge], chances[edge] = start + i, chance
                edge += 1
    return edge


@inlined_kernel
@no_type_check
def _positive(edge_weight, start, degree):
    """How many edges of a row have a chance at all."""
    if edge_weight.shape[0] == 0:
        return degree
    count = 0
    for place in range(start, start + degree):
        count += edge_weight[place] > 0
    return count


@kernel
@no_type_check
def choose_rows(
    indptr, indices, node_ids, first, i, last, row_ptr, numbers, words, pi, scale, edge_weight,
    rule, fanout, exact, out_ptr, row, positions, values, chances, edge,
):  # fmt: skip
    """Choose the edges of the rows of nodes i .. last-1 while `positions` has room.

    `row_ptr` and `scale` are indexed from node `first` on. Returns the first node whose row is left
    and the edge end; fills out_ptr after each row, positions, values and chances.
    """
    keys = np.empty(max(fanout, 0), dtype=np.float64)
    places = np.empty(max(fanout, 0), dtype=np.int64)
    while i < last:
        start = indptr[node_ids[i]]
        degree = indptr[node_ids[i] + 1] - start
        if edge + degree + SPARE > positions.shape[0]:
            break
        everything = fanout < 0 or _positive(edge_weight, start, degree) <= fanout
        share = 1.0 if everything else fanout / degree
        begin, c = row_ptr[i - first], scale[i - first]
        if exact and not everything:
            edge = _row_smallest(
                start, degree, begin, numbers, words, pi, edge_weight, rule, c, share, keys,
                places, positions, chances, edge,
            )  # fmt: skip
        else:
            threshold = np.uint64(0) if everything else share_word(fanout, degree)
            edge = _row_below(
                start, degree, begin, numbers, words, pi, edge_weight, rule, c, everything, share,
                threshold, positions, chances, edge,
            )  # fmt: skip
        read_chosen(indices, positions, values, out_ptr[row], edge)
        i += 1
        row += 1
        out_ptr[row] = edge
    return i, edge


@kernel
@no_type_check
def weigh_rows(
    indptr, node_ids, first, last, row, row_ptr, positions, chances, edge_weight, fanout, hajek,
    out,
):  # fmt: skip
    """Weights of a hop's chosen edges, out[0] being the first of row `row`.

    Horvitz-Thompson: A / (a pi) with a = sum A over the full row; Hajek: A / pi over its sum in the
    sample. Without `chances` (length 0) pi is min(1, fanout / degree).
    """
    before = row_ptr[row]
    for i in range(first, last):
        prefetch_read(indptr, node_ids[min(i + AHEAD, last - 1)])
        start, stop = indptr[node_ids[i]], indptr[node_ids[i] + 1]
        degree = stop - start
        share = 1.0 if fanout < 0 or degree <= fanout else fanout / degree
        begin, end = row_ptr[row + i - first], row_ptr[row + i - first + 1]
        if edge_weight.shape[0] == 0 and chances.shape[0] == 0:
            # One probability for the whole row: Hajek is the plain mean of what was drawn.
            same = 1.0 / np.float64(max(end - begin, 1)) if hajek else 1.0 / share / max(degree, 1)
            for e in range(begin, end):
                out[e - before] = same
            continue
        total, chosen = 0.0, 0.0
        if edge_weight.shape[0] == 0:
            total = np.float64(degree)
        elif not hajek:
            for place in range(start, stop):
                total += np.float64(edge_weight[place])
        for e in range(begin, end):
            weight = 1.0 if edge_weight.shape[0] == 0 else np.float64(edge_weight[positions[e]])
            value = weight / (chances[e] if chances.shape[0] > 0 else share)
            chosen += value
            out[e - before] = value / total if not hajek else value
        if hajek:
            for e in range(begin, end):
                out[e - before] = out[e - before] / chosen


_AHEAD = 16


@kernel
@no_type_check
def _count_edges(indptr, node_ids, first, last, row_ptr):
    """Fill row_ptr of the full rows of nodes first .. last-1 and return their largest degree."""
    largest = 0
    row_ptr[0] = 0
    for i in range(first, last):
        prefetch_read(indptr, node_ids[min(i + _AHEAD, last - 1)])
        degree = indptr[node_ids[i] + 1] - indptr[node_ids[i]]
        row_ptr[i - first + 1] = row_ptr[i - first] + degree
        largest = max(largest, degree)
    return largest


@kernel
@no_type_check
def _copy_rows(indptr, indices, node_ids, first, last, values):
    """The neighbours of nodes first .. last-1, row after row."""
    end = 0
    for i in range(first, last):
        for place in range(indptr[node_ids[i]], indptr[node_ids[i] + 1]):
            values[end] = indices[place]
            end += 1


@inlined_kernel
@no_type_check
def _ask(values, begin, end, table, shift):
    """Ask for the table entries of some values."""
    for e in range(begin, end):
        node = np.uint64(values[e])
        slot = node if shift == 0 else (node * ODD) >> np.uint64(shift)
        prefetch_write(table, np.int64(slot))


@kernel
@no_type_check
def relabel_values(values, numbers, begin, end, node_ids, known, table, shift, base):
    """Local ids of values[begin:end]; new ones are added. Returns the number of nodes then.

    While a chunk is looked up, the entries of the next one are on their way.
    """
    known = np.uint64(known)
    _ask(values, begin, min(begin + CHUNK, end), table, shift)
    while begin < end:
        stop = min(begin + CHUNK, end)
        _ask(values, stop, min(stop + CHUNK, end), table, shift)
        if shift == 0:
            known = relabel_dense(values, numbers, begin, stop, node_ids, known, table, base)
        else:
            known = relabel_hashed(
                values, numbers, begin, stop, node_ids, known, table, shift, base
            )
        begin = stop
    return np.int64(known)


class Candidates:
    """Numbers, words and probabilities of one hop's candidates; buffers only grow."""

    def __init__(self, num_nodes: int, value_dtype: np.dtype, *, dense: bool) -> None:
        self._space = Workspace(num_nodes, 1, value_dtype, dense=dense)
        self.num_known = 0
        self.count = 0
        self.words = np.zeros(0, dtype=np.uint64)
        self.pi = np.zeros(0, dtype=np.float64)
        self.inverse = np.zeros(0, dtype=np.float64)
        self.top = np.zeros(0, dtype=np.float64)
        self.scale = np.zeros(0, dtype=np.float64)
        self.row = np.zeros((2, 0), dtype=np.float64)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        own = sum(a.nbytes for a in vars(self).values() if isinstance(a, np.ndarray))
        return own + self._space.nbytes

    @property
    def row_ptr(self) -> NDArray[np.int64]:
        """Where each row's edges begin in `numbers`."""
        return self._space.row_ptr

    @property
    def numbers(self) -> NDArray[np.int32]:
        """The candidate of every edge of the hop, rows in order."""
        return self._space.local

    def collect(
        self,
        indptr: NDArray[np.integer],
        indices: NDArray[np.integer],
        nodes: NDArray[np.int64],
        first: int,
        last: int,
        streams: HopStreams,
        hop: int,
    ) -> None:
        """Number the candidates of the rows of nodes[first:last] and draw their words.

        Args:
            indptr: The graph.
            indices: The graph.
            nodes: Global ids known so far are nodes[:last].
            first: First node to expand.
            last: Number of known nodes; all from `first` on are expanded.
            streams: What to draw from.
            hop: Which hop's stream.
        """
        space = self._space
        space.begin(last)
        space.state[ROWS_NEEDED] = last - first + 1
        space.grow(0)
        largest = _count_edges(indptr, nodes, first, last, space.row_ptr)
        edges = int(space.row_ptr[last - first])
        space.state[EDGES_NEEDED] = edges + SPARE
        space.state[NODES_NEEDED] = min(last + edges, space.num_nodes) + SPARE
        space.grow(0)
        base = np.uint64(space.base)
        add_seeds(nodes[:last], space.num_nodes, space.node_ids, space.table, space.shift, base)
        self.num_known = last
        _copy_rows(indptr, indices, nodes, first, last, space.values)
        self.count = relabel_values(
            space.values, space.local, 0, edges, space.node_ids, last, space.table, space.shift,
            base,
        )  # fmt: skip
        space.node_ends[1] = self.count
        space.finish()
        self._reserve(last - first, largest)
        words_kernel(
            streams.first[hop], streams.second[hop], streams.cosine, streams.sine,
            space.node_ids, self.count, self.words,
        )  # fmt: skip

    def _reserve(self, rows: int, largest: int) -> None:
        if self.words.shape[0] < self.count:
            size = self.count + self.count // 4
            self.words = np.empty(size, dtype=np.uint64)
            self.pi, self.inverse, self.top = np.empty((3, size), dtype=np.float64)
        if self.scale.shape[0] < rows:
            self.scale = np.empty(rows + rows // 4, dtype=np.float64)
        if self.row.shape[1] < largest:
            self.row = np.empty((2, largest), dtype=np.float64)
