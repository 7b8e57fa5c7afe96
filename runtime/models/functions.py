"""Differentiable aggregation over a TorchBlock, alone or fused with the dense layer behind it.

CPU tensors of float32 take the numba loops of `kernels`, a GPU's the kernels of `aggregate_triton`;
anything else (float64, a GPU without Triton or asked for one order of all sums) takes the same
formula in torch operations, which is also what the tests compare with.
"""

from typing import Any

import torch
from torch import Tensor

from runtime.models import dense, fused
from runtime.models.adjacency import TorchBlock
from runtime.models.backends import HALVES, runs_on_device, runs_on_kernels
from runtime.models.block_sums import HostSums

PER_ELEMENT = {"cpu": 14, "cuda": 28}
"""Multiply-adds of a product that take as long as summing one element of a row, by device.

Measured on cores, derived from a data sheet for GPUs (DEC-68).
"""


def aggregate_plain(x: Tensor, block: TorchBlock) -> Tensor:
    """sum_j w_j x_j (or the mean) in torch operations; any device and dtype.

    Args:
        x: Shape (num_src, d).
        block: The adjacency.

    Returns:
        Shape (num_dst, d).
    """
    row = block.row_of_edge()
    messages = wide(x.index_select(0, block.indices))
    if block.weight is not None:
        messages = messages * block.weight.to(messages.dtype).unsqueeze(1)
    out = messages.new_zeros(block.num_dst, x.shape[1]).index_add(0, row, messages)
    if block.weight is None:
        out = out / block.indptr.diff().clamp(min=1).to(out.dtype).unsqueeze(1)
    return out.to(x.dtype)


def wide(x: Tensor) -> Tensor:
    """The tensor in float32 where it has half of it: sums over many edges are taken so."""
    return x.float() if x.dtype in HALVES else x


def _sums(block: TorchBlock, x: Tensor) -> fused.Sums | None:
    """The block's sums by the loops that apply to those rows; None: torch's own operations."""
    if runs_on_kernels(x):
        return HostSums(block)
    if runs_on_device(x):
        from runtime.models.block_sums_device import DeviceSums

        return DeviceSums(block)
    return None


def aggregate(x: Tensor, block: TorchBlock) -> Tensor:
    """sum_j w_j x_j over each destination's edges, or their mean where the block has no weights.

    Args:
        x: Shape (num_src, d).
        block: The adjacency.

    Returns:
        Shape (num_dst, d).
    """
    sums = _sums(block, x)
    return aggregate_plain(x, block) if sums is None else fused.aggregate(x, sums)


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        inputs = x.detach()
        out = dense.linear(inputs, weight, bias, relu=relu)
        ctx.save_for_backward(inputs, weight, out if relu else None)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        inputs, weight, out = ctx.saved_tensors
        masked, column_sums = fused.before_relu(grad, out, dense.padded_rows(inputs.shape[0]))
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = dense.linear(masked, weight.t(), None)[: grad.shape[0]]
        grad_bias = column_sums if ctx.needs_input_grad[2] else None
        return grad_x, dense.weight_gradient(masked, inputs), grad_bias, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool = False) -> Tensor:
    """The product x weight^T + bias, then the rectifier with `relu`; as `dense.linear`."""
    if not runs_on_kernels(x):
        y = torch.nn.functional.linear(x, weight, bias)
        return y.relu() if relu else y
    return _Dense.apply(x, weight, bias, relu)


def aggregate_linear(
    x: Tensor,
    weight: Tensor,
    root: Tensor | None,
    bias: Tensor | None,
    block: TorchBlock,
    *,
    relu: bool = False,
) -> Tensor:
    """agg(x) weight^T + x_dst root^T + bias, then the rectifier with `relu`.

    The sum is linear, so it may be taken before or after the product; the cheaper order is chosen.

    Args:
        x: Shape (num_src, in).
        weight: Shape (out, in).
        root: Weight of the destination's own row, shape (out, in), or None.
        bias: Shape (out,), or None.
        block: The adjacency.
        relu: Apply the rectifier.

    Returns:
        Shape (num_dst, out).
    """
    trains = torch.is_grad_enabled() and weight.requires_grad
    out_width, in_width = weight.shape
    sums = None
    if x.dtype == torch.float32 and not torch.is_autocast_enabled(x.device.type):
        sums = _sums(block, x)
    if sums is not None and not transforms_first(
        block, in_width, out_width, trains=trains, inner=x.requires_grad
    ):
        return fused.aggregate_dense(x, weight, root, bias, sums, relu=relu)
    out = aggregate(linear(x, weight, None), block)
    if root is not None:
        out = out + linear(x[: block.num_dst], root, bias)
    elif bias is not None:
        out = out + bias
    return out.relu() if relu else out


def transforms_first(
    block: TorchBlock, in_width: int, out_width: int, *, trains: bool, inner: bool
) -> bool:
    """Whether transforming all sources before the sum costs less than the sum before.

    Counted in multiply-adds, forward and back. Back, each order takes one product as large as its
    forward one for the weights, and another where the rows before need a gradient; sums go back
    over the transformed rows in any case, over rows before the product only where those need it.

    What a summed element costs in multiply-adds is `PER_ELEMENT`.

    Args:
        block: the adjacency.
        in_width: of a row before the product.
        out_width: and after it.
        trains: gradients are taken.
        inner: the rows themselves need one: not those of the first layer.
    """
    products, sums = 1, 1
    if trains:
        products, sums = 2 + inner, 1 + inner
    product = products * in_width * out_width
    element = PER_ELEMENT.get(block.indptr.device.type, PER_ELEMENT["cpu"]) * block.num_edges
    after = block.num_dst * product + sums * element * in_width
    before = block.num_src * product + (1 + trains) * element * out_width
    return before < after
