"""Differentiable aggregation on a GPU's kernels: `functions` with `aggregate_triton` for loops."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from runtime.models.adjacency import TorchBlock
from runtime.models.aggregate_triton import spread_rows, sum_rows


class _Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: TorchBlock) -> Tensor:
        ctx.block, ctx.dtype = block, x.dtype
        return sum_rows(x, block)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        return spread_rows(grad, ctx.block, grad.shape[1]).to(ctx.dtype), None


class _AggregateDense(torch.autograd.Function):
    """relu([agg(x), x_dst] [W, W_root]^T + b): one product forward, two back."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        root: Tensor | None,
        bias: Tensor | None,
        block: TorchBlock,
        relu: bool,
    ) -> Tensor:
        inputs = sum_rows(x, block, with_root=root is not None)
        joined = weight if root is None else torch.cat([weight, root], dim=1)
        out = linear(inputs, joined, bias)
        if relu:
            out.relu_()
        ctx.block, ctx.width, ctx.with_root = block, x.shape[1], root is not None
        ctx.save_for_backward(inputs, joined, out if relu else None)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        inputs, joined, out = ctx.saved_tensors
        if out is not None:
            grad = torch.ops.aten.threshold_backward(grad, out, 0)
        grad_joined = grad.t() @ inputs
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = spread_rows(grad @ joined, ctx.block, ctx.width, with_root=ctx.with_root)
        grad_root = grad_joined[:, ctx.width :] if ctx.with_root else None
        grad_bias = grad.sum(0) if ctx.needs_input_grad[3] else None
        return grad_x, grad_joined[:, : ctx.width], grad_root, grad_bias, None, None


def aggregate(x: Tensor, block: TorchBlock) -> Tensor:
    """As `functions.aggregate`, of float32, float16 or bfloat16."""
    return _Aggregate.apply(x, block)


def aggregate_dense(
    x: Tensor,
    weight: Tensor,
    root: Tensor | None,
    bias: Tensor | None,
    block: TorchBlock,
    *,
    relu: bool,
) -> Tensor:
    """As `functions.aggregate_linear`, summed before the product; float32 alone."""
    return _AggregateDense.apply(x, weight, root, bias, block, relu)
