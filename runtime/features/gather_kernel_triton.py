"""The kernel of `gather_triton`: finds each id's row through the location table, copies and counts.

Ids and codes are read two turns and one ahead of the rows, so that no turn waits for both.
"""

from typing import Any, no_type_check

import triton
import triton.language as tl

from runtime.features.location import MAX_SOURCES, SOURCE_BITS, SOURCE_MASK

BITS: Any = tl.constexpr(SOURCE_BITS)
MASK: Any = tl.constexpr(SOURCE_MASK)
TABLE: Any = tl.constexpr(MAX_SOURCES)
PACKED_SOURCES, PACKED_TURNS = 64 // 16, (1 << 16) - 1
"""Most sources, and turns of a program, that one number per row can count in fields of 16 bits."""


@triton.jit
@no_type_check
def _place(order, row, mask, ORDERED: tl.constexpr):
    if ORDERED:
        return tl.load(order + row, mask=mask, other=0)
    return row


@triton.jit
@no_type_check
def gather_kernel(
    ids, order, codes, places, out, counts, count, num_nodes,
    WIDTH: tl.constexpr, READ: tl.constexpr, STRIDE: tl.constexpr, UNIT: tl.constexpr,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr,
    ORDERED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One launch of `DeviceTable.gather`, for the sources of one dtype."""
    columns, lanes = tl.arange(0, COLUMNS), tl.arange(0, LANES)
    # Few sources are counted row by row, each in a field of one number; many are added up in every
    # turn, for which a program's threads wait for one another.
    one = tl.full((ROWS,), 1, tl.int64)
    seen = tl.zeros((ROWS,), tl.int64) if PACKED else tl.zeros((LANES,), tl.int64)
    bad = tl.zeros((ROWS,), tl.int32)
    step = tl.num_programs(0).to(tl.int64) * ROWS
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    asked, asked_next = row < count, row + step < count
    # A turn's rows wait for their codes, those for ids: both are asked for turns ahead.
    place = _place(order, row, asked, ORDERED)
    place_next = _place(order, row + step, asked_next, ORDERED)
    node = tl.load(ids + place, mask=asked, other=0)
    node_next = tl.load(ids + place_next, mask=asked_next, other=0)
    code = tl.load(codes + node, mask=asked & (node >= 0) & (node < num_nodes), other=0)
    for _ in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        ahead = row + 2 * step
        place_ahead = _place(order, ahead, ahead < count, ORDERED)
        node_ahead = tl.load(ids + place_ahead, mask=ahead < count, other=0)
        known_next = (row + step < count) & (node_next >= 0) & (node_next < num_nodes)
        code_next = tl.load(codes + node_next, mask=known_next, other=0)
        asked = row < count
        known = asked & (node >= 0) & (node < num_nodes)
        wide = code
        if codes.dtype.element_ty == tl.int32:
            wide = code.to(tl.uint32, bitcast=True).to(tl.int64)
        number, slot = wide & MASK, wide >> BITS
        base = tl.load(places + number, mask=known, other=0)
        stride = tl.load(places + TABLE + number, mask=known, other=0)
        limit = tl.load(places + 2 * TABLE + number, mask=known, other=0)
        held = known & (base != 0) & (slot >= 0) & (slot < limit)
        source = (base + slot * stride).to(tl.pointer_type(UNIT))[:, None]
        source = tl.multiple_of(source, [ALIGN, ALIGN])
        target = out + place[:, None] * STRIDE
        for first in range(0, READ, COLUMNS):
            column = first + columns[None, :]
            value = tl.load(source + column, mask=held[:, None] & (column < READ), other=0)
            written = held[:, None] & (column < WIDTH)
            tl.store(target + column, value.to(out.dtype.element_ty), mask=written)
        bad += (asked & ((node < 0) | (node >= num_nodes))).to(tl.int32)
        bad += (known & (base != 0) & ((slot < 0) | (slot >= limit))).to(tl.int32)
        if PACKED:
            seen += tl.where(held, one << (tl.where(held, number, 0) * 16), 0)
        else:
            found = (number[:, None] == lanes[None, :]) & held[:, None]
            seen += tl.sum(found.to(tl.int64), axis=0)
        row, place, place_next = row + step, place_next, place_ahead
        node, node_next, code = node_next, node_ahead, code_next
    total = seen
    if PACKED:
        fields = (seen[:, None] >> (lanes[None, :] * 16)) & 0xFFFF
        total = tl.sum(fields, axis=0)
    tl.atomic_add(counts + lanes, total, mask=total > 0)
    tl.atomic_add(counts + TABLE, tl.sum(bad.to(tl.int64), axis=0))
