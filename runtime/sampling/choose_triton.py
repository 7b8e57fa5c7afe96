"""Choosing the edges of many rows at once on a GPU: the same edges in the same order as the CPU's.

`choose_some` is Floyd's method as `reference` defines it, a tile of rows at a time, all the offsets
of a row in registers. `count_below` and `write_below` scan rows for LABOR-0's threshold test
(`labor_scan`), or take rows whole; both passes draw the same words, so nothing is kept between
them. The two arrays of the graph may lie in page-locked host memory.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.sampling.rng_triton import bounded, key_of, value_of

_BLOCK = 256
_TILE = 1024
_SHORT = 256
"""Rows up to this degree are scanned several to a tile; longer ones have a program each."""
_SHORT_TILE, _LONG_TILE = (16, 32), (1, 1024)


@triton.jit
@no_type_check
def _bounds_kernel(indptr, nodes, starts, degrees, counts, num_rows, fanout, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_rows
    node = tl.load(nodes + at, mask=mask, other=0)
    start = tl.load(indptr + node, mask=mask, other=0)
    degree = tl.load(indptr + node + 1, mask=mask, other=0) - start
    tl.store(starts + at, start, mask=mask)
    tl.store(degrees + at, degree, mask=mask)
    tl.store(counts + at, tl.where(fanout < 0, degree, tl.minimum(degree, fanout)), mask=mask)


@triton.jit(do_not_specialize=["stream"])
@no_type_check
def _floyd_kernel(
    stream, indices, nodes, starts, degrees, row_ptr, positions, values, num_rows, fanout,
    ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    degree = tl.load(degrees + row, mask=mask, other=0)
    key = key_of(stream, tl.load(nodes + row, mask=mask, other=0))
    columns = tl.arange(0, WIDE)[None, :]
    some = degree > fanout
    chosen = tl.zeros((ROWS, WIDE), tl.int64) + columns
    for i in range(fanout):
        turn = tl.zeros((ROWS,), tl.int64) + i
        last = tl.where(some, degree - fanout + i, 0)
        offset = bounded(value_of(key, turn), last + 1)
        equal = (chosen == offset[:, None]) & (columns < i)
        taken = tl.max(equal.to(tl.int32), axis=1) > 0
        offset = tl.where(taken, last, offset)
        chosen = tl.where(some[:, None] & (columns == i), offset[:, None], chosen)
    kept = mask[:, None] & (columns < tl.minimum(degree, fanout)[:, None])
    edge = tl.load(row_ptr + row, mask=mask, other=0)[:, None] + columns
    position = tl.load(starts + row, mask=mask, other=0)[:, None] + chosen
    tl.store(positions + edge, position, mask=kept)
    value = tl.load(indices + position, mask=kept, other=0)
    tl.store(values + edge, value.to(tl.int64), mask=kept)


@triton.jit
@no_type_check
def _share_word(fanout, degree):
    """floor(2^64 fanout / degree) for fanout < degree < 2^32, as in `poisson.share_word`."""
    divisor = degree.to(tl.uint64)
    first = (tl.zeros_like(degree) + fanout).to(tl.uint64) << 32
    return ((first // divisor) << 32) | (((first % divisor) << 32) // divisor)


@triton.jit(do_not_specialize=["stream"])
@no_type_check
def _scan_kernel(
    stream, indices, starts, degrees, counts, row_ptr, positions, values, num_rows, fanout,
    above, most, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    degree = tl.load(degrees + row, mask=row < num_rows, other=0)
    mine = (row < num_rows) & (degree > above) & (degree <= most)
    degree = tl.where(mine, degree, 0)
    whole = (degree <= fanout) | (tl.zeros_like(degree) + fanout < 0)
    threshold = _share_word(fanout, tl.where(whole, 1, degree))
    start = tl.load(starts + row, mask=mine, other=0)
    edge = tl.zeros((ROWS,), tl.int64)
    if WRITE:
        edge = tl.load(row_ptr + row, mask=mine, other=0)
    for first in range(0, tl.max(degree, axis=0), COLUMNS):
        place = first + tl.arange(0, COLUMNS)[None, :]
        inside = place < degree[:, None]
        position = start[:, None] + place
        value = tl.load(indices + position, mask=inside, other=0).to(tl.int64)
        word = value_of(key_of(stream, value), tl.zeros_like(value))
        kept = inside & (whole[:, None] | (word < threshold[:, None]))
        if WRITE:
            to = edge[:, None] + tl.cumsum(kept.to(tl.int32), axis=1) - 1
            tl.store(positions + to, position, mask=kept)
            tl.store(values + to, value, mask=kept)
        edge += tl.sum(kept.to(tl.int64), axis=1)
    if not WRITE:
        tl.store(counts + row, edge, mask=mine)


def row_bounds(indptr: Tensor, nodes: Tensor, fanout: int) -> tuple[Tensor, Tensor, Tensor]:
    """Start, degree and min(degree, fanout) of each node's row; int64 [n] on `nodes`' device."""
    starts, degrees, counts = (torch.empty_like(nodes) for _ in range(3))
    if nodes.numel():
        _bounds_kernel[(triton.cdiv(nodes.numel(), _BLOCK),)](
            indptr, nodes, starts, degrees, counts, nodes.numel(), fanout, BLOCK=_BLOCK
        )
    return starts, degrees, counts


def choose_some(
    stream: int,
    indices: Tensor,
    nodes: Tensor,
    bounds: tuple[Tensor, Tensor],
    row_ptr: Tensor,
    fanout: int,
    edges: tuple[Tensor, Tensor],
) -> None:
    """Fill `edges` with positions and neighbours of up to `fanout` edges per row.

    Args:
        stream: the hop's, as `rng_triton.signed` gives it.
        indices: the graph's, int32 or int64 [E].
        nodes: int64 [n].
        bounds: starts and degrees of the rows, from `row_bounds`.
        row_ptr: int64 [n + 1], where each row's edges begin.
        fanout: positive.
        edges: positions and values, int64, at least row_ptr[n] long.
    """
    if nodes.numel() == 0:
        return
    wide = triton.next_power_of_2(fanout)
    rows = min(max(_TILE // wide, 1), 128)
    _floyd_kernel[(triton.cdiv(nodes.numel(), rows),)](
        stream, indices, nodes, *bounds, row_ptr, *edges, nodes.numel(), fanout,
        ROWS=rows, WIDE=wide,
    )  # fmt: skip


def count_below(
    stream: int, indices: Tensor, bounds: tuple[Tensor, Tensor], fanout: int, counts: Tensor
) -> None:
    """Count the edges of each row that LABOR-0 keeps; -1 takes all. Arguments as `choose_some`."""
    _scan(stream, indices, bounds, fanout, counts, (counts, counts, counts), write=False)


def write_below(
    stream: int,
    indices: Tensor,
    bounds: tuple[Tensor, Tensor],
    row_ptr: Tensor,
    fanout: int,
    edges: tuple[Tensor, Tensor],
) -> None:
    """Write the edges that `count_below` counted, in the order of the graph."""
    _scan(stream, indices, bounds, fanout, row_ptr, (row_ptr, *edges), write=True)


def _scan(
    stream: int,
    indices: Tensor,
    bounds: tuple[Tensor, Tensor],
    fanout: int,
    counts: Tensor,
    outputs: tuple[Any, Any, Any],
    *,
    write: bool,
) -> None:
    num_rows = bounds[0].numel()
    if num_rows == 0:
        return
    longest = (1 << 32) - 1
    for above, most, (rows, columns) in (
        (-1, _SHORT, _SHORT_TILE),
        (_SHORT, longest, _LONG_TILE),
    ):
        _scan_kernel[(triton.cdiv(num_rows, rows),)](
            stream, indices, *bounds, counts, *outputs, num_rows, fanout, above, most,
            ROWS=rows, COLUMNS=columns, WRITE=write,
        )  # fmt: skip
