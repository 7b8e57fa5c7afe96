"""Gathers of rows from a table into a buffer that the caller uses again.

A gather has two passes: ids become addresses, which checks every bound, then a kernel copies from
address to row and prefetches ahead. Outputs larger than a cache are written past the caches where
they are written in order: a plain store would first read the line that it overwrites.
"""

import functools
import math
import typing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.format import BFLOAT16
from gnnplan.runtime.intrinsics import (
    copy_bytes,
    fence,
    prefetch,
    stream_16_bytes,
    widen_1,
    widen_8,
    widen_brain_1,
    widen_brain_8,
)

PREFETCH_BYTES = 6144
"""Distance ahead of the copy at which rows are prefetched."""
STREAM_BYTES = 4 << 20
"""Least size of an output that is written past the caches."""
STREAM_ROW_BYTES = 512
"""Least size of rows that are streamed although they share cache lines with their neighbours."""
FROM_FLOAT16, FROM_BFLOAT16 = 1, 2
NO_POSITIONS = np.empty(0, np.int64)
"""Positions that send row i of the source to row i of the output."""


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _row_addresses(ids, base, row_bytes, num_rows, addresses):
    """Fill the addresses of rows; return the position of the first id out of range, or -1."""
    for i in range(ids.size):
        row = ids[i]
        if row < 0 or row >= num_rows:
            return i
        addresses[i] = base + row * row_bytes
    return -1


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _prefetch_row(address, row_bytes):
    """Prefetch the cache lines of a row and no other: each line too many costs bandwidth."""
    for line in range(address - address % 64, address + row_bytes, 64):
        prefetch(line)


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _stream_row(row, source, row_bytes, unit):
    """Copy a row past the caches in units of 16 or 64 bytes, and the rest by plain stores."""
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
    """Copy rows [first, last) of `addresses` to their rows of `target`; skip address 0.

    `streaming` is the size of the units that bypass the caches, 0 for plain stores.
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
def widen_row(row, source, row_bytes, widening):
    """Copy a row of 16-bit numbers to a float32 one; `widening` is that of `widening_of`."""
    whole = row_bytes - row_bytes % 16
    if widening == FROM_BFLOAT16:
        for offset in range(0, whole, 16):
            widen_brain_8(row + 2 * offset, source + offset)
        for offset in range(whole, row_bytes, 2):
            widen_brain_1(row + 2 * offset, source + offset)
        return
    for offset in range(0, whole, 16):
        widen_8(row + 2 * offset, source + offset)
    for offset in range(whole, row_bytes, 2):
        widen_1(row + 2 * offset, source + offset)


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def widen_rows(addresses, positions, target, row_bytes, first, last, ahead, widening):
    """Copy like `copy_rows`, from rows of `row_bytes` to float32 rows twice as wide."""
    for i in range(first, last):
        if i + ahead < last and addresses[i + ahead] != 0:
            _prefetch_row(addresses[i + ahead], row_bytes)
        source = addresses[i]
        if source == 0:
            continue
        row = target + (positions[i] if positions.size else i) * row_bytes * 2
        widen_row(row, source, row_bytes, widening)


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="gather")


def in_ranges(work: Callable[[int, int], None], count: int, threads: int) -> None:
    """Run work(first, last) over [0, count) on `threads` threads, of which the caller is one."""
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
    """Refuse rows that the kernels cannot turn into float32 without loss."""
    if dtype not in (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16):
        raise DatasetError(f"expected float32, float16 or bfloat16 feature rows, found {dtype}")


def widening_of(stored: np.dtype[Any], out: np.dtype[Any]) -> int:
    """Return how rows become those of an output: 0 as they are, else from which of 16 bits."""
    if stored == out:
        return 0
    return FROM_BFLOAT16 if stored == BFLOAT16 else FROM_FLOAT16


def _streamed_units(row_bytes: int, target: int) -> int:
    """Return the size of the units in which rows in order bypass the caches; 0: they do not.

    Rows of whole units follow on each other, so all lines between them are filled. Other rows store
    their first and last line plainly, which pays for longer rows only.
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
    """Copy the row at each address to row i of `out`, or to row `positions[i]`.

    Args:
        addresses: int64 (n,) into arrays that stay alive during the call; 0 leaves its row of `out`
            as it is.
        dtype: Dtype of the rows: that of `out`, or float16 or bfloat16 for a float32 `out`.
        out: (m, feature_dim), C-contiguous.
        positions: int64 (n,), below m; empty for 0, 1, ..., n - 1.
        threads: Threads that share the copy.
    """
    row_bytes = out.shape[1] * dtype.itemsize
    target = out.ctypes.data
    widening = mode = widening_of(dtype, out.dtype)
    if not widening and positions.size == 0 and addresses.size * row_bytes >= STREAM_BYTES:
        mode = _streamed_units(row_bytes, target)
    kernel = widen_rows if widening else copy_rows
    ahead = min(max(PREFETCH_BYTES // max(row_bytes, 1), 2), 64)
    if threads == 1:
        kernel(addresses, positions, target, row_bytes, 0, addresses.size, ahead, mode)
        return

    def work(begin: int, end: int) -> None:
        kernel(addresses, positions, target, row_bytes, begin, end, ahead, mode)

    in_ranges(work, addresses.size, threads)


class TableAddress(NamedTuple):
    """Where the rows of a C-contiguous table lie, found once."""

    address: int
    row_bytes: int
    num_rows: int

    @staticmethod
    def of(table: NDArray[Any]) -> "TableAddress":
        """Find a table, which must stay alive and where it is."""
        if not table.flags.c_contiguous:
            raise ValueError("expected a C-contiguous table of rows")
        row_bytes = table.dtype.itemsize * math.prod(table.shape[1:])
        return TableAddress(table.ctypes.data, row_bytes, table.shape[0])

    def addresses(self, ids: NDArray[np.int64], out: NDArray[np.int64]) -> NDArray[np.int64]:
        """Fill and return the address of each row `ids[i]`."""
        bad = _row_addresses(ids, self.address, self.row_bytes, self.num_rows, out)
        if bad >= 0:
            raise IndexError(f"expected row ids in [0, {self.num_rows}), found {ids[bad]}")
        return out


def addresses_of(
    table: NDArray[Any], ids: NDArray[np.int64], addresses: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Fill and return the address of each row `ids[i]` of a C-contiguous table."""
    return TableAddress.of(table).addresses(ids, addresses)


def check_output(ids: NDArray[np.int64], out: NDArray[Any], feature_dim: int) -> None:
    """Refuse an output that does not hold exactly the rows of `ids`."""
    if out.shape != (ids.size, feature_dim):
        raise ValueError(f"expected an output of {(ids.size, feature_dim)}, found {out.shape}")
    if not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError("expected a writeable C-contiguous output")


def gather_rows(
    table: NDArray[Any],
    ids: NDArray[np.int64],
    out: NDArray[Any],
    *,
    threads: int = 1,
) -> NDArray[Any]:
    """Write table[ids[i]] to out[i] and return `out`; rows of 16 bits are widened without loss.

    `table` (N, feature_dim) and `out` (n, feature_dim) are C-contiguous. An id outside the table
    raises IndexError.
    """
    check_storage(table.dtype)
    check_output(ids, out, table.shape[1])
    addresses = addresses_of(table, ids, np.empty(ids.size, np.int64))
    copy_from_addresses(addresses, table.dtype, out, threads=threads)
    return out


_AHEAD = 32
"""Distance in seeds at which labels are prefetched."""


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _take(values, ids, out):
    """Write values[ids[i]] to out[i]; return the position of the first id out of range, or -1."""
    base = values.ctypes.data
    for i in range(ids.size):
        if i + _AHEAD < ids.size:
            prefetch(base + ids[i + _AHEAD] * values.itemsize)  # never faults, whatever the id
        if ids[i] < 0 or ids[i] >= values.size:
            return i
        out[i] = values[ids[i]]
    return -1


def take_labels(labels: NDArray[Any], ids: NDArray[np.int64]) -> NDArray[Any]:
    """Return labels[ids] as a new array; labels are (num_nodes,) or (num_nodes, num_classes)."""
    if labels.ndim != 1:
        return np.ascontiguousarray(labels[ids])
    out = np.empty(ids.size, labels.dtype)
    bad = _take(labels, ids, out)
    if bad >= 0:
        raise IndexError(f"expected node ids in [0, {labels.size}), found {ids[bad]}")
    return out
