"""Sums of neighbours' rows over a block's edges, and their gradient, as kernels of a GPU.

One warp sums one destination's rows, several edges at a time, and reads every row once. Forward
sums have a fixed order. Gradients are spread by atomic additions in the device's order, so those of
two runs may differ in their last bits.

A block's weights are one number per edge, or with heads one per edge and head, (num_edges, heads),
each for its share of the columns. Kernels that give padded blocks GCN's are `weights.PaddedGcn`'s.
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


@triton.jit
@no_type_check
def root_kernel(
    n_id, counts, degree, self_loops, row_places, row_ptr, edge_places, stays, root_places, full,
    roots, FULL: tl.constexpr, LOOPS: tl.constexpr, NESTED: tl.constexpr, HOPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write 1 / sqrt(d) of each source, and with FULL its full degree, for `weights.PaddedGcn`."""
    which = tl.program_id(1)
    block = which
    if NESTED:
        block += HOPS - 1
    count, own = tl.load(counts + block + 1), tl.load(counts + block)
    one = tl.full((BLOCK,), 1, tl.float32)
    for chunk in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = tl.arange(0, BLOCK).to(tl.int64) + chunk * BLOCK
        mask = at < count
        if FULL:
            node = tl.load(n_id + at, mask=mask, other=0)
            whole = tl.load(degree + node, mask=mask, other=0).to(tl.float32)
            tl.store(full + at, whole, mask=mask)
            if LOOPS:  # in float64, as numpy subtracts int32 from float32
                others = whole.to(tl.float64)
                others -= tl.load(self_loops + node, mask=mask, other=0).to(tl.float64)
                root = (1.0 / tl.sqrt(others + 1.0)).to(tl.float32)
            else:
                root = tl.div_rn(one, tl.sqrt_rn(whole + 1.0))
        else:
            mine = mask & (at < own)
            end = row_ptr + tl.load(row_places + block) + at
            first, last = tl.load(end, mask=mine, other=0), tl.load(end + 1, mask=mine, other=0)
            if LOOPS:
                before = stays + tl.load(edge_places + block)
                first = tl.load(before + first, mask=mine, other=0)
                last = tl.load(before + last, mask=mine, other=0)
            root = tl.div_rn(one, tl.sqrt_rn((last - first).to(tl.float32) + 1.0))
        tl.store(roots + tl.load(root_places + which) + at, root, mask=mask)


@triton.jit
@no_type_check
def weigh_kernel(
    counts, sizes, row_places, row_ptr, edge_places, stays, rows, local, root_places, new_places,
    full, roots, new_ptr, new_rows, new_local, weight, FULL: tl.constexpr, LOOPS: tl.constexpr,
    HOPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a block's edges with self-loops and weights, and padding, for `weights.PaddedGcn`."""
    block = tl.program_id(1)
    num_dst, num_edges = tl.load(counts + block), tl.load(counts + HOPS + 1 + block)
    room, src_room = tl.load(sizes + block), tl.load(sizes + block + 1)
    edge_room = tl.load(sizes + HOPS + 1 + block) + room
    end_of = row_ptr + tl.load(row_places + block)
    first_edge = tl.load(edge_places + block)
    root, to = roots + tl.load(root_places + block), tl.load(new_places + block)
    kept_ends = new_ptr + tl.load(row_places + block)
    total = num_edges
    earlier = first_edge * 0
    if LOOPS:
        earlier = tl.load(stays + first_edge)
        total = tl.load(stays + first_edge + num_edges) - earlier
    total += num_dst
    lanes, stride = tl.arange(0, BLOCK).to(tl.int64), tl.num_programs(0) * BLOCK
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    for at in range(begin, num_edges, stride):
        edge = at + lanes
        mask = edge < num_edges
        row = tl.load(rows + first_edge + edge, mask=mask, other=0).to(tl.int64)
        source = tl.load(local + first_edge + edge, mask=mask, other=0).to(tl.int64)
        first = tl.load(end_of + row, mask=mask, other=0)
        drawn = (tl.load(end_of + row + 1, mask=mask, other=1) - first).to(tl.float32)
        whole = drawn
        if FULL:
            whole = tl.load(full + row, mask=mask, other=0)
        value = whole * tl.div_rn(tl.full((BLOCK,), 1, tl.float32), drawn)
        value = value * tl.load(root + row, mask=mask, other=0)
        value = value * tl.load(root + source, mask=mask, other=0)
        place = edge
        if LOOPS:
            place = tl.load(stays + first_edge + edge, mask=mask, other=0) - earlier
            mask = mask & (row != source)
        place += to + row
        tl.store(new_local + place, source.to(tl.int32), mask=mask)
        tl.store(new_rows + place, row.to(tl.int32), mask=mask)
        tl.store(weight + place, value, mask=mask)
    for at in range(begin, room, stride):
        row = at + lanes
        mask = row < num_dst
        last = tl.load(end_of + row + 1, mask=mask, other=0)
        if LOOPS:
            last = tl.load(stays + first_edge + last, mask=mask, other=0) - earlier
        own = tl.load(root + row, mask=mask, other=0)
        tl.store(new_local + to + last + row, row.to(tl.int32), mask=mask)
        tl.store(new_rows + to + last + row, row.to(tl.int32), mask=mask)
        tl.store(weight + to + last + row, own * own, mask=mask)
        tl.store(kept_ends + row + 1, tl.where(mask, last + row + 1, total), mask=row < room)
    for at in range(total + begin, edge_room, stride):
        place = at + lanes
        inside = place < edge_room
        tl.store(new_local + to + place, (src_room - 1).to(tl.int32), mask=inside)
        tl.store(new_rows + to + place, (room - 1).to(tl.int32), mask=inside)
        tl.store(weight + to + place, 0.0, mask=inside)
