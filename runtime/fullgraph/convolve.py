"""SAGE, GCN and GAT layers over a part, with gradients that cross the boundary."""

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

from runtime.errors import InputError
from runtime.fullgraph.crossing import Crossing
from runtime.fullgraph.exchange import Exchange, Pending
from runtime.fullgraph.outside import AbstractOutside
from runtime.models.attention import attention
from runtime.models.functions import linear
from runtime.models.fused import aggregate_dense


def weights_of(conv: nn.Module) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(weight of the sum, weight of the node's own row, bias) of a SAGE or GCN layer."""
    if isinstance(conv, SAGEConv):
        return conv.lin_l.weight, conv.lin_r.weight if conv.root_weight else None, conv.lin_l.bias
    if isinstance(conv, GCNConv):
        return conv.lin.weight, None, conv.bias
    raise InputError(f"layer: expected SAGEConv or GCNConv, found {type(conv).__name__}")


def convolve(conv: nn.Module, x: Tensor, outside: AbstractOutside, *, relu: bool) -> Tensor:
    """A SAGE or GCN layer on the inner rows, shape (n_in, in) to (n_in, out). Collective."""
    weight, root, bias = weights_of(conv)
    return aggregate_dense(x, weight, root, bias, outside, relu=relu)


def convolve_known(conv: nn.Module, inputs: Tensor, num_inner: int, *, relu: bool) -> Tensor:
    """A SAGE or GCN layer whose `Sums.rows` are known; nothing crosses."""
    weight, root, bias = weights_of(conv)
    joined = weight if root is None else torch.cat([weight, root], dim=1)
    return linear(inputs, joined, bias, relu=relu)[:num_inner]


class _Receive(torch.autograd.Function):
    """Rows under way, as a function of the inner rows; their gradients travel back."""

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
    """A GAT layer on the inner rows; the softmax runs over the neighbours that are here, unscaled.

    Args:
        conv: the layer.
        x: inner rows, shape (n_in, in).
        crossing: with its joined block.
        exchange: brings the rest; inner rows are transformed meanwhile.
        relu: apply the rectifier.
        known: the outside rows, where they were kept from before: nothing crosses.
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
    )
    if not conv.concat:
        out = out.view(-1, conv.heads, conv.out_channels).mean(dim=1)
    if conv.bias is not None:
        out = out + conv.bias
    return out.relu() if relu else out
