"""Location tables: which source holds each node's row, and in which slot of it.

The planner writes one code per node, `slot << 8 | source number`; the number counts in the plan's
list of sources. A slot of an own or a peer source is a row of that rank's own array. A slot of a
host, remote or disk source is the node's row in the dataset. A read decodes its ids, finds the
addresses of rows in memory, and sorts the others by source.
"""

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.intrinsics import prefetch
from gnnplan.runtime.plan.schema import Source

SOURCE_BITS = 8
MAX_SOURCES = 1 << SOURCE_BITS
SOURCE_MASK = MAX_SOURCES - 1
IN_DATASET = ("host", "remote", "disk")
"""Kinds of sources whose slot is the node's row in the dataset."""
_NO_IDS = np.empty(0, np.int64)

Codes = NDArray[np.uint32] | NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class LocationTable:
    """Source and slot of every node's row, for one rank."""

    codes: Codes
    """uint32 or uint64 (num_nodes,): `slot << 8 | source number`."""
    sources: Sequence[Source]

    def __post_init__(self) -> None:
        if self.codes.ndim != 1:
            raise PlanError(f"location table: expected one axis, found shape {self.codes.shape}")
        if not 0 < len(self.sources) <= MAX_SOURCES:
            raise PlanError(
                f"location table: expected 1 to {MAX_SOURCES} sources, found {len(self.sources)}"
            )

    @property
    def num_nodes(self) -> int:
        """Number of nodes that the table locates."""
        return int(self.codes.shape[0])

    def decode(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return source numbers (uint8) and slots (int64) of nodes, both of shape (n,)."""
        codes = self.codes[ids]
        return (codes & SOURCE_MASK).astype(np.uint8), (codes >> SOURCE_BITS).astype(np.int64)

    def count(self) -> NDArray[np.int64]:
        """Return the number of nodes of each source, int64 (256,)."""
        return _count_sources(self.codes)

    def own_sources(self, rank: int) -> NDArray[np.bool_]:
        """Return which sources, of 256 numbers, are the rank's own rows."""
        found = np.zeros(MAX_SOURCES, np.bool_)
        for number, source in enumerate(self.sources):
            found[number] = source.kind == "own" or (source.kind == "peer" and source.rank == rank)
        return found

    def check(self, own_ids: Mapping[int, NDArray[np.int64]], rank: int) -> None:
        """Check that every code addresses a slot that holds that very node (formulas 1.2, Test).

        `own_ids` has the node in each own slot of this rank and every peer. PlanError names the
        first node that is located wrongly.
        """
        numbers = np.flatnonzero(self.count())
        if numbers.size and numbers[-1] >= len(self.sources):
            node = int(np.flatnonzero((self.codes & SOURCE_MASK) == numbers[-1])[0])
            raise PlanError(
                f"location table of rank {rank}: node {node} names source {numbers[-1]}, "
                f"the plan has {len(self.sources)}; plan again"
            )
        for number in numbers:
            self._check_source(int(number), own_ids, rank)

    def _check_source(
        self, number: int, own_ids: Mapping[int, NDArray[np.int64]], rank: int
    ) -> None:
        source = self.sources[number]
        in_dataset = source.kind in IN_DATASET
        holder = rank if source.kind == "own" else source.rank
        if not in_dataset and holder not in own_ids:
            raise PlanError(
                f"location table of rank {rank}: source {number} is {source.kind} rank {holder}, "
                "which has no own rows; plan again"
            )
        stored = _NO_IDS if in_dataset else np.ascontiguousarray(own_ids[holder], np.int64)
        node = _first_wrong(self.codes, number, stored, in_dataset)
        if node < 0:
            return
        slot = int(self.codes[node]) >> SOURCE_BITS
        if in_dataset:
            where = f"row {slot}"
        else:
            held = f"node {stored[slot]}" if slot < stored.size else "nothing"
            where = f"slot {slot} of {stored.size}, which holds {held}"
        raise PlanError(
            f"location table of rank {rank}: node {node} points to {source.kind} {where}; "
            "plan again"
        )


def encode(
    numbers: NDArray[np.integer], slots: NDArray[np.integer], *, wide: bool | None = None
) -> Codes:
    """Pack source numbers, up to 255, and slots into codes.

    Codes are uint64 if `wide`, else uint32; None takes uint32 where every slot fits in 24 bits.
    """
    highest = int(slots.max(initial=0))
    if wide is None:
        wide = highest >= 1 << (32 - SOURCE_BITS)
    bits = (64 if wide else 32) - SOURCE_BITS
    if highest >= 1 << bits or int(slots.min(initial=0)) < 0:
        raise ValueError(f"expected slots in [0, 2**{bits}), found up to {highest}")
    if int(numbers.max(initial=0)) >= MAX_SOURCES or int(numbers.min(initial=0)) < 0:
        raise ValueError(f"expected source numbers in [0, {MAX_SOURCES})")
    kind = np.uint64 if wide else np.uint32
    codes: Codes = slots.astype(np.uint64) if wide else slots.astype(np.uint32)
    codes <<= kind(SOURCE_BITS)
    np.bitwise_or(codes, numbers, out=codes, dtype=kind, casting="unsafe")  # checked above
    return codes


def renumber(codes: Codes, numbers: NDArray[np.integer]) -> None:
    """Change every code's source number in place; `numbers` (256,) has the new ones."""
    _renumber(codes, numbers.astype(codes.dtype))


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _renumber(codes, numbers):
    mask = numbers.dtype.type(SOURCE_MASK)
    for i in range(codes.size):
        number = codes[i] & mask
        codes[i] = (codes[i] ^ number) | numbers[number]


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _count_sources(codes):
    counts = np.zeros(MAX_SOURCES, np.int64)
    for i in range(codes.size):
        counts[np.int64(codes[i]) & SOURCE_MASK] += 1
    return counts


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _first_wrong(codes, number, stored, in_dataset):
    """Return the first node of a source whose slot does not hold it, or -1."""
    for node in range(codes.size):
        code = np.int64(codes[node])
        if code & SOURCE_MASK != number:
            continue
        slot = code >> SOURCE_BITS
        if in_dataset:
            if slot != node:
                return node
        elif slot < 0 or slot >= stored.size or stored[slot] != node:
            return node
    return -1


_AHEAD = 24
"""Distance in ids at which codes are prefetched."""


def scratch_bytes(num_ids: int) -> int:
    """Return the bytes of a thread's working arrays once they have grown for so many ids.

    >>> scratch_bytes(100)
    4125
    """
    return _scratch_size(num_ids) * (1 + 4 * 8)


def _scratch_size(num_ids: int) -> int:
    return num_ids + num_ids // 4


class Scratch:
    """Working arrays of one thread for up to `size` ids."""

    @staticmethod
    def grown(num_ids: int) -> "Scratch":
        """Make arrays for so many ids and for batches a little larger."""
        return Scratch(_scratch_size(num_ids))

    def __init__(self, size: int) -> None:
        self.size = size
        self.numbers = np.empty(size, np.uint8)
        self.slots = np.empty(size, np.int64)
        self.addresses = np.empty(size, np.int64)
        """Address of each id's row; 0 where it is not in memory."""
        self.lane_slots = np.empty(size, np.int64)
        """Slots sorted by source."""
        self.positions = np.empty(size, np.int64)
        """Position in the batch of each of `lane_slots`."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.numbers.nbytes + 4 * self.slots.nbytes


@dataclass(frozen=True, slots=True)
class DenseGroup:
    """Arrays of one dtype in memory, indexed by source number."""

    dtype: np.dtype[Any]
    numbers: list[int]
    bases: NDArray[np.int64]
    """Address of each source's row 0, int64 (256,); 0 for a source outside the group."""
    row_bytes: NDArray[np.int64]
    num_rows: NDArray[np.int64]


def look_up(codes: Codes, ids: NDArray[np.int64], scratch: Scratch) -> NDArray[np.int64]:
    """Decode ids into the scratch; return the number of ids of each source, int64 (256,)."""
    counts = np.zeros(MAX_SOURCES, np.int64)
    codes = np.asarray(codes).view(np.ndarray)
    bad = _look_up(codes, codes.ctypes.data, ids, scratch.numbers, scratch.slots, counts)
    if bad >= 0:
        raise IndexError(f"expected node ids in [0, {codes.size}), found {ids[bad]}")
    return counts


def locate(group: DenseGroup, num_ids: int, scratch: Scratch) -> NDArray[np.int64]:
    """Return the address of each decoded row of a group, 0 for others; a view of the scratch."""
    addresses = scratch.addresses[:num_ids]
    bad = _locate(
        scratch.numbers, scratch.slots, group.bases, group.row_bytes, group.num_rows, addresses
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
    """Sort slots and positions of the decoded ids by source, in batch order within each.

    `counts` comes from `look_up`; sources outside `order` are left out. Returns the begin of each
    source of `order`, and the end: int64 (len(order) + 1,).
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
    """Decode each id's code; return the position of the first id out of range, or -1."""
    for i in range(ids.size):
        if i + _AHEAD < ids.size:
            # A prefetch cannot fault, whatever the id.
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
