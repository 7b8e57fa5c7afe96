"""Bulk sampling with the graph partitioned 1.5D over the ranks (Tripathy et al., MLSys 2024).

A process row samples the batches of its c ranks for k steps as one stack, hop after hop: it fetches
the rows of A that the hop needs from the ranks that hold them, then draws and extracts. Each rank
gets its own batches, equal bit for bit to those of the single-process sampler, whatever the grid
and whatever k. All c processes of a row hold the same stack and draw the same numbers; the last hop
draws for this rank alone, as no later fetch needs to know the others'.

`bulk.SageStack` takes all hops of a batch in one launch, which needs all of A; here a launch is one
hop of all batches, by the same `choose_rows` with the same numbers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import no_type_check

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.runtime.comm.mesh import ProcessGrid
from gnnplan.runtime.errors import BudgetExceeded, SamplerError
from gnnplan.runtime.sampling.build import BatchSampler
from gnnplan.runtime.sampling.bulk.bulk import stack_streams
from gnnplan.runtime.sampling.bulk.product import StackedBlocks, add_layer, stack_seeds, unstack
from gnnplan.runtime.sampling.checks import RELABEL_BUDGET_BYTES, fits_densely
from gnnplan.runtime.sampling.choose.layerwise import Method, Numbers, add_squares, one_row
from gnnplan.runtime.sampling.choose.uniform import UniformRows
from gnnplan.runtime.sampling.compiled import kernel
from gnnplan.runtime.sampling.distributed.grid_rows import Exchange, FetchedRows, GridRows, Shard
from gnnplan.runtime.sampling.frontier import choose_rows
from gnnplan.runtime.sampling.layerwise import LayerStack, LayerwiseSampler, draw_layer, hop_numbers
from gnnplan.runtime.sampling.memory import BulkBytes, Ledger, StackCutter, object_bytes
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch, Request, cut_block, make_batch
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from gnnplan.runtime.sampling.placed_indices import prefetch_write
from gnnplan.runtime.sampling.relabel import Table, begin_batch, find_or_add

AHEAD = 16
SPARE = 64
ALL = 1 << 62


@dataclass(frozen=True, kw_only=True, slots=True)
class Frontier:
    """What k batches know before a hop, and which part of it the hop expands."""

    nodes: NDArray[np.int64]
    """Global ids, batch after batch. Shape (nodes,)."""
    ends: NDArray[np.int64]
    firsts: NDArray[np.int64]
    """Place from which batch b expands nodes[ends[b] + firsts[b] : ends[b + 1]]. Shape (k,)."""

    def expanded(self) -> NDArray[np.int64]:
        """Return the nodes that the hop expands, of all batches."""
        sizes = np.diff(self.ends)
        place = np.arange(self.nodes.shape[0]) - np.repeat(self.ends[:-1], sizes)
        return self.nodes[place >= np.repeat(self.firsts, sizes)]


@kernel
@no_type_check
def _expand_layer(
    rows, streams, nodes, ends, firsts, table, ids, positions, edge_bounds, out_nodes, out_ends,
    row_ptr, edge_ends, local, places,
):  # fmt: skip
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
    """Expand one hop; `dst_ends` counts the expanded nodes, `nodes` are all known afterwards.

    `indptr` need be right for the expanded nodes alone; `streams` are this hop's, uint64 [k].
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
    """Make the batches of a first_seen stack: a batch's hops are one CSR, its blocks prefixes."""
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
            cut_block(
                known[hop + 1], whole[: known[hop] + 1], slice(edges[hop + 1]), sources, places
            )
            for hop in reversed(range(len(layers)))
        ]
        last = layers[-1]
        n_id = last.nodes[last.ends[b] : last.ends[b + 1]]
        drawn = np.diff(edges).tolist()
        batches.append(make_batch(request, blocks, n_id, drawn, Dialect.FIRST_SEEN))
    return batches


def sage_hops(
    sampler: NeighborSampler,
    rows: GridRows,
    requests: Sequence[Request],
    own: slice,
    table: Table,
    ledger: Ledger,
) -> list[MiniBatch]:
    """Draw uniform neighbours: the batches `requests[own]`, as `sampler` would one by one.

    `requests` are the stack of the process row, `own` this rank's among them: slice(j, None, c).
    The sampler's graph is not looked at.
    """
    every_hop = sampler.dialect is Dialect.EVERY_HOP
    streams = stack_streams(sampler.seed, sampler.purpose, sampler.num_hops, requests)
    nodes, ends = stack_seeds(requests, rows.shard.num_nodes, table)
    frontier = Frontier(nodes=nodes, ends=ends, firsts=np.zeros(len(requests), dtype=np.int64))
    layers: list[StackedBlocks] = []
    for hop, fanout in enumerate(sampler.fanouts):
        found = rows.fetch(frontier.expanded(), ledger)
        words = streams[hop]
        if hop == len(sampler.fanouts) - 1 and own.step > 1:
            frontier = Frontier(
                nodes=take(frontier.nodes, frontier.ends, own),
                ends=take_ends(frontier.ends, own),
                firsts=frontier.firsts[own].copy(),
            )
            layers, words = [pick(layer, own, ledger) for layer in layers], words[own].copy()
        layer = expand_layer(
            rows.view(found), found.cols, words, fanout, frontier, table, ledger,
            edge_ids=sampler.edge_ids,
        )  # fmt: skip
        _end_hop(layers, layer, found, ledger)
        del found
        firsts = np.zeros(layer.ends.shape[0] - 1, dtype=np.int64)
        if not every_hop:
            firsts = np.diff(frontier.ends)
        frontier = Frontier(nodes=layer.nodes, ends=layer.ends, firsts=firsts)
    mine = requests[own]
    return unstack(layers, mine) if every_hop else nest(layers, mine)


def layer_hops(
    stack: LayerStack,
    rows: GridRows,
    requests: Sequence[Request],
    own: slice,
    table: Table,
    ledger: Ledger,
) -> list[MiniBatch]:
    """Draw LADIES, PLADIES or FastGCN, without preference for local vertices; see `sage_hops`.

    The stack's graph is made to show the rows that were fetched last.
    """
    graph = stack.graph
    numbers = hop_numbers(stack.policy, requests, len(stack.sizes))
    nodes, ends = stack_seeds(requests, graph.num_nodes, table)
    layers: list[StackedBlocks] = []
    for hop, size in enumerate(stack.sizes):
        found = rows.fetch(nodes, ledger)
        graph.indptr, graph.indices = rows.view(found), found.cols
        graph.edge_weight = np.empty(0, np.float32) if found.weight is None else found.weight
        drawing = numbers[hop]
        if hop == len(stack.sizes) - 1 and own.step > 1:
            nodes, ends = take(nodes, ends, own), take_ends(ends, own)
            layers, drawing = [pick(layer, own, ledger) for layer in layers], _only(drawing, own)
        layer = draw_layer(
            graph, (nodes, ends), drawing, size, table, ledger, edge_ids=stack.edge_ids
        )
        _end_hop(layers, layer, found, ledger)
        del found
        nodes, ends = layer.nodes, layer.ends
    return unstack(layers, requests[own])


def _end_hop(
    layers: list[StackedBlocks], layer: StackedBlocks, found: FetchedRows, ledger: Ledger
) -> None:
    """Append a layer drawn from fetched rows, with edge ids of the whole graph; count them gone."""
    if layer.e_id is not None:
        layer.e_id = found.global_edges(layer.e_id)
    ledger.free(found.ids, found.ptr, found.cols, found.weight, found.edge_start)
    add_layer(layers, layer, ledger)


def column_squares(rows: GridRows) -> NDArray[np.float64]:
    """Return FastGCN's sum_s A_ts^2 of every vertex t, float64 [N]; collective.

    Blocks are added in order, so that the sums are those of one process to the last bit.
    """
    shard, column = rows.shard, rows.grid.column_comm
    total = torch.zeros(shard.num_nodes, dtype=torch.float64)
    for block in range(rows.grid.num_rows):
        if block == rows.grid.row:
            none = np.zeros(0, np.float32)
            weight = none if shard.edge_weight is None else shard.edge_weight
            add_squares(shard.indices, weight, total.numpy())
        total = column.broadcast(total, source=block)
    return total.numpy()


def take(values: NDArray, ends: NDArray[np.int64], own: slice) -> NDArray:
    """Take entries of some batches, where batch b has values[ends[b] : ends[b + 1]]."""
    bounds = zip(ends[:-1][own].tolist(), ends[1:][own].tolist(), strict=True)
    return np.concatenate([values[:0], *(values[first:last] for first, last in bounds)])


def take_ends(ends: NDArray[np.int64], own: slice) -> NDArray[np.int64]:
    """Return where those batches end when they stand alone."""
    return np.concatenate([[0], np.cumsum(np.diff(ends)[own])]).astype(np.int64)


def pick(layer: StackedBlocks, own: slice, ledger: Ledger) -> StackedBlocks:
    """Copy some batches of a layer."""
    ledger.free(*_arrays(layer))
    rows = layer.dst_ends + np.arange(layer.dst_ends.shape[0])  # a row pointer has an entry more
    forgotten = layer.nodes.shape[0] < layer.ends[-1]
    weight, e_id = layer.weight, layer.e_id
    out = StackedBlocks(
        dst_ends=take_ends(layer.dst_ends, own),
        row_ptr=take(layer.row_ptr, rows, own),
        edge_ends=take_ends(layer.edge_ends, own),
        indices=take(layer.indices, layer.edge_ends, own),
        nodes=layer.nodes if forgotten else take(layer.nodes, layer.ends, own),
        ends=take_ends(layer.ends, own),
        weight=None if weight is None else take(weight, layer.edge_ends, own),
        e_id=None if e_id is None else take(e_id, layer.edge_ends, own),
    )
    ledger.note(sum(array.nbytes for array in _arrays(out) if array is not None))
    return out


def _arrays(layer: StackedBlocks) -> list[NDArray | None]:
    return [layer.row_ptr, layer.indices, layer.nodes, layer.weight, layer.e_id]


def _only(numbers: Numbers, own: slice) -> Numbers:
    return Numbers._make(each[own].copy() for each in numbers)


class GridSampler:
    """Samples stacks of steps; every method is collective over the grid, one thread at a time.

    Args (others as in `BulkSampler`):
        sampler: Uniform neighbours, a layer-wise sampler, or the stack of one, made on a graph
            without edges (`empty_graph`), since no rank holds the graph.
        shard: This rank's block row of A.
        grid: Ranks of the grid.
        exchange: Stages one after another, or all in one all-to-allv; the batches are the same.
        budget_bytes: Most bytes that a stack may take on any rank; all ranks cut k down alike.
    """

    def __init__(
        self,
        sampler: BatchSampler | LayerStack,
        shard: Shard,
        grid: ProcessGrid,
        *,
        exchange: Exchange = Exchange.ONE_SHOT,
        budget_bytes: int | None = None,
        kept_batches: int = 0,
        relabel_budget_bytes: int = RELABEL_BUDGET_BYTES,
    ) -> None:
        self.grid, self._cutter = grid, StackCutter(budget_bytes, kept_batches)
        self._sampler: NeighborSampler | LayerStack
        if type(sampler) is NeighborSampler or isinstance(sampler, LayerStack):
            self._sampler = sampler
        elif isinstance(sampler, LayerwiseSampler):
            self._sampler = sampler.stack
        else:
            raise cannot_stack(sampler)
        edge_ids = self._sampler.edge_ids
        self.rows = GridRows(shard=shard, grid=grid, exchange=Exchange(exchange), edge_ids=edge_ids)
        dense = fits_densely(shard.num_nodes, relabel_budget_bytes)
        self._table = Table(shard.num_nodes, dense=dense)
        stack = self._sampler
        if isinstance(stack, LayerStack) and stack.graph.law.method is Method.FASTGCN:
            stack.graph.fixed = one_row(column_squares(self.rows), shard.indices.dtype)

    def sample_many(self, steps: Sequence[Sequence[Request]]) -> list[MiniBatch]:
        """Sample this rank's batches of these steps; see `stacks`."""
        return [batch for stack in self.stacks(steps) for batch in stack]

    def stacks(self, steps: Sequence[Sequence[Request]]) -> Iterator[list[MiniBatch]]:
        """Sample this rank's batches, one per step, stack by stack; the first is a pilot of 1.

        `steps` are, of each step, the requests of this process row's ranks, by column. All ranks of
        the grid pass as many steps, an empty share as a request without seeds.
        """
        return self._cutter.stacks(steps, self._sample_stack, self._fit_budget)

    def _sample_stack(
        self, steps: Sequence[Sequence[Request]]
    ) -> tuple[list[MiniBatch], BulkBytes]:
        requests = [request for step in steps for request in step]
        if len(requests) != len(steps) * self.grid.replication:
            raise SamplerError(
                f"expected {self.grid.replication} requests per step (the process row's ranks), "
                f"found {len(requests)} for {len(steps)} steps; correct them"
            )
        own = slice(self.grid.column, None, self.grid.replication)
        ledger, sampler = Ledger(), self._sampler
        if isinstance(sampler, LayerStack):
            batches = layer_hops(sampler, self.rows, requests, own, self._table, ledger)
        else:
            batches = sage_hops(sampler, self.rows, requests, own, self._table, ledger)
        ledger.note(object_bytes(len(batches), sum(len(batch.blocks) for batch in batches)))
        table_bytes = self._table.nbytes + self.rows.table_bytes
        return batches, BulkBytes.of(ledger, table_bytes, len(batches))

    def _fit_budget(self, found: BulkBytes, budget_bytes: int) -> int:
        """Return the steps that fit on every rank; all ranks find the same."""
        here = found.largest_stack(budget_bytes)
        if here == 0 and found.peak_bytes(1) <= budget_bytes:
            here = 1
        size = self.grid.agree_min(here)
        if size == 0:
            step = found.peak_bytes(1) - found.table_bytes
            raise BudgetExceeded(
                f"expected one step to fit {budget_bytes} bytes on every rank, found here "
                f"{found.table_bytes} (block row and tables) + {step} (batches) = "
                f"{found.peak_bytes(1)}; raise the budget, or lower the batch size or the fan-outs"
            )
        return size


def empty_graph(num_nodes: int, dtype: np.dtype) -> tuple[NDArray[np.int64], NDArray[np.integer]]:
    """Return indptr and indices of a graph without edges, to make a sampler's settings on."""
    return np.zeros(num_nodes + 1, dtype=np.int64), np.empty(0, dtype=dtype)


def cannot_stack(sampler: object) -> SamplerError:
    """Return the error for a sampler that has no bulk form."""
    return SamplerError(
        "expected uniform neighbours without replacement, ladies, pladies or fastgcn for stacks of "
        f"batches, found {type(sampler).__name__}; plan with bulk_batches 1 and the whole topology"
    )
