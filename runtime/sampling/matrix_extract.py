"""EXTRACT: the bipartite blocks A_l = Q_R A Q_C of stacked batches, one launch for all k.

Q_R has a row per destination, Q_C a column per vertex drawn. Neither is stored: the stack's Q_C
would be k*n rows with k*s entries. A row of A is read once, and each of its columns is looked up in
the relabelling table, which at that moment holds the vertices of the row's own batch.

The destinations are the first sources, for the layer's self term. An edge to a destination is kept
only where that vertex was drawn as well, so that its weight needs no other inclusion probability.
"""

from dataclasses import dataclass
from typing import no_type_check

import numpy as np
from numpy.typing import NDArray

from runtime.sampling.compiled import kernel
from runtime.sampling.intrinsics import prefetch_read
from runtime.sampling.matrix_memory import Ledger
from runtime.sampling.matrix_product import degree_sums
from runtime.sampling.matrix_table import Table, begin, find, find_or_add
from runtime.sampling.statistics import Estimator

_AHEAD = 16
_PLAIN, _HORVITZ_THOMPSON, _HAJEK = 0, 1, 2
_CODES = {Estimator.PLAIN: 0, Estimator.HORVITZ_THOMPSON: 1, Estimator.HAJEK: 2}


@dataclass(kw_only=True, slots=True)
class StackedBlocks:
    """One layer of k batches; batch b has destinations and edges `ends[b]` to `ends[b + 1]`."""

    dst_ends: NDArray[np.int64]
    """Shape (k + 1,)."""
    row_ptr: NDArray[np.int64]
    """Shape (destinations + k,): k CSR row pointers, each from 0, one after another."""
    edge_ends: NDArray[np.int64]
    """Shape (k + 1,)."""
    indices: NDArray[np.int32]
    """Shape (edges,); local to the batch."""
    nodes: NDArray[np.int64]
    """Shape (sources,); global ids, destinations of a batch first."""
    ends: NDArray[np.int64]
    """Shape (k + 1,), of the sources."""
    weight: NDArray[np.float32] | None = None
    """Shape (edges,)."""
    e_id: NDArray[np.int64] | None = None
    """Shape (edges,)."""


@kernel
@no_type_check
def _enter_sources(ids, dst, drawn, drawn_factor, table, shift, base, factor):
    """Destinations, then the vertices drawn that are new; factor 0 marks those not drawn."""
    known = np.uint64(0)
    for i in range(dst.shape[0]):
        find_or_add(table, shift, base, ids, dst[i], known)
        ids[known] = dst[i]
        factor[known] = 0.0
        known += np.uint64(1)
    for i in range(drawn.shape[0]):
        name = find_or_add(table, shift, base, ids, drawn[i], known)
        ids[known] = drawn[i]
        factor[name] = drawn_factor[i]
        known += np.uint64(name == known)
    return known


@kernel
@no_type_check
def _weigh(weight, first, last, estimator, row_sum):
    """From A / pi to A / (pi * sum of the row of A), or to shares of the drawn edges."""
    total = row_sum
    if estimator == _HAJEK:
        total = 0.0
        for e in range(first, last):
            total += weight[e]
    for e in range(first, last):
        weight[e] = weight[e] / total


@kernel
@no_type_check
def _extract(
    indptr, indices, edge_weight, estimator, dst_nodes, dst_ends, drawn_ptr, drawn, drawn_factor,
    table, shift, stamp, factor, row_ptr, edge_ends, local, weight, e_id, nodes, ends,
):  # fmt: skip
    edge = 0
    ends[0] = edge_ends[0] = 0
    for b in range(dst_ends.shape[0] - 1):
        dst = dst_nodes[dst_ends[b] : dst_ends[b + 1]]
        ids = nodes[ends[b] :]
        base = begin(table, stamp, ids.shape[0])
        known = _enter_sources(
            ids, dst, drawn[drawn_ptr[b] : drawn_ptr[b + 1]],
            drawn_factor[drawn_ptr[b] : drawn_ptr[b + 1]], table, shift, base, factor,
        )  # fmt: skip
        row = dst_ends[b] + b
        row_ptr[row] = 0
        for i in range(dst.shape[0]):
            start, end = indptr[dst[i]], indptr[dst[i] + 1]
            prefetch_read(indices, indptr[dst[min(i + 2, dst.shape[0] - 1)]])
            first, row_sum = edge, 0.0
            for e in range(start, end):
                if shift == 0:
                    prefetch_read(table, np.int64(indices[min(e + _AHEAD, end - 1)]))
                value = np.float64(edge_weight[e]) if edge_weight.shape[0] > 0 else 1.0
                row_sum += value
                name = find(table, shift, base, ids, indices[e], known)
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
    """The blocks between destinations and drawn vertices, of all batches.

    Args:
        indptr: int64 [N + 1].
        indices: int32 or int64 [E].
        edge_weight: float32 [E], the entries of A; empty where all are 1. Entries of 0 are no edge.
        estimator: Of the mean sum_t A_ts x_t / sum_t A_ts: plain (no weights, or shares of A),
            Horvitz-Thompson or Hajek.
        dst: Node ids [destinations] and ends [k + 1].
        drawn: Row pointer [k + 1], node ids and inverse inclusion probabilities.
        table: For relabelling.
        ledger: Counts the bytes.
        edge_ids: Fill `e_id`.
    """
    nodes, ends = dst
    num_batches = ends.shape[0] - 1
    per_batch = np.empty(num_batches, dtype=np.int64)
    size = int(degree_sums(indptr, nodes, ends, per_batch))
    sources = np.diff(ends) + np.diff(drawn[0])
    table.reserve(int(sources.max(initial=0)))
    weighted = estimator is not Estimator.PLAIN
    factor = ledger.scratch(int(sources.max(initial=0)), np.float64)
    out = StackedBlocks(
        dst_ends=ends,
        row_ptr=ledger.empty(nodes.shape[0] + num_batches, np.int64),
        edge_ends=ledger.empty(num_batches + 1, np.int64),
        indices=ledger.empty(size, np.int32),
        nodes=ledger.empty(int(sources.sum()), np.int64),
        ends=ledger.empty(num_batches + 1, np.int64),
        weight=ledger.empty(size if weighted else 0, np.float32),
        e_id=ledger.empty(size if edge_ids else 0, np.int64),
    )
    used = _extract(
        indptr, indices, edge_weight, _CODES[estimator], nodes, ends, *drawn, table.entries,
        table.shift, table.stamp, factor, out.row_ptr, out.edge_ends, out.indices, out.weight,
        out.e_id, out.nodes, out.ends,
    )  # fmt: skip
    ledger.free_scratch()
    out.nodes = ledger.trim(out.nodes, int(out.ends[-1]))
    out.indices = ledger.trim(out.indices, used)
    assert out.weight is not None
    assert out.e_id is not None
    out.weight = ledger.trim(out.weight, used) if weighted else None
    out.e_id = ledger.trim(out.e_id, used) if edge_ids else None
    return out
