"""Graph attention on a TorchBlock (GAT, Velickovic et al., ICLR 2018, equations 1-4).

For destination i, head h, over its edges j with one self-loop:
    e_ij = leaky_relu(a_src . h_j + a_dst . h_i),  alpha_ij = softmax_j(e_ij),
    out_i = sum_j alpha_ij h_j.
"""

from typing import Any, no_type_check

import numba
import numpy as np
import torch
from torch import Tensor

from gnnplan.runtime.models.adjacency import TorchBlock
from gnnplan.runtime.models.functions import runs_on_kernels, wide

_jit: Any = numba.njit(
    cache=True, nogil=True, fastmath={"contract", "reassoc"}, error_model="numpy"
)


@_jit
@no_type_check
def _attend(indptr, indices, h, score_src, score_dst, slope, keep, alpha, out):
    heads = score_src.shape[1]
    width = h.shape[1] // heads
    kept = keep.shape[0] > 0
    for i in range(indptr.shape[0] - 1):
        first, last = indptr[i], indptr[i + 1]
        out[i, :] = 0
        for k in range(heads):
            largest = np.float32(-np.inf)
            for e in range(first, last):
                score = score_src[indices[e], k] + score_dst[i, k]
                score = score if score > 0 else slope * score
                alpha[e, k] = score
                largest = max(largest, score)
            total = np.float32(0)
            for e in range(first, last):
                alpha[e, k] = np.exp(alpha[e, k] - largest)
                total += alpha[e, k]
            for e in range(first, last):
                alpha[e, k] /= total
        for e in range(first, last):
            source = h[indices[e]]
            for k in range(heads):
                a = alpha[e, k] * keep[e, k] if kept else alpha[e, k]
                for c in range(k * width, (k + 1) * width):
                    out[i, c] += a * source[c]


@_jit
@no_type_check
def _attend_gradient(
    indptr, indices, h, score_src, score_dst, slope, keep, alpha, grad, dh, d_src, d_dst
):
    heads = score_src.shape[1]
    width = h.shape[1] // heads
    kept = keep.shape[0] > 0
    widest = 0
    for i in range(indptr.shape[0] - 1):
        widest = max(widest, indptr[i + 1] - indptr[i])
    d_alpha = np.empty(widest, np.float32)
    for i in range(indptr.shape[0] - 1):
        first, last = indptr[i], indptr[i + 1]
        for k in range(heads):
            start, stop = k * width, (k + 1) * width
            mean = np.float32(0)
            for e in range(first, last):
                j = indices[e]
                factor = keep[e, k] if kept else np.float32(1)
                a = alpha[e, k] * factor
                dot = np.float32(0)
                for c in range(start, stop):
                    dot += grad[i, c] * h[j, c]
                    dh[j, c] += a * grad[i, c]
                d_alpha[e - first] = dot * factor
                mean += alpha[e, k] * dot * factor
            for e in range(first, last):
                j = indices[e]
                d_score = alpha[e, k] * (d_alpha[e - first] - mean)
                if score_src[j, k] + score_dst[i, k] <= 0:
                    d_score *= slope
                d_src[j, k] += d_score
                d_dst[i, k] += d_score


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        score_src: Tensor,
        score_dst: Tensor,
        keep: Tensor,
        block: TorchBlock,
        slope: float,
    ) -> Tensor:
        alpha = torch.empty(block.num_edges, score_src.shape[1])
        out = torch.empty(block.num_dst, h.shape[1])
        ctx.block, ctx.slope = block, np.float32(slope)
        ctx.save_for_backward(h, score_src, score_dst, keep, alpha)
        arrays = [t.detach().contiguous().numpy() for t in (h, score_src, score_dst)]
        edges = (block.indptr.numpy(), block.indices.numpy())
        _attend(*edges, *arrays, ctx.slope, keep.numpy(), alpha.numpy(), out.numpy())
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        h, score_src, score_dst, keep, alpha = ctx.saved_tensors
        d_h, d_src, d_dst = (torch.zeros_like(t) for t in (h, score_src, score_dst))
        arrays = [t.detach().contiguous().numpy() for t in (h, score_src, score_dst)]
        edges = (ctx.block.indptr.numpy(), ctx.block.indices.numpy())
        rest = [t.contiguous().numpy() for t in (keep, alpha, grad_outputs[0], d_h, d_src, d_dst)]
        _attend_gradient(*edges, *arrays, ctx.slope, *rest)
        return d_h, d_src, d_dst, None, None, None


def _attend_plain(
    h: Tensor,
    score_src: Tensor,
    score_dst: Tensor,
    keep: Tensor,
    block: TorchBlock,
    slope: float,
) -> Tensor:
    """The same in torch operations, for any device and dtype."""
    heads, dtype = score_src.shape[1], h.dtype
    h, score_src, score_dst, keep = (wide(each) for each in (h, score_src, score_dst, keep))
    row, source = block.row_of_edge(), block.indices.long()
    score = torch.nn.functional.leaky_relu(score_src[source] + score_dst[row], slope)
    index = row.unsqueeze(1).expand(-1, heads)
    largest = score.new_zeros(block.num_dst, heads).scatter_reduce(
        0, index, score.detach(), "amax", include_self=False
    )
    weight = (score - largest[row]).exp()
    total = weight.new_zeros(block.num_dst, heads).index_add(0, row, weight)
    alpha = weight / total[row]
    alpha = alpha * keep if keep.shape[0] else alpha
    messages = h.view(h.shape[0], heads, -1)[source] * alpha.unsqueeze(2)
    out = h.new_zeros(block.num_dst, h.shape[1]).index_add(0, row, messages.flatten(1))
    return out.to(dtype)


def attention(
    h: Tensor,
    score_src: Tensor,
    score_dst: Tensor,
    block: TorchBlock,
    *,
    slope: float,
    dropout: float = 0.0,
) -> Tensor:
    """Attention-weighted sum over each destination's edges.

    Args:
        h: Transformed sources, heads side by side; shape (num_src, heads * width).
        score_src: a_src . h_j; shape (num_src, heads).
        score_dst: a_dst . h_i; shape (num_dst, heads).
        block: The adjacency, with self-loops where the model wants them.
        slope: Negative slope of the leaky rectifier.
        dropout: Probability with which a coefficient is dropped (training only).

    Returns:
        Shape (num_dst, heads * width).
    """
    keep = h.new_empty(0, score_src.shape[1])
    if dropout > 0:
        ones = h.new_ones(block.num_edges, score_src.shape[1])
        keep = torch.nn.functional.dropout(ones, dropout)
    if not runs_on_kernels(h):
        return _attend_plain(h, score_src, score_dst, keep, block, slope)
    return _Attention.apply(h, score_src, score_dst, keep, block, slope)
