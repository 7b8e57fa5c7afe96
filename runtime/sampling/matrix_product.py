"""P = QA and NORM: the probability rows of stacked batches (formulas 4.2, 4.4).

After Tripathy et al., MLSys 2024. Row b of the result belongs to row b of Q. Where Q has one
non-zero per row (GraphSAGE: a row per vertex) the product is a gather of rows of A. Where a row of
Q has many (LADIES: a row per batch) rows of A are added up, Gustavson's way, with one accumulator
for all k rows.
"""

from dataclasses import dataclass
from typing import no_type_check

import numpy as np
from numpy.typing import NDArray

from runtime.sampling.compiled import kernel
from runtime.sampling.intrinsics import prefetch_read, prefetch_write
from runtime.sampling.matrix_memory import Ledger
from runtime.sampling.matrix_table import Table, begin, find_or_add

_AHEAD = 16


@dataclass(kw_only=True, slots=True)
class SparseRows:
    """Sparse rows, column ids in order of first appearance."""

    ptr: NDArray[np.int64]
    """Shape (rows + 1,)."""
    cols: NDArray[np.integer]
    """Shape (non-zeros,); global node ids, of the type of the graph's `indices`."""
    values: NDArray[np.float64]
    """Shape (non-zeros,)."""


@kernel
@no_type_check
def degree_sums(indptr, nodes, ends, out):
    """out[b] = stored edges of the nodes of batch b; the sum over batches is returned."""
    total = 0
    for b in range(ends.shape[0] - 1):
        out[b] = 0
        for i in range(ends[b], ends[b + 1]):
            out[b] += indptr[nodes[i] + 1] - indptr[nodes[i]]
        total += out[b]
    return total


@kernel
@no_type_check
def _gather_rows(indptr, indices, edge_weight, nodes, ptr, cols, values):
    ptr[0] = 0
    for i in range(nodes.shape[0]):
        start, position = indptr[nodes[i]], ptr[i]
        degree = indptr[nodes[i] + 1] - start
        for e in range(degree):
            cols[position + e] = indices[start + e]
            values[position + e] = edge_weight[start + e] if edge_weight.shape[0] > 0 else 1.0
        ptr[i + 1] = position + degree


@kernel
@no_type_check
def _add_rows(
    indptr, indices, edge_weight, power, nodes, ends, table, shift, stamp, ptr, cols, values
):
    """Values = sum over the rows of A of entry^power; returns the number of non-zeros."""
    ptr[0] = 0
    for b in range(ends.shape[0] - 1):
        ids, sums = cols[ptr[b] :], values[ptr[b] :]
        base = begin(table, stamp, ids.shape[0])
        known = np.uint64(0)
        for i in range(ends[b], ends[b + 1]):
            start, end = indptr[nodes[i]], indptr[nodes[i] + 1]
            prefetch_read(indices, indptr[nodes[min(i + 2, ends[b + 1] - 1)]])
            for e in range(start, end):
                if shift == 0:
                    prefetch_write(table, np.int64(indices[min(e + _AHEAD, end - 1)]))
                name = find_or_add(table, shift, base, ids, indices[e], known)
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


def gather_product(
    indptr: NDArray[np.integer],
    indices: NDArray[np.integer],
    edge_weight: NDArray[np.float32],
    nodes: NDArray[np.int64],
    ledger: Ledger,
) -> SparseRows:
    """QA for a Q with a single 1 per row, at column nodes[row]: rows of A side by side.

    Args:
        indptr: int64 [N + 1].
        indices: int32 or int64 [E].
        edge_weight: float32 [E], the entries of A; empty where all are 1.
        nodes: int64 [rows].
        ledger: Counts the bytes of the result.
    """
    size = int((indptr[nodes + 1] - indptr[nodes]).sum())
    rows = SparseRows(
        ptr=ledger.empty(nodes.shape[0] + 1, np.int64),
        cols=ledger.empty(size, indices.dtype),
        values=ledger.empty(size, np.float64),
    )
    _gather_rows(indptr, indices, edge_weight, nodes, rows.ptr, rows.cols, rows.values)
    return rows


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
    """QA for a Q whose row b has ones at nodes[ends[b]:ends[b + 1]]; entries of A to a power.

    A stored edge is an entry of its own: of two parallel edges each is raised, then they are added.

    Args:
        indptr: int64 [N + 1].
        indices: int32 or int64 [E].
        edge_weight: float32 [E], the entries of A; empty where all are 1.
        power: 1 or 2.
        nodes: int64 [total], batch after batch.
        ends: int64 [k + 1].
        table: The accumulator.
        ledger: Counts the bytes of the result.
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
        indptr, indices, edge_weight, power, nodes, ends, table.entries, table.shift, table.stamp,
        ptr, cols, values,
    )  # fmt: skip
    return SparseRows(ptr=ptr, cols=ledger.trim(cols, used), values=ledger.trim(values, used))


def normalise(rows: SparseRows, *, squared: bool = False) -> None:
    """NORM, in place: each row over its sum, entries squared before on request; empty rows stay."""
    _normalise(rows.ptr, rows.values, squared)
