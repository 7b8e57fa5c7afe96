"""Tiers and stores of feature rows: contracts, counters, and rows in this host's memory.

A tier is one kind of memory that rows are read from, by slot. A store reads rows by node id, from
its tiers.
"""

import typing
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.features.gather import (
    addresses_of,
    copy_from_addresses,
    in_ranges,
    widen_row,
    widening_of,
)
from gnnplan.runtime.graph.dataset import Graph, rows_within_types
from gnnplan.runtime.intrinsics import copy_bytes

Ids = NDArray[np.int64]
Rows = NDArray[Any]


@dataclass(slots=True)
class Counters:
    """Rows, bytes and seconds of one read, or of several added up."""

    rows: dict[str, int] = field(default_factory=dict)
    """Rows by source (own, host, peer, remote, disk, cache); a repeated id counts each time."""
    bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of those rows as their source stores them (CSR: columns and values of the entries)."""
    disk_reads: int = 0
    disk_read_bytes: int = 0
    """Bytes of those requests, in whole aligned blocks."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Elapsed seconds of the exchanges inside the read, by stage name."""

    def add_rows(self, kind: str, num_rows: int, num_bytes: int) -> None:
        """Add rows read from a source."""
        self.rows[kind] = self.rows.get(kind, 0) + num_rows
        self.bytes[kind] = self.bytes.get(kind, 0) + num_bytes

    def add_seconds(self, stage: str, seconds: float) -> None:
        """Add elapsed seconds to a stage."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds


def sum_counters(counters: Iterable[Counters]) -> Counters:
    """Return the sum of several counters."""
    out = Counters()
    for each in counters:
        for kind, rows in each.rows.items():
            out.add_rows(kind, rows, each.bytes[kind])
        for stage, seconds in each.seconds.items():
            out.add_seconds(stage, seconds)
        out.disk_reads += each.disk_reads
        out.disk_read_bytes += each.disk_read_bytes
    return out


class AbstractTier(ABC):
    """One kind of memory that feature rows are read from. Implementations are final."""

    kind: str
    """Name of the tier in the counters: own, peer, host, remote or disk."""

    @property
    @abstractmethod
    def resident_bytes(self) -> int:
        """Bytes of memory private to this rank that the tier holds now."""

    @abstractmethod
    def read(self, slots: Ids, positions: Ids, counts: Ids, out: Rows, counters: Counters) -> None:
        """Write the row in `slots[i]` to `out[positions[i]]`, and count it.

        Args:
            slots: int64 (n,), grouped by the tier's sources, in their order.
            positions: int64 (n,), distinct rows of `out`.
            counts: Number of slots of each of the tier's sources, in order.
            out: float32 (m, feature_dim), C-contiguous.
            counters: Counters that this read adds to.

        Raises:
            IndexError: A slot is outside the tier.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what the tier holds; it cannot be read afterwards."""


class Dense:
    """Rows of one array in memory: this rank's own, or the host's shared mapping.

    It is no `AbstractTier`: a store copies the rows of all arrays in one pass over the batch.
    """

    def __init__(self, kind: str, table: NDArray[Any], *, private: bool) -> None:
        """Wrap a table of rows; `private` says that the memory is this rank's alone."""
        self.kind = kind
        # A plain view: a memory map's subclass would slow every slice and confuse the kernels.
        self.table = np.asarray(table).view(np.ndarray)
        self.dtype, self.width = self.table.dtype, int(self.table.shape[1])
        self.row_bytes = self.dtype.itemsize * self.width
        self.resident_bytes = self.table.nbytes if private else 0

    def take(self, slots: Ids, rows: NDArray[Any], *, threads: int = 1) -> None:
        """Copy the row in `slots[i]` to `rows[i]`, of the table's dtype and width."""
        addresses = addresses_of(self.table, slots, np.empty(slots.size, np.int64))
        copy_from_addresses(addresses, self.dtype, rows, threads=threads)


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _fill_rows(indptr, indices, data, slots, positions, out, first, last):
    num_entries = 0
    for i in range(first, last):
        row = out[positions[i]]
        row[:] = 0
        begin, end = indptr[slots[i]], indptr[slots[i] + 1]
        for e in range(begin, end):
            column = indices[e]
            if column < 0 or column >= row.size:
                return -1
            row[column] = data[e]
        num_entries += end - begin
    return num_entries


class SparseHost(AbstractTier):
    """Rows of the host's CSR features, made dense when they are read."""

    kind = "host"
    dtype = np.dtype(np.float32)

    def __init__(
        self,
        indptr: NDArray[np.int64],
        indices: NDArray[np.int32] | NDArray[np.int64],
        data: NDArray[Any],
        width: int,
        *,
        threads: int = 1,
    ) -> None:
        self._arrays = tuple(np.asarray(a).view(np.ndarray) for a in (indptr, indices, data))
        self.width = width
        self._threads = threads
        self._entry_bytes = indices.dtype.itemsize + data.dtype.itemsize

    @property
    def resident_bytes(self) -> int:
        """Zero bytes: the mapping is shared."""
        return 0

    def read(self, slots: Ids, positions: Ids, counts: Ids, out: Rows, counters: Counters) -> None:
        """Read rows as `AbstractTier.read` says; counted bytes are those of the entries."""
        del counts
        indptr, indices, data = self._arrays
        num_rows = indptr.shape[0] - 1
        if slots.size and not (slots.min() >= 0 and slots.max() < num_rows):
            raise IndexError(f"expected rows in [0, {num_rows}), found {slots.max()}")
        entries: list[int] = []

        def work(first: int, last: int) -> None:
            args = (indptr, indices, data, slots, positions, out, first, last)
            entries.append(int(_fill_rows(*args)))

        in_ranges(work, slots.size, self._threads)
        if min(entries) < 0:
            raise DatasetError(f"x_indices: expected columns in [0, {out.shape[1]})")
        counters.add_rows(self.kind, slots.size, sum(entries) * self._entry_bytes)

    def take(self, slots: Ids, rows: Rows, *, threads: int = 1) -> None:
        """Fill the row in `slots[i]` into `rows[i]`, on the tier's threads."""
        del threads
        self.read(slots, np.arange(slots.size), np.array([slots.size]), rows, Counters())

    def close(self) -> None:
        """Drop the mapping."""
        self._arrays = tuple(np.empty(1, a.dtype) for a in self._arrays)


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _copy_type(base, row_bytes, widening, number, node_type, row_of, slots, positions, out):
    """Copy the rows of the nodes of one type; return how many there are.

    Its table begins at address `base`, and `out` (m, bytes) are the bytes of the output;
    `widening` is that of `widening_of`.
    """
    target, width = out.ctypes.data, out.shape[1]
    used = 2 * row_bytes if widening else row_bytes
    count = 0
    for i in range(slots.shape[0]):
        if node_type[slots[i]] == number:
            source, row = base + row_of[slots[i]] * row_bytes, target + positions[i] * width
            if widening:
                widen_row(row, source, row_bytes, widening)
            else:
                copy_bytes(row, source, row_bytes)
            out[positions[i], used:] = 0
            count += 1
    return count


class TypedHost(AbstractTier):
    """Rows of the host's table per node type, by node, padded with zeros to the widest one."""

    kind = "host"

    def __init__(self, tables: Sequence[NDArray[Any]], node_type: NDArray[Any]) -> None:
        """Index the rows of tables of one dtype by type, each in order of node id."""
        self._tables = [np.ascontiguousarray(table).view(np.ndarray) for table in tables]
        self.dtype = self._tables[0].dtype
        self._node_type = np.ascontiguousarray(node_type).view(np.ndarray)
        self._row_of = rows_within_types(self._node_type, len(self._tables))
        self.width = max(int(table.shape[1]) for table in self._tables)
        self.shape = (len(self._node_type), self.width)

    @classmethod
    def of(cls, graph: Graph) -> "TypedHost":
        """Take a dataset's tables; DatasetError says that it has none."""
        if not graph.x_by_type or graph.node_type is None:
            raise DatasetError(f"{graph.name}: expected a feature table per node type, found none")
        return cls([graph.x_by_type[name] for name in graph.meta.node_types], graph.node_type)

    def __getitem__(self, part: slice) -> Rows:
        """Return the rows of a range of nodes, as an array of all rows would."""
        ids = np.arange(*part.indices(self.shape[0]))
        rows = np.empty((ids.size, self.width), self.dtype)
        self.take(ids, rows)
        return rows

    @property
    def resident_bytes(self) -> int:
        """Bytes of the index from node to row."""
        return self._row_of.nbytes

    def read(self, slots: Ids, positions: Ids, counts: Ids, out: Rows, counters: Counters) -> None:
        """Read rows as `AbstractTier.read` says; a type's bytes are those of its own columns."""
        del counts
        if slots.size and not (slots.min() >= 0 and slots.max() < self.shape[0]):
            raise IndexError(f"expected node ids from 0 to {self.shape[0] - 1}")
        widening, room = widening_of(self.dtype, out.dtype), out.view(np.uint8)
        for number, table in enumerate(self._tables):
            row_bytes = table.shape[1] * table.dtype.itemsize
            where = (self._node_type, self._row_of, slots, positions, room)
            rows = int(_copy_type(table.ctypes.data, row_bytes, widening, number, *where))
            counters.add_rows(self.kind, rows, rows * row_bytes)

    def take(self, slots: Ids, rows: Rows, *, threads: int = 1) -> None:
        """Fill the row of node `slots[i]` into `rows[i]`."""
        del threads
        self.read(slots, np.arange(slots.size), np.array([slots.size]), rows, Counters())

    def close(self) -> None:
        """Drop the mappings."""
        self._tables = []


class AbstractFeatureStore(ABC):
    """Feature rows by global node id. Implementations are final and wrap one another."""

    feature_dim: int

    @abstractmethod
    def read(self, ids: NDArray[np.int64], out: NDArray[Any]) -> Counters:
        """Write the features of node `ids[i]` to `out[i]`; rows are widened without loss.

        Where rows lie with other ranks the call is collective: all ranks read equally often.

        Args:
            ids: int64 (n,), from 0 to num_nodes - 1; may repeat, may be empty.
            out: (n, feature_dim), C-contiguous; float32, or the type that all rows are stored in.

        Raises:
            IndexError: An id is outside the graph.
        """

    @property
    @abstractmethod
    def resident_bytes(self) -> int:
        """Bytes of memory private to this rank that the store holds now."""

    @abstractmethod
    def close(self) -> None:
        """Give back files, threads and process groups."""


Tiers = list[tuple[AbstractTier, list[int]]]
"""Tiers, each with the numbers of its sources in the tier's order."""

Served = Dense | SparseHost | TypedHost
"""Rows that a rank serves to the others by slot, of one dtype and width on all ranks."""
