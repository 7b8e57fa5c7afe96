"""Aggregation over inner nodes and over what other ranks send, forward and backward.

An `AbstractOutside` knows one way to bring the other parts' rows in. The weighted sum is linear, so
backward needs none of the received rows: they live only while they are added.
"""

from abc import abstractmethod
from typing import Any, no_type_check

import numba
import numpy as np
import torch
from torch import Tensor

from runtime.fullgraph.exchange import Crossing, Exchange
from runtime.models import dense
from runtime.models.adjacency import TorchBlock
from runtime.models.functions import Sums, aggregate_plain, runs_on_kernels
from runtime.models.kernels import aggregate_rows, source_gradient
from runtime.sampling.placed_indices import prefetch_read

_jit: Any = numba.njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
_AHEAD = 16
"""Edges between the row being added and the row being prefetched, as in `models.kernels`."""
_LINE = 16


@_jit
@no_type_check
def add_rows(indptr, indices, weight, x, out):
    """out[i, :d] += sum_e w_e x[indices[e]]; the columns of out beyond d stay."""
    width = x.shape[1]
    last_edge = indices.shape[0]
    for i in range(indptr.shape[0] - 1):
        row = out[i]
        for e in range(indptr[i], indptr[i + 1]):
            ahead = e + _AHEAD
            if ahead < last_edge and width > 0:
                start = np.int64(indices[ahead]) * width
                for c in range(0, width, _LINE):
                    prefetch_read(x, start + c)
                prefetch_read(x, start + width - 1)
            w, source = weight[e], x[indices[e]]
            for c in range(width):
                row[c] += w * source[c]


class AbstractOutside(Sums):
    """Weighted sums over a layer's neighbours, inner and outside, and their gradients.

    Every call is collective.
    """

    num_inner: int

    @property
    def num_dst(self) -> int:
        """Inner rows."""
        return self.num_inner

    def rows(self, x: Tensor, *, with_root: bool) -> Tensor:
        """[sum a h, h], or the sum alone, with zero rows up to `dense.padded_rows`."""
        num = x.shape[0]
        padded = dense.padded_rows(num) if runs_on_kernels(x) else num
        out = x.new_empty(padded, (2 if with_root else 1) * x.shape[1])
        out[num:].zero_()
        self.aggregate(x, out, with_root=with_root)
        return out

    @abstractmethod
    def aggregate(self, x: Tensor, out: Tensor, *, with_root: bool) -> None:
        """out[i, :d] = sum_v a_iv h_v over all neighbours kept; out[i, d:2d] = x[i] with a root.

        Args:
            x: inner rows, shape (n_in, d).
            out: shape (at least n_in, d or 2 d).
            with_root: also copy the node's own row.
        """


class Boundary(AbstractOutside):
    """Each rank gets the rows of its halo that the epoch keeps."""

    def __init__(self, crossing: Crossing, exchange: Exchange) -> None:
        self.crossing, self.exchange = crossing, exchange
        self.num_inner = crossing.inner.num_dst

    def aggregate(self, x: Tensor, out: Tensor, *, with_root: bool) -> None:
        """Inner rows are added while the others are on their way."""
        c = self.crossing
        if c.silent:
            add_inner(x, c.inner, out, with_root=with_root)
            return
        pending = self.exchange.start(x, c.send, c.send_counts, c.received_counts)
        add_inner(x, c.inner, out, with_root=with_root)
        add_outer(pending.wait(), c.outer, out)

    def gradient(self, grad: Tensor, width: int, *, with_root: bool) -> Tensor:
        """Halo gradients go to their owners while the inner ones are summed."""
        c = self.crossing
        if c.silent:
            return inner_gradient(grad, c.inner, width, with_root=with_root)
        outgoing = inner_gradient(grad, c.outer, width, with_root=False)
        pending = self.exchange.start(outgoing, None, c.received_counts, c.send_counts)
        found = inner_gradient(grad, c.inner, width, with_root=with_root)
        return found.index_add_(0, c.send.to(found.device), pending.wait())


def weight_array(block: TorchBlock):
    """A block's weights for the kernels."""
    assert block.weight is not None
    return block.weight.numpy()


def add_inner(x: Tensor, block: TorchBlock, out: Tensor, *, with_root: bool) -> None:
    """Set the rows of `out` from inner rows."""
    num, width = block.num_dst, x.shape[1]
    if runs_on_kernels(x):
        rows = x.detach().contiguous().numpy()
        edges = (block.indptr.numpy(), block.indices.numpy(), weight_array(block))
        aggregate_rows(*edges, rows, out.numpy(), with_root)
        return
    out[:num, :width] = aggregate_plain(x, block)
    if with_root:
        out[:num, width:] = x


def add_outer(received: Tensor, block: TorchBlock, out: Tensor) -> None:
    """Add received rows to the sums in `out`."""
    if runs_on_kernels(received):
        edges = (block.indptr.numpy(), block.indices.numpy(), weight_array(block))
        add_rows(*edges, received.numpy(), out.numpy())
        return
    out[: block.num_dst, : received.shape[1]] += aggregate_plain(received, block)


def inner_gradient(grad: Tensor, block: TorchBlock, width: int, *, with_root: bool) -> Tensor:
    """Gradient of a block's sources: edges transposed, plus the root's part."""
    if runs_on_kernels(grad):
        indptr, rows, weight = block.transposed()
        out = torch.empty(block.num_src, width)
        source_gradient(indptr, rows, weight, grad.numpy(), out.numpy(), np.int64(width), with_root)
        return out
    assert block.weight is not None
    messages = grad[:, :width][block.row_of_edge()] * block.weight.to(grad.dtype).unsqueeze(1)
    out = grad.new_zeros(block.num_src, width).index_add_(0, block.indices.long(), messages)
    return out + grad[:, width:] if with_root else out
