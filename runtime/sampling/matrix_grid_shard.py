"""A rank's block row of A, and rows of A that were fetched from others' blocks."""

from dataclasses import dataclass
from typing import no_type_check

import numpy as np
from numpy.typing import NDArray

from runtime.comm.grid import ProcessGrid
from runtime.sampling.compiled import kernel


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Block row of A that this rank holds: rows first, first + 1, ... of `num_nodes`."""

    num_nodes: int
    first: int
    indptr: NDArray[np.int64]
    """Shape (rows + 1,), from 0."""
    indices: NDArray[np.integer]
    """Shape (non-zeros,); global ids."""
    edge_start: int
    """Position of the block's first edge in the whole graph."""
    edge_weight: NDArray[np.float32] | None = None
    """Shape (non-zeros,); None where all entries are 1."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        weight_bytes = 0 if self.edge_weight is None else self.edge_weight.nbytes
        return self.indptr.nbytes + self.indices.nbytes + weight_bytes


def cut_shard(
    indptr: NDArray[np.integer],
    indices: NDArray[np.integer],
    edge_weight: NDArray[np.floating] | None,
    grid: ProcessGrid,
) -> Shard:
    """Copy this rank's block row out of a graph, which may be memory-mapped."""
    num_nodes = int(indptr.shape[0]) - 1
    bounds = grid.bounds(num_nodes)
    first, last = int(bounds[grid.row]), int(bounds[grid.row + 1])
    start, end = int(indptr[first]), int(indptr[last])
    weight = None
    if edge_weight is not None:
        weight = np.array(edge_weight[start:end], dtype=np.float32)
    return Shard(
        num_nodes=num_nodes,
        first=first,
        indptr=np.asarray(indptr[first : last + 1]).astype(np.int64) - start,
        indices=np.array(indices[start:end]).view(np.ndarray),
        edge_start=start,
        edge_weight=weight,
    )


@dataclass(kw_only=True, slots=True)
class FetchedRows:
    """Distinct rows of A, ascending by id."""

    ids: NDArray[np.int64]
    """Shape (rows,)."""
    ptr: NDArray[np.int64]
    """Shape (rows + 1,)."""
    cols: NDArray[np.integer]
    """Shape (non-zeros,)."""
    weight: NDArray[np.float32] | None
    """Shape (non-zeros,), or None where all entries are 1."""
    edge_start: NDArray[np.int64] | None
    """Position of each row in the whole graph, shape (rows,); only where edge ids are wanted."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        arrays = (self.ids, self.ptr, self.cols, self.weight, self.edge_start)
        return sum(array.nbytes for array in arrays if array is not None)

    def global_edges(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions in the whole graph of positions in `cols`."""
        assert self.edge_start is not None
        shift = np.repeat(self.edge_start - self.ptr[:-1], np.diff(self.ptr))
        return positions + shift[positions]


@kernel
@no_type_check
def copy_rows(indptr, source, rows, ptr, out):
    """out[ptr[i]:] = entries of row rows[i]; int64 indptr, rows and ptr."""
    for i in range(rows.shape[0]):
        start, to = indptr[rows[i]], ptr[i]
        for e in range(indptr[rows[i] + 1] - start):
            out[to + e] = source[start + e]
