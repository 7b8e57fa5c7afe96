"""Location tables: for each node, which source holds its row and in which slot.

One code per node, `slot << 8 | source number`; the number counts in the plan's list of sources.
The planner writes the table, a read looks at nothing else. Slots mean: own, a row of this rank's
own array; peer, a row of that rank's own array; host, remote and disk, the node's row in the
dataset.
"""

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.plan.schema import Source

SOURCE_BITS = 8
MAX_SOURCES = 1 << SOURCE_BITS
SOURCE_MASK = MAX_SOURCES - 1
IN_DATASET = ("host", "remote", "disk")
"""Kinds whose slot is the node's row in the dataset."""
_NO_IDS = np.empty(0, np.int64)

Codes = NDArray[np.uint32] | NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class LocationTable:
    """Where each node's row lives, for one rank."""

    codes: Codes
    """Shape (num_nodes,): slot << 8 | source number."""
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
        """Number of nodes the table locates."""
        return int(self.codes.shape[0])

    def decode(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Source number and slot of each node, both of shape (n,)."""
        codes = self.codes[ids]
        return (codes & SOURCE_MASK).astype(np.uint8), (codes >> SOURCE_BITS).astype(np.int64)

    def count(self) -> NDArray[np.int64]:
        """Nodes per source number, shape (256,)."""
        return _count_sources(self.codes)

    def check(self, own_ids: Mapping[int, NDArray[np.int64]], rank: int) -> None:
        """Check that every code addresses a slot that holds that very node (formulas 1.2, Test).

        Args:
            own_ids: global id in each own slot, by rank; this rank's and every peer's.
            rank: the rank whose table this is.

        Raises:
            PlanError: names the first node that is located wrongly.
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
    """Pack source numbers and slots into codes; uint32 where every slot fits in 24 bits.

    Args:
        numbers: shape (n,), values in [0, 256).
        slots: shape (n,), values in [0, 2**56).
        wide: True for uint64, False for uint32; None chooses by the largest slot.

    Raises:
        ValueError: a number or a slot does not fit.
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
    """Change every code's source number, in place.

    Args:
        codes: shape (n,).
        numbers: the new number of each source, in [0, 256); shape (256,).
    """
    _renumber(codes, numbers.astype(codes.dtype))


def host_table(num_nodes: int) -> LocationTable:
    """Every node on the host at its own row: features without a cache, and topology today."""
    rows = np.arange(num_nodes, dtype=np.int64)
    return LocationTable(encode(np.zeros(num_nodes, np.uint8), rows), [Source(kind="host")])


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
    """First node of a source whose slot does not hold it, or -1."""
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
