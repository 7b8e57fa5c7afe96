"""Differentiable aggregation over a TorchBlock, alone or fused with the dense layer behind it.

    relu([agg(x), x_dst] [W, W_root]^T + b)

float32 on a CPU takes the numba loops of `kernels`, a GPU the kernels of `aggregate_triton`. All
else (float64, a GPU without Triton or asked for deterministic sums) takes the same formula in torch
operations. A `Sums` knows which rows are summed: those of a block, or of a part whose neighbours
other ranks hold.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gnnplan.runtime.device import has_triton
from gnnplan.runtime.models import product_comes_first
from gnnplan.runtime.models.adjacency import TorchBlock
from gnnplan.runtime.models.kernels import aggregate_rows, mask_and_column_sums, source_gradient
from gnnplan.runtime.processor import processor_of

ROW_MULTIPLE = 512
"""Multiple to which rows are padded: few distinct shapes, so oneDNN makes its kernels once."""
_SLAB_ROWS = 4096
"""Rows per slab of a weight gradient: both operands of a slab stay in the L2/L3 cache."""
_SMALL_PRODUCT = 1 << 24
"""Multiply-adds below which a call's overhead outweighs the faster kernel."""


def padded_rows(num_rows: int) -> int:
    """Round a number of rows up to a multiple of ROW_MULTIPLE."""
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE


def with_padding(x: Tensor) -> Tensor:
    """Pad x with zero rows up to `padded_rows`."""
    padding = padded_rows(x.shape[0]) - x.shape[0]
    return nn.functional.pad(x, (0, 0, 0, padding)) if padding else x


def _onednn_applies(x: Tensor, num_multiply_adds: int) -> bool:
    return (
        num_multiply_adds >= _SMALL_PRODUCT
        and _on_cores(x)
        and x.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _on_cores(x: Tensor) -> bool:
    return x.device.type == "cpu" and not processor_of(x.device).is_gpu


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "")


def linear_dense(x: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool = False) -> Tensor:
    """Compute x weight^T + bias, then the rectifier with `relu`; no gradient is recorded."""
    num_rows = x.shape[0]
    if not _onednn_applies(x, num_rows * weight.numel()):
        y = nn.functional.linear(x, weight, bias)
        return y.relu_() if relu else y
    after = "relu" if relu else "none"
    whole = num_rows // ROW_MULTIPLE * ROW_MULTIPLE
    if x.shape[1] <= weight.shape[0] or whole in (0, num_rows):
        return _onednn(with_padding(x), weight, bias, after)[:num_rows]
    # The result is narrower than the rows: putting it together moves less than padding them does.
    rest = _onednn(with_padding(x[whole:]), weight, bias, after)[: num_rows - whole]
    return torch.cat([_onednn(x[:whole], weight, bias, after), rest])


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Compute grad^T x, (out, in); rows of `grad` beyond those of x must be zero."""
    num_rows = x.shape[0]
    if not _onednn_applies(x, num_rows * x.shape[1] * grad.shape[1]):
        return grad[:num_rows].t() @ x
    total: Tensor | None = None
    for first in range(0, num_rows, _SLAB_ROWS):
        inputs = with_padding(x[first : first + _SLAB_ROWS])
        outputs = grad[first : first + inputs.shape[0]]
        if outputs.shape[0] < inputs.shape[0]:
            outputs = with_padding(outputs)
        part = _onednn(outputs.t(), inputs.t(), None, "none")
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


HALVES = (torch.float16, torch.bfloat16)
"""Types of 16 bits, whose sums are taken in float32."""


def runs_on_kernels(x: Tensor) -> bool:
    """Return whether the numba loops apply to this tensor."""
    on_host = x.dtype == torch.float32 and _on_cores(x)
    # Mixed precision is left to torch: the loops take float32 alone.
    return on_host and not torch.is_autocast_enabled("cpu")


def runs_on_device(x: Tensor) -> bool:
    """Return whether the GPU's kernels apply to this tensor."""
    if x.dtype not in (torch.float32, *HALVES) or not processor_of(x.device).is_gpu:
        return False
    # Atomic additions have no fixed order, which deterministic algorithms must have.
    return _has_triton() and not torch.are_deterministic_algorithms_enabled()


_has_triton = functools.cache(has_triton)


class _StepDraws:
    """Dropout of one forward pass, by a stream on the device and the number of the call."""

    def __init__(self, key: Tensor) -> None:
        self.key, self.turn = key, 0

    def drop(self, x: Tensor, probability: float) -> Tensor:
        from gnnplan.runtime.models.aggregate_triton import drop_by_key

        self.turn += 1
        return drop_by_key(x, self.key, self.turn, probability)


_step_draws: ContextVar[_StepDraws | None] = ContextVar("_step_draws", default=None)


@contextmanager
def drawing_by(key: Tensor) -> Iterator[None]:
    """Let `drop` draw by counter in the body, one forward pass, from a stream int64 (1,).

    A row's draws then depend on its number alone, not on how many rows there are (DEC-169).
    """
    token = _step_draws.set(_StepDraws(key))
    try:
        yield
    finally:
        _step_draws.reset(token)


def drop(x: Tensor, probability: float, *, training: bool = True) -> Tensor:
    """Drop each number of x with a probability in training: by torch, or as `drawing_by` says."""
    draws = _step_draws.get()
    if draws is None or not training or probability == 0:
        return nn.functional.dropout(x, probability, training=training)
    return draws.drop(x, probability)


class Sums(ABC):
    """Weighted sums (or means) of neighbours' rows, and their gradient."""

    @property
    @abstractmethod
    def num_dst(self) -> int:
        """Number of rows that are summed for."""

    @abstractmethod
    def rows(self, x: Tensor, *, with_root: bool) -> Tensor:
        """Sum the rows of x, (num_src, d), and put x[i] behind the sum of row i with a root.

        Returns (num_dst or more, d or 2 d); rows from `num_dst` on are zero.
        """

    @abstractmethod
    def gradient(self, grad: Tensor, width: int, *, with_root: bool) -> Tensor:
        """Return the gradient of x, (num_src, width).

        `grad` is that of `rows`: (num_dst, width or 2 width).
        """


class _Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: Sums) -> Tensor:
        ctx.sums, ctx.dtype = sums, x.dtype
        return _first_rows(sums.rows(x.detach(), with_root=False), sums.num_dst)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        return ctx.sums.gradient(grad, grad.shape[1], with_root=False).to(ctx.dtype), None


def aggregate_sums(x: Tensor, sums: Sums) -> Tensor:
    """Return the sums alone, (num_dst, d), in the dtype of x."""
    return _Aggregate.apply(x, sums)


class _AggregateDense(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, root: Tensor | None, bias: Tensor | None,
        sums: Sums, relu: bool,
    ) -> Tensor:  # fmt: skip
        joined = weight if root is None else torch.cat([weight, root], dim=1)
        inputs = sums.rows(x.detach(), with_root=root is not None)
        out = _first_rows(linear_dense(inputs, joined, bias, relu=relu), sums.num_dst)
        ctx.sums, ctx.width, ctx.with_root = sums, x.shape[1], root is not None
        ctx.save_for_backward(inputs, joined, out if relu else None)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        inputs, joined, out = ctx.saved_tensors
        num_dst = grad.shape[0]
        masked, column_sums = mask_gradient(grad, out, inputs.shape[0])
        grad_joined = weight_gradient(masked, inputs)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_inputs = _first_rows(linear_dense(masked, joined.t(), None), num_dst)
            del masked  # its memory serves the exchange of rows with other ranks
            grad_x = ctx.sums.gradient(grad_inputs, ctx.width, with_root=ctx.with_root)
        grad_root = grad_joined[:, ctx.width :] if ctx.with_root else None
        grad_bias = column_sums if ctx.needs_input_grad[3] else None
        return grad_x, grad_joined[:, : ctx.width], grad_root, grad_bias, None, None


def aggregate_dense(
    x: Tensor, weight: Tensor, root: Tensor | None, bias: Tensor | None, sums: Sums, *, relu: bool
) -> Tensor:
    """Compute the layer of this module, (num_dst, out), the sum before the product.

    `x` is (num_src, in), `weight` and the root's weight are (out, in), `bias` is (out,).
    """
    return _AggregateDense.apply(x, weight, root, bias, sums, relu)


def mask_gradient(grad: Tensor, out: Tensor | None, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the gradient before the rectifier, with `num_rows` rows, and its column sums.

    `grad` is the gradient behind it, (num_dst, d); `out` its output, None where there is none.
    Rows beyond num_dst are zero.
    """
    given = grad.shape[0]
    if num_rows == given and (out is None or not runs_on_kernels(grad)):
        if out is not None:
            grad = torch.ops.aten.threshold_backward(grad, out, 0)
        masked = grad.contiguous()
        return masked, masked.sum(0)
    masked = grad.new_empty(num_rows, grad.shape[1])
    masked[given:].zero_()
    if out is not None and runs_on_kernels(grad):
        sums = grad.new_empty(grad.shape[1])
        arrays = [each.contiguous().numpy() for each in (grad, out)]
        mask_and_column_sums(*arrays, masked.numpy(), sums.numpy())
        return masked, sums
    if out is None:
        masked[:given] = grad
    else:
        torch.mul(grad, out > 0, out=masked[:given])
    return masked, masked[:given].sum(0)


def _first_rows(rows: Tensor, count: int) -> Tensor:
    """Return the first rows without a copy."""
    return rows if rows.shape[0] == count else rows[:count]


_NO_WEIGHT: NDArray[np.float32] = np.empty(0, np.float32)


class BlockSums(Sums):
    """Sums over a block whose rows one rank has."""

    def __init__(self, block: TorchBlock) -> None:
        self.block = block

    @property
    def num_dst(self) -> int:
        """Number of destinations."""
        return self.block.num_dst


class HostSums(BlockSums):
    """Sums of float32 rows in host memory."""

    def rows(self, x: Tensor, *, with_root: bool) -> Tensor:
        """Sum with the numba loops; rows of zeros follow up to `padded_rows`."""
        block = self.block
        out = torch.empty(padded_rows(block.num_dst), (2 if with_root else 1) * x.shape[1])
        out[block.num_dst :].zero_()
        weight = _NO_WEIGHT if block.weight is None else block.weight.numpy()
        edges = (block.indptr.numpy(), block.indices.numpy(), weight)
        aggregate_rows(*edges, x.contiguous().numpy(), out.numpy(), with_root)
        return out

    def gradient(self, grad: Tensor, width: int, *, with_root: bool) -> Tensor:
        """Sum over the transposed block, so that every source's row is written once."""
        indptr, rows, weight = self.block.transposed()
        out = torch.empty(self.block.num_src, width)
        given = grad.contiguous().numpy()
        source_gradient(indptr, rows, weight, given, out.numpy(), width, with_root)
        return out


def aggregate_plain(x: Tensor, block: TorchBlock) -> Tensor:
    """Compute sum_j w_j x_j, or the mean, in torch operations, for any device: (num_dst, d)."""
    row = block.row_of_edge()
    messages = wide(x.index_select(0, block.indices))
    if block.weight is not None:
        messages = messages * block.weight.to(messages.dtype).unsqueeze(1)
    out = messages.new_zeros(block.num_dst, x.shape[1]).index_add(0, row, messages)
    if block.weight is None:
        out = out / block.indptr.diff().clamp(min=1).to(out.dtype).unsqueeze(1)
    return out.to(x.dtype)


def wide(x: Tensor) -> Tensor:
    """Return 16-bit values in float32, in which sums over many edges are taken."""
    return x.float() if x.dtype in HALVES else x


def _sums(block: TorchBlock, x: Tensor) -> Sums | None:
    """Return the block's sums by the loops that apply to x; None: torch's own operations."""
    if runs_on_kernels(x):
        return HostSums(block)
    if runs_on_device(x):
        from gnnplan.runtime.models.aggregate_triton import DeviceSums

        return DeviceSums(block)
    return None


def aggregate(x: Tensor, block: TorchBlock) -> Tensor:
    """Compute each destination's sum_j w_j x_j, or the mean without weights: (num_dst, d)."""
    sums = _sums(block, x)
    return aggregate_plain(x, block) if sums is None else aggregate_sums(x, sums)


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        inputs = x.detach()
        out = linear_dense(inputs, weight, bias, relu=relu)
        ctx.save_for_backward(inputs, weight, out if relu else None)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        inputs, weight, out = ctx.saved_tensors
        masked, column_sums = mask_gradient(grad, out, padded_rows(inputs.shape[0]))
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = linear_dense(masked, weight.t(), None)[: grad.shape[0]]
        grad_bias = column_sums if ctx.needs_input_grad[2] else None
        return grad_x, weight_gradient(masked, inputs), grad_bias, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool = False) -> Tensor:
    """Compute x weight^T + bias, then the rectifier with `relu`."""
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
    """Compute agg(x) weight^T + x_dst root^T + bias, then the rectifier: (num_dst, out).

    The sum is linear, so it may be taken before or after the product; the cheaper order is chosen.
    `x` is (num_src, in), `weight` and `root` are (out, in), `bias` is (out,).
    """
    trains = torch.is_grad_enabled() and weight.requires_grad
    out_width, in_width = weight.shape
    sums = None
    if x.dtype == torch.float32 and not torch.is_autocast_enabled(x.device.type):
        sums = _sums(block, x)
    if sums is not None and not transforms_first(
        block, in_width, out_width, trains=trains, inner=x.requires_grad
    ):
        return aggregate_dense(x, weight, root, bias, sums, relu=relu)
    out = aggregate(linear(x, weight, None), block)
    if root is not None:
        out = out + linear(x[: block.num_dst], root, bias)
    elif bias is not None:
        out = out + bias
    return out.relu() if relu else out


def transforms_first(
    block: TorchBlock, in_width: int, out_width: int, *, trains: bool, inner: bool
) -> bool:
    """Return whether the product of all sources before the sum costs less than the sum before it.

    `inner`: the rows need a gradient.
    """
    return product_comes_first(
        block.num_src,
        block.num_dst,
        block.num_edges / block.step,
        in_width,
        out_width,
        device="cuda" if processor_of(block.indptr.device).is_gpu else "cpu",
        trains=trains,
        inner=inner,
    )
