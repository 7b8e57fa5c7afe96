"""A feature store with a cache in front that fills itself: `cache_slots` says what it keeps.

It wraps another store. A read looks its rows up, reads what is missing (and this rank's own rows,
which never enter the cache) from the store below in one call, and keeps the missing rows as far as
the policy has slots for them. The call below is made even when nothing is missing, because with
other ranks in the plan it is collective.

Reads are serialised: which row a slot holds depends on their order, the rows returned never do.
"""

import threading
import typing
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from runtime.errors import PlanError
from runtime.features.abstract import AbstractFeatureStore
from runtime.features.cache_slots import Decision, Slots
from runtime.features.counters import Counters
from runtime.features.gather import check_output, check_storage, copy_from_addresses
from runtime.features.location import MAX_SOURCES, LocationTable

POLICIES = ("lru", "clock")


class CachedFeatureStore(AbstractFeatureStore):
    """Another store's rows, `num_slots` of them kept at hand."""

    def __init__(
        self,
        below: AbstractFeatureStore,
        location: LocationTable,
        *,
        rank: int,
        policy: str,
        num_slots: int,
        dtype: Any = np.float32,
        threads: int = 1,
    ) -> None:
        """Put an empty cache in front of a store.

        Args:
            below: the store to read from; closed with this one.
            location: its table, which says what this rank owns.
            rank: this rank.
            policy: lru | clock.
            num_slots: rows to keep, at least 1.
            dtype: float32, or float16 where every row below holds float16 values.
            threads: threads of one copy.

        Raises:
            PlanError: an unknown policy, or no slots.
        """
        if policy not in POLICIES:
            raise PlanError(f"expected a cache policy among {', '.join(POLICIES)}, found {policy}")
        if num_slots < 1:
            raise PlanError(f"expected a cache of at least one row, found {num_slots}")
        check_storage(np.dtype(dtype))
        self.feature_dim = below.feature_dim
        self.below = below
        self._codes = np.asarray(location.codes).view(np.ndarray)
        self._bypass = np.zeros(MAX_SOURCES, np.bool_)
        for number, source in enumerate(location.sources):
            own = source.kind == "own" or (source.kind == "peer" and source.rank == rank)
            self._bypass[number] = own
        num_slots = min(num_slots, location.num_nodes)
        self._slots = Slots(location.num_nodes, num_slots, clock=policy == "clock")
        self._table = np.empty((num_slots, self.feature_dim), dtype)
        self._staging = np.empty((0, self.feature_dim), np.float32)
        self._threads = threads
        self._lock = threading.Lock()
        self.num_touched = 0
        """Distinct rows looked up in the cache so far, summed over reads."""
        self.num_hits = 0
        """Those of them that it held."""

    @property
    def resident_bytes(self) -> int:
        """The store below, the kept rows, the directory and the staging buffer."""
        held = self._table.nbytes + self._slots.nbytes + self._staging.nbytes
        return self.below.resident_bytes + held

    def read(self, ids: NDArray[np.int64], out: NDArray[np.float32]) -> Counters:
        """See `AbstractFeatureStore.read`; source `cache` counts hits and repeats of a miss."""
        check_output(ids, out, self.feature_dim)
        with self._lock:
            decision = self._slots.decide(ids, self._codes, self._bypass)
            direct = decision.ids.size == ids.size  # nothing to merge: read where it belongs
            try:
                rows = out if direct else self._staged(decision.ids.size)
                counters = self.below.read(decision.ids, rows)
            except BaseException:
                self._slots.clear()  # the directory names rows that never came
                raise
            if not direct:
                self._merge(decision, rows, out)
            self._keep(decision, rows)
            self.num_touched += decision.num_touched
            self.num_hits += decision.num_hits
        row_bytes = self.feature_dim * self._table.dtype.itemsize
        counters.add_rows("cache", decision.num_served, decision.num_served * row_bytes)
        return counters

    def cached(self) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """The nodes kept now and their rows, copied: for tests and reports."""
        with self._lock:
            slots = np.flatnonzero(self._slots.node_of >= 0)
            return self._slots.node_of[slots], self._table[slots]

    def _staged(self, num_rows: int) -> NDArray[np.float32]:
        if self._staging.shape[0] < num_rows:
            self._staging = np.empty((num_rows + num_rows // 4, self.feature_dim), np.float32)
        return self._staging[:num_rows]

    def _merge(
        self, decision: Decision, rows: NDArray[np.float32], out: NDArray[np.float32]
    ) -> None:
        """Copy the rows read and the rows kept to their places in the batch."""
        hit, read = np.empty((2, decision.where.size), np.int64)
        bases = (self._table.ctypes.data, self._table.strides[0], rows.ctypes.data, rows.strides[0])
        same = self._table.dtype == rows.dtype
        _locate(decision.where, *bases, hit, hit if same else read)
        copy_from_addresses(hit, self._table.dtype, out, threads=self._threads)
        if not same:
            copy_from_addresses(read, rows.dtype, out, threads=self._threads)

    def _keep(self, decision: Decision, rows: NDArray[np.float32]) -> None:
        if self._table.dtype != rows.dtype:
            self._table[decision.slots] = rows[decision.rows]
            return
        addresses = decision.rows * rows.strides[0] + rows.ctypes.data
        copy_from_addresses(
            addresses, rows.dtype, self._table, positions=decision.slots, threads=self._threads
        )

    def close(self) -> None:
        """Let go of the rows and close the store below."""
        with self._lock:
            self._slots = Slots(0, 0, clock=False)
            self._table, self._staging = self._table[:0].copy(), self._staging[:0].copy()
        self.below.close()


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _locate(where, table, table_stride, rows, rows_stride, hit, read):
    """Address of each row, in the list of its dtype (which may be one); 0 in the other."""
    for i in range(where.size):
        hit[i] = read[i] = 0
        if where[i] < 0:
            hit[i] = table + ~where[i] * table_stride
        else:
            read[i] = rows + where[i] * rows_stride
