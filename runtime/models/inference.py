"""Layer-wise inference over full neighbourhoods, one bounded chunk of vertices at a time.

Layer l is computed for every vertex the later layers need before layer l + 1 starts, so each vertex
is computed once per layer; recursive expansion would compute it once per path.
"""

from collections.abc import Iterator
from typing import Any, no_type_check

import numba
import numpy as np
from numpy.typing import NDArray

from runtime.sampling.minibatch import Block, Dialect, MiniBatch

_jit: Any = numba.njit(cache=True, nogil=True)


@_jit
@no_type_check
def _mark_sources(indptr, indices, rows, marked):
    for i in rows:
        marked[i] = True
        for e in range(indptr[i], indptr[i + 1]):
            marked[indices[e]] = True


def vertices_per_layer(
    indptr: NDArray[Any], indices: NDArray[Any], ids: NDArray[np.int64], num_layers: int
) -> list[NDArray[np.int64]]:
    """Vertices whose output each layer must give so that the last one gives that of `ids`.

    Returns:
        Per layer, input side first, sorted distinct ids; the last is `ids` sorted.
    """
    layers = [np.unique(ids)]
    for _ in range(num_layers - 1):
        marked = np.zeros(indptr.shape[0] - 1, np.bool_)
        _mark_sources(indptr, indices, layers[0], marked)
        layers.insert(0, np.flatnonzero(marked))
    return layers


def chunks(
    rows: NDArray[np.int64], indptr: NDArray[Any], max_edges: int
) -> Iterator[NDArray[np.int64]]:
    """Cut vertices into runs of at most `max_edges` edges and vertices, one vertex at the least."""
    work = np.cumsum(indptr[rows + 1] - indptr[rows] + 1)
    first = 0
    while first < rows.shape[0]:
        done = int(work[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(work, done + max_edges, side="right")))
        yield rows[first:last]
        first = last


@_jit
@no_type_check
def _relabel(indptr, indices, rows, local, n_id, block_indptr, block_indices):
    count = rows.shape[0]
    for i in range(count):
        local[rows[i]] = i
        n_id[i] = rows[i]
    position = 0
    block_indptr[0] = 0
    for i in range(rows.shape[0]):
        for e in range(indptr[rows[i]], indptr[rows[i] + 1]):
            v = indices[e]
            if local[v] < 0:
                local[v] = count
                n_id[count] = v
                count += 1
            block_indices[position] = local[v]
            position += 1
        block_indptr[i + 1] = position
    for i in range(count):
        local[n_id[i]] = -1
    return count


class FullNeighbourhoods:
    """Blocks of one layer with all in-neighbours of given vertices.

    Args:
        indptr: int64 [N + 1].
        indices: int32 or int64 [E].
    """

    def __init__(self, indptr: NDArray[Any], indices: NDArray[Any]):
        self.indptr, self.indices = indptr, indices
        self._local = np.full(indptr.shape[0] - 1, -1, np.int32)

    def batch(self, rows: NDArray[np.int64]) -> MiniBatch:
        """A batch of one block whose destinations are `rows` (distinct ids)."""
        num_edges = int((self.indptr[rows + 1] - self.indptr[rows]).sum())
        n_id = np.empty(rows.shape[0] + num_edges, np.int64)
        indptr = np.empty(rows.shape[0] + 1, np.int64)
        indices = np.empty(num_edges, np.int32)
        count = int(_relabel(self.indptr, self.indices, rows, self._local, n_id, indptr, indices))
        block = Block(num_src=count, num_dst=rows.shape[0], indptr=indptr, indices=indices)
        return MiniBatch(
            blocks=[block],
            n_id=n_id[:count],
            seeds=rows,
            input_id=np.arange(rows.shape[0]),
            dialect=Dialect.EVERY_HOP,
            num_sampled_nodes=[rows.shape[0], count - rows.shape[0]],
            num_sampled_edges=[num_edges],
        )
