"""Choose the edges of a hop by LABOR: candidates, their probabilities, edges (formulas 5.3).

Every vertex that a row of the hop may draw is a candidate, with one random number and one
probability p_t. Vertices known before the hop come first, so that new ones are told by number.
pi_ts = min(1, c_s p_ts). A pass raises p_t to p_t max_s c_s and solves every row's c_s anew, so
that sum_t A^2 / pi_ts keeps its target, that of neighbour sampling with the row's fan-out. LABOR-*
passes until the expected number of new vertices gains less than a tolerance.

Three rules give pi_ts: k/d (LABOR-0 without weights, compared in integers like the scan), c_s A_ts
(LABOR-0 with weights), c_s p_t (after passes).
"""

from typing import NamedTuple, no_type_check

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.sampling.checks import read_only
from gnnplan.runtime.sampling.choose.poisson import (
    offer,
    row_scale,
    row_scale_weighted,
    share_word,
    unit,
)
from gnnplan.runtime.sampling.compiled import inlined_kernel, kernel
from gnnplan.runtime.sampling.dependent import HopStreams, words_kernel
from gnnplan.runtime.sampling.placed_indices import prefetch_read
from gnnplan.runtime.sampling.relabel import add_seeds, relabel_values
from gnnplan.runtime.sampling.workspace import SPARE, Workspace

AHEAD = 16
"""Rows between asking for a row's bounds and reading them."""
UNIFORM, PER_EDGE, PER_VERTEX = 0, 1, 2
"""Rules that give pi_ts."""


class CandidateRows(NamedTuple):
    """Rows of a hop, and the numbers by which their edges are chosen."""

    indptr: NDArray[np.integer]
    edge_weight: NDArray[np.floating]
    """Weight of each edge; empty: all 1."""
    row_ptr: NDArray[np.int64]
    """Where each row's edges begin in `numbers`, from the hop's first row on."""
    numbers: NDArray[np.int32]
    words: NDArray[np.uint64]
    pi: NDArray[np.float64]
    """p_t of each candidate."""
    scale: NDArray[np.float64]
    """c_s of each row."""
    found: NDArray[np.float64]
    rule: int
    fanout: int
    exact: bool
    """Whether a row takes exactly `fanout` edges, rather than so many on average."""


class ChosenEdges(NamedTuple):
    """Edges chosen, from the batch's first on."""

    row_ptr: NDArray[np.int64]
    positions: NDArray[np.int64]
    chances: NDArray[np.float64]
    """pi_ts of each edge."""


@inlined_kernel
@no_type_check
def _fill_chances(rule, edge_weight, start, numbers, pi, scale, everything, share, found):
    """Write pi_ts of a row's edges, at most 1; 0 where the weight is 0."""
    for i in range(numbers.shape[0]):
        weight = np.float64(edge_weight[start + i]) if edge_weight.shape[0] > 0 else 1.0
        if weight == 0.0:
            found[i] = 0.0
        elif everything:
            found[i] = 1.0
        elif rule == UNIFORM:
            found[i] = share
        else:
            found[i] = min(1.0, scale * (weight if rule == PER_EDGE else pi[numbers[i]]))


@kernel
@no_type_check
def _take_below(numbers, words, found, threshold, start, positions, chances, edge):
    """Take a row's edges with a number below their chance, or a word below the threshold if any."""
    for i in range(numbers.shape[0]):
        word = words[numbers[i]]
        by_word = word < threshold and found[i] > 0
        if by_word or (threshold == 0 and unit(word) < found[i]):
            positions[edge], chances[edge] = start + i, found[i]
            edge += 1
    return edge


@kernel
@no_type_check
def _take_smallest(numbers, words, found, keys, places, start, positions, chances, edge):
    """Take the len(keys) edges with the smallest r_t / pi_ts among those of positive chance."""
    count = 0
    for i in range(numbers.shape[0]):
        if found[i] > 0:
            key = np.float64(words[numbers[i]] >> np.uint64(11)) / found[i]
            count = offer(keys, places, count, key, i)
    for i in range(numbers.shape[0]):
        if found[i] > 0:
            key = np.float64(words[numbers[i]] >> np.uint64(11)) / found[i]
            if key < keys[0] or (key == keys[0] and i <= places[0]):
                positions[edge], chances[edge] = start + i, found[i]
                edge += 1
    return edge


@inlined_kernel
@no_type_check
def _positive(edge_weight, start, degree):
    if edge_weight.shape[0] == 0:
        return degree
    count = 0
    for place in range(start, start + degree):
        count += edge_weight[place] > 0
    return count


@kernel
@no_type_check
def choose_by_number(rows, node_ids, first, i, last, out, row, edge):
    """Choose the edges of nodes i .. last-1, of a hop from node `first` on, while there is room.

    Return the first node whose row is left and the edge end; `row` is the row of node i.
    """
    indptr, edge_weight, row_ptr, all_numbers, words, pi, scale, scratch, rule, fanout, exact = rows
    out_ptr, positions, chances = out
    keys = np.empty(max(fanout, 0), dtype=np.float64)
    places = np.empty(max(fanout, 0), dtype=np.int64)
    while i < last:
        start = indptr[node_ids[i]]
        degree = indptr[node_ids[i] + 1] - start
        if edge + degree + SPARE > positions.shape[0]:
            break
        everything = fanout < 0 or _positive(edge_weight, start, degree) <= fanout
        share = 1.0 if everything else fanout / degree
        begin, c, found = row_ptr[i - first], scale[i - first], scratch[:degree]
        numbers = all_numbers[begin : begin + degree]
        _fill_chances(rule, edge_weight, start, numbers, pi, c, everything, share, found)
        if exact and not everything:
            edge = _take_smallest(
                numbers, words, found, keys, places, start, positions, chances, edge
            )
        else:
            by_word = rule == UNIFORM and not everything
            threshold = share_word(fanout, degree) if by_word else np.uint64(0)
            edge = _take_below(numbers, words, found, threshold, start, positions, chances, edge)
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
    """Write the weights of a hop's chosen edges, out[0] being the first of row `row`.

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


@kernel
@no_type_check
def _count_edges(indptr, node_ids, first, last, row_ptr):
    largest = 0
    row_ptr[0] = 0
    for i in range(first, last):
        prefetch_read(indptr, node_ids[min(i + AHEAD, last - 1)])
        degree = indptr[node_ids[i] + 1] - indptr[node_ids[i]]
        row_ptr[i - first + 1] = row_ptr[i - first] + degree
        largest = max(largest, degree)
    return largest


@kernel
@no_type_check
def _copy_rows(indptr, indices, node_ids, first, last, values):
    end = 0
    for i in range(first, last):
        for place in range(indptr[node_ids[i]], indptr[node_ids[i] + 1]):
            values[end] = indices[place]
            end += 1


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
    def row_ptr(self) -> NDArray[np.int64]:
        """Return where each row's edges begin in `numbers`."""
        return self._space.row_ptr

    @property
    def numbers(self) -> NDArray[np.int32]:
        """Return the candidate of every edge of the hop, rows in order."""
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
        """Number the candidates of the rows of nodes[first:last] and draw their words at a hop.

        nodes[:last] are the global ids known so far.
        """
        space = self._space
        space.begin(last)
        space.reserve(0, last - first, 0, last)
        largest = _count_edges(indptr, nodes, first, last, space.row_ptr)
        edges = int(space.row_ptr[last - first])
        space.reserve(0, last - first, edges, min(last + edges, space.num_nodes))
        table = space.table.arrays()
        add_seeds(table, space.node_ids, nodes[:last], space.num_nodes)
        self.num_known = last
        _copy_rows(indptr, indices, nodes, first, last, space.values)
        self.count = relabel_values(
            table, space.values, space.local, 0, edges, space.node_ids, last
        )
        space.node_ends[1] = self.count
        space.finish()
        self._make_room(last - first, largest)
        words_kernel(
            streams.first[hop], streams.second[hop], streams.cosine, streams.sine,
            space.node_ids, self.count, self.words,
        )  # fmt: skip

    def _make_room(self, rows: int, largest: int) -> None:
        if self.words.shape[0] < self.count:
            size = self.count + self.count // 4
            self.words = np.empty(size, dtype=np.uint64)
            self.pi, self.inverse, self.top = np.empty((3, size), dtype=np.float64)
        if self.scale.shape[0] < rows:
            self.scale = np.empty(rows + rows // 4, dtype=np.float64)
        if self.row.shape[1] < largest:
            self.row = np.empty((2, largest), dtype=np.float64)


MAX_PASSES = 100
"""Passes after which LABOR-* stops even where it still gains; about ten are usual."""


@kernel
@no_type_check
def _solve_rows(row_ptr, num_rows, numbers, fanout, inverse, scratch, scale):
    """Solve every row's c_s without weights; rows of at most `fanout` edges get all pi = 1."""
    for row in range(num_rows):
        begin, degree = row_ptr[row], row_ptr[row + 1] - row_ptr[row]
        largest = 0.0
        for i in range(degree):
            scratch[i] = inverse[numbers[begin + i]]
            largest = max(largest, scratch[i])
        if fanout < 0 or degree <= fanout:
            scale[row] = largest
        else:
            scale[row] = row_scale(scratch, degree, degree * (degree / fanout))


@kernel
@no_type_check
def _solve_rows_weighted(
    row_ptr, num_rows, numbers, fanout, inverse, per_edge, starts, edge_weight, scratch, scale
):
    """Solve as `_solve_rows`, with weights; p_ts is A_ts where `per_edge`."""
    for row in range(num_rows):
        begin, start = row_ptr[row], starts[row]
        count, total, largest = 0, 0.0, 0.0
        for i in range(row_ptr[row + 1] - begin):
            weight = np.float64(edge_weight[start + i])
            if weight > 0:
                one = 1.0 / weight if per_edge else inverse[numbers[begin + i]]
                scratch[0, count], scratch[1, count] = one, weight * weight
                total += weight
                largest = max(largest, one)
                count += 1
        if fanout < 0 or count <= fanout:
            scale[row] = largest
        else:
            excess = total * total * (1.0 / fanout - 1.0 / count)
            scale[row] = row_scale_weighted(scratch[0], scratch[1], count, excess)


@kernel
@no_type_check
def _highest_scale(row_ptr, num_rows, numbers, scale, weighted, per_edge, starts, edge_weight, top):
    for row in range(num_rows):
        for e in range(row_ptr[row], row_ptr[row + 1]):
            value = scale[row]
            if weighted:
                weight = np.float64(edge_weight[starts[row] + e - row_ptr[row]])
                value = value * weight if per_edge else value * (weight > 0)
            t = numbers[e]
            top[t] = max(top[t], value)


@kernel
@no_type_check
def _expected_new(top, pi, known, count):
    """Sum min(1, p_t max_s c_s) over new candidates: vertices that the hop adds, expected."""
    total = 0.0
    for t in range(known, count):
        total += min(1.0, pi[t] * top[t])
    return total


class LaborSolver:
    """Runs the passes of one hop over its candidates."""

    def __init__(
        self, variant: int | str, tolerance: float, edge_weight: NDArray[np.floating] | None
    ) -> None:
        self._passes = MAX_PASSES if variant == "star" else int(variant)
        self._star = variant == "star"
        self._tolerance = tolerance
        self._weighted = edge_weight is not None
        no_weight = read_only(np.zeros(0, dtype=np.float32))
        self._weight = no_weight if edge_weight is None else edge_weight

    def solve(
        self, candidates: Candidates, starts: NDArray[np.integer], fanout: int
    ) -> tuple[float, int]:
        """Fill `scale` and, after at least one pass, `pi`; rows begin at `starts` in the graph.

        Return the expected number of new vertices, and the passes made.
        """
        c = candidates
        c.pi[: c.count] = 1.0
        c.inverse[: c.count] = 1.0
        self._rows(c, starts, fanout, 0)
        expected = self._expect(c, starts, 0)
        for turn in range(1, self._passes + 1):
            c.pi[: c.count] *= c.top[: c.count]
            with np.errstate(divide="ignore"):
                np.divide(1.0, c.pi[: c.count], out=c.inverse[: c.count])
            self._rows(c, starts, fanout, turn)
            before, expected = expected, self._expect(c, starts, turn)
            if self._star and before - expected <= self._tolerance * before:
                return expected, turn
        return expected, self._passes

    def _rows(self, c: Candidates, starts: NDArray[np.integer], fanout: int, turn: int) -> None:
        rows = starts.shape[0]
        if self._weighted:
            _solve_rows_weighted(
                c.row_ptr, rows, c.numbers, fanout, c.inverse, turn == 0, starts, self._weight,
                c.row, c.scale,
            )  # fmt: skip
        else:
            _solve_rows(c.row_ptr, rows, c.numbers, fanout, c.inverse, c.row[0], c.scale)

    def _expect(self, c: Candidates, starts: NDArray[np.integer], turn: int) -> float:
        c.top[: c.count] = 0.0
        _highest_scale(
            c.row_ptr, starts.shape[0], c.numbers, c.scale, self._weighted, turn == 0, starts,
            self._weight, c.top,
        )  # fmt: skip
        return _expected_new(c.top, c.pi, c.num_known, c.count)
