"""Dense float32 products of tall matrices on the CPU, with oneDNN where torch has it.

torch sends float32 products to MKL, which runs at half speed on processors it was not made for
(2-core AMD EPYC of family 26, one thread, 13 000 x 200 x 256: MKL 16.2 ms, oneDNN 8.0 ms). oneDNN
makes a kernel per shape, so the varying number of rows is padded to a multiple of `ROW_MULTIPLE`.
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
    if _onednn_applies(x, num_rows * weight.numel()):
        return _onednn(with_padding(x), weight, bias, "relu" if relu else "none")[:num_rows]
    y = nn.functional.linear(x, weight, bias)
    return y.relu_() if relu else y


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """grad^T x, shape (out, in), for grad (rows, out) and x (rows, in).

    Fastest where the number of rows is a multiple of ROW_MULTIPLE (pad both with zero rows).
    """
    num_rows = x.shape[0]
    if num_rows % ROW_MULTIPLE or not _onednn_applies(x, num_rows * x.shape[1] * grad.shape[1]):
        return grad.t() @ x
    total: Tensor | None = None
    for first in range(0, num_rows, _SLAB_ROWS):
        rows = slice(first, first + _SLAB_ROWS)
        part = _onednn(grad[rows].t(), x[rows].t(), None, "none")
        total = part if total is None else total.add_(part)
    assert total is not None
    return total
