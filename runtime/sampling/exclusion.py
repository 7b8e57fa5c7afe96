"""Sample for links: neighbours in the graph without some edges, and negative destinations.

A batch equals, bit for bit, that of `NeighborSampler` on the graph with those edges taken out
(tests/reference): a row of degree d with m edges out chooses among d - m offsets, and each choice
passes over the edges that are out before it.

The j-th negative of a link is found in at most `TRIES` tries. Try t takes candidate number

    bounded(draw(stream(seed, epoch, step, 0, NEGATIVE), link, j * TRIES + t), num_candidates)

and is kept unless it is the link's own destination or, on request, the graph stores the edge from
the link's source to it; the last try is kept in any case. `link` is the link's global id, so its
negatives are the same on any number of ranks.
"""

from enum import StrEnum
from typing import Any, NamedTuple, no_type_check

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.checks import check_graph
from gnnplan.runtime.sampling.choose.uniform import AHEAD, UniformRows, bound_row_edges, choose_row
from gnnplan.runtime.sampling.compiled import form_for, kernel
from gnnplan.runtime.sampling.frontier import (
    bound_edges,
    choose_rows,
    expand_chunks,
    expand_hop,
    rows_per_node,
)
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from gnnplan.runtime.sampling.placed_indices import prefetch_read
from gnnplan.runtime.sampling.rng import (
    ODD,
    Purpose,
    bounded_kernel,
    key_kernel,
    stream,
    value_kernel,
)


@kernel
@no_type_check
def fill_slots(rows, slots):
    """Enter the number of each row into an empty hash table, -1 everywhere."""
    mask = np.uint64(slots.shape[0] - 1)
    for number in range(rows.shape[0]):
        slot = (np.uint64(rows[number]) * ODD >> np.uint64(32)) & mask
        while slots[slot] >= 0:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = number


@kernel
@no_type_check
def _row_number(rows, slots, node):
    mask = np.uint64(slots.shape[0] - 1)
    slot = (np.uint64(node) * ODD >> np.uint64(32)) & mask
    while slots[slot] >= 0 and rows[slots[slot]] != node:
        slot = (slot + np.uint64(1)) & mask
    return slots[slot]


@kernel
@no_type_check
def _choose_without(key, start, degree, fanout, out, positions, edge):
    left = degree - out.shape[0]
    if fanout < 0 or fanout >= left:
        skipped = 0
        for offset in range(degree):
            if skipped < out.shape[0] and out[skipped] == start + offset:
                skipped += 1
            else:
                positions[edge + offset - skipped] = start + offset
        return edge + left
    taken = np.zeros(left, np.bool_)
    for i in range(fanout):
        last = left - fanout + i
        offset = bounded_kernel(value_kernel(key, i), last + 1)
        offset = last if taken[offset] else offset
        taken[offset] = True
        place = start + offset
        for passed in out:
            if passed > place:
                break
            place += 1
        positions[edge + i] = place
    return edge + fanout


class Exclude(StrEnum):
    """Which edges are left out for a batch of links."""

    NONE = "none"
    FORWARD = "forward"
    """Links themselves, source to destination, with all their parallel copies."""
    BOTH = "both"
    """Destination to source as well, for graphs that store both directions."""


class ExcludedEdges(NamedTuple):
    """Edges that are left out, by the row they lie in."""

    rows: NDArray[np.int64]
    """Destinations with an edge left out, ascending. Shape (num_rows,)."""
    ends: NDArray[np.int64]
    """Ends of the rows in `places`. Shape (num_rows + 1,)."""
    places: NDArray[np.int64]
    """Positions in the graph's `indices`, ascending."""
    slots: NDArray[np.int32]
    """Hash table from a destination to its row number, -1 where empty; length a power of two."""


class RowsWithout(NamedTuple):
    """Rows as in `UniformRows`, without some edges; bounds count the edges that are left out."""

    indptr: NDArray[np.integer]
    indices: NDArray[np.integer]
    fanouts: NDArray[np.int64]
    excluded: ExcludedEdges


@form_for(rows_per_node, RowsWithout)
@no_type_check
def _rows_per_node(rows):
    return 1


@form_for(bound_edges, RowsWithout)
@no_type_check
def _bound_edges(rows, hop, node_ids, first, last):
    return bound_row_edges(rows.indptr, rows.fanouts[hop], node_ids, first, last)


@form_for(choose_rows, RowsWithout)
@no_type_check
def _choose_rows(rows, hop, stream, node_ids, i, last, row, edge, enough, row_ptr, positions):
    indptr, indices, fanouts, (nodes, ends, places, slots) = rows
    fanout = fanouts[hop]
    while i < last and edge < enough:
        prefetch_read(indptr, node_ids[i + AHEAD])
        node = np.uint64(node_ids[i])
        number = _row_number(nodes, slots, node_ids[i])
        if number < 0:
            edge = choose_row(indptr, indices, stream, fanout, node, positions, edge)
        else:
            out = places[ends[number] : ends[number + 1]]
            start = indptr[node]
            degree = indptr[node + np.uint64(1)] - start
            key = key_kernel(stream, node)
            edge = _choose_without(key, start, degree, fanout, out, positions, edge)
        i += 1
        row += 1
        row_ptr[row] = edge
    return i, edge


form_for(expand_hop, RowsWithout)(expand_chunks.py_func)


@kernel
@no_type_check
def _find_edges(indptr, indices, pairs, rows, places):
    """Write each stored edge of the pairs as (row, place); return how many there are."""
    count = 0
    for i in range(pairs.shape[0]):
        for e in range(indptr[pairs[i, 1]], indptr[pairs[i, 1] + 1]):
            if indices[e] == pairs[i, 0]:
                if count < rows.shape[0]:
                    rows[count] = pairs[i, 1]
                    places[count] = e
                count += 1
    return count


def excluded_pairs(pairs: NDArray[np.int64], exclude: Exclude, num_nodes: int) -> NDArray[np.int64]:
    """Return the distinct pairs to leave out, ascending, each as source * num_nodes + destination.

    One number a pair: np.unique over rows is several times slower.
    """
    if exclude is Exclude.NONE:
        pairs = pairs[:0]
    elif exclude is Exclude.BOTH:
        pairs = np.concatenate([pairs, pairs[:, ::-1]])
    return np.unique(pairs[:, 0] * num_nodes + pairs[:, 1])


def find_excluded(
    indptr: NDArray[np.integer],
    indices: NDArray[np.integer],
    pairs: NDArray[np.int64],
    exclude: Exclude,
) -> ExcludedEdges:
    """Look up the edges of some links (int64 [n, 2]) in the graph; pass over those it lacks."""
    num_nodes = len(indptr) - 1
    keys = excluded_pairs(pairs, exclude, num_nodes)
    pairs = np.stack([keys // num_nodes, keys % num_nodes], axis=1)
    rows, places = np.empty((2, 2 * len(pairs)), np.int64)
    count = int(_find_edges(indptr, indices, pairs, rows, places))
    if count > len(rows):  # parallel edges
        rows, places = np.empty(count, np.int64), np.empty(count, np.int64)
        _find_edges(indptr, indices, pairs, rows, places)
    order = np.argsort(places[:count])
    distinct, starts = np.unique(rows[:count][order], return_index=True)
    slots = np.full(1 << (2 * len(distinct)).bit_length(), -1, np.int32)
    fill_slots(distinct, slots)
    ends = np.append(starts, count).astype(np.int64)
    return ExcludedEdges(distinct, ends, places[:count][order], slots)


class ExcludingSampler(NeighborSampler):
    """Samples as `NeighborSampler`, with its arguments; batches may leave out edges."""

    def sample_without(
        self,
        pairs: NDArray[np.int64],
        exclude: Exclude,
        seeds: NDArray[np.int64],
        **request: Any,
    ) -> MiniBatch:
        """Sample on the graph without the edges of some pairs; any thread may call it.

        The pairs are source and destination, int64 [n, 2]; they need not be edges of the graph.
        With those of the whole global batch, any number of ranks draws the same. `seeds` and the
        rest as in `sample`.
        """
        check_pairs(pairs, self.num_nodes)
        self._threads.excluded = find_excluded(self.indptr, self.indices, pairs, exclude)
        try:
            return self.sample(seeds, **request)
        finally:
            self._threads.excluded = None

    @property
    def keeps_chosen(self) -> bool:
        """Whether a workspace holds the edges that were chosen: rows without some need it."""
        return True

    def _rows_now(self) -> UniformRows | RowsWithout:
        excluded: ExcludedEdges | None = getattr(self._threads, "excluded", None)
        if excluded is None or len(excluded.places) == 0:
            return self._rows
        return RowsWithout(*self._rows, excluded)


TRIES = 16
"""Most candidates looked at for one negative."""


class Candidates(StrEnum):
    """What negative destinations are drawn from."""

    UNIFORM = "uniform"
    IN_BATCH = "in-batch"
    """Destinations of the step's global batch, as often as they are true ones."""


@kernel
@no_type_check
def _has_edge(indptr, indices, source, destination):
    e, end = indptr[destination], indptr[destination + 1]
    while e < end and indices[e] != source:
        e += 1
    return e < end


@kernel
@no_type_check
def _draw_negatives(stream, pairs, links, candidates, num_candidates, indptr, indices, avoid, out):
    for i in range(pairs.shape[0]):
        source, destination = pairs[i, 0], pairs[i, 1]
        key = key_kernel(stream, links[i])
        for j in range(out.shape[1]):
            node = np.int64(0)
            for t in range(TRIES):
                place = bounded_kernel(value_kernel(key, j * TRIES + t), num_candidates)
                node = candidates[place] if candidates.shape[0] else place
                if node != destination and not (avoid and _has_edge(indptr, indices, source, node)):
                    break
            out[i, j] = node


class NegativeSampler:
    """Draws negative destinations; any thread may call it.

    `indices` are read only to avoid edges: then a candidate is drawn again where the graph stores
    the edge, by a scan of the candidate's row.
    """

    def __init__(
        self,
        indptr: NDArray[np.integer],
        indices: NDArray[np.integer],
        num_negatives: int,
        *,
        candidates: Candidates = Candidates.UNIFORM,
        avoid_edges: bool = True,
        seed: int = 0,
    ) -> None:
        if num_negatives < 1:
            raise SamplerError(f"expected at least one negative per link, found {num_negatives}")
        self.indptr, self.indices = check_graph(indptr, indices)
        self.num_negatives = num_negatives
        self.candidates = Candidates(candidates)
        self.avoid_edges = avoid_edges
        self.seed = seed

    def draw(
        self,
        pairs: NDArray[np.int64],
        links: NDArray[np.int64],
        *,
        epoch: int,
        step: int,
        batch_destinations: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64]:
        """Draw negative destinations of some of a step's links, int64 [n, num_negatives].

        `pairs` are source and destination of each link, int64 [n, 2], `links` its global id;
        `batch_destinations` those of the global batch, for in-batch negatives, which are refused
        without.
        """
        num_nodes = self.indptr.shape[0] - 1
        check_pairs(pairs, num_nodes)
        pool = np.zeros(0, np.int64)
        if self.candidates is Candidates.IN_BATCH:
            if batch_destinations is None or len(batch_destinations) == 0:
                raise SamplerError(
                    "expected the global batch's destinations to draw in-batch negatives from, "
                    "found none; pass batch_destinations"
                )
            pool = np.ascontiguousarray(batch_destinations, dtype=np.int64)
        out = np.empty((pairs.shape[0], self.num_negatives), np.int64)
        _draw_negatives(
            stream(self.seed, epoch, step, 0, Purpose.NEGATIVE),
            np.ascontiguousarray(pairs, dtype=np.int64),
            np.ascontiguousarray(links, dtype=np.int64),
            pool,
            len(pool) or num_nodes,
            self.indptr,
            self.indices,
            self.avoid_edges,
            out,
        )
        return out


def check_pairs(pairs: NDArray[np.int64], num_nodes: int | None = None) -> None:
    """Refuse node pairs that are not [n, 2], or out of range where the number of nodes is given."""
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise SamplerError(
            f"expected links as [n, 2] pairs (source, destination), found {list(pairs.shape)}"
        )
    if num_nodes is None:
        return
    bad = (pairs < 0) | (pairs >= num_nodes)
    if bad.any():
        raise SamplerError(
            f"expected links between nodes 0 and {num_nodes - 1}, found node "
            f"{int(pairs[bad][0])}; check the links against the graph"
        )
