"""A gather of rows of several memories through a location table, by one Triton kernel.

A source is an array that the device can address: this GPU's rows, a peer's mapped memory, or
page-locked host memory, read in place. The kernel finds each id's source and slot, copies the row
and counts rows by source, while the host waits for nothing. The grid is capped and strides over the
batch, so that other kernels find room beside it. A turn's ids and codes are read two turns and one
turn ahead. From much host memory rows are read in the order of their places, which saves address
look-ups.

Rows that begin at multiples of 16 bytes (`device_rows.padded_rows`) are read and written in words
of 16 bytes, others in the widest words that their addresses allow. Sources of each dtype take a
launch of their own; a row that no source holds keeps what the output held.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, no_type_check

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gnnplan.runtime.features.device_rows import DeviceRows, owns_padding
from gnnplan.runtime.features.location import MAX_SOURCES, SOURCE_BITS, SOURCE_MASK, Codes
from gnnplan.runtime.graph.format import WORD_BYTES, word_multiple
from gnnplan.runtime.processor import processor_of

BITS: Any = tl.constexpr(SOURCE_BITS)
MASK: Any = tl.constexpr(SOURCE_MASK)
TABLE: Any = tl.constexpr(MAX_SOURCES)
PACKED_SOURCES, PACKED_TURNS = 64 // 16, (1 << 16) - 1
"""Most sources, and turns of a program, that one number per row counts in fields of 16 bits."""


@triton.jit
@no_type_check
def _place(order, row, mask, ORDERED: tl.constexpr):
    if ORDERED:
        return tl.load(order + row, mask=mask, other=0)
    return row


@triton.jit
@no_type_check
def gather_kernel(
    ids, order, codes, places, out, counts, known_ids, count, num_nodes,
    WIDTH: tl.constexpr, READ: tl.constexpr, STRIDE: tl.constexpr, UNIT: tl.constexpr,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr,
    ORDERED: tl.constexpr, PACKED: tl.constexpr, REPORTS: tl.constexpr, PADS: tl.constexpr,
):  # fmt: skip
    """Run one launch of `DeviceTable.gather`, for the sources of one dtype."""
    columns, lanes = tl.arange(0, COLUMNS), tl.arange(0, LANES)
    num_ids = count
    if PADS:
        num_ids = tl.load(known_ids)
    # Few sources: each row counts them in fields of one number. Many: a sum in every turn, for
    # which a program's threads wait for one another.
    one = tl.full((ROWS,), 1, tl.int64)
    seen = tl.zeros((ROWS,), tl.int64) if PACKED else tl.zeros((LANES,), tl.int64)
    bad = tl.zeros((ROWS,), tl.int32)
    step = tl.num_programs(0).to(tl.int64) * ROWS
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    asked, asked_next = row < count, row + step < count
    # Rows wait for their codes, and codes for ids: both are read turns ahead.
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
        asked = row < num_ids
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
            if PADS:
                written |= ((row >= num_ids) & (row < count))[:, None] & (column < WIDTH)
            tl.store(target + column, value.to(out.dtype.element_ty), mask=written)
        if REPORTS:  # the first launch of a gather counts ids outside the graph
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


COUNTS = MAX_SOURCES + 1
"""Length of the counters: rows by source number, then ids or slots out of range."""
PROGRAMS_PER_PROCESSOR = 4
_TILE = 2048
"""Units of one turn (DEC-90)."""
_MAX_ROWS = 256
_MAX_COLUMNS = 1024
REACH_BYTES = 1 << 30
"""Size of host memory that a GPU reads at random without address look-ups (DEC-92)."""
_LEAST_SORTED = 1 << 14
"""Number of rows from which on sorting takes less time than it saves."""
_LEAST_FAR = 0.05
"""Share of the nodes that must lie beyond that reach for sorting to pay (DEC-92)."""
_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_UNITS = {4: (torch.int32, tl.int32), 2: (torch.int16, tl.int16)}


@dataclass(frozen=True, slots=True)
class _Group:
    """Sources of one dtype."""

    dtype: torch.dtype
    places: Tensor
    """int64 (3, 256): address of row 0 (0 outside the group), bytes between rows, number of
    rows."""
    align: int
    """Largest power of two, at most 16, that divides every address of a row."""
    padded: bool
    """Whether every row may be read in whole words of 16 bytes."""
    lanes: int


class DeviceTable:
    """Location table and its sources by number, ready for the kernel.

    Sources have one width and no gaps inside rows; the caller serves numbers without an entry.
    """

    def __init__(
        self, codes: Codes, sources: Mapping[int, DeviceRows], device: torch.device
    ) -> None:
        _check(sources)
        self.sources = dict(sources)
        self.device = device
        self.num_nodes = int(codes.shape[0])
        self.feature_dim = next(iter(sources.values())).table.shape[1]
        # torch knows few operations on unsigned numbers; the kernel reads the bits as such.
        signed = np.ascontiguousarray(codes).view(np.int32 if codes.itemsize == 4 else np.int64)
        self.codes = torch.from_numpy(signed.copy()).to(device)
        self._groups = [
            _group(dtype, self.sources, device)
            for dtype in sorted({s.table.dtype for s in sources.values()}, key=str)
        ]
        self._sorts = _reads_far(codes, self.sources)
        self._programs = default_programs(device)

    def with_codes(self, codes: Tensor) -> "DeviceTable":
        """Return this table with other locations of the same nodes, on the device."""
        other = copy(self)
        other.codes = codes
        return other

    @property
    def num_launches(self) -> int:
        """Return how many kernels a gather launches."""
        return len(self._groups) if self.feature_dim else 0

    def new_counts(self) -> Tensor:
        """Return zeroed counters for `gather`, int64 (257,) on the device."""
        return torch.zeros(COUNTS, dtype=torch.int64, device=self.device)

    def gather(
        self,
        ids: Tensor,
        out: Tensor,
        counts: Tensor,
        *,
        known_ids: Tensor | None = None,
        max_programs: int | None = None,
    ) -> None:
        """Write the row of node `ids[i]` to `out[i]`; return before the device is done.

        Args:
            ids: int64 (n,) on the device, contiguous, perhaps repeated.
            out: float32, float16 or bfloat16 (n, feature_dim) on the device, rows contiguous. Gaps
                between rows (`device_rows.padded_rows`) are overwritten.
            counts: From `new_counts`; rows by source are added. Entry 256 counts ids outside the
                graph and slots outside their source, whose rows are not written.
            known_ids: How many of the first ids count, int64 (1,) on the device; rows of the others
                become 0. None: all count.
            max_programs: Most programs of the grid; None: four per multiprocessor.
        """
        self._check_call(ids, out, counts)
        if ids.numel() == 0 or self.feature_dim == 0:
            return
        sorts = self._sorts and ids.numel() >= _LEAST_SORTED and known_ids is None
        order = self._order(ids) if sorts else None
        programs = max_programs or self._programs
        for group in self._groups:
            reports = group is self._groups[0]
            self._launch(group, ids, order, out, counts, known_ids, programs, reports=reports)

    def _order(self, ids: Tensor) -> Tensor:
        """Order ids by their rows' places; ids outside the graph stand anywhere."""
        return self.codes[ids.clamp(0, self.num_nodes - 1)].sort().indices

    def _launch(
        self,
        group: _Group,
        ids: Tensor,
        order: Tensor | None,
        out: Tensor,
        counts: Tensor,
        known_ids: Tensor | None,
        programs: int,
        *,
        reports: bool,
    ) -> None:
        size = group.dtype.itemsize
        whole = word_multiple(self.feature_dim * size) // size
        read = whole if group.padded else self.feature_dim
        width, target, unit = self.feature_dim, out, _DTYPES[group.dtype]
        stride = out.stride(0) if out.shape[0] > 1 else whole
        if group.dtype == out.dtype:
            width = whole if group.padded and owns_padding(out) else width
            address = out.data_ptr()
            of_torch, unit = _UNITS[_divisor(4, width * size, stride * size, address, group.align)]
            if of_torch != out.dtype:
                # Bytes are copied as integers; whole rows with their gaps are whole integers.
                target = out.as_strided(((out.shape[0] - 1) * stride + width,), (1,)).view(of_torch)
            width, read, stride = (n * size // of_torch.itemsize for n in (width, read, stride))
        columns = min(triton.next_power_of_2(read), _MAX_COLUMNS)
        rows = min(max(_TILE // columns, 1), _MAX_ROWS)
        turns = triton.cdiv(ids.numel(), rows)
        grid = (min(turns, programs),)
        packed = group.lanes <= PACKED_SOURCES and triton.cdiv(turns, grid[0]) <= PACKED_TURNS
        gather_kernel[grid](
            ids, ids if order is None else order, self.codes, group.places, target, counts,
            counts if known_ids is None else known_ids, ids.numel(), self.num_nodes,
            WIDTH=width, READ=read, STRIDE=stride, UNIT=unit, ALIGN=group.align, ROWS=rows,
            COLUMNS=columns, LANES=group.lanes, ORDERED=order is not None, PACKED=packed,
            REPORTS=reports, PADS=known_ids is not None,
        )  # fmt: skip

    def _check_call(self, ids: Tensor, out: Tensor, counts: Tensor) -> None:
        if ids.dtype != torch.int64 or ids.ndim != 1 or not ids.is_contiguous():
            raise ValueError(f"expected ids as contiguous int64 [n], found {_said(ids)}")
        gaps = out.ndim == 2 and out.shape[1] > 1 and out.stride(1) != 1
        if out.shape != (ids.numel(), self.feature_dim) or gaps:
            raise ValueError(
                f"expected an output of {(ids.numel(), self.feature_dim)} with contiguous rows, "
                f"found {_said(out)}"
            )
        if out.dtype not in _DTYPES:
            raise ValueError(f"expected float32, float16 or bfloat16 output, found {out.dtype}")
        if counts.shape != (COUNTS,) or counts.dtype != torch.int64:
            raise ValueError(f"expected counters of int64 [{COUNTS}], found {_said(counts)}")
        for each in (ids, out, counts):
            if each.device.type != self.device.type:
                raise ValueError(f"expected tensors on {self.device}, found one on {each.device}")


def default_programs(device: torch.device) -> int:
    """Return the number of programs that fill the device; a few in the interpreter."""
    return PROGRAMS_PER_PROCESSOR * processor_of(device).multiprocessors


def _group(dtype: torch.dtype, sources: Mapping[int, DeviceRows], device: torch.device) -> _Group:
    places = torch.zeros((3, MAX_SOURCES), dtype=torch.int64)
    numbers: list[int] = []
    align, padded = WORD_BYTES, True
    for number, source in sources.items():
        if source.table.dtype != dtype or source.table.shape[0] == 0:
            continue
        stride_bytes = source.table.stride(0) * source.table.element_size()
        numbers.append(number)
        places[:, number] = torch.tensor(
            [source.table.data_ptr(), stride_bytes, source.table.shape[0]]
        )
        align = _divisor(align, stride_bytes, source.table.data_ptr())
        padded = padded and owns_padding(source.table)
    lanes = 1 << max(numbers, default=0).bit_length()  # the next power of 2 above the largest
    return _Group(dtype, places.to(device), align, padded, lanes)


def _reads_far(codes: Codes, sources: Mapping[int, DeviceRows]) -> bool:
    """Return whether rows spread over so much host memory that their order pays."""
    host = {n: s.table for n, s in sources.items() if s.kind == "host"}
    spans = [t.shape[0] * t.stride(0) * t.element_size() for t in host.values()]
    if sum(spans) <= REACH_BYTES:
        return False
    numbers = np.bincount((codes & SOURCE_MASK).astype(np.uint8), minlength=MAX_SOURCES)
    return int(numbers[list(host)].sum()) >= _LEAST_FAR * codes.shape[0]


def _divisor(align: int, *numbers: int) -> int:
    """Return the largest power of two, at most `align`, that divides all byte counts."""
    while any(number % align for number in numbers):
        align //= 2
    return align


def _check(sources: Mapping[int, DeviceRows]) -> None:
    if not sources:
        raise ValueError("expected at least one source that the device can address")
    widths = {source.table.shape[1:] for source in sources.values()}
    if len(widths) != 1:
        raise ValueError(f"expected sources of one width, found {sorted(widths)}")
    for number, source in sources.items():
        if not 0 <= number < MAX_SOURCES:
            raise ValueError(f"expected source numbers in [0, {MAX_SOURCES}), found {number}")
        if source.table.dtype not in _DTYPES:
            raise ValueError(f"expected float32, float16 or bfloat16, found {source.table.dtype}")
        if source.table.shape[1] > 1 and source.table.stride(1) != 1:
            raise ValueError(f"expected contiguous rows, found strides {source.table.stride()}")


def _said(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
