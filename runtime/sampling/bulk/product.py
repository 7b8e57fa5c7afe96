"""Multiply sparse matrices of stacked batches: P = QA, NORM and EXTRACT (formulas 4.2, 4.4).

After Tripathy et al., MLSys 2024. Row b of P belongs to row b of Q. Where a row of Q has many
non-zeros (LADIES: a row per batch) rows of A are added up, Gustavson's way, with one accumulator
for all k rows. EXTRACT makes the bipartite blocks A_l = Q_R A Q_C: Q_R has a row per destination,
Q_C a column per vertex drawn, and neither is stored: a row of A is read once, and each of its
columns is looked up in the relabelling table, which then holds the vertices of the row's own batch.

The destinations are the first sources, for the layer's self term. An edge to a destination is kept
only where that vertex was drawn as well, so that its weight needs no other inclusion probability.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, no_type_check

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.sampling.checks import bad_seed
from gnnplan.runtime.sampling.compiled import kernel
from gnnplan.runtime.sampling.memory import Ledger
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch, Request, cut_block, make_batch
from gnnplan.runtime.sampling.placed_indices import prefetch_read, prefetch_write
from gnnplan.runtime.sampling.relabel import Table, begin_batch, find, find_bad_seed, find_or_add
from gnnplan.runtime.sampling.statistics import Estimator

_AHEAD = 16


@dataclass(kw_only=True, slots=True)
class SparseRows:
    """Sparse rows in CSR form, column ids in order of first appearance."""

    ptr: NDArray[np.int64]
    cols: NDArray[np.integer]
    """Global node ids, shape (non-zeros,), of the type of the graph's `indices`."""
    values: NDArray[np.float64]


@kernel
@no_type_check
def degree_sums(indptr, nodes, ends, out):
    """Write the stored edges of the nodes of batch b to out[b]; return their sum."""
    total = 0
    for b in range(ends.shape[0] - 1):
        out[b] = 0
        for i in range(ends[b], ends[b + 1]):
            out[b] += indptr[nodes[i] + 1] - indptr[nodes[i]]
        total += out[b]
    return total


@kernel
@no_type_check
def _add_rows(indptr, indices, edge_weight, power, nodes, ends, table, ptr, cols, values):
    """Sum entry^power over rows of A; return the number of non-zeros."""
    entries, shift, stamp = table
    ptr[0] = 0
    for b in range(ends.shape[0] - 1):
        ids, sums = cols[ptr[b] :], values[ptr[b] :]
        base = begin_batch(table, ids.shape[0])
        known = np.uint64(0)
        for i in range(ends[b], ends[b + 1]):
            start, end = indptr[nodes[i]], indptr[nodes[i] + 1]
            prefetch_read(indices, indptr[nodes[min(i + 2, ends[b + 1] - 1)]])
            for e in range(start, end):
                if shift == 0:
                    prefetch_write(entries, np.int64(indices[min(e + _AHEAD, end - 1)]))
                name = find_or_add(entries, shift, base, ids, indices[e], known)
                # No branch: whether a column is new is a coin flip that no predictor guesses.
                ids[known] = indices[e]
                sums[known] = 0.0
                known += np.uint64(name == known)
                value = np.float64(edge_weight[e]) if edge_weight.shape[0] > 0 else 1.0
                sums[name] += value * value if power == 2 else value
        ptr[b + 1] = ptr[b] + np.int64(known)
        stamp[0] += np.int64(known) + 1
    return ptr[ends.shape[0] - 1]


@kernel
@no_type_check
def _normalise(ptr, values, squared):
    for b in range(ptr.shape[0] - 1):
        total = 0.0
        for i in range(ptr[b], ptr[b + 1]):
            if squared:
                values[i] *= values[i]
            total += values[i]
        if total > 0:
            for i in range(ptr[b], ptr[b + 1]):
                values[i] /= total


def sum_product(
    indptr: NDArray[np.integer],
    indices: NDArray[np.integer],
    edge_weight: NDArray[np.float32],
    power: int,
    nodes: NDArray[np.int64],
    ends: NDArray[np.int64],
    table: Table,
    ledger: Ledger,
) -> SparseRows:
    """Return QA for a Q whose row b has ones at the nodes of batch b; entries of A to a power.

    A stored edge is an entry of its own: of two parallel edges each is raised, then they are added.
    An empty `edge_weight` stands for entries of 1.
    """
    num_batches = ends.shape[0] - 1
    per_batch = np.empty(num_batches, dtype=np.int64)
    degree_sums(indptr, nodes, ends, per_batch)
    # A row has no more non-zeros than the graph has nodes, nor than its batch has edges.
    # One entry more is written, and not counted.
    size = int(np.minimum(per_batch, indptr.shape[0] - 1).sum()) + 1
    table.reserve(int(min(per_batch.max(initial=0), indptr.shape[0] - 1)))
    ptr = ledger.empty(num_batches + 1, np.int64)
    cols = ledger.empty(size, indices.dtype)
    values = ledger.empty(size, np.float64)
    used = _add_rows(
        indptr, indices, edge_weight, power, nodes, ends, table.arrays(), ptr, cols, values
    )  # fmt: skip
    return SparseRows(ptr=ptr, cols=ledger.trim(cols, used), values=ledger.trim(values, used))


def normalise(rows: SparseRows, *, squared: bool = False) -> None:
    """Divide each row by its sum, in place, entries squared before if asked; empty rows stay."""
    _normalise(rows.ptr, rows.values, squared)


_PLAIN, _HORVITZ_THOMPSON, _HAJEK = 0, 1, 2
_CODES = {Estimator.PLAIN: 0, Estimator.HORVITZ_THOMPSON: 1, Estimator.HAJEK: 2}


@dataclass(kw_only=True, slots=True)
class StackedBlocks:
    """One layer of k batches; batch b has what lies from an `ends[b]` to `ends[b + 1]`."""

    dst_ends: NDArray[np.int64]
    row_ptr: NDArray[np.int64]
    """k CSR row pointers, each from 0, one after another. Shape (destinations + k,)."""
    edge_ends: NDArray[np.int64]
    indices: NDArray[np.int32]
    """Sources, local to the batch. Shape (edges,)."""
    nodes: NDArray[np.int64]
    """Global ids of the sources, destinations of a batch first. Shape (sources,)."""
    ends: NDArray[np.int64]
    """Ends of the sources. Shape (k + 1,)."""
    weight: NDArray[np.float32] | None = None
    e_id: NDArray[np.int64] | None = None


@kernel
@no_type_check
def _enter_sources(entries, shift, base, ids, dst, drawn, drawn_factor, factor):
    """Enter destinations, then new vertices drawn; factor 0 marks those that were not drawn."""
    known = np.uint64(0)
    for i in range(dst.shape[0]):
        find_or_add(entries, shift, base, ids, dst[i], known)
        ids[known] = dst[i]
        factor[known] = 0.0
        known += np.uint64(1)
    for i in range(drawn.shape[0]):
        name = find_or_add(entries, shift, base, ids, drawn[i], known)
        ids[known] = drawn[i]
        factor[name] = drawn_factor[i]
        known += np.uint64(name == known)
    return known


@kernel
@no_type_check
def _weigh(weight, first, last, estimator, row_sum):
    """Turn A / pi into A / (pi * sum of the row of A), or into shares of the drawn edges."""
    total = row_sum
    if estimator == _HAJEK:
        total = 0.0
        for e in range(first, last):
            total += weight[e]
    for e in range(first, last):
        weight[e] = weight[e] / total


class _Out(NamedTuple):
    row_ptr: NDArray[np.int64]
    edge_ends: NDArray[np.int64]
    indices: NDArray[np.int32]
    weight: NDArray[np.float32]
    e_id: NDArray[np.int64]
    nodes: NDArray[np.int64]
    ends: NDArray[np.int64]


@kernel
@no_type_check
def _extract(
    indptr, indices, edge_weight, estimator, dst_nodes, dst_ends, drawn, table, factor, out
):
    entries, shift, stamp = table
    drawn_ptr, drawn_ids, drawn_factor = drawn
    row_ptr, edge_ends, local, weight, e_id, nodes, ends = out
    edge = 0
    ends[0] = edge_ends[0] = 0
    for b in range(dst_ends.shape[0] - 1):
        dst = dst_nodes[dst_ends[b] : dst_ends[b + 1]]
        ids = nodes[ends[b] :]
        base = begin_batch(table, ids.shape[0])
        known = _enter_sources(
            entries, shift, base, ids, dst, drawn_ids[drawn_ptr[b] : drawn_ptr[b + 1]],
            drawn_factor[drawn_ptr[b] : drawn_ptr[b + 1]], factor,
        )  # fmt: skip
        row = dst_ends[b] + b
        row_ptr[row] = 0
        for i in range(dst.shape[0]):
            start, end = indptr[dst[i]], indptr[dst[i] + 1]
            prefetch_read(indices, indptr[dst[min(i + 2, dst.shape[0] - 1)]])
            first, row_sum = edge, 0.0
            for e in range(start, end):
                if shift == 0:
                    prefetch_read(entries, np.int64(indices[min(e + _AHEAD, end - 1)]))
                value = np.float64(edge_weight[e]) if edge_weight.shape[0] > 0 else 1.0
                row_sum += value
                name = find(entries, shift, base, ids, indices[e], known)
                if name < known and factor[name] > 0.0 and value > 0.0:
                    local[edge] = name
                    if estimator != _PLAIN:
                        weight[edge] = value * factor[name]
                    if e_id.shape[0] > 0:
                        e_id[edge] = e
                    edge += 1
            if estimator != _PLAIN:
                _weigh(weight, first, edge, estimator, row_sum)
            row_ptr[row + i + 1] = edge - edge_ends[b]
        edge_ends[b + 1] = edge
        ends[b + 1] = ends[b] + np.int64(known)
        stamp[0] += np.int64(known) + 1
    return edge


def extract(
    indptr: NDArray[np.integer],
    indices: NDArray[np.integer],
    edge_weight: NDArray[np.float32],
    estimator: Estimator,
    dst: tuple[NDArray[np.int64], NDArray[np.int64]],
    drawn: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]],
    table: Table,
    ledger: Ledger,
    *,
    edge_ids: bool = False,
) -> StackedBlocks:
    """Make the blocks between destinations and drawn vertices, of all batches.

    `estimator` is of the mean sum_t A_ts x_t / sum_t A_ts; plain gives no weights, or shares of A.
    Entries of A that are 0 are no edge; an empty `edge_weight` stands for entries of 1. `dst` are
    node ids and ends [k + 1]; `drawn` are row pointer [k + 1], node ids and inverse inclusion
    chances.
    """
    nodes, ends = dst
    num_batches = ends.shape[0] - 1
    per_batch = np.empty(num_batches, dtype=np.int64)
    size = int(degree_sums(indptr, nodes, ends, per_batch))
    sources = np.diff(ends) + np.diff(drawn[0])
    table.reserve(int(sources.max(initial=0)))
    weighted = estimator is not Estimator.PLAIN
    factor = ledger.scratch(int(sources.max(initial=0)), np.float64)
    out = _Out(
        row_ptr=ledger.empty(nodes.shape[0] + num_batches, np.int64),
        edge_ends=ledger.empty(num_batches + 1, np.int64),
        indices=ledger.empty(size, np.int32),
        nodes=ledger.empty(int(sources.sum()), np.int64),
        ends=ledger.empty(num_batches + 1, np.int64),
        weight=ledger.empty(size if weighted else 0, np.float32),
        e_id=ledger.empty(size if edge_ids else 0, np.int64),
    )
    used = _extract(
        indptr, indices, edge_weight, _CODES[estimator], nodes, ends, drawn,
        table.arrays(), factor, out,
    )  # fmt: skip
    ledger.free_scratch()
    return StackedBlocks(
        dst_ends=ends,
        row_ptr=out.row_ptr,
        edge_ends=out.edge_ends,
        indices=ledger.trim(out.indices, used),
        nodes=ledger.trim(out.nodes, int(out.ends[-1])),
        ends=out.ends,
        weight=ledger.trim(out.weight, used) if weighted else None,
        e_id=ledger.trim(out.e_id, used) if edge_ids else None,
    )


NOTHING = np.empty(0, dtype=np.int64)


def join_seeds(requests: Sequence[Request]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all seeds, one batch after another, and where each batch ends: [total] and [k + 1]."""
    sizes = [request.seeds.shape[0] for request in requests]
    ends = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=ends[1:])
    nodes = np.concatenate([request.seeds for request in requests]).astype(np.int64, copy=False)
    return nodes, ends


def stack_seeds(
    requests: Sequence[Request], num_nodes: int, table: Table
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Join and check the seeds."""
    nodes, ends = join_seeds(requests)
    table.reserve(int(np.diff(ends).max()))
    bad = find_bad_seed(table.arrays(), nodes, ends, num_nodes)
    if bad >= 0:
        batch = int(np.searchsorted(ends, bad, side="right")) - 1
        raise bad_seed(requests[batch].seeds, int(bad - ends[batch]), num_nodes)
    return nodes, ends


def add_layer(layers: list[StackedBlocks], layer: StackedBlocks, ledger: Ledger) -> None:
    """Append a layer; drop the node ids of the one before, with which its own start."""
    if layers:
        ledger.free(layers[-1].nodes)
        layers[-1].nodes = NOTHING
    layers.append(layer)


def unstack(layers: Sequence[StackedBlocks], requests: Sequence[Request]) -> list[MiniBatch]:
    """Cut an every_hop stack into batches, blocks outermost first, as views of its arrays."""
    hops = [
        (layer, layer.dst_ends.tolist(), layer.edge_ends.tolist(), layer.ends.tolist())
        for layer in reversed(layers)
    ]
    nodes, node_ends = layers[-1].nodes, hops[0][3]
    batches = []
    for b, request in enumerate(requests):
        blocks = [
            cut_block(
                ends[b + 1] - ends[b],
                layer.row_ptr[dst_ends[b] + b : dst_ends[b + 1] + b + 1],
                slice(edge_ends[b], edge_ends[b + 1]),
                layer.indices,
                layer.e_id,
                layer.weight,
            )
            for layer, dst_ends, edge_ends, ends in hops
        ]
        edges_drawn = [ends[b + 1] - ends[b] for _, _, ends, _ in reversed(hops)]
        n_id = nodes[node_ends[b] : node_ends[b + 1]]
        batches.append(make_batch(request, blocks, n_id, edges_drawn, Dialect.EVERY_HOP))
    return batches
