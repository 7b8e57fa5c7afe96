"""Gathering rows at random from a table into a buffer that the caller re-uses.

A gather is two passes: rows become addresses (every bound is checked there), then a kernel copies
from address to row, prefetching some kilobytes ahead; the copy is what costs. Where the output is
larger than a cache would keep, and is written in order, stores bypass the caches: a plain store
first reads the line it overwrites. Against torch.index_select(out=) on the same buffer this is
1.3 to 2.3 times faster (tests/benchmarks/gather.py measures both).
"""

import functools
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.features.location import MAX_SOURCES, SOURCE_BITS, SOURCE_MASK, Codes
from gnnplan.runtime.features.tier import Dense
from gnnplan.runtime.intrinsics import (
    copy_bytes,
    fence,
    prefetch,
    stream_16_bytes,
    widen_1,
    widen_8,
)

PREFETCH_BYTES = 6144
"""How far ahead of the copy rows are asked for; flat from 6 to 10 KiB where it was measured."""
STREAM_BYTES = 4 << 20
"""Outputs of at least this size are written past the caches."""
STREAM_ROW_BYTES = 512
"""Rows of at least this many bytes are streamed though they share lines with their neighbours."""
NO_POSITIONS = np.empty(0, np.int64)
"""Means: row i of the source goes to row i of the output."""


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _row_addresses(ids, base, row_bytes, num_rows, addresses):
    """Fill addresses of rows; returns the position of the first id out of range, or -1."""
    for i in range(ids.size):
        row = ids[i]
        if row < 0 or row >= num_rows:
            return i
        addresses[i] = base + row * row_bytes
    return -1


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _prefetch_row(address, row_bytes):
    """Ask for the cache lines of a row, and for no other: a line too many is bandwidth lost."""
    for line in range(address - address % 64, address + row_bytes, 64):
        prefetch(line)


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _stream_row(row, source, row_bytes, unit):
    """Copy a row past the caches, in units of 16 or 64 bytes; what fills none is stored plainly."""
    head = min(-row % unit, row_bytes)
    whole = head + (row_bytes - head) // unit * unit
    if head > 0:
        copy_bytes(row, source, head)
    for offset in range(head, whole, 16):
        stream_16_bytes(row + offset, source + offset)
    if whole < row_bytes:
        copy_bytes(row + whole, source + whole, row_bytes - whole)


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def copy_rows(addresses, positions, target, row_bytes, first, last, ahead, streaming):
    """Copy rows [first, last) of `addresses` to their rows of `target`; address 0 is skipped.

    `streaming`: units in which rows bypass the caches, 0 for plain stores.
    """
    for i in range(first, last):
        if i + ahead < last and addresses[i + ahead] != 0:
            _prefetch_row(addresses[i + ahead], row_bytes)
        source = addresses[i]
        if source == 0:
            continue
        row = target + (positions[i] if positions.size else i) * row_bytes
        if streaming > 0:
            _stream_row(row, source, row_bytes, streaming)
        else:
            copy_bytes(row, source, row_bytes)
    if streaming > 0:
        fence()


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def widen_rows(addresses, positions, target, row_bytes, first, last, ahead, _streaming):
    """Like `copy_rows` from float16 rows of `row_bytes` to float32 rows twice as wide."""
    for i in range(first, last):
        if i + ahead < last and addresses[i + ahead] != 0:
            _prefetch_row(addresses[i + ahead], row_bytes)
        source = addresses[i]
        if source == 0:
            continue
        row = target + (positions[i] if positions.size else i) * row_bytes * 2
        whole = row_bytes - row_bytes % 16
        for offset in range(0, whole, 16):
            widen_8(row + 2 * offset, source + offset)
        for offset in range(whole, row_bytes, 2):
            widen_1(row + 2 * offset, source + offset)


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="gather")


def in_ranges(work: Callable[[int, int], None], count: int, threads: int) -> None:
    """Run work(first, last) over [0, count) on `threads` threads, the caller's among them."""
    threads = max(1, min(threads, count // 1024))
    if threads == 1:
        work(0, count)
        return
    cuts = [count * t // threads for t in range(threads + 1)]
    pool = _pool(threads - 1)
    others = [pool.submit(work, cuts[t], cuts[t + 1]) for t in range(1, threads)]
    work(cuts[0], cuts[1])
    for other in others:
        other.result()


def check_storage(dtype: np.dtype[Any]) -> None:
    """Refuse a row dtype that the kernels cannot turn into float32 without loss."""
    if dtype not in (np.dtype(np.float32), np.dtype(np.float16)):
        raise DatasetError(f"expected float32 or float16 feature rows, found {dtype}")


def _streamed_units(row_bytes: int, target: int) -> int:
    """Bytes of the units in which rows written in order bypass the caches; 0: they do not.

    Rows of whole units follow on each other, and the lines between them are filled all the same;
    of other rows the first and last line are stored plainly, which pays where there are more.
    """
    if row_bytes % 16 == 0 and target % 16 == 0:
        return 16
    return 64 if row_bytes >= STREAM_ROW_BYTES else 0


def copy_from_addresses(
    addresses: NDArray[np.int64],
    dtype: np.dtype[Any],
    out: NDArray[Any],
    *,
    positions: NDArray[np.int64] = NO_POSITIONS,
    threads: int = 1,
) -> None:
    """Copy the row at each address into `out`, at row i or at `positions[i]`.

    Args:
        addresses: shape (n,); where each row lies; 0 leaves its row of `out` as it is. The caller
            answers for them: they must point into arrays that stay alive during the call.
        dtype: of the rows; that of `out`, or float16 widened to a float32 `out`.
        out: shape (m, feature_dim), C-contiguous.
        positions: shape (n,), values below m; empty for 0, 1, ... n-1.
        threads: how many threads share the copy.
    """
    row_bytes = out.shape[1] * dtype.itemsize
    target = out.ctypes.data
    same = dtype == out.dtype
    kernel = copy_rows if same else widen_rows
    streaming = 0
    if same and positions.size == 0 and addresses.size * row_bytes >= STREAM_BYTES:
        streaming = _streamed_units(row_bytes, target)
    ahead = min(max(PREFETCH_BYTES // max(row_bytes, 1), 2), 64)

    def work(first: int, last: int) -> None:
        kernel(addresses, positions, target, row_bytes, first, last, ahead, streaming)

    in_ranges(work, addresses.size, threads)


def addresses_of(
    table: NDArray[Any], ids: NDArray[np.int64], addresses: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Fill and return the address of each row `ids[i]` of a C-contiguous table.

    Raises:
        IndexError: an id is outside [0, len(table)).
    """
    if not table.flags.c_contiguous:
        raise ValueError("expected a C-contiguous table of rows")
    row_bytes = table.dtype.itemsize * math.prod(table.shape[1:])
    bad = _row_addresses(ids, table.ctypes.data, row_bytes, table.shape[0], addresses)
    if bad >= 0:
        raise IndexError(f"expected row ids in [0, {table.shape[0]}), found {ids[bad]}")
    return addresses


def check_output(ids: NDArray[np.int64], out: NDArray[np.float32], feature_dim: int) -> None:
    """Refuse an output buffer that the rows of `ids` do not fit exactly."""
    if out.shape != (ids.size, feature_dim):
        raise ValueError(f"expected an output of {(ids.size, feature_dim)}, found {out.shape}")
    if not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError("expected a writeable C-contiguous output")


def gather_rows(
    table: NDArray[np.float32] | NDArray[np.float16],
    ids: NDArray[np.int64],
    out: NDArray[np.float32],
    *,
    threads: int = 1,
) -> NDArray[np.float32]:
    """out[i] = table[ids[i]], bit for bit; float16 rows are widened.

    Args:
        table: shape (N, feature_dim), C-contiguous; a memory map serves as well.
        ids: shape (n,), values in [0, N); repeated values are allowed.
        out: shape (n, feature_dim), C-contiguous, re-used by the caller.
        threads: how many threads share the copy.

    Returns:
        `out`.

    Raises:
        IndexError: an id is outside the table.
        ValueError: the shapes do not fit.
        DatasetError: the table is neither float32 nor float16.
    """
    check_storage(table.dtype)
    check_output(ids, out, table.shape[1])
    addresses = addresses_of(table, ids, np.empty(ids.size, np.int64))
    copy_from_addresses(addresses, table.dtype, out, threads=threads)
    return out


_AHEAD = 24
"""Ids ahead of the lookup whose codes are prefetched."""


class Scratch:
    """Working arrays of one thread, for up to `size` ids."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.numbers = np.empty(size, np.uint8)
        """Source number of each id."""
        self.slots = np.empty(size, np.int64)
        """Slot of each id."""
        self.addresses = np.empty(size, np.int64)
        """Address of each id's row, 0 where it is not in memory."""
        self.lane_slots = np.empty(size, np.int64)
        """Slots again, partitioned by source."""
        self.positions = np.empty(size, np.int64)
        """Position in the batch of each of `lane_slots`."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.numbers.nbytes + 4 * self.slots.nbytes


@dataclass(frozen=True, slots=True)
class DenseGroup:
    """Arrays in memory with one dtype: where row 0 lies and how wide rows are, by source number."""

    dtype: np.dtype[Any]
    numbers: list[int]
    bases: NDArray[np.int64]
    """Shape (256,); 0 for the sources that are not of this group."""
    row_bytes: NDArray[np.int64]
    num_rows: NDArray[np.int64]


def group_by_dtype(dense: Mapping[int, Dense]) -> list[DenseGroup]:
    """One group per dtype, so that each is copied by one pass of one kernel."""
    groups: dict[np.dtype[Any], DenseGroup] = {}
    for number, each in dense.items():
        dtype = each.table.dtype
        if dtype not in groups:
            zeros = (np.zeros(MAX_SOURCES, np.int64) for _ in range(3))
            groups[dtype] = DenseGroup(dtype, [], *zeros)
        group = groups[dtype]
        group.numbers.append(number)
        group.bases[number] = each.table.ctypes.data
        group.row_bytes[number] = each.row_bytes
        group.num_rows[number] = each.table.shape[0]
    return list(groups.values())


def look_up(codes: Codes, ids: NDArray[np.int64], scratch: Scratch) -> NDArray[np.int64]:
    """Fill the scratch's numbers and slots; returns how many ids each source has, shape (256,).

    Raises:
        IndexError: an id is outside the table.
    """
    counts = np.zeros(MAX_SOURCES, np.int64)
    codes = np.asarray(codes).view(np.ndarray)
    bad = _look_up(codes, codes.ctypes.data, ids, scratch.numbers, scratch.slots, counts)
    if bad >= 0:
        raise IndexError(f"expected node ids in [0, {codes.size}), found {ids[bad]}")
    return counts


def locate(group: DenseGroup, num_ids: int, scratch: Scratch) -> NDArray[np.int64]:
    """Address of each looked-up row of a group, 0 for all others; a view of the scratch.

    Raises:
        IndexError: a slot is outside its array.
    """
    addresses = scratch.addresses[:num_ids]
    bad = _locate(
        scratch.numbers,
        scratch.slots,
        group.bases,
        group.row_bytes,
        group.num_rows,
        addresses,
    )
    if bad >= 0:
        number, slot = scratch.numbers[bad], scratch.slots[bad]
        raise IndexError(
            f"expected slots in [0, {group.num_rows[number]}) of source {number}, found {slot}"
        )
    return addresses


def partition(
    num_ids: int, order: Sequence[int], counts: NDArray[np.int64], scratch: Scratch
) -> NDArray[np.int64]:
    """List slots and positions by source, in batch order within each.

    Args:
        num_ids: how many ids were looked up.
        order: source numbers, in the order wanted; other sources are left out.
        counts: ids per source number.
        scratch: its `lane_slots` and `positions` are filled.

    Returns:
        Where each source of `order` begins, and the end; shape (len(order) + 1,).
    """
    starts = np.zeros(len(order) + 1, np.int64)
    np.cumsum(counts[list(order)], out=starts[1:])
    cursors = np.full(MAX_SOURCES, -1, np.int64)
    cursors[list(order)] = starts[:-1]
    _partition(
        num_ids, scratch.numbers, scratch.slots, cursors, scratch.lane_slots, scratch.positions
    )
    return starts


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _look_up(codes, base, ids, numbers, slots, counts):
    """Decode the code of each id; returns the position of the first id out of range, or -1."""
    for i in range(ids.size):
        if i + _AHEAD < ids.size:
            # An id out of range only asks for a line that does not exist: a prefetch cannot fault.
            prefetch(base + ids[i + _AHEAD] * codes.itemsize)
        node = ids[i]
        if node < 0 or node >= codes.size:
            return i
        code = np.int64(codes[node])
        number = code & SOURCE_MASK
        numbers[i] = number
        slots[i] = code >> SOURCE_BITS
        counts[number] += 1
    return -1


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _locate(numbers, slots, bases, row_bytes, num_rows, addresses):
    for i in range(addresses.size):
        number = numbers[i]
        if bases[number] == 0:
            addresses[i] = 0
            continue
        if slots[i] < 0 or slots[i] >= num_rows[number]:
            return i
        addresses[i] = bases[number] + slots[i] * row_bytes[number]
    return -1


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _partition(num_ids, numbers, slots, cursors, lane_slots, positions):
    for i in range(num_ids):
        at = cursors[numbers[i]]
        if at < 0:
            continue
        lane_slots[at] = slots[i]
        positions[at] = i
        cursors[numbers[i]] = at + 1


AHEAD = 32
"""How many seeds ahead a label is asked for."""


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _take(values, ids, out):
    """out[i] = values[ids[i]]; returns the position of the first id out of range, or -1."""
    base = values.ctypes.data
    for i in range(ids.size):
        if i + AHEAD < ids.size:
            prefetch(base + ids[i + AHEAD] * values.itemsize)  # never faults, whatever the id
        if ids[i] < 0 or ids[i] >= values.size:
            return i
        out[i] = values[ids[i]]
    return -1


def take_labels(labels: NDArray[Any], ids: NDArray[np.int64]) -> NDArray[Any]:
    """labels[ids], in a new array.

    Args:
        labels: [num_nodes], or [num_nodes, num_classes] where nodes have several.
        ids: [n] node ids.

    Raises:
        IndexError: an id is not a node's.
    """
    if labels.ndim != 1:
        return np.ascontiguousarray(labels[ids])
    out = np.empty(ids.size, labels.dtype)
    bad = _take(labels, ids, out)
    if bad >= 0:
        raise IndexError(f"expected node ids in [0, {labels.size}), found {ids[bad]}")
    return out
