"""A feature store with a dynamic cache in front of another store: LRU or clock, batch by batch.

A read looks its rows up, reads the missing ones and this rank's own rows, which never enter the
cache, from the store below in one call, and keeps missing rows as far as the policy has slots for
them. The call is made even for nothing, because with other ranks in the plan it is collective.
Reads are serialised: their order decides which rows a slot holds, never which rows are returned.

A batch touches its distinct rows once (formulas 8.7 [A7]), all at the same moment: no row of a
batch leaves in favour of another one of it. A batch of more distinct rows than slots keeps its hits
and its first misses.

LRU evicts the row whose last batch is longest ago; rows of one batch leave as hits, then misses,
each in the batch's order. It keeps a log of touches, oldest first, of which each slot's last entry
counts (DEC-80). Clock (second chance) goes round the slots and spares once a row that was hit since
it last passed; a row just loaded is not yet hit.
"""

import threading
import typing
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.features.gather import check_output, check_storage, copy_from_addresses
from gnnplan.runtime.features.location import SOURCE_MASK, Codes, LocationTable
from gnnplan.runtime.features.tier import AbstractFeatureStore, Counters
from gnnplan.runtime.graph.format import convert_rows

USED, NEXT, OLDEST, HAND, STATE_LENGTH = 0, 1, 2, 3, 4
LOG = 3
"""Number of touches per slot that the log has room for.

A batch adds at most one per slot and clearing leaves one per slot, so a clearing serves as many
touches as there are slots.
"""
_EMPTY = -1
"""Value in `slot_of` of a node that is not cached; -2 - r is a miss of this batch, read as row
r."""


@dataclass(slots=True)
class Decision:
    """Plan of one read through the cache."""

    where: NDArray[np.int64]
    """int64 (n,): row i is row where[i] of the read below or, below 0, slot ~where[i]."""
    ids: NDArray[np.int64]
    """Ids to read below: bypassing ones, perhaps repeated, and each missing one once."""
    rows: NDArray[np.int64]
    slots: NDArray[np.int64]
    """Slots of the rows of that read which the cache keeps, listed in `rows`."""
    num_served: int
    """Number of the n rows that needed no read: hits, and repeats of a miss."""
    num_touched: int
    num_hits: int


class Slots:
    """Directory of a cache of `num_slots` rows of a graph, without the rows."""

    def __init__(self, num_nodes: int, num_slots: int, *, clock: bool) -> None:
        self.num_slots = num_slots
        self._clock = clock
        self._slot_of = np.full(num_nodes, _EMPTY, np.int32)
        self.node_of = np.full(num_slots, -1, np.int64)
        """Node in each slot (num_slots,), -1 in an empty one."""
        places = LOG * num_slots
        self._stamp = np.full(num_slots, -1, np.int32 if places < 1 << 31 else np.int64)
        """Last touch of each slot: its batch under clock, its place in the log under LRU."""
        self._log = np.full(0 if clock else places, -1, np.int32)
        self._hit = np.zeros(num_slots if clock else 0, np.uint8)
        self._state = np.zeros(STATE_LENGTH, np.int64)
        self._batch = 0
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the directory."""
        return sum(a.nbytes for a in vars(self).values() if isinstance(a, np.ndarray))

    def clear(self) -> None:
        """Forget every row."""
        self._slot_of[:] = _EMPTY
        self.node_of[:] = -1
        self._stamp[:] = -1
        self._state[:] = 0

    def decide(self, ids: NDArray[np.int64], codes: Codes, bypass: NDArray[np.bool_]) -> Decision:
        """Look up ids (n,), touch the hits and give slots to the misses outside `bypass`.

        An id outside the graph raises IndexError, and nothing has changed.
        """
        where, below = np.empty(ids.size, np.int64), np.empty(ids.size, np.int64)
        rows, slots = np.empty(ids.size, np.int64), np.empty(ids.size, np.int64)
        mark = self._begin()
        counts = _look_up(
            ids, codes, bypass, self._slot_of, self._stamp, self._log, self._hit, self._state,
            mark, self._clock, where, below, rows,
        )  # fmt: skip
        bad, num_below, num_missing, num_served, num_hits = counts
        if bad >= 0:
            raise IndexError(f"expected node ids in [0, {codes.size}), found {ids[bad]}")
        num_kept = _take_in(
            below, self._slot_of, self.node_of, self._stamp, self._log, self._hit, self._state,
            mark, self._clock, num_missing, rows, slots,
        )  # fmt: skip
        return Decision(
            where, below[:num_below], rows[:num_kept], slots[:num_kept], num_served,
            num_hits + num_missing, num_hits,
        )  # fmt: skip

    def _begin(self) -> int:
        """Return the stamp from which on a slot counts as touched by this batch."""
        if self._clock:
            self._batch += 1
            return self._batch
        if self._state[NEXT] + self.num_slots > self._log.size:
            _clear_log(self._log, self._stamp, self._state)
        return int(self._state[NEXT])


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _touch(slot, stamp, log, state):
    place = state[NEXT]
    stamp[slot] = place
    log[place] = slot
    state[NEXT] = place + 1


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _clear_log(log, stamp, state):
    kept = 0
    for place in range(state[OLDEST], state[NEXT]):
        slot = log[place]
        if stamp[slot] == place:
            stamp[slot] = kept
            log[kept] = slot
            kept += 1
    state[OLDEST], state[NEXT] = 0, kept


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _look_up(
    ids, codes, bypass, slot_of, stamp, log, hit, state, mark, clock, where, below, missing
):
    """Sort ids into hits, misses and bypassing ones; touch the hits.

    Returns the position of the first bad id or -1, and the numbers of rows to read, of distinct
    misses (whose rows `missing` lists), of rows that need no read, and of distinct hits.
    """
    for i in range(ids.size):
        if ids[i] < 0 or ids[i] >= codes.size:
            return i, 0, 0, 0, 0
    num_below = num_missing = num_served = num_hits = 0
    for i in range(ids.size):
        node = ids[i]
        slot = slot_of[node]
        if slot >= 0:
            where[i] = ~np.int64(slot)
            num_served += 1
            if stamp[slot] < mark:
                num_hits += 1
                if clock:
                    stamp[slot] = mark
                    hit[slot] = 1
                else:
                    _touch(slot, stamp, log, state)
        elif slot < _EMPTY:
            where[i] = -2 - np.int64(slot)
            num_served += 1
        else:
            where[i] = num_below
            below[num_below] = node
            if not bypass[np.int64(codes[node]) & SOURCE_MASK]:
                slot_of[node] = -2 - num_below
                missing[num_missing] = num_below
                num_missing += 1
            num_below += 1
    return -1, num_below, num_missing, num_served, num_hits


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _victim(stamp, log, hit, state, mark, clock):
    """Return a slot that is free now, or -1 where this batch has touched them all."""
    if state[USED] < stamp.size:
        state[USED] += 1
        return state[USED] - 1
    if not clock:
        while state[OLDEST] < mark:
            place = state[OLDEST]
            state[OLDEST] = place + 1
            if stamp[log[place]] == place:
                return log[place]
        return -1
    for _ in range(2 * stamp.size):
        slot = state[HAND]
        state[HAND] = (slot + 1) % stamp.size
        if stamp[slot] == mark:
            continue
        if not hit[slot]:
            return slot
        hit[slot] = 0
    return -1


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _take_in(
    below, slot_of, node_of, stamp, log, hit, state, mark, clock, num_missing, rows, slots
):
    """Give slots to the misses in order, as far as they go; return how many got one."""
    kept = 0
    for m in range(num_missing):
        row = rows[m]
        node = below[row]
        slot = -1
        if kept == m:  # once a miss gets no slot, no later one does
            slot = _victim(stamp, log, hit, state, mark, clock)
        if slot < 0:
            slot_of[node] = _EMPTY
            continue
        if node_of[slot] >= 0:
            slot_of[node_of[slot]] = _EMPTY
        node_of[slot] = node
        slot_of[node] = slot
        if clock:
            stamp[slot] = mark
            hit[slot] = 0
        else:
            _touch(slot, stamp, log, state)
        rows[kept] = row
        slots[kept] = slot
        kept += 1
    return kept


POLICIES = ("lru", "clock")


class CachedFeatureStore(AbstractFeatureStore):
    """Store that keeps `num_slots` rows of another store at hand."""

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
        """Put an empty cache in front of a store, which is closed with it.

        The location table says what this rank owns. Rows are kept as float32, or in 16 bits where
        every row below holds such values.
        """
        if policy not in POLICIES:
            raise PlanError(f"expected a cache policy among {', '.join(POLICIES)}, found {policy}")
        if num_slots < 1:
            raise PlanError(f"expected a cache of at least one row, found {num_slots}")
        check_storage(np.dtype(dtype))
        self.feature_dim = below.feature_dim
        self.below = below
        self._codes = np.asarray(location.codes).view(np.ndarray)
        self._bypass = location.own_sources(rank)
        num_slots = min(num_slots, location.num_nodes)
        self._slots = Slots(location.num_nodes, num_slots, clock=policy == "clock")
        self._table = np.empty((num_slots, self.feature_dim), dtype)
        self._staging = np.empty((0, self.feature_dim), np.float32)
        self._threads = threads
        self._lock = threading.Lock()
        self.num_touched = 0
        self.num_hits = 0

    @property
    def resident_bytes(self) -> int:
        """Bytes of the store below, the kept rows, the directory and the staging buffer."""
        held = self._table.nbytes + self._slots.nbytes + self._staging.nbytes
        return self.below.resident_bytes + held

    def read(self, ids: NDArray[np.int64], out: NDArray[Any]) -> Counters:
        """Read rows as the contract says; source `cache` counts hits and repeats of a miss."""
        check_output(ids, out, self.feature_dim)
        with self._lock:
            decision = self._slots.decide(ids, self._codes, self._bypass)
            direct = decision.ids.size == ids.size  # nothing to merge: read into the output
            try:
                rows = out if direct else self._staged(decision.ids.size, out.dtype)
                counters = self.below.read(decision.ids, rows)
            except BaseException:
                self._slots.clear()  # rows that it lists were never read
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
        """Return copies of the kept nodes and rows, for tests and reports."""
        with self._lock:
            slots = np.flatnonzero(self._slots.node_of >= 0)
            return self._slots.node_of[slots], self._table[slots]

    def _staged(self, num_rows: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        if self._staging.shape[0] < num_rows or self._staging.dtype != dtype:
            self._staging = np.empty((num_rows + num_rows // 4, self.feature_dim), dtype)
        return self._staging[:num_rows]

    def _merge(self, decision: Decision, rows: NDArray[Any], out: NDArray[Any]) -> None:
        hit, read = np.empty((2, decision.where.size), np.int64)
        bases = (self._table.ctypes.data, self._table.strides[0], rows.ctypes.data, rows.strides[0])
        same = self._table.dtype == rows.dtype
        _locate(decision.where, *bases, hit, hit if same else read)
        copy_from_addresses(hit, self._table.dtype, out, threads=self._threads)
        if not same:
            copy_from_addresses(read, rows.dtype, out, threads=self._threads)

    def _keep(self, decision: Decision, rows: NDArray[Any]) -> None:
        if self._table.dtype != rows.dtype:
            self._table[decision.slots] = convert_rows(rows[decision.rows], self._table.dtype)
            return
        addresses = decision.rows * rows.strides[0] + rows.ctypes.data
        copy_from_addresses(
            addresses, rows.dtype, self._table, positions=decision.slots, threads=self._threads
        )

    def close(self) -> None:
        """Release the rows and close the store below."""
        with self._lock:
            self._slots = Slots(0, 0, clock=False)
            self._table, self._staging = self._table[:0].copy(), self._staging[:0].copy()
        self.below.close()


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _locate(where, table, table_stride, rows, rows_stride, hit, read):
    """Fill each row's address into the list of its dtype (which may be one), 0 into the other."""
    for i in range(where.size):
        hit[i] = read[i] = 0
        if where[i] < 0:
            hit[i] = table + ~where[i] * table_stride
        else:
            read[i] = rows + where[i] * rows_stride
