"""A model's forward pass over one part of the graph.

Rows of other parts come by a halo exchange, or slice by slice as in CAGNET's 1D algorithm
(Tripathy, Yelick and Buluc, SC 2020): rank i holds block row A_i and rows H_i, and forms sum_q A_iq
H_q. In stage t rank r gets the slice of rank r - t; the next slice is on its way while this one is
added, so at most two are held. In the backward pass the partial gradients A_iq^T G_i go to their
owners in the same order.
"""

from abc import abstractmethod
from typing import Any, no_type_check

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.fullgraph.draws import AbstractMasks, EpochDraws
from gnnplan.runtime.fullgraph.exchange import Crossing, Exchange, Pending, edge_weights, kept_block
from gnnplan.runtime.fullgraph.part import Part, build_part, connect
from gnnplan.runtime.models import functions as dense
from gnnplan.runtime.models.adjacency import TorchBlock
from gnnplan.runtime.models.build import BlockModel, attention
from gnnplan.runtime.models.functions import (
    Sums,
    aggregate_dense,
    linear,
    runs_on_device,
    runs_on_kernels,
)
from gnnplan.runtime.models.kernels import aggregate_rows, source_gradient
from gnnplan.runtime.plan.schema import FullGraph
from gnnplan.runtime.sampling.placed_indices import prefetch_read

_jit: Any = numba.njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
_AHEAD = 16
"""Distance in edges at which rows are prefetched, as in `models.kernels`."""
_LINE = 16


@_jit
@no_type_check
def add_rows(indptr, indices, weight, x, out):
    """Add sum_e w_e x[indices[e]] to out[i, :d]; leave the columns of out beyond d."""
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
        """Number of inner rows."""
        return self.num_inner

    def rows(self, x: Tensor, *, with_root: bool) -> Tensor:
        """Return [sum a h, h], or the sum alone, with zero rows up to `dense.padded_rows`."""
        num = x.shape[0]
        padded = dense.padded_rows(num) if runs_on_kernels(x) else num
        out = x.new_empty(padded, (2 if with_root else 1) * x.shape[1])
        out[num:].zero_()
        self.aggregate(x, out, with_root=with_root)
        return out

    @abstractmethod
    def aggregate(self, x: Tensor, out: Tensor, *, with_root: bool) -> None:
        """Set out[i, :d] to sum_v a_iv h_v over kept neighbours; with a root, out[i, d:] to x[i].

        `x` is (n_in, d), `out` has at least n_in rows of d or 2 d columns.
        """


class Boundary(AbstractOutside):
    """Sums over the rows of the halo that the epoch keeps."""

    def __init__(self, crossing: Crossing, exchange: Exchange) -> None:
        self.crossing, self.exchange = crossing, exchange
        self.num_inner = crossing.inner.num_dst

    def aggregate(self, x: Tensor, out: Tensor, *, with_root: bool) -> None:
        """Add inner rows while the others are on their way."""
        c = self.crossing
        if c.silent:
            add_inner(x, c.inner, out, with_root=with_root)
            return
        pending = self.exchange.start(x, c.send, c.send_counts, c.received_counts)
        add_inner(x, c.inner, out, with_root=with_root)
        add_outer(pending.wait(), c.outer, out)

    def gradient(self, grad: Tensor, width: int, *, with_root: bool) -> Tensor:
        """Send halo gradients to their owners while the inner ones are summed."""
        c = self.crossing
        if c.silent:
            return inner_gradient(grad, c.inner, width, with_root=with_root)
        outgoing = inner_gradient(grad, c.outer, width, with_root=False)
        pending = self.exchange.start(outgoing, None, c.received_counts, c.send_counts)
        found = inner_gradient(grad, c.inner, width, with_root=with_root)
        return found.index_add_(0, c.send.to(found.device), pending.wait())


def weight_array(block: TorchBlock):
    """Return a block's weights for the kernels."""
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
    if runs_on_device(x):
        device_kernels().sum_rows(x, block, with_root=with_root, out=out)
        return
    out[:num, :width] = 0
    add_by_slabs(x, block.indices, block.row_of_edge(), block, out[:num, :width])
    if with_root:
        out[:num, width:] = x


def add_outer(received: Tensor, block: TorchBlock, out: Tensor) -> None:
    """Add received rows to the sums in `out`."""
    if runs_on_kernels(received):
        edges = (block.indptr.numpy(), block.indices.numpy(), weight_array(block))
        add_rows(*edges, received.numpy(), out.numpy())
    elif runs_on_device(received):
        device_kernels().sum_rows(received, block, out=out, add=True)
    else:
        sums = out[: block.num_dst, : received.shape[1]]
        add_by_slabs(received, block.indices, block.row_of_edge(), block, sums)


def inner_gradient(grad: Tensor, block: TorchBlock, width: int, *, with_root: bool) -> Tensor:
    """Return the gradient of a block's sources: edges transposed, plus the root's part."""
    if runs_on_kernels(grad):
        indptr, rows, weight = block.transposed()
        out = torch.empty(block.num_src, width)
        source_gradient(indptr, rows, weight, grad.numpy(), out.numpy(), np.int64(width), with_root)
        return out
    if runs_on_device(grad):
        return device_kernels().spread_rows(grad, block, width, with_root=with_root)
    out = grad.new_zeros(block.num_src, width)
    add_by_slabs(grad[:, :width], block.row_of_edge(), block.indices, block, out)
    return out.add_(grad[:, width:]) if with_root else out


_SLAB_EDGES = 1 << 18
"""Edges whose rows lie in memory at once where neither kernel applies."""


def add_by_slabs(
    rows: Tensor, sources: Tensor, targets: Tensor, block: TorchBlock, out: Tensor
) -> None:
    """Add w_e rows[sources[e]] to out[targets[e]] in torch operations, on any device."""
    assert block.weight is not None
    weight = block.weight.to(rows.dtype).unsqueeze(1)
    for first in range(0, block.num_edges, _SLAB_EDGES):
        edges = slice(first, first + _SLAB_EDGES)
        out.index_add_(0, targets[edges], rows.index_select(0, sources[edges]) * weight[edges])


def device_kernels() -> Any:
    """Import the GPU's kernels, which need Triton."""
    from gnnplan.runtime.models import aggregate_triton

    return aggregate_triton


def weights_of(conv: nn.Module) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (weight of the sum, weight of the node's own row, bias) of a SAGE or GCN layer."""
    if isinstance(conv, SAGEConv):
        return conv.lin_l.weight, conv.lin_r.weight if conv.root_weight else None, conv.lin_l.bias
    if isinstance(conv, GCNConv):
        return conv.lin.weight, None, conv.bias
    raise InputError(f"layer: expected SAGEConv or GCNConv, found {type(conv).__name__}")


def convolve(conv: nn.Module, x: Tensor, outside: AbstractOutside, *, relu: bool) -> Tensor:
    """Apply a SAGE or GCN layer to the inner rows, (n_in, in) to (n_in, out). Collective."""
    weight, root, bias = weights_of(conv)
    return aggregate_dense(x, weight, root, bias, outside, relu=relu)


def convolve_known(conv: nn.Module, inputs: Tensor, num_inner: int, *, relu: bool) -> Tensor:
    """Apply a SAGE or GCN layer whose `Sums.rows` are known; nothing crosses."""
    weight, root, bias = weights_of(conv)
    joined = weight if root is None else torch.cat([weight, root], dim=1)
    return linear(inputs, joined, bias, relu=relu)[:num_inner]


class _Receive(torch.autograd.Function):
    """Rows under way as a function of the inner rows; their gradients travel back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, pending: Pending, crossing: Crossing, exchange: Exchange
    ) -> Tensor:
        ctx.crossing, ctx.exchange, ctx.num_inner = crossing, exchange, x.shape[0]
        return pending.wait()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        c = ctx.crossing
        rows = ctx.exchange.start(grad, None, c.received_counts, c.send_counts).wait()
        back = grad.new_zeros(ctx.num_inner, grad.shape[1])
        return back.index_add_(0, c.send.to(grad.device), rows), None, None, None


def attend(
    conv: GATConv, x: Tensor, crossing: Crossing, exchange: Exchange, *, relu: bool,
    known: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Apply a GAT layer to the inner rows (n_in, in); its softmax runs over the neighbours here.

    Inner rows are transformed while the exchange brings the others; `known` rows were kept from
    before. The crossing has its joined block.
    """
    assert crossing.joined is not None
    weight: Tensor = conv.lin.weight  # pyright: ignore[reportOptionalMemberAccess]
    if known is not None or crossing.silent:
        here = linear(x, weight, None)
        rows = known
    else:
        c = crossing
        pending = exchange.start(x, c.send, c.send_counts, c.received_counts)
        here = linear(x, weight, None)
        rows = _Receive.apply(x, pending, crossing, exchange)
    h = here if rows is None else torch.cat([here, linear(rows, weight, None)])
    by_head = h.view(-1, conv.heads, conv.out_channels)
    out = attention(
        h,
        (by_head * conv.att_src).sum(-1),
        (by_head[: x.shape[0]] * conv.att_dst).sum(-1),
        crossing.joined,
        slope=conv.negative_slope,
        dropout=conv.dropout if conv.training else 0.0,
        by_kernels=True,
    )
    if not conv.concat:
        out = out.view(-1, conv.heads, conv.out_channels).mean(dim=1)
    if conv.bias is not None:
        out = out + conv.bias
    return out.relu() if relu else out


class Slices(AbstractOutside):
    """Sums over whole slices of all other parts."""

    def __init__(
        self,
        part: Part,
        partition: NDArray[np.int32],
        whole: Crossing,
        exchange: Exchange,
    ) -> None:
        self._exchange, self._comm = exchange, exchange.comm
        self._inner = whole.inner
        self.num_inner = part.num_inner
        self._sizes = [int(n) for n in np.bincount(partition, minlength=part.size)]
        self._blocks: list[TorchBlock] = []
        owner = partition[part.halo]
        for q in range(part.size):
            slot = np.full(part.num_halo, -1, np.int32)
            slot[owner == q] = np.searchsorted(
                np.flatnonzero(partition == q), part.halo[owner == q]
            )
            self._blocks.append(kept_block(whole.outer, slot, self._sizes[q]))

    def aggregate(self, x: Tensor, out: Tensor, *, with_root: bool) -> None:
        """Add slice after slice."""
        stages = self._comm.size
        pending = self._slice(x, 1) if stages > 1 else None
        add_inner(x, self._inner, out, with_root=with_root)
        for stage in range(1, stages):
            assert pending is not None
            rows = pending.wait()
            pending = self._slice(x, stage + 1) if stage + 1 < stages else None
            add_outer(rows, self._blocks[self._source(stage)], out)

    def gradient(self, grad: Tensor, width: int, *, with_root: bool) -> Tensor:
        """Send each slice's partial gradient to its owner; add what comes back."""
        stages, exchange = self._comm.size, self._exchange
        found: Tensor | None = None
        pending: Pending | None = None
        for stage in range(1, stages):
            to = self._source(stage)
            part = inner_gradient(grad, self._blocks[to], width, with_root=False)
            if pending is None:
                found = inner_gradient(grad, self._inner, width, with_root=with_root)
            else:
                assert found is not None
                found += pending.wait()
            counts = self._only(to, self._sizes[to])
            came_from = (self._comm.rank + stage) % stages
            pending = exchange.start(part, None, counts, self._only(came_from, self.num_inner))
        if pending is None or found is None:
            return inner_gradient(grad, self._inner, width, with_root=with_root)
        return found.add_(pending.wait())

    def _source(self, stage: int) -> int:
        return (self._comm.rank - stage) % self._comm.size

    def _slice(self, x: Tensor, stage: int) -> Pending:
        to, source = (self._comm.rank + stage) % self._comm.size, self._source(stage)
        received = self._only(source, self._sizes[source])
        return self._exchange.start(x, None, self._only(to, x.shape[0]), received)

    def _only(self, rank: int, count: int) -> list[int]:
        return [count if r == rank else 0 for r in range(self._comm.size)]


class FullGraphModel:
    """This rank's inner nodes under the plan's model and settings; made collectively.

    `indptr` and `indices` are the whole graph's CSC, `partition` has each node's owner. Draws are
    made on the host, from `masks` in tests that enumerate them. With `overlap`, rows travel on a
    thread of their own.
    """

    def __init__(
        self,
        model: BlockModel,
        name: str,
        indptr: NDArray[np.int64],
        indices: NDArray[np.int32] | NDArray[np.int64],
        partition: NDArray[np.int32],
        settings: FullGraph,
        *,
        comm: Communicator,
        seed: int = 0,
        device: torch.device | None = None,
        overlap: bool = False,
        masks: AbstractMasks | None = None,
    ) -> None:
        self.model, self.name, self.settings = model, name, settings
        by_edge = settings.drop != "nodes" and settings.keep < 1
        part = build_part(
            indptr, indices, partition, comm.rank, comm.size,
            loops=name != "sage", edge_ids=by_edge,
        )  # fmt: skip
        self.part: Part = connect(part, comm.host_lane)
        weights = edge_weights(self.part, indptr, indices, name)
        self.exchange = Exchange(comm, overlap=overlap)
        self.draws = EpochDraws(
            self.part, weights, settings,
            seed=seed, num_layers=len(model.convs),
            comm=self.exchange.comm, device=device or torch.device("cpu"),
            attention=name == "gat", masks=masks,
        )  # fmt: skip
        self._slices: Slices | None = None
        if settings.exchange == "broadcast":
            self._slices = Slices(self.part, partition, self.draws.whole, self.exchange)
        self._known: Tensor | None = None

    def precompute(self, x: Tensor) -> None:
        """Aggregate the unsampled inputs of the first layer, once. Collective.

        SAGE and GCN keep the first layer's sums, GAT the halo's input rows.
        """
        whole = self.draws.whole
        if self.name == "gat":
            sent = self.exchange.start(x, whole.send, whole.send_counts, whole.received_counts)
            self._known = sent.wait()
            return
        outside = self._slices or Boundary(whole, self.exchange)
        with torch.no_grad():
            self._known = outside.rows(x.detach(), with_root=self.name == "sage")

    def layers(self, epoch: int) -> list[Crossing]:
        """Return the epoch's draws. Collective where edges are sampled."""
        return self.draws.layers(epoch)

    def forward(self, x: Tensor, layers: list[Crossing]) -> Tensor:
        """Return logits (n_in, classes) of input rows (n_in, d_0); collective both ways."""
        model = self.model
        last = len(model.convs) - 1
        for number, (conv, crossing) in enumerate(zip(model.convs, layers, strict=True)):
            x = self._layer(conv, x, crossing, number, relu=number < last)
            if model.dropout > 0 and number < last:
                x = nn.functional.dropout(x, model.dropout, training=model.training)
        return x

    def _layer(
        self, conv: nn.Module, x: Tensor, crossing: Crossing, number: int, *, relu: bool
    ) -> Tensor:
        known = self._known if number == 0 else None
        if isinstance(conv, GATConv):
            return attend(conv, x, crossing, self.exchange, relu=relu, known=known)
        if known is not None:
            return convolve_known(conv, known, x.shape[0], relu=relu)
        outside: AbstractOutside = self._slices or Boundary(crossing, self.exchange)
        return convolve(conv, x, outside, relu=relu)

    def close(self) -> None:
        """End the exchange."""
        self.exchange.close()
