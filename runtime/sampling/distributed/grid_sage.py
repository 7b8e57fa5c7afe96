"""One hop of GraphSAGE over k stacked batches, where rows of A come hop by hop.

`bulk.sage` takes all hops of a batch in one launch, which needs all of A. On a grid the rows of a
hop are fetched first, for all batches together, so here a launch is one hop of all batches. Edges
are chosen by the same `choose_rows` with the same numbers: the blocks are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import no_type_check

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.sampling.bulk.memory import Ledger
from gnnplan.runtime.sampling.bulk.product import StackedBlocks
from gnnplan.runtime.sampling.choose.uniform import UniformRows
from gnnplan.runtime.sampling.compiled import kernel
from gnnplan.runtime.sampling.frontier import choose_rows
from gnnplan.runtime.sampling.minibatch import Block, Dialect, MiniBatch, Request, make_batch
from gnnplan.runtime.sampling.placed_indices import prefetch_write
from gnnplan.runtime.sampling.relabel import Table, begin_batch, find_or_add

AHEAD = 16
SPARE = 64
"""Entries that scratch has beyond the last one used: prefetches read ahead."""
ALL = 1 << 62


@dataclass(frozen=True, kw_only=True, slots=True)
class Frontier:
    """What k batches know before a hop, and which part of it the hop expands."""

    nodes: NDArray[np.int64]
    """Shape (nodes,); global ids, batch after batch."""
    ends: NDArray[np.int64]
    """Shape (k + 1,)."""
    firsts: NDArray[np.int64]
    """Shape (k,); batch b expands nodes[ends[b] + firsts[b] : ends[b + 1]]."""

    def expanded(self) -> NDArray[np.int64]:
        """The nodes that the hop expands, of all batches."""
        sizes = np.diff(self.ends)
        place = np.arange(self.nodes.shape[0]) - np.repeat(self.ends[:-1], sizes)
        return self.nodes[place >= np.repeat(self.firsts, sizes)]


@kernel
@no_type_check
def _expand_layer(
    rows, streams, nodes, ends, firsts, table, ids, positions, edge_bounds, out_nodes, out_ends,
    row_ptr, edge_ends, local, places,
):  # fmt: skip
    """Expand one hop of every batch; `ids` and `positions` are scratch of one batch."""
    entries, shift, stamp = table
    indices = rows.indices
    row = 0
    out_ends[0] = edge_ends[0] = 0
    for b in range(ends.shape[0] - 1):
        last, first = ends[b + 1] - ends[b], firsts[b]
        base = begin_batch(table, last + edge_bounds[b])
        for i in range(last):
            ids[i] = nodes[ends[b] + i]
            find_or_add(entries, shift, base, ids, ids[i], np.uint64(i))
        edge = edge_ends[b]
        _, count = choose_rows(
            rows, 0, streams[b], ids, first, last, 0, 0, ALL, row_ptr[row:], positions
        )
        row_ptr[row] = 0
        known = np.uint64(last)
        for e in range(count):
            if shift == 0:
                ahead = min(e + AHEAD, count - 1)
                prefetch_write(entries, np.int64(indices[positions[ahead]]))
            node = indices[positions[e]]
            name = find_or_add(entries, shift, base, ids, node, known)
            # No branch: whether a node is new is a coin flip that no predictor guesses.
            ids[known] = node
            local[edge + e] = name
            known += np.uint64(name == known)
        row += last - first + 1
        if places.shape[0] > 0:
            places[edge : edge + count] = positions[:count]
        out_ends[b + 1] = out_ends[b] + np.int64(known)
        out_nodes[out_ends[b] : out_ends[b + 1]] = ids[: np.int64(known)]
        edge_ends[b + 1] = edge + count
        stamp[0] += np.int64(known) + 1


def expand_layer(
    indptr: NDArray[np.int64],
    indices: NDArray[np.integer],
    streams: NDArray[np.uint64],
    fanout: int,
    frontier: Frontier,
    table: Table,
    ledger: Ledger,
    *,
    edge_ids: bool,
) -> StackedBlocks:
    """One hop; `dst_ends` counts the expanded nodes, `nodes` are all known afterwards.

    Args:
        indptr: int64 [N + 1], right for the nodes that are expanded.
        indices: int32 or int64, what indptr points into.
        streams: uint64 [k], of this hop.
        fanout: Neighbours drawn, or -1 for all.
        frontier: What the batches know.
        table: For relabelling.
        ledger: Counts the bytes.
        edge_ids: Fill `e_id` with positions in `indices`.
    """
    ends, num_batches = frontier.ends, frontier.ends.shape[0] - 1
    rows = np.diff(ends) - frontier.firsts
    expanded = frontier.expanded()
    degrees = indptr[expanded + 1] - indptr[expanded]
    if fanout >= 0:
        degrees = np.minimum(degrees, fanout)
    dst_ends = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
    totals = np.concatenate([[0], np.cumsum(degrees)])
    edges = np.diff(totals[dst_ends])
    most = np.diff(ends) + edges
    largest = int(most.max(initial=0))
    table.reserve(largest)
    longest = int(edges.max(initial=0)) + SPARE
    ids, positions = (ledger.scratch(n, np.int64) for n in (largest + SPARE, longest))
    size = int(totals[-1])
    out = StackedBlocks(
        dst_ends=dst_ends,
        row_ptr=ledger.empty(int(rows.sum()) + num_batches, np.int64),
        edge_ends=ledger.empty(num_batches + 1, np.int64),
        indices=ledger.empty(size, np.int32),
        nodes=ledger.empty(int(most.sum()), np.int64),
        ends=ledger.empty(num_batches + 1, np.int64),
        e_id=ledger.empty(size if edge_ids else 0, np.int64),
    )
    assert out.e_id is not None
    _expand_layer(
        UniformRows(indptr, indices, np.array([fanout])), streams, frontier.nodes, ends,
        frontier.firsts, table.arrays(), ids, positions, edges, out.nodes, out.ends, out.row_ptr,
        out.edge_ends, out.indices, out.e_id,
    )  # fmt: skip
    ledger.free_scratch()
    out.nodes = ledger.trim(out.nodes, int(out.ends[-1]))
    out.e_id = out.e_id if edge_ids else None
    return out


def nest(layers: Sequence[StackedBlocks], requests: Sequence[Request]) -> list[MiniBatch]:
    """The batches of a first_seen stack: a batch's hops become one CSR, its blocks prefixes."""
    batches = []
    for b, request in enumerate(requests):
        row_ptr, indices, e_id = [np.zeros(1, dtype=np.int64)], [], []
        known, edges = [request.seeds.shape[0]], [0]
        for layer in layers:
            rows, hop = slice(*layer.dst_ends[b : b + 2]), slice(*layer.edge_ends[b : b + 2])
            ptr = layer.row_ptr[rows.start + b : rows.stop + b + 1]
            row_ptr.append(ptr[1:] + edges[-1])
            indices.append(layer.indices[hop])
            if layer.e_id is not None:
                e_id.append(layer.e_id[hop])
            known.append(int(layer.ends[b + 1] - layer.ends[b]))
            edges.append(edges[-1] + int(hop.stop - hop.start))
        whole, sources = np.concatenate(row_ptr), np.concatenate(indices)
        places = np.concatenate(e_id) if e_id else None
        blocks = [
            Block(
                num_src=known[hop + 1],
                num_dst=known[hop],
                indptr=whole[: known[hop] + 1],
                indices=sources[: edges[hop + 1]],
                e_id=None if places is None else places[: edges[hop + 1]],
            )
            for hop in reversed(range(len(layers)))
        ]
        last = layers[-1]
        n_id = last.nodes[last.ends[b] : last.ends[b + 1]]
        drawn = np.diff(edges).tolist()
        batches.append(make_batch(request, blocks, n_id, drawn, Dialect.FIRST_SEEN))
    return batches
