"""Differentiable aggregation over a TorchBlock, alone or fused with the dense layer behind it.

CPU tensors of float32 take the numba loops of `kernels`, a GPU's the kernels of `aggregate_triton`;
anything else (float64, a GPU without Triton or asked for one order of all sums) takes the same
formula in torch operations, which is also what the tests compare with.
"""

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.fallback import has_triton
from runtime.models import dense
from runtime.models.adjacency import TorchBlock
from runtime.models.kernels import aggregate_rows, mask_and_column_sums, source_gradient

_NO_WEIGHT: NDArray[np.float32] = np.empty(0, np.float32)
PER_ELEMENT = {"cpu": 14, "cuda": 28}
"""Multiply-adds of a product that take as long as summing one element of a row, by device.

Of a GPU derived from data sheets: an H200 multiplies and adds 33.5e12 float32 a second, and reads
1.2e12.
"""
_HALVES = (torch.float16, torch.bfloat16)


def runs_on_kernels(x: Tensor) -> bool:
    """Whether the numba loops apply to this tensor."""
    on_host = x.device.type == "cpu" and x.dtype == torch.float32
    # Mixed precision is torch's: the loops know float32 alone.
    return on_host and not torch.is_autocast_enabled("cpu")


def runs_on_device(x: Tensor) -> bool:
    """Whether the GPU's kernels apply to this tensor."""
    if x.device.type != "cuda" or x.dtype not in (torch.float32, *_HALVES):
        return False
    # Atomic additions have no order: who asks torch for one gets torch's own sums.
    return _has_triton() and not torch.are_deterministic_algorithms_enabled()


_has_triton = functools.cache(has_triton)


def _weight_array(block: TorchBlock) -> NDArray[np.float32]:
    return _NO_WEIGHT if block.weight is None else block.weight.numpy()


def _rows(x: Tensor) -> NDArray[np.float32]:
    return x.detach().contiguous().numpy()


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
    return x.float() if x.dtype in _HALVES else x


def _gradient_of_sources(block: TorchBlock, grad: Tensor, width: int, *, with_root: bool) -> Tensor:
    indptr, rows, weight = block.transposed()
    out = torch.empty(block.num_src, width)
    source_gradient(indptr, rows, weight, _rows(grad), out.numpy(), width, with_root)
    return out


class _Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: TorchBlock) -> Tensor:
        ctx.block = block
        out = torch.empty(block.num_dst, x.shape[1])
        indptr, indices = block.indptr.numpy(), block.indices.numpy()
        aggregate_rows(indptr, indices, _weight_array(block), _rows(x), out.numpy(), False)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        return _gradient_of_sources(ctx.block, grad, grad.shape[1], with_root=False), None


def aggregate(x: Tensor, block: TorchBlock) -> Tensor:
    """sum_j w_j x_j over each destination's edges, or their mean where the block has no weights.

    Args:
        x: Shape (num_src, d).
        block: The adjacency.

    Returns:
        Shape (num_dst, d).
    """
    if runs_on_kernels(x):
        return _Aggregate.apply(x, block)
    if runs_on_device(x):
        from runtime.models import functions_device

        return functions_device.aggregate(x, block)
    return aggregate_plain(x, block)


def _masked(grad: Tensor, out: Tensor | None, num_rows: int) -> tuple[Tensor, Tensor]:
    """The gradient before the rectifier in a buffer of `num_rows` rows, and its column sums."""
    masked = torch.empty(num_rows, grad.shape[1])
    masked[grad.shape[0] :].zero_()
    if out is None:
        masked[: grad.shape[0]] = grad
        return masked, grad.sum(0)
    sums = torch.empty(grad.shape[1])
    mask_and_column_sums(_rows(grad), _rows(out), masked.numpy(), sums.numpy())
    return masked, sums


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
        masked, sums = _masked(grad, out, dense.padded_rows(inputs.shape[0]))
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = dense.linear(masked, weight.t(), None)[: grad.shape[0]]
        grad_bias = sums if ctx.needs_input_grad[2] else None
        return grad_x, dense.weight_gradient(masked, inputs), grad_bias, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool = False) -> Tensor:
    """The product x weight^T + bias, then the rectifier with `relu`; as `dense.linear`."""
    if not runs_on_kernels(x):
        y = torch.nn.functional.linear(x, weight, bias)
        return y.relu() if relu else y
    return _Dense.apply(x, weight, bias, relu)


class _AggregateDense(torch.autograd.Function):
    """relu([agg(x), x_dst] [W, W_root]^T + b): one product forward, one for the weights back."""

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
        width = x.shape[1] if root is None else 2 * x.shape[1]
        joined = weight if root is None else torch.cat([weight, root], dim=1)
        inputs = torch.empty(dense.padded_rows(block.num_dst), width)
        inputs[block.num_dst :].zero_()
        aggregate_rows(
            block.indptr.numpy(),
            block.indices.numpy(),
            _weight_array(block),
            _rows(x),
            inputs.numpy(),
            root is not None,
        )
        out = dense.linear(inputs, joined, bias, relu=relu)[: block.num_dst]
        ctx.block, ctx.width, ctx.with_root = block, x.shape[1], root is not None
        ctx.save_for_backward(inputs, joined, out if relu else None)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        inputs, joined, out = ctx.saved_tensors
        masked, sums = _masked(grad, out, inputs.shape[0])
        grad_joined = dense.weight_gradient(masked, inputs)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_inputs = dense.linear(masked, joined.t(), None)[: ctx.block.num_dst]
            grad_x = _gradient_of_sources(
                ctx.block, grad_inputs, ctx.width, with_root=ctx.with_root
            )
        grad_root = grad_joined[:, ctx.width :] if ctx.with_root else None
        grad_bias = sums if ctx.needs_input_grad[3] else None
        return grad_x, grad_joined[:, : ctx.width], grad_root, grad_bias, None, None


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
    on_device = runs_on_device(x) and x.dtype == torch.float32
    on_device = on_device and not torch.is_autocast_enabled("cuda")
    if (on_device or runs_on_kernels(x)) and not transforms_first(
        block, in_width, out_width, trains=trains, inner=x.requires_grad
    ):
        if on_device:
            from runtime.models import functions_device

            return functions_device.aggregate_dense(x, weight, root, bias, block, relu=relu)
        return _AggregateDense.apply(x, weight, root, bias, block, relu)
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

    A summed element costs 6 multiply-adds on one thread and 17 on two (2 cores, 11 blocks of seven
    graphs: `PER_ELEMENT` chooses the faster order of all on two, and never one that costs a fifth
    more on one).

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
