"""Loops over CSR blocks that numpy and torch lack.

Loops run on one thread without the GIL; rows are contiguous float32. The backward pass reads a
transposed block, so every gradient row is written once.
"""

from typing import Any, no_type_check

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.sampling.minibatch import Block, Dialect, MiniBatch
from gnnplan.runtime.sampling.placed_indices import prefetch_read

_jit: Any = numba.njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")


_AHEAD = 16
"""Edges between the row being added and the row being prefetched (DEC-75)."""
_LINE = 16
"""float32 numbers in a cache line."""


@_jit
@no_type_check
def _prefetch_rows(x, indices, first, last):
    width = x.shape[1]
    for e in range(first, min(last, indices.shape[0])):
        start = np.int64(indices[e]) * width
        for c in range(0, width, _LINE):
            prefetch_read(x, start + c)
        prefetch_read(x, start + width - 1)  # rows need not start at a line


@_jit
@no_type_check
def aggregate_rows(indptr, indices, weight, x, out, with_root):
    """out[i, :d] = sum_e w_e x[indices[e]] (mean where weight is empty); out[i, d:2d] = x[i]."""
    width = x.shape[1]
    weighted = weight.shape[0] > 0
    for i in range(indptr.shape[0] - 1):
        first, last = indptr[i], indptr[i + 1]
        row = out[i]
        row[:width] = 0
        e = first
        while e < last:
            count = min(4, last - e)
            _prefetch_rows(x, indices, e + _AHEAD, e + _AHEAD + count)
            if weighted:
                for k in range(e, e + count):
                    w, source = weight[k], x[indices[k]]
                    for c in range(width):
                        row[c] += w * source[c]
            elif count == 4:  # four rows per pass: a quarter of the loads and stores of `row`
                a, b = x[indices[e]], x[indices[e + 1]]
                p, q = x[indices[e + 2]], x[indices[e + 3]]
                for c in range(width):
                    row[c] += (a[c] + b[c]) + (p[c] + q[c])
            else:
                for k in range(e, last):
                    source = x[indices[k]]
                    for c in range(width):
                        row[c] += source[c]
            e += count
        if not weighted:
            scale = np.float32(1) / np.float32(max(last - first, 1))
            for c in range(width):
                row[c] *= scale
        if with_root:
            own = x[i]
            for c in range(width):
                row[width + c] = own[c]


@_jit
@no_type_check
def source_gradient(indptr, rows, weight, grad, out, width, with_root):
    """out[j] = sum_e w_e grad[rows[e], :width], plus grad[j, width:] where j is a destination.

    `indptr`, `rows` and `weight` are the transposed block: edges by source.
    """
    num_dst = grad.shape[0]
    for j in range(indptr.shape[0] - 1):
        row = out[j]
        if with_root and j < num_dst:
            own = grad[j]
            for c in range(width):
                row[c] = own[width + c]
        else:
            for c in range(width):
                row[c] = 0
        for e in range(indptr[j], indptr[j + 1]):
            w, source = weight[e], grad[rows[e]]
            for c in range(width):
                row[c] += w * source[c]


@_jit
@no_type_check
def _transpose(indptr, indices, weight, num_src, t_indptr, t_rows, t_weight):
    num_dst = indptr.shape[0] - 1
    t_indptr[:] = 0
    for e in range(indptr[num_dst]):
        t_indptr[indices[e] + 1] += 1
    for j in range(num_src):
        t_indptr[j + 1] += t_indptr[j]
    cursor = t_indptr[:num_src].copy()
    weighted = weight.shape[0] > 0
    for i in range(num_dst):
        first, last = indptr[i], indptr[i + 1]
        mean = np.float32(1) / np.float32(max(last - first, 1))
        for e in range(first, last):
            j = indices[e]
            t_rows[cursor[j]] = i
            t_weight[cursor[j]] = weight[e] if weighted else mean
            cursor[j] += 1


def transpose(
    indptr: NDArray[np.int64], indices: NDArray[np.int32], weight: NDArray[np.float32], num_src: int
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """Sort edges by source: indptr [num_src + 1], destination rows [E], weights [E].

    An empty `weight` stands for the mean, 1 / (edges of the destination). The edges of a source
    keep their order.
    """
    num_edges = int(indptr[-1])
    t_indptr = np.empty(num_src + 1, np.int64)
    t_rows = np.empty(num_edges, np.int32)
    t_weight = np.empty(num_edges, np.float32)
    _transpose(indptr, indices, weight, num_src, t_indptr, t_rows, t_weight)
    return t_indptr, t_rows, t_weight


@_jit
@no_type_check
def _head(row, k, width):
    """Return the columns of a head."""
    return row[k * width : (k + 1) * width]


_reordering_jit: Any = numba.njit(
    cache=True, nogil=True, fastmath={"contract", "reassoc"}, error_model="numpy"
)
"""Compiles loops whose sums may be taken in another order, so that they run on vectors."""


@_reordering_jit
@no_type_check
def attend_rows(indptr, indices, h, score_src, score_dst, slope, keep, alpha, out):
    """out[i] = sum_e alpha_e keep_e h[indices[e]] by head, alpha the softmax of the edges' scores.

    Writes `alpha` too, (edges, heads). An empty `keep` keeps every coefficient as it is.
    """
    heads = score_src.shape[1]
    width = h.shape[1] // heads
    kept = keep.shape[0] > 0
    for i in range(indptr.shape[0] - 1):
        first, last = indptr[i], indptr[i + 1]
        row = out[i]
        row[:] = 0
        for e in range(first, last):
            of_edge, of_source, of_row = alpha[e], score_src[indices[e]], score_dst[i]
            for k in range(heads):
                score = of_source[k] + of_row[k]
                of_edge[k] = score if score > 0 else slope * score
        for k in range(heads):
            largest = np.float32(-np.inf)
            for e in range(first, last):
                largest = max(largest, alpha[e, k])
            total = np.float32(0)
            for e in range(first, last):
                weight = np.exp(alpha[e, k] - largest)
                alpha[e, k] = weight
                total += weight
            for e in range(first, last):
                alpha[e, k] /= total
        for e in range(first, last):
            _prefetch_rows(h, indices, e + _AHEAD, e + _AHEAD + 1)
            source = h[indices[e]]
            for k in range(heads):
                a = alpha[e, k] * keep[e, k] if kept else alpha[e, k]
                # Columns are counted from zero within views: only such loops become vectors.
                into, part = _head(row, k, width), _head(source, k, width)
                for c in range(width):
                    into[c] += a * part[c]


@_reordering_jit
@no_type_check
def attention_gradient(
    indptr, indices, h, score_src, score_dst, slope, keep, alpha, grad, d_h, d_src, d_dst
):
    """Add the gradients of h and of both scores to `d_h`, `d_src` and `d_dst`."""
    heads = score_src.shape[1]
    width = h.shape[1] // heads
    kept = keep.shape[0] > 0
    widest = 0
    for i in range(indptr.shape[0] - 1):
        widest = max(widest, indptr[i + 1] - indptr[i])
    d_alpha, mean = np.empty((widest, heads), np.float32), np.empty(heads, np.float32)
    for i in range(indptr.shape[0] - 1):
        first, last = indptr[i], indptr[i + 1]
        mean[:] = 0
        given = grad[i]
        for e in range(first, last):
            _prefetch_rows(h, indices, e + _AHEAD, e + _AHEAD + 1)
            _prefetch_rows(d_h, indices, e + _AHEAD, e + _AHEAD + 1)
            j = indices[e]
            source, into = h[j], d_h[j]
            for k in range(heads):
                factor = keep[e, k] if kept else np.float32(1)
                a = alpha[e, k] * factor
                dot = np.float32(0)
                g, part, d = _head(given, k, width), _head(source, k, width), _head(into, k, width)
                for c in range(width):
                    dot += g[c] * part[c]
                    d[c] += a * g[c]
                d_alpha[e - first, k] = dot * factor
                mean[k] += alpha[e, k] * dot * factor
        for e in range(first, last):
            j = indices[e]
            for k in range(heads):
                d_score = alpha[e, k] * (d_alpha[e - first, k] - mean[k])
                if score_src[j, k] + score_dst[i, k] <= 0:
                    d_score *= slope
                d_src[j, k] += d_score
                d_dst[i, k] += d_score


@_jit
@no_type_check
def mask_and_column_sums(grad, out, masked, sums):
    """Write the gradient where out > 0, zero elsewhere, and its column sums, in one pass."""
    sums[:] = 0
    for i in range(out.shape[0]):
        g, o, m = grad[i], out[i], masked[i]
        for c in range(g.shape[0]):
            value = g[c] if o[c] > 0 else np.float32(0)
            m[c] = value
            sums[c] += value


@_jit
@no_type_check
def _with_self_loops(indptr, indices, out_indptr, out_indices):
    position = 0
    out_indptr[0] = 0
    for i in range(indptr.shape[0] - 1):
        for e in range(indptr[i], indptr[i + 1]):
            if indices[e] != i:
                out_indices[position] = indices[e]
                position += 1
        out_indices[position] = i
        position += 1
        out_indptr[i + 1] = position
    return position


def with_self_loops(
    indptr: NDArray[np.int64], indices: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Replace drawn self-loops by exactly one per destination, last in its row."""
    out_indptr = np.empty_like(indptr)
    out_indices = np.empty(int(indptr[-1]) + indptr.shape[0] - 1, np.int32)
    length = _with_self_loops(indptr, indices, out_indptr, out_indices)
    return out_indptr, out_indices[:length]


_strict_jit: Any = numba.njit(cache=True, nogil=True)


@_strict_jit
@no_type_check
def _mark_sources(indptr, indices, rows, marked):
    for i in rows:
        marked[i] = True
        for e in range(indptr[i], indptr[i + 1]):
            marked[indices[e]] = True


def vertices_per_layer(
    indptr: NDArray[Any], indices: NDArray[Any], ids: NDArray[np.int64], num_layers: int
) -> list[NDArray[np.int64]]:
    """Return the vertices whose output each layer must give for the outputs of `ids` at the end.

    One sorted array of distinct ids per layer, input side first.
    """
    layers = [np.unique(ids)]
    for _ in range(num_layers - 1):
        marked = np.zeros(indptr.shape[0] - 1, np.bool_)
        _mark_sources(indptr, indices, layers[0], marked)
        layers.insert(0, np.flatnonzero(marked))
    return layers


def count_work(rows: NDArray[np.int64], indptr: NDArray[Any]) -> NDArray[np.int64]:
    """Count vertices and their edges, as running sums over the vertices; two arrays at once."""
    work = indptr[rows + 1].astype(np.int64, copy=False)
    work -= indptr[rows]
    work += 1
    return np.cumsum(work, out=work)


@_strict_jit
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
    """Makes blocks of one layer with all in-neighbours of given vertices of a CSC graph."""

    def __init__(self, indptr: NDArray[Any], indices: NDArray[Any]):
        self.indptr, self.indices = indptr, indices
        self._local = np.full(indptr.shape[0] - 1, -1, np.int32)

    def batch(self, rows: NDArray[np.int64]) -> MiniBatch:
        """Return a batch of one block whose destinations are `rows` (distinct ids)."""
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
