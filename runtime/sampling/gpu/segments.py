"""Work on rows of numbers side by side on a GPU: totals, the n-th smallest, scale, water level.

A row is a stretch of a CSR array. Short rows share a tile, a long one has a program of its own, and
every sum is taken in a fixed order, so that results do not depend on the order of programs.

- n-th smallest: bits of the key from the highest down, ended as soon as a bound has exactly n keys
  below it; a row of d random keys takes about log2(d) scans.
- scale and level: the rounds of `poisson.row_scale` and `poisson.water_level`.

In all functions `ptr` is where rows begin, int64 [n + 1], and `widest` at least the longest row.
"""

from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.sampling.gpu.choose import (
    NOWHERE,
    kernel_unit,
    keys_below,
    list_of,
    lists_of,
    row_bounds,
    row_ends,
    scan_below,
    tiles,
)
from gnnplan.runtime.sampling.gpu.hops import LeftOut, Rows
from gnnplan.runtime.sampling.gpu.topology import DeviceTopology

NEVER = (1 << 63) - 1
"""Key of an entry that is not to be taken."""
_LOOKED_UP = (8, 128)
"""Keys of a program, and entries of a list at once."""
_PARTS, _PARTS_INTERPRETED = 32, 2
"""Parts of a list that are looked through at once: a list that many links end at is long."""
COPIES = 4
"""Edges that are found for each that is asked for; more parallel ones have no room."""


@dataclass(frozen=True, slots=True)
class WholeRows:
    """Rows with all their edges laid out one after another."""

    rows: Rows
    ptr: Tensor
    row_of: Tensor
    positions: Tensor
    values: Tensor
    widest: int


def whole_rows(graph: DeviceTopology, nodes: Tensor, stream: Tensor) -> WholeRows:
    """Lay out all edges of some nodes' rows; the host waits for their number."""
    rows = row_bounds(graph, nodes, -1, passes=1)
    ptr = row_ends(rows.degrees)
    total = int(ptr[-1])
    positions, values = (
        torch.empty(total, dtype=torch.int64, device=nodes.device) for _ in range(2)
    )
    scan_below(stream, graph, rows, -1, ptr, (positions, values))
    numbers = torch.arange(nodes.numel(), device=nodes.device)
    row_of = torch.repeat_interleave(numbers, rows.degrees, output_size=total)
    return WholeRows(rows, ptr, row_of, positions, values, graph.widest)


@triton.jit
@no_type_check
def row_of(ptr, num_rows, above, most, ROWS: tl.constexpr):
    """Return this program's rows, which are its own, where they begin and how long they are."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    begin = tl.load(ptr + row, mask=row < num_rows, other=0)
    degree = tl.load(ptr + row + 1, mask=row < num_rows, other=0) - begin
    mine = (row < num_rows) & (degree > above) & (degree <= most)
    return row, mine, begin, tl.where(mine, degree, 0)


@triton.jit
@no_type_check
def _nth_kernel(
    ptr, keys, wanted, found, below, num_rows, above, most, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row, mine, begin, degree = row_of(ptr, num_rows, above, most, ROWS)
    want = tl.load(wanted + row, mask=mine, other=0)
    longest = tl.max(degree, axis=0)
    columns = tl.arange(0, COLUMNS).to(tl.int64)[None, :]
    pending = mine & (want > 0) & (want <= degree)
    asked = pending
    limit, bound = tl.zeros((ROWS,), tl.int64), tl.zeros((ROWS,), tl.int64)
    step = tl.full((ROWS,), 1 << 62, tl.int64)
    while tl.max(pending.to(tl.int32), axis=0) > 0:
        trial = limit + step
        count = tl.zeros((ROWS,), tl.int64)
        for first in range(0, longest, COLUMNS):
            place = first + columns
            inside = (place < degree[:, None]) & pending[:, None]
            key = tl.load(keys + begin[:, None] + place, mask=inside, other=0)
            count += tl.sum((inside & (key < trial[:, None])).to(tl.int64), axis=1)
        exact = pending & (count == want)
        bound = tl.where(exact, trial, bound)
        limit = tl.where(pending & (count < want), trial, limit)
        step = step >> 1
        pending = pending & (count != want) & (step > 0)
    # With a bound the n-th smallest is the largest key below it; without one equal keys share the
    # place, and the limit, the largest number with fewer than n keys below it, is their value.
    value = tl.where(bound > 0, 0, limit)
    for first in range(0, longest, COLUMNS):
        place = first + columns
        inside = (place < degree[:, None]) & asked[:, None]
        key = tl.load(keys + begin[:, None] + place, mask=inside, other=0)
        under = tl.where(inside & (key < bound[:, None]), key, 0)
        value = tl.maximum(value, tl.max(under, axis=1))
    count = tl.zeros((ROWS,), tl.int64)
    for first in range(0, longest, COLUMNS):
        place = first + columns
        inside = (place < degree[:, None]) & asked[:, None]
        key = tl.load(keys + begin[:, None] + place, mask=inside, other=0)
        count += tl.sum((inside & (key < value[:, None])).to(tl.int64), axis=1)
    tl.store(found + row, value, mask=asked)
    tl.store(below + row, count, mask=asked)


@triton.jit
@no_type_check
def _scale_kernel(
    ptr, inverse, squares, excess, scale, num_rows, above, most, WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, mine, begin, degree = row_of(ptr, num_rows, above, most, ROWS)
    extra = tl.load(excess + row, mask=mine, other=0.0)
    longest = tl.max(degree, axis=0)
    columns = tl.arange(0, COLUMNS).to(tl.int64)[None, :]
    solved = mine & (extra > 0)
    pending = solved
    level = tl.zeros((ROWS,), tl.float64)
    saturated = tl.zeros((ROWS,), tl.int64) - 1
    while tl.max(pending.to(tl.int32), axis=0) > 0:
        rest, free = tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.float64)
        under = tl.zeros((ROWS,), tl.int64)
        for first in range(0, longest, COLUMNS):
            place = first + columns
            inside = (place < degree[:, None]) & pending[:, None]
            each = tl.load(inverse + begin[:, None] + place, mask=inside, other=0.0)
            over = inside & (each > level[:, None])
            if WEIGHTED:
                square = tl.load(squares + begin[:, None] + place, mask=over, other=0.0)
            else:
                square = tl.where(over, 1.0, 0.0).to(tl.float64)
            rest += tl.sum(square * tl.where(over, each, 0.0), axis=1)
            free += tl.sum(square, axis=1)
            under += tl.sum((inside & (over == 0)).to(tl.int64), axis=1)
        pending = pending & (under > saturated)
        divisor = tl.where(pending, extra + free, 1.0)
        level = tl.where(pending, rest / divisor, level)
        saturated = tl.where(pending, under, saturated)
    tl.store(scale + row, level, mask=solved)


@triton.jit
@no_type_check
def _level_kernel(
    ptr, values, sizes, levels, num_rows, above, most, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, mine, begin, degree = row_of(ptr, num_rows, above, most, ROWS)
    size = tl.load(sizes + row, mask=mine, other=0).to(tl.float64)
    longest = tl.max(degree, axis=0)
    columns = tl.arange(0, COLUMNS).to(tl.int64)[None, :]
    solved = mine & (size > 0)
    pending = solved
    level = tl.zeros((ROWS,), tl.float64)
    saturated = tl.zeros((ROWS,), tl.float64) - 1
    while tl.max(pending.to(tl.int32), axis=0) > 0:
        count, rest = tl.zeros((ROWS,), tl.float64), tl.zeros((ROWS,), tl.float64)
        for first in range(0, longest, COLUMNS):
            place = first + columns
            inside = (place < degree[:, None]) & pending[:, None]
            each = tl.load(values + begin[:, None] + place, mask=inside, other=0.0)
            full = each * level[:, None] >= 1.0
            count += tl.sum((inside & full).to(tl.float64), axis=1)
            rest += tl.sum(tl.where(inside & (full == 0), each, 0.0), axis=1)
        pending = pending & (count > saturated) & (count < size) & (rest > 0)
        level = tl.where(pending, (size - count) / tl.where(rest > 0, rest, 1.0), level)
        saturated = tl.where(pending, count, saturated)
    tl.store(levels + row, level, mask=solved)


def nth_smallest(ptr: Tensor, keys: Tensor, wanted: Tensor, widest: int) -> tuple[Tensor, Tensor]:
    """Return the `wanted`-th smallest key of every row, and how many keys of the row are smaller.

    Keys are int64, not negative. Rows where `wanted` is 0 or more than the row holds stay 0.
    """
    found, below = torch.zeros_like(wanted), torch.zeros_like(wanted)
    by_rows(_nth_kernel, ptr, (keys, wanted, found, below), widest)
    return found, below


def row_scales(
    ptr: Tensor, inverse: Tensor, squares: Tensor | None, excess: Tensor, widest: int
) -> Tensor:
    """Return the c of each row with sum A^2 / min(1, c p) = sum A^2 + excess; float64 [n].

    `inverse` is 1 / p of each entry, 0 for one that does not count; `squares` A^2, None: 1. Rows
    whose excess is not positive get 0.
    """
    scale = torch.zeros_like(excess)
    arrays = (inverse, inverse if squares is None else squares, excess, scale)
    by_rows(_scale_kernel, ptr, arrays, widest, WEIGHTED=squares is not None)
    return scale


def water_levels(ptr: Tensor, values: Tensor, sizes: Tensor, widest: int) -> Tensor:
    """Return the c of each row with sum min(1, c v) = size, v not negative; float64 [n].

    Sizes are below the positive entries of their rows; rows where it is 0 get 0.
    """
    levels = torch.zeros(sizes.shape, dtype=torch.float64, device=sizes.device)
    by_rows(_level_kernel, ptr, (values, sizes, levels), widest)
    return levels


def smallest(
    ptr: Tensor, rows: Tensor, keys: Tensor, wanted: Tensor, widest: int
) -> tuple[Tensor, Tensor]:
    """Mark the `wanted` smallest keys of each row, the first ones among equals.

    `rows` is the row of each entry. Keys are int64, not negative; `NEVER` is never taken. Return
    the marks, and the `wanted`-th smallest key of each row.
    """
    limit, below = nth_smallest(ptr, keys, wanted, widest)
    marks, equal = keys < limit[rows], keys == limit[rows]
    equal &= (wanted > 0)[rows] & (keys != NEVER)
    place = torch.cumsum(equal, 0)
    first = torch.zeros(equal.numel() + 1, dtype=torch.int64, device=keys.device)
    first[1:] = place
    allowed = (place - first[ptr[:-1]][rows]) <= (wanted - below)[rows]
    return marks | (equal & allowed), limit


def by_rows(
    kernel: Any, ptr: Tensor, arrays: tuple[Tensor, ...], widest: int, **values: Any
) -> None:
    """Launch a kernel over rows, once for each shape of tile that rows so long need."""
    num_rows = ptr.numel() - 1
    if num_rows == 0:
        return
    for above, most, (tile, columns) in tiles(widest):
        kernel[(triton.cdiv(num_rows, tile),)](
            ptr, *arrays, num_rows, above, most, ROWS=tile, COLUMNS=columns, **values
        )


_BLOCK = 256


@triton.jit
@no_type_check
def _prefix_kernel(
    ptr, values, sums, num_rows, above, most, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    _, _, begin, degree = row_of(ptr, num_rows, above, most, ROWS)
    columns = tl.arange(0, COLUMNS).to(tl.int64)[None, :]
    before = tl.zeros((ROWS,), tl.float64)
    for first in range(0, tl.max(degree, axis=0), COLUMNS):
        place = first + columns
        inside = place < degree[:, None]
        each = tl.load(values + begin[:, None] + place, mask=inside, other=0.0)
        running = tl.cumsum(each, axis=1) + before[:, None]
        tl.store(sums + begin[:, None] + place, running, mask=inside)
        # The last sum itself, so that sums cannot fall from one tile to the next.
        before = tl.maximum(before, tl.max(tl.where(inside, running, 0.0), axis=1))


@triton.jit
@no_type_check
def _upper_kernel(sums, lows, highs, goals, places, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    low = tl.load(lows + at, mask=mask, other=0)
    high = tl.load(highs + at, mask=mask, other=0)
    goal = tl.load(goals + at, mask=mask, other=0.0)
    while tl.max((low < high).to(tl.int32), axis=0) > 0:
        middle = (low + high) >> 1
        searching = low < high
        above = tl.load(sums + middle, mask=searching, other=0.0) > goal
        high = tl.where(searching & above, middle, high)
        low = tl.where(searching & (above == 0), middle + 1, low)
    tl.store(places + at, low, mask=mask)


def prefix_sums(ptr: Tensor, values: Tensor, widest: int) -> Tensor:
    """Return inclusive sums of each row's entries (not negative), float64; they never fall."""
    sums = torch.empty_like(values)
    by_rows(_prefix_kernel, ptr, (values, sums), widest)
    return sums


def upper_bounds(sums: Tensor, lows: Tensor, highs: Tensor, goals: Tensor) -> Tensor:
    """Return the first place p in lows .. highs-1 with sums[p] > goal, or highs; int64 [m]."""
    places = torch.empty_like(lows)
    if lows.numel():
        _upper_kernel[(triton.cdiv(lows.numel(), _BLOCK),)](
            sums, lows, highs, goals, places, lows.numel(), BLOCK=_BLOCK
        )
    return places


def segment_sums(ptr: Tensor, values: Tensor) -> Tensor:
    """Return sums of each row's entries in a fixed order; float64 [n]."""
    return _reduce(ptr, values, "sum")


def segment_largest(ptr: Tensor, values: Tensor) -> Tensor:
    """Return the largest of each row's entries (not negative), 0 for an empty row; float64 [n]."""
    return _reduce(ptr, values, "max")


def _reduce(ptr: Tensor, values: Tensor, how: str) -> Tensor:
    lengths = ptr[1:] - ptr[:-1]
    if values.numel() == 0 or lengths.numel() == 0:
        return torch.zeros(lengths.shape, dtype=torch.float64, device=ptr.device)
    return torch.segment_reduce(values, how, lengths=lengths, unsafe=True, initial=0.0)


def segment_counts(ptr: Tensor, marks: Tensor) -> Tensor:
    """Return how many marks (bool) are set in each row; int64 [n]."""
    before = torch.zeros(marks.numel() + 1, dtype=torch.int64, device=marks.device)
    torch.cumsum(marks, 0, out=before[1:])
    return before[ptr[1:]] - before[ptr[:-1]]


@triton.jit(do_not_specialize=["base"])
@no_type_check
def _look_up_kernel(
    keys, num_keys, num_nodes, indptr, places, base, counts, ends, found, overflow, room,
    WRITE: tl.constexpr, PLACES: tl.constexpr, UNIT: tl.constexpr, BYTES: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part, parts = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    asked = at < num_keys
    key = tl.load(keys + at, mask=asked, other=NOWHERE)
    node = key // num_nodes
    earlier = tl.load(keys + at - 1, mask=asked & (at > 0), other=0) // num_nodes
    mine = (key < NOWHERE) & ((at == 0) | (earlier != node))
    start, degree, address = list_of(indptr, places, base, node, mine, PLACES, BYTES)
    # A part of each list is this program's: of a long one many at once.
    length = (degree + parts - 1) // parts
    begin, stop = part * length, tl.minimum(degree, (part + 1) * length)
    edge = tl.zeros((ROWS,), tl.int64)
    if WRITE:
        edge += tl.load(ends + at * parts + part, mask=mine, other=0)
    for first in range(0, tl.max(length, axis=0), COLUMNS):
        place = begin[:, None] + first + tl.arange(0, COLUMNS).to(tl.int64)[None, :]
        inside = place < stop[:, None]
        pointer = (address[:, None] + place * BYTES).to(tl.pointer_type(UNIT))
        value = tl.load(pointer, mask=inside, other=0).to(tl.int64)
        wanted = node[:, None] * num_nodes + value
        below = keys_below(keys, wanted, inside, num_keys, STEPS)
        stored = inside & (below < num_keys)
        stored = stored & (tl.load(keys + below, mask=stored, other=NOWHERE) == wanted)
        if WRITE:
            to = edge[:, None] + tl.cumsum(stored.to(tl.int32), axis=1) - 1
            tl.store(found + to, start[:, None] + place, mask=stored & (to < room))
        edge += tl.sum(stored.to(tl.int64), axis=1)
    if WRITE:
        if (part == 0) & (tl.program_id(0) == 0) & (tl.load(ends + num_keys * parts) > room):
            tl.store(overflow, 1)
    else:
        tl.store(counts + at * parts + part, edge, mask=asked)


def make_left_out(num_keys: int, device: torch.device) -> LeftOut:
    """Make room for the edges of so many keys."""
    parts = _PARTS if processor_of(device).captures else _PARTS_INTERPRETED
    sizes = (num_keys, num_keys + 1, COPIES * num_keys, parts * num_keys, parts * num_keys + 1)
    return LeftOut(*(torch.zeros(size, dtype=torch.int64, device=device) for size in sizes))


def find_edges(graph: DeviceTopology, asked: Tensor, out: LeftOut, overflow: Tensor) -> None:
    """Find in the graph the edges whose keys are asked for, in any order, int64 [n].

    Launches five kernels and waits for nothing; more edges than there is room for raise a flag.
    """
    count, (rows, columns) = asked.numel(), _LOOKED_UP
    parts = out.turns.numel() // count
    torch.sort(asked, out=(out.keys, out.turns[:count]))
    for write in (False, True):
        _look_up_kernel[(triton.cdiv(count, rows), parts)](
            out.keys, count, graph.num_nodes, *lists_of(graph), out.turns, out.sums, out.places,
            overflow, out.places.numel(), WRITE=write, PLACES=graph.addresses is not None,
            STEPS=count.bit_length(), ROWS=rows, COLUMNS=columns, **kernel_unit(graph),
        )  # fmt: skip
        if not write:
            torch.cumsum(out.turns, 0, out=out.sums[1:])
            out.ends.copy_(out.sums[::parts])
