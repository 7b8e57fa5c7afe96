"""The candidates of a hop: every vertex that a row of the hop may draw, numbered once.

What LABOR-i needs beyond a scan: one random number and one probability per candidate, and for every
edge of the hop the number of its candidate. Vertices known before the hop come first, whether they
are candidates or not, so that new ones are told apart by their number.
"""

from typing import no_type_check

import numpy as np
from numpy.typing import NDArray

from runtime.sampling.compiled import inlined_kernel, kernel
from runtime.sampling.dependent import HopStreams, words_kernel
from runtime.sampling.hop_room import EDGES_NEEDED, NODES_NEEDED, ROWS_NEEDED, SPARE
from runtime.sampling.intrinsics import prefetch_read, prefetch_write
from runtime.sampling.kernels import CHUNK
from runtime.sampling.relabel import add_seeds, relabel_dense, relabel_hashed
from runtime.sampling.rng import ODD
from runtime.sampling.workspace import Workspace

_AHEAD = 16


@kernel
@no_type_check
def _count_edges(indptr, node_ids, first, last, row_ptr):
    """Fill row_ptr of the full rows of nodes first .. last-1 and return their largest degree."""
    largest = 0
    row_ptr[0] = 0
    for i in range(first, last):
        prefetch_read(indptr, node_ids[min(i + _AHEAD, last - 1)])
        degree = indptr[node_ids[i] + 1] - indptr[node_ids[i]]
        row_ptr[i - first + 1] = row_ptr[i - first] + degree
        largest = max(largest, degree)
    return largest


@kernel
@no_type_check
def _copy_rows(indptr, indices, node_ids, first, last, values):
    """The neighbours of nodes first .. last-1, row after row."""
    end = 0
    for i in range(first, last):
        for place in range(indptr[node_ids[i]], indptr[node_ids[i] + 1]):
            values[end] = indices[place]
            end += 1


@inlined_kernel
@no_type_check
def _ask(values, begin, end, table, shift):
    """Ask for the table entries of some values."""
    for e in range(begin, end):
        node = np.uint64(values[e])
        slot = node if shift == 0 else (node * ODD) >> np.uint64(shift)
        prefetch_write(table, np.int64(slot))


@kernel
@no_type_check
def relabel_values(values, numbers, begin, end, node_ids, known, table, shift, base):
    """Local ids of values[begin:end]; new ones are added. Returns the number of nodes then.

    While a chunk is looked up, the entries of the next one are on their way.
    """
    known = np.uint64(known)
    _ask(values, begin, min(begin + CHUNK, end), table, shift)
    while begin < end:
        stop = min(begin + CHUNK, end)
        _ask(values, stop, min(stop + CHUNK, end), table, shift)
        if shift == 0:
            known = relabel_dense(values, numbers, begin, stop, node_ids, known, table, base)
        else:
            known = relabel_hashed(
                values, numbers, begin, stop, node_ids, known, table, shift, base
            )
        begin = stop
    return np.int64(known)


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
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        own = sum(a.nbytes for a in vars(self).values() if isinstance(a, np.ndarray))
        return own + self._space.nbytes

    @property
    def row_ptr(self) -> NDArray[np.int64]:
        """Where each row's edges begin in `numbers`."""
        return self._space.row_ptr

    @property
    def numbers(self) -> NDArray[np.int32]:
        """The candidate of every edge of the hop, rows in order."""
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
        """Number the candidates of the rows of nodes[first:last] and draw their words.

        Args:
            indptr: The graph.
            indices: The graph.
            nodes: Global ids known so far are nodes[:last].
            first: First node to expand.
            last: Number of known nodes; all from `first` on are expanded.
            streams: What to draw from.
            hop: Which hop's stream.
        """
        space = self._space
        space.begin(last)
        space.state[ROWS_NEEDED] = last - first + 1
        space.grow(0)
        largest = _count_edges(indptr, nodes, first, last, space.row_ptr)
        edges = int(space.row_ptr[last - first])
        space.state[EDGES_NEEDED] = edges + SPARE
        space.state[NODES_NEEDED] = min(last + edges, space.num_nodes) + SPARE
        space.grow(0)
        base = np.uint64(space.base)
        add_seeds(nodes[:last], space.num_nodes, space.node_ids, space.table, space.shift, base)
        self.num_known = last
        _copy_rows(indptr, indices, nodes, first, last, space.values)
        self.count = relabel_values(
            space.values, space.local, 0, edges, space.node_ids, last, space.table, space.shift,
            base,
        )  # fmt: skip
        space.node_ends[1] = self.count
        space.finish()
        self._reserve(last - first, largest)
        words_kernel(
            streams.first[hop], streams.second[hop], streams.cosine, streams.sine,
            space.node_ids, self.count, self.words,
        )  # fmt: skip

    def _reserve(self, rows: int, largest: int) -> None:
        if self.words.shape[0] < self.count:
            size = self.count + self.count // 4
            self.words = np.empty(size, dtype=np.uint64)
            self.pi, self.inverse, self.top = np.empty((3, size), dtype=np.float64)
        if self.scale.shape[0] < rows:
            self.scale = np.empty(rows + rows // 4, dtype=np.float64)
        if self.row.shape[1] < largest:
            self.row = np.empty((2, largest), dtype=np.float64)
