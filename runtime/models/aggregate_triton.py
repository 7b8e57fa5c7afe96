"""Sums of neighbours' rows over a block's edges, and their gradient, as kernels of a GPU.

One warp sums one destination's rows, several edges at a time, and reads every row once. Forward
sums have a fixed order. Gradients are spread by atomic additions in the device's order, so those of
two runs may differ in their last bits.

A block's weights are one number per edge, or with heads one per edge and head, (num_edges, heads),
each for its share of the columns.
"""

from dataclasses import replace
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnnplan.runtime.models.adjacency import TorchBlock
from gnnplan.runtime.models.functions import BlockSums
from gnnplan.runtime.sampling.gpu.rng import key_of, value_of

_MOST_COLUMNS = 256
_ELEMENTS = 2048
"""Numbers that a warp has under way at once: 64 of each lane."""
_MOST_EDGES = 32


@triton.jit
@no_type_check
def _list_of(indptr, true_rows, row, STEP: tl.constexpr, COUNTED: tl.constexpr):
    """Begin and end of a row's edges; padding's, behind the count on the device, has none."""
    first, last = tl.load(indptr + row * STEP), tl.load(indptr + row * STEP + 1)
    if COUNTED:
        last = tl.where(row < tl.load(true_rows), last, first)
    return first, last


@triton.jit
@no_type_check
def _own_row(column, true_rows, row, WIDTH: tl.constexpr, COUNTED: tl.constexpr):
    """Columns of a destination's own row that count: of padding none."""
    width = WIDTH
    if COUNTED:
        width = tl.where(row < tl.load(true_rows), WIDTH, 0)
    return column < width


@triton.jit
@no_type_check
def _sum_kernel(
    indptr, indices, weight, true_rows, x, out,
    WIDTH: tl.constexpr, X_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, WEIGHTED: tl.constexpr,
    HEADS: tl.constexpr, ROOT: tl.constexpr, ADD: tl.constexpr, STEP: tl.constexpr,
    COUNTED: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    first, last = _list_of(indptr, true_rows, row, STEP, COUNTED)
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(first, last, EDGES):
        edge = start + tl.arange(0, EDGES)
        live = edge < last
        source = tl.load(indices + edge, mask=live, other=0).to(tl.int64)
        place = x + source[:, None] * X_STRIDE + column[None, :]
        rows = tl.load(place, mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32)
        if WEIGHTED:
            if HEADS == 1:
                rows *= tl.load(weight + edge, mask=live, other=0.0)[:, None]
            else:
                each = edge[:, None] * HEADS + (column // (WIDTH // HEADS))[None, :]
                rows *= tl.load(weight + each, mask=live[:, None] & inside[None, :], other=0.0)
        total += tl.sum(rows, axis=0)
    if not WEIGHTED:
        total /= tl.maximum(last - first, 1).to(tl.float32)
    target = out + row * OUT_STRIDE + column
    if ADD:
        total += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, total.to(out.dtype.element_ty), mask=inside)
    if ROOT:
        counts = _own_row(column, true_rows, row, WIDTH, COUNTED)
        own = tl.load(x + row * X_STRIDE + column, mask=counts, other=0.0)
        tl.store(target + WIDTH, own, mask=inside)


@triton.jit
@no_type_check
def _spread_kernel(
    indptr, indices, weight, true_rows, grad, out,
    WIDTH: tl.constexpr, GRAD_STRIDE: tl.constexpr, WEIGHTED: tl.constexpr, HEADS: tl.constexpr,
    ROOT: tl.constexpr, STEP: tl.constexpr, COUNTED: tl.constexpr, EDGES: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    first, last = _list_of(indptr, true_rows, row, STEP, COUNTED)
    place = grad + row * GRAD_STRIDE + column
    if ROOT:
        counts = _own_row(column, true_rows, row, WIDTH, COUNTED)
        own = tl.load(place + WIDTH, mask=counts, other=0.0).to(tl.float32)
        tl.atomic_add(out + row * WIDTH + column, own, mask=counts, sem="relaxed")
    given = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if not WEIGHTED:
        given /= tl.maximum(last - first, 1).to(tl.float32)
    for start in range(first, last, EDGES):
        edge = start + tl.arange(0, EDGES)
        live = edge < last
        source = tl.load(indices + edge, mask=live, other=0).to(tl.int64)
        # A sum, no view: of one column Triton's interpreter before 3.9 reads a view's neighbours.
        share = tl.zeros((EDGES, COLUMNS), tl.float32) + given[None, :]
        if WEIGHTED:
            if HEADS == 1:
                share *= tl.load(weight + edge, mask=live, other=0.0)[:, None]
            else:
                each = edge[:, None] * HEADS + (column // (WIDTH // HEADS))[None, :]
                share *= tl.load(weight + each, mask=live[:, None] & inside[None, :], other=0.0)
        target = out + source[:, None] * WIDTH + column[None, :]
        tl.atomic_add(target, share, mask=live[:, None] & inside[None, :], sem="relaxed")


@triton.jit
@no_type_check
def _dot_kernel(
    indptr, indices, true_rows, x, grad, out,
    WIDTH: tl.constexpr, X_STRIDE: tl.constexpr, GRAD_STRIDE: tl.constexpr, HEADS: tl.constexpr,
    STEP: tl.constexpr, COUNTED: tl.constexpr, EDGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, last = _list_of(indptr, true_rows, row, STEP, COUNTED)
    for start in range(first, last, EDGES):
        edge = start + tl.arange(0, EDGES)
        live = edge < last
        source = tl.load(indices + edge, mask=live, other=0).to(tl.int64)
        total = tl.zeros((EDGES,), tl.float32)
        for begin in range(0, WIDTH, COLUMNS):
            column = begin + tl.arange(0, COLUMNS)
            inside = column < WIDTH
            of_head = head * WIDTH + column
            given = tl.load(grad + row * GRAD_STRIDE + of_head, mask=inside, other=0.0)
            place = x + source[:, None] * X_STRIDE + of_head[None, :]
            rows = tl.load(place, mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32)
            total += tl.sum(rows * given.to(tl.float32)[None, :], axis=1)
        tl.store(out + edge * HEADS + head, total, mask=live)


def sum_rows(
    x: Tensor,
    block: TorchBlock,
    *,
    with_root: bool = False,
    out: Tensor | None = None,
    add: bool = False,
) -> Tensor:
    """Compute each destination's sum_j w_j x_j, or the mean where there are no weights.

    `x` is (num_src, d) of float32, float16 or bfloat16; sums are taken in float32. Returns x's
    dtype, (num_dst, d), or (num_dst, 2 d) with each destination's own row behind its sum. `out`
    takes them in its first rows and columns; with `add` sums are added to what is there.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    width = x.shape[1]
    if out is None:
        out = x.new_empty((block.num_dst, 2 * width if with_root else width))
    if block.num_dst * width:
        grid, tile = _tiles(block.num_dst, width)
        _sum_kernel[grid](
            block.indptr, block.indices, _weights(block), _true_rows(block), x, out,
            WIDTH=width, X_STRIDE=x.stride(0), OUT_STRIDE=out.stride(0),
            WEIGHTED=block.weight is not None, HEADS=_heads(block), ROOT=with_root, ADD=add,
            **_rows_kind(block), **tile,
        )  # fmt: skip
    return out


def spread_rows(grad: Tensor, block: TorchBlock, width: int, *, with_root: bool = False) -> Tensor:
    """Return the gradient of `sum_rows` with respect to x, float32 (num_src, width).

    `grad` is that of its result: (num_dst, width), or (num_dst, 2 width) with the root.
    """
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    out = torch.zeros((block.num_src, width), dtype=torch.float32, device=grad.device)
    if grad.numel():
        grid, tile = _tiles(block.num_dst, width)
        _spread_kernel[grid](
            block.indptr, block.indices, _weights(block), _true_rows(block), grad, out,
            WIDTH=width, GRAD_STRIDE=grad.stride(0), WEIGHTED=block.weight is not None,
            HEADS=_heads(block), ROOT=with_root, **_rows_kind(block), **tile,
        )  # fmt: skip
    return out


def dot_rows(grad: Tensor, x: Tensor, block: TorchBlock, heads: int) -> Tensor:
    """Return the gradient of `sum_rows` with respect to weights by head, (num_edges, heads).

    `grad` is that of its result, (num_dst, d), and `x` its rows, (num_src, d).
    """
    grad, x = grad.contiguous(), x.contiguous()
    made = torch.empty if block.live is None else torch.zeros  # padding's edges have no row
    out = made((block.num_edges, heads), dtype=torch.float32, device=x.device)
    if out.numel():
        width = x.shape[1] // heads
        _, tile = _tiles(block.num_dst, width)
        _dot_kernel[block.num_dst, heads](
            block.indptr, block.indices, _true_rows(block), x, grad, out,
            WIDTH=width, X_STRIDE=x.stride(0), GRAD_STRIDE=grad.stride(0), HEADS=heads,
            **_rows_kind(block), **tile,
        )  # fmt: skip
    return out


_DROPPED = 1024
"""Numbers that a program of dropout goes over."""


@triton.jit(do_not_specialize=["turn", "least"])
@no_type_check
def _drop_kernel(key, x, out, turn, least, scale, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    drawn = value_of(key_of(tl.load(key), at), at * 0 + turn) >> 40
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
    kept = tl.where(drawn.to(tl.int64) >= least, value, 0.0)
    tl.store(out + at, kept.to(out.dtype.element_ty), mask=inside)


def _dropped(x: Tensor, key: Tensor, turn: int, probability: float) -> Tensor:
    out = torch.empty_like(x)
    if x.numel():
        _drop_kernel[(triton.cdiv(x.numel(), _DROPPED),)](
            key, x, out, turn, round(probability * (1 << 24)), 1.0 / (1.0 - probability),
            x.numel(), BLOCK=_DROPPED,
        )  # fmt: skip
    return out


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, key: Tensor, turn: int, probability: float) -> Tensor:
        ctx.drawn = key, turn, probability
        return _dropped(x.detach().contiguous(), key, turn, probability)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        return _dropped(grad.contiguous(), *ctx.drawn), None, None, None


def drop_by_key(x: Tensor, key: Tensor, turn: int, probability: float) -> Tensor:
    """Drop numbers of x and scale up the others; draw i of a key and turn decides on number i.

    Rows behind those of x, as padding has, change no draw. `key` is a stream on the device, int64
    (1,).
    """
    return _Drop.apply(x, key, turn, probability)


class _SumByHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, block: TorchBlock) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x, weight)
        return sum_rows(x.detach(), replace(block, weight=weight.detach().contiguous()))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        x, weight = ctx.saved_tensors
        weighted = replace(ctx.block, weight=weight.contiguous())
        grad_weight = dot_rows(grad, x, ctx.block, weight.shape[1])
        return spread_rows(grad, weighted, x.shape[1]), grad_weight, None


def sum_by_head(x: Tensor, weight: Tensor, block: TorchBlock) -> Tensor:
    """Sum float32 rows with weights by edge and head, which have gradients too: (num_dst, d)."""
    return _SumByHead.apply(x, weight, block)


def _heads(block: TorchBlock) -> int:
    return 1 if block.weight is None or block.weight.dim() == 1 else block.weight.shape[1]


def _weights(block: TorchBlock) -> Tensor:
    """Return the block's weights, or any tensor where it has none: it is not read."""
    return block.indptr if block.weight is None else block.weight


def _true_rows(block: TorchBlock) -> Tensor:
    """Return the count of true rows, or any tensor where all are: it is not read."""
    return block.indptr if block.live is None else block.live


def _rows_kind(block: TorchBlock) -> dict[str, Any]:
    return {"STEP": block.step, "COUNTED": block.live is not None}


def _tiles(num_rows: int, width: int) -> tuple[tuple[int, int], dict[str, Any]]:
    columns = min(1 << (width - 1).bit_length(), _MOST_COLUMNS)
    edges = min(_ELEMENTS // columns, _MOST_EDGES)
    return (num_rows, -(-width // columns)), {"EDGES": edges, "COLUMNS": columns, "num_warps": 1}


class DeviceSums(BlockSums):
    """Sums of float32, float16 or bfloat16 rows, taken in float32."""

    def rows(self, x: Tensor, *, with_root: bool) -> Tensor:
        """Sum with the GPU's kernel."""
        return sum_rows(x, self.block, with_root=with_root)

    def gradient(self, grad: Tensor, width: int, *, with_root: bool) -> Tensor:
        """Spread by atomic additions, in float32."""
        return spread_rows(grad, self.block, width, with_root=with_root)
