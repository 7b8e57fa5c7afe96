"""Grow every sampler's batch from its seeds hop by hop: choose edges, gather neighbours, relabel.

Rows that choose independently are expanded by `expand_hops`, all hops of a batch in one call
without the GIL. Its rows are a named tuple of arrays (`indptr`, `indices`, `fanouts` and more)
whose type says how a row chooses: `choose.uniform`, `exclusion` and `typed` compile their forms of
the functions below into the loop. Samplers that need a whole hop before they choose run the same
hops from Python (`HopwiseSampler`).
"""

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, no_type_check

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.sampling.checks import (
    RELABEL_BUDGET_BYTES,
    bad_seed,
    check_fanouts,
    check_graph,
    fits_densely,
)
from gnnplan.runtime.sampling.compiled import kernel
from gnnplan.runtime.sampling.dependent import HopStreams, StreamPolicy
from gnnplan.runtime.sampling.minibatch import (
    Block,
    Dialect,
    MiniBatch,
    Request,
    RequestSampler,
    assemble,
    copied,
    make_batch,
    steps_between,
)
from gnnplan.runtime.sampling.relabel import CHUNK, add_seeds, gather, relabel_chosen, relabel_range
from gnnplan.runtime.sampling.workspace import HOP, Workspace, has_room, of_thread

Weights = NDArray[np.float32]


def rows_per_node(rows: Any) -> int:
    """Count the rows that one node expands."""
    raise NotImplementedError


def bound_edges(rows: Any, hop: int, node_ids: Any, first: int, last: int) -> int:
    """Return an upper bound on the edges that nodes first .. last-1 choose at a hop."""
    raise NotImplementedError


def choose_rows(
    rows: Any, hop: int, stream: Any, node_ids: Any, i: int, last: int, row: int, edge: int,
    enough: int, row_ptr: Any, positions: Any,
) -> tuple[int, int]:  # fmt: skip
    """Choose edges of node i and those after it, until `last` or until edge number `enough`.

    `row` is the row of node i, `edge` the number of the first edge. Fill `positions` by edge and
    `row_ptr` after each row. Return the first node that was not reached and the edges' end.
    """
    raise NotImplementedError


def expand_hop(
    rows: Any, hop: int, stream: Any, w: Any, first: int, last: int, row: int, edge: int,
    keep_positions: bool,
) -> tuple[int, int]:  # fmt: skip
    """Sample the rows of nodes first .. last-1; return the edge end and the number of nodes."""
    raise NotImplementedError


@kernel
@no_type_check
def expand_chunks(rows, hop, stream, w, first, last, row, edge, keep_positions):
    """Sample as `expand_hop` does, rows of any length, in chunks.

    While a chunk is chosen, the neighbours of the one before arrive, and the table entries of the
    one before that.
    """
    w.row_ptr[row] = edge
    known, each = np.uint64(last), rows_per_node(rows)
    i = first
    relabelled = gathered = chosen = edge
    while relabelled < chosen or i < last:
        before = chosen
        i, chosen = choose_rows(
            rows, hop, stream, w.node_ids, i, last, row + (i - first) * each, before,
            before + CHUNK, w.row_ptr, w.positions,
        )  # fmt: skip
        gather(w.table, rows.indices, w.positions, w.values, gathered, before)
        known = relabel_range(w.table, w.values, w.local, relabelled, gathered, w.node_ids, known)
        relabelled, gathered = gathered, before
    return chosen, np.int64(known)


@kernel
@no_type_check
def expand_hops(rows, streams, every_hop, keep_positions, w):
    """Sample hop after hop; return True when done, False when a buffer is too small.

    `streams` holds one uint64 per hop; `w` are the workspace's `Buffers`, with the seeds entered
    and node_ends[0] their number. Without `keep_positions`, `positions` and `values` are undefined.
    """
    each = rows_per_node(rows)
    num_nodes = (rows.indptr.shape[0] - 1) // each
    for hop in range(w.state[HOP], rows.fanouts.shape[0]):
        first = 0 if every_hop or hop == 0 else w.node_ends[hop - 1]
        last, row, edge = w.node_ends[hop], w.row_ends[hop], w.edge_ends[hop]
        more = bound_edges(rows, hop, w.node_ids, first, last)
        row_end = row + (last - first) * each
        if not has_room(w, hop, row_end, edge + more, min(last + more, num_nodes)):
            return False
        w.edge_ends[hop + 1], w.node_ends[hop + 1] = expand_hop(
            rows, hop, streams[hop], w, first, last, row, edge, keep_positions
        )
        w.row_ends[hop + 1] = row_end
    return True


class HopSampler(RequestSampler[MiniBatch]):
    """Samples batches hop by hop, each thread in a workspace of its own.

    Args:
        indptr: int64 [N + 1], non-decreasing (an opened dataset is validated already).
        indices: int32 or int64 [E], C-contiguous; may be memory-mapped.
        fanouts: Neighbours per hop, the hop next to the seeds first; -1 takes all.
        streams: Streams that the steps draw from.
        dialect: Which vertices a hop expands.
        edge_ids: Fill each block's `e_id` with positions in `indices`.
        relabel_budget_bytes: Bytes per thread up to which the relabelling table is dense; else it
            is a hash table of the batch's size, and the batches are the same.

    Raises:
        SamplerError: fan-outs empty, zero or below -1; arrays of the wrong type or shape.
    """

    first_hop: int = 0
    """Number of the first hop in the streams; not 0 where others drew before (`cooperative`)."""

    def __init__(
        self,
        indptr: NDArray[np.integer],
        indices: NDArray[np.integer],
        fanouts: Sequence[int],
        *,
        streams: StreamPolicy,
        dialect: Dialect = Dialect.FIRST_SEEN,
        edge_ids: bool = False,
        relabel_budget_bytes: int = RELABEL_BUDGET_BYTES,
    ) -> None:
        self.fanouts = check_fanouts(fanouts)
        self.num_hops = len(self.fanouts)
        self.indptr, self.indices = check_graph(indptr, indices)
        self.num_nodes = int(self.indptr.shape[0]) - 1
        self.dialect = Dialect(dialect)
        self.streams, self.seed = streams, streams.seed
        self.edge_ids = edge_ids
        self.dense_table = fits_densely(self.num_nodes, relabel_budget_bytes)
        self._threads = threading.local()

    @abstractmethod
    def _draw(self, w: Workspace, streams: HopStreams) -> Weights | None:
        """Draw all hops from the seeds entered; return the edges' weights in order, if any."""

    def _sample(self, request: Request) -> MiniBatch:
        seeds, w = request.seeds, self._workspace()
        w.begin(int(seeds.shape[0]))
        bad = add_seeds(w.table.arrays(), w.node_ids, seeds, self.num_nodes)
        if bad >= 0:
            raise bad_seed(seeds, bad, self.num_nodes)
        streams = self.streams.streams(request.epoch, request.step, self.num_hops, self.first_hop)
        weight = self._draw(w, streams)
        w.finish()
        n_id = copied(w.node_ids, int(w.node_ends[-1]))
        drawn = steps_between(w.edge_ends)
        return make_batch(request, self._blocks(w, weight), n_id, drawn, self.dialect)

    def _blocks(self, w: Workspace, weight: Weights | None) -> list[Block]:
        return assemble(w, self.dialect, edge_ids=self.edge_ids, weight=weight)

    def _workspace(self) -> Workspace:
        return self._of_thread(
            "workspace",
            lambda: Workspace(
                self.num_nodes, self.num_hops, self.indices.dtype, dense=self.dense_table,
                chosen=self.keeps_chosen,
            ),
        )  # fmt: skip

    @property
    def keeps_chosen(self) -> bool:
        """Whether a workspace holds the edges that were chosen."""
        return True

    def _of_thread(self, name: str, make: Callable[[], Any]) -> Any:
        return of_thread(self._threads, name, make)


class HopwiseSampler(HopSampler):
    """Chooses a whole hop, then relabels it: for rows that depend on each other or on scratch."""

    @abstractmethod
    def _choose(
        self, w: Workspace, streams: HopStreams, hop: int, first: int, last: int
    ) -> Weights | None: ...

    def _draw(self, w: Workspace, streams: HopStreams) -> Weights | None:
        weights: list[Weights] = []
        for hop in range(self.num_hops):
            every_hop = self.dialect is Dialect.EVERY_HOP
            first = 0 if every_hop or hop == 0 else int(w.node_ends[hop - 1])
            weight = self._choose(w, streams, hop, first, int(w.node_ends[hop]))
            if weight is not None:
                weights.append(weight)
            self._relabel(w, hop)
        return np.concatenate(weights) if weights else None

    def _choose_rows(
        self,
        w: Workspace,
        hop: int,
        first: int,
        last: int,
        choose: Callable[[int, int, int], tuple[int, int]],
    ) -> None:
        """Call choose(node, row, edge) until it has done the rows of nodes first .. last-1.

        It fills `positions` and returns the first node whose row is left for want of room, and the
        edge end. Afterwards the ends of rows and edges stand in the workspace.
        """
        row, edge = int(w.row_ends[hop]), int(w.edge_ends[hop])
        w.row_ends[hop + 1] = row + last - first
        w.node_ends[hop + 1] = last
        w.reserve(hop, row + last - first, edge, last)
        w.row_ptr[row] = edge
        node = first
        while True:
            node, edge = choose(node, row + node - first, edge)
            w.edge_ends[hop + 1] = edge
            if node == last:
                return
            start, stop = self.indptr[w.node_ids[node]], self.indptr[w.node_ids[node] + 1]
            more = max(int(stop - start), self.fanouts[hop])
            w.reserve(hop + 1, 0, edge + more, last)

    def _relabel(self, w: Workspace, hop: int) -> None:
        begin, end = int(w.edge_ends[hop]), int(w.edge_ends[hop + 1])
        known = int(w.node_ends[hop])
        w.reserve(hop, 0, end, min(known + end - begin, self.num_nodes))
        w.node_ends[hop + 1] = relabel_chosen(
            w.table.arrays(), self.indices, w.positions, w.values, w.local, begin, end, w.node_ids,
            known,
        )  # fmt: skip

    def _edge_numbers(self, w: Workspace, edge: int) -> NDArray[np.float64]:
        """Return a float64 per edge that the workspace has room for, the first `edge` kept."""
        numbers = self._of_thread("edge_numbers", lambda: np.zeros(0, dtype=np.float64))
        if numbers.shape[0] < w.positions.shape[0]:
            larger = np.empty(w.positions.shape[0], dtype=np.float64)
            larger[:edge] = numbers[:edge]
            self._threads.edge_numbers = numbers = larger
        return numbers
