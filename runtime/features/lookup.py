"""From node ids to addresses and to per-source lists: the kernels in front of the copy."""

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from runtime.features.location import MAX_SOURCES, SOURCE_BITS, SOURCE_MASK, Codes
from runtime.features.tier import Dense
from runtime.intrinsics import prefetch

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
