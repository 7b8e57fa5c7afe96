"""Dense float32 products of tall matrices on the CPU, with oneDNN where torch has it.

torch sends float32 products to MKL, which runs at half speed on processors it was not made for
(DEC-74). oneDNN makes a kernel per shape, so the varying number of rows is padded to a multiple of
`ROW_MULTIPLE`.
"""

import torch
from torch import Tensor, nn

ROW_MULTIPLE = 512
"""Rows are padded to this: few distinct shapes, so oneDNN's kernels are made once."""
_SLAB_ROWS = 4096
"""Rows per slab of a weight gradient: both operands of a slab stay in the L2/L3 cache."""
_SMALL_PRODUCT = 1 << 24
"""Multiply-adds below which the call overhead outweighs the faster kernel."""


def padded_rows(num_rows: int) -> int:
    """The next multiple of ROW_MULTIPLE."""
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE


def with_padding(x: Tensor) -> Tensor:
    """The rows of x followed by zero rows up to `padded_rows`; x itself where none is missing."""
    padding = padded_rows(x.shape[0]) - x.shape[0]
    return nn.functional.pad(x, (0, 0, 0, padding)) if padding else x


def _onednn_applies(x: Tensor, num_multiply_adds: int) -> bool:
    return (
        num_multiply_adds >= _SMALL_PRODUCT
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool = False) -> Tensor:
    """The product x weight^T + bias, then max(y, 0) with `relu`; records no gradient.

    Args:
        x: Shape (rows, in).
        weight: Shape (out, in).
        bias: Shape (out,), or None.
        relu: Apply the rectifier in the same pass.

    Returns:
        Shape (rows, out), freshly allocated.
    """
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
    """grad^T x, shape (out, in).

    Args:
        grad: Shape (rows or more, out); rows beyond those of x must be zero.
        x: Shape (rows, in). Only the last rows are copied, to pad them.
    """
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
