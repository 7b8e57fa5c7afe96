"""Which row lies in which slot of a dynamic cache, and who must leave: LRU and clock, per batch.

A batch touches each of its distinct rows once (formulas 8.7 [A7]), all at the same moment: a row
touched by a batch never leaves in favour of another row of it. So where a batch has more distinct
rows than there are slots, the cache keeps its hits and fills up with the first misses.

LRU evicts the row whose last batch is longest ago; rows of one batch leave in the order hits, then
misses, each in the order of the batch. It keeps a log of touches, oldest first: an entry counts
where it is the last one of its slot, which the slot remembers. A touch so writes two places, one of
them beside the last; a list of neighbours in age would write six, all over memory
(DEC-80). Clock (second chance) goes round the slots: a row that
was hit since the hand last passed is spared once; a row just loaded is not yet hit.
"""

import typing
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from runtime.features.location import SOURCE_MASK, Codes

USED, NEXT, OLDEST, HAND, STATE_LENGTH = 0, 1, 2, 3, 4
LOG = 3
"""Touches the log has room for, per slot. A batch adds one per slot at most, and what is left after
clearing away the entries that no longer count is one per slot, so a clearing serves as many touches
as there are slots."""
_EMPTY = -1
"""In `slot_of`: not cached. Below it: -2 - r, a miss of this batch whose row is read as row r."""


@dataclass(slots=True)
class Decision:
    """What one read is to do."""

    where: NDArray[np.int64]
    """Shape (n,); row i comes from row where[i] of the read below, or, below 0, slot ~where[i]."""
    ids: NDArray[np.int64]
    """Ids to read below: those that bypass the cache (with repeats) and each missing id once."""
    rows: NDArray[np.int64]
    """Rows of that read which the cache keeps."""
    slots: NDArray[np.int64]
    """The slot that each of them goes to."""
    num_served: int
    """How many of the n rows needed no read: hits, and repeats of a miss."""
    num_touched: int
    """Distinct ids looked up."""
    num_hits: int
    """Distinct ids found."""


class Slots:
    """The directory of a cache of `num_slots` rows of a graph; holds no rows itself."""

    def __init__(self, num_nodes: int, num_slots: int, *, clock: bool) -> None:
        self.num_slots = num_slots
        self._clock = clock
        self._slot_of = np.full(num_nodes, _EMPTY, np.int32)
        self.node_of = np.full(num_slots, -1, np.int64)
        """Shape (num_slots,); the node in each slot, -1 in an empty one."""
        places = LOG * num_slots
        self._stamp = np.full(num_slots, -1, np.int32 if places < 1 << 31 else np.int64)
        """Of each slot its last touch: the batch under clock, the place in the log under LRU."""
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
        """Look up a batch, touch what it finds, and give slots to what it misses.

        Args:
            ids: shape (n,); repeated ids are allowed.
            codes: the location table's.
            bypass: shape (256,); source numbers whose rows never enter the cache.

        Raises:
            IndexError: an id is outside the graph; nothing has changed.
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
        """The stamp from which on a slot is one that this batch has touched."""
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
    """Move the entries that count to the front, in their order."""
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
    ids,
    codes,
    bypass,
    slot_of,
    stamp,
    log,
    hit,
    state,
    mark,
    clock,
    where,
    below,
    missing,
):
    """Sort ids into hits, misses and bypassing ones; touch the hits.

    Returns the position of the first bad id or -1, the numbers of rows to read, of distinct misses
    (their rows are listed in `missing`), of rows that need no read, and of distinct hits.
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
    """A slot that is free now, or -1 where this batch has touched them all."""
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
        if kept == m:  # the first one without a slot is followed by none with
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
