"""A layer that sums its neighbours' rows and multiplies once, with its gradients.

    relu([agg(x), x_dst] [W, W_root]^T + b)

One product forward, one for the weights back. Where the rows are summed, over a block on the host,
over one on a GPU or over a part of the graph whose neighbours other ranks hold, is for a `Sums` to
know.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from runtime.models import dense
from runtime.models.backends import runs_on_kernels
from runtime.models.kernels import mask_and_column_sums


class Sums(ABC):
    """Weighted sums (or means) of neighbours' rows, and their gradient."""

    @property
    @abstractmethod
    def num_dst(self) -> int:
        """Rows that are summed for."""

    @abstractmethod
    def rows(self, x: Tensor, *, with_root: bool) -> Tensor:
        """The sums, behind each of them the row's own values with a root.

        Args:
            x: shape (num_src, d).
            with_root: put x[i] behind the sum of row i.

        Returns:
            Shape (num_dst or more, d or 2 d); rows from `num_dst` on are zero.
        """

    @abstractmethod
    def gradient(self, grad: Tensor, width: int, *, with_root: bool) -> Tensor:
        """Gradient of x, from that of `rows`; shape (num_src, width).

        Args:
            grad: shape (num_dst, width or 2 width).
            width: d.
            with_root: as given to `rows`.
        """


class _Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: Sums) -> Tensor:
        ctx.sums, ctx.dtype = sums, x.dtype
        return _first(sums.rows(x.detach(), with_root=False), sums.num_dst)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        return ctx.sums.gradient(grad, grad.shape[1], with_root=False).to(ctx.dtype), None


def aggregate(x: Tensor, sums: Sums) -> Tensor:
    """The sums alone, shape (num_dst, d), in the dtype of x."""
    return _Aggregate.apply(x, sums)


class _AggregateDense(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, root: Tensor | None, bias: Tensor | None,
        sums: Sums, relu: bool,
    ) -> Tensor:  # fmt: skip
        joined = weight if root is None else torch.cat([weight, root], dim=1)
        inputs = sums.rows(x.detach(), with_root=root is not None)
        out = _first(dense.linear(inputs, joined, bias, relu=relu), sums.num_dst)
        ctx.sums, ctx.width, ctx.with_root = sums, x.shape[1], root is not None
        ctx.save_for_backward(inputs, joined, out if relu else None)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        inputs, joined, out = ctx.saved_tensors
        num_dst = grad.shape[0]
        masked, column_sums = before_relu(grad, out, inputs.shape[0])
        grad_joined = dense.weight_gradient(masked, inputs)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_inputs = _first(dense.linear(masked, joined.t(), None), num_dst)
            del masked  # it need not lie there while other ranks' rows come and go
            grad_x = ctx.sums.gradient(grad_inputs, ctx.width, with_root=ctx.with_root)
        grad_root = grad_joined[:, ctx.width :] if ctx.with_root else None
        grad_bias = column_sums if ctx.needs_input_grad[3] else None
        return grad_x, grad_joined[:, : ctx.width], grad_root, grad_bias, None, None


def aggregate_dense(
    x: Tensor,
    weight: Tensor,
    root: Tensor | None,
    bias: Tensor | None,
    sums: Sums,
    *,
    relu: bool,
) -> Tensor:
    """The layer of this module.

    Args:
        x: shape (num_src, in).
        weight: shape (out, in).
        root: weight of a row's own values, shape (out, in), or None.
        bias: shape (out,), or None.
        sums: where its neighbours are.
        relu: apply the rectifier.

    Returns:
        Shape (num_dst, out).
    """
    return _AggregateDense.apply(x, weight, root, bias, sums, relu)


def before_relu(grad: Tensor, out: Tensor | None, num_rows: int) -> tuple[Tensor, Tensor]:
    """The gradient before the rectifier, `num_rows` rows of it, and its column sums.

    Args:
        grad: behind the rectifier, shape (num_dst, d).
        out: what the rectifier gave; None: there was none.
        num_rows: at least num_dst; rows beyond are zero.
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


def _first(rows: Tensor, count: int) -> Tensor:
    """The first rows: the tensor itself where it has no more."""
    return rows if rows.shape[0] == count else rows[:count]
