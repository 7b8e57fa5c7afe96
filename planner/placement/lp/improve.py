"""Small exchanges after rounding: a copy added, swapped for another, or read from elsewhere.

Rounding leaves gaps of less than an item per device and bucket, and uneven loads. Each pass tries,
for every device, the items that would gain most against the copies that are missed least, and keeps
what lowers a sum of powers of the objective's rows, which comes ever closer to their maximum. Only
moves that keep every budget are tried; the compiled loops change `loads` [rows of the objective] by
what the clique's reads of a move's items weigh, and take back what does not lower the sum.

Of few items every one is tried against every other (`exchange`). Of many, long queues change place
front against front, and the host's items are chosen anew, until the objective is near enough to its
bound (`exchange_queues`).
"""

import itertools
import typing
from dataclasses import replace
from typing import Any, cast

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.placement.costs import DISK, HOST, OWN, PEER, PLACES, ObjectiveRows
from gnnplan.planner.placement.evaluate import read_bytes
from gnnplan.planner.placement.placement import ItemPlacement, Placement, fill_host
from gnnplan.planner.placement.problem import PlacementProblem


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _move(loads, weights, own, code, reads, kind, clique, c, i, sign):
    """Add (or take away) what clique c's reads of item i load."""
    t = kind[i]
    for g in range(clique.size):
        if clique[g] == c:
            s = 0 if own[g, i] else code[c, i]
            x = sign * reads[g, i]
            for k in range(loads.size):
                loads[k] += weights[k, t, g, s] * x


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _sum_of_powers(loads, power, top):
    total, most = 0.0, 0.0
    for k in range(loads.size):
        x = loads[k] / top if top > 0 else 0.0
        most = max(most, x)
        y = x * x
        y *= y
        y *= y
        if power == 32:
            y *= y
            y *= y
        total += y
    return most if power == 0 else total


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _better(new, old, power):
    top = 0.0
    for k in range(old.size):
        top = max(top, old[k])
    a, b = _sum_of_powers(new, power, top), _sum_of_powers(old, power, top)
    if power > 0:
        return a < b * (1 - 1e-10)
    if a < b * (1 - 1e-12):
        return True
    return a <= b * (1 + 1e-13) and _sum_of_powers(new, 8, top) < _sum_of_powers(old, 8, top) * (
        1 - 1e-10
    )


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _holders(own, clique, c, i):
    count = 0
    for g in range(clique.size):
        if clique[g] == c and own[g, i]:
            count += 1
    return count


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _needed_across(own, code, clique, c, i):
    """Whether another clique reads item i across and only clique c's last copy serves it."""
    needed = False
    for d in range(code.shape[0]):
        needed |= d != c and code[d, i] == 2
    return needed


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _exchange(
    g, wanted, missed, power, loads, weights, own, code, far, reads, size, free, kind, clique
):
    c = clique[g]
    trial = np.empty_like(loads)
    for i in wanted:
        if own[g, i]:
            continue
        for step in range(missed.size + 1):
            j = missed[step - 1] if step else -1
            if j >= 0 and not own[g, j]:
                continue
            if size[i] > free[g] + (size[j] if j >= 0 else 0):
                continue
            code_i = code[c, i]
            code_j = code[c, j] if j >= 0 else 0
            last = j >= 0 and _holders(own, clique, c, j) == 1
            if last and _needed_across(own, code, clique, c, j):
                continue
            done = False
            for via_peer in range(2):
                if via_peer == 0 and code_i == 1:
                    continue
                trial[:] = loads
                _move(trial, weights, own, code, reads, kind, clique, c, i, -1.0)
                if j >= 0:
                    _move(trial, weights, own, code, reads, kind, clique, c, j, -1.0)
                own[g, i] = True
                if via_peer:
                    code[c, i] = 1
                if j >= 0:
                    own[g, j] = False
                    if last and code_j == 1:
                        code[c, j] = far[j]
                    _move(trial, weights, own, code, reads, kind, clique, c, j, 1.0)
                _move(trial, weights, own, code, reads, kind, clique, c, i, 1.0)
                if _better(trial, loads, power):
                    loads[:] = trial
                    free[g] += (size[j] if j >= 0 else 0) - size[i]
                    done = True
                    break
                own[g, i] = False
                code[c, i] = code_i
                if j >= 0:
                    own[g, j] = True
                    code[c, j] = code_j
            if done:
                break


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _trade(
    g, h, mine, theirs, power, loads, weights, own, code, far, reads, size, free, kind, clique
):
    trial, c = np.empty_like(loads), clique[g]
    for i in mine:
        for j in theirs:
            if (i < 0 and j < 0) or (i >= 0 and not own[g, i]) or (j >= 0 and not own[h, j]):
                continue
            if (i >= 0 and own[h, i]) or (j >= 0 and own[g, j]):
                continue
            a, b = size[i] if i >= 0 else 0, size[j] if j >= 0 else 0
            if b - a > free[g] or a - b > free[h]:
                continue
            trial[:] = loads
            for sign in (-1.0, 1.0):
                for item in (i, j):
                    if item >= 0:
                        _move(trial, weights, own, code, reads, kind, clique, c, item, sign)
                if sign < 0 or not _better(trial, loads, power):
                    if i >= 0:
                        own[g, i], own[h, i] = own[h, i], own[g, i]
                    if j >= 0:
                        own[g, j], own[h, j] = own[h, j], own[g, j]
                else:
                    loads[:] = trial
                    free[g] += a - b
                    free[h] += b - a


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _reread(power, loads, weights, own, code, far, reads, size, free, kind, clique):
    trial = np.empty_like(loads)
    for c in range(code.shape[0]):
        for i in range(size.size):
            if _holders(own, clique, c, i) == 0:
                continue
            old = code[c, i]
            new = far[i] if old == 1 else 1
            trial[:] = loads
            _move(trial, weights, own, code, reads, kind, clique, c, i, -1.0)
            code[c, i] = new
            _move(trial, weights, own, code, reads, kind, clique, c, i, 1.0)
            if _better(trial, loads, power):
                loads[:] = trial
            else:
                code[c, i] = old


DROPPED = 64
"""Most copies that make room for one item."""
FAILURES = 24
"""Items in a row that lower nothing, after which a queue is left."""


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _exchange_queues(
    g, wanted, missed, power, loads, weights, own, code, far, reads, size, free, kind, clique
):
    """Give device g the wanted items in turn, for the copies that are missed least."""
    c = clique[g]
    trial, dropped = np.empty_like(loads), np.empty(DROPPED, np.int64)
    last, codes = np.zeros(DROPPED, np.bool_), np.zeros(DROPPED, np.uint8)
    front, failed = 0, 0
    for i in wanted:
        room, count, at = free[g], 0, front
        while room < size[i] and at < missed.size and count < DROPPED:
            j = missed[at]
            at += 1
            last[count] = _holders(own, clique, c, j) == 1
            if last[count] and _needed_across(own, code, clique, c, j):
                continue
            dropped[count], codes[count] = j, code[c, j]
            room += size[j]
            count += 1
        code_i, done = code[c, i], False
        for via_peer in (1, 0):
            if room < size[i] or (via_peer == 0 and code_i == 1):
                break
            trial[:] = loads
            _move(trial, weights, own, code, reads, kind, clique, c, i, -1.0)
            for d in range(count):
                _move(trial, weights, own, code, reads, kind, clique, c, dropped[d], -1.0)
            own[g, i] = True
            if via_peer:
                code[c, i] = 1
            for d in range(count):
                own[g, dropped[d]] = False
                if last[d] and codes[d] == 1:
                    code[c, dropped[d]] = far[dropped[d]]
                _move(trial, weights, own, code, reads, kind, clique, c, dropped[d], 1.0)
            _move(trial, weights, own, code, reads, kind, clique, c, i, 1.0)
            done = _better(trial, loads, power)
            if done:
                break
            own[g, i], code[c, i] = False, code_i
            for d in range(count):
                own[g, dropped[d]], code[c, dropped[d]] = True, codes[d]
        if done:
            loads[:] = trial
            free[g] = room - size[i]
            front = at
        failed = 0 if done else failed + 1
        if failed == FAILURES:
            break


MOST_PAIRS = 400_000
"""Items times devices up to which exchanges are tried; with more, an item is a small matter."""
MOST_QUEUED = 32_000_000
"""Items times devices up to which queues are exchanged: nine bytes are kept for each."""
QUEUE_PAIRS = 96_000_000
"""Items times devices that all rounds of queues go over together."""
QUEUE_ROUNDS = 24
QUEUED, STILL = 16, 1e-3
"""One in so many of a device's copies stands in a queue; the next power follows a smaller gain."""
TRIED = 48
"""Items and copies of a device that are tried against each other."""
PASSES = 6
POWERS = (8, 32, 0)
"""Powers of the rows' sums that are lowered in turn; 0 is the maximum, which alone stops where no
single exchange lowers it, although several together would.
"""


def exchange(
    problem: PlacementProblem,
    rows: ObjectiveRows,
    placement: Placement,
    seconds: NDArray[np.float64],
) -> Placement:
    """Improve a placement by exchanges, through the sums of powers or straight at the maximum.

    Priced `seconds` per byte, shape [T, G, 5], say what is worth trying.
    """
    if not worth_exchanging(problem):
        return placement
    best, least = placement, float(rows.values(read_bytes(problem, placement)).max())
    for powers in (POWERS, POWERS[-1:]):
        found, most = _descend(problem, rows, placement, seconds, powers)
        if most < least:
            best, least = found, most
    # At the programme's prices copies everywhere and copies anywhere are worth the same per byte.
    # Where rounding left more room on one link than on another, that no longer holds.
    found, most = _descend(problem, rows, best, None, POWERS)
    return found if most < least else best


def worth_exchanging(problem: PlacementProblem) -> bool:
    """Tell whether items are few enough for exchanges of single ones to matter and to be quick."""
    items = sum(kind.num_items for kind in problem.kinds)
    return items * problem.num_devices <= MOST_PAIRS


def exchange_queues(
    problem: PlacementProblem, rows: ObjectiveRows, placement: Placement, enough: float
) -> Placement:
    """Improve a placement of many items until its objective is `enough`, or nothing helps."""
    pairs = sum(kind.num_items for kind in problem.kinds) * problem.num_devices
    if pairs > MOST_QUEUED:
        return placement
    state = _State(problem, placement)
    loads, weights = rows.values(state.read_bytes()), np.ascontiguousarray(rows.weights)
    powers = list(POWERS)
    for _ in range(min(QUEUE_ROUNDS, max(2, QUEUE_PAIRS // pairs))):
        before = float(loads.max())
        if before <= enough or not powers:
            break
        loads = state.choose_host(rows, loads, powers[0])
        for g in range(problem.num_devices):
            finite = state.finite(_seconds_at(rows, loads, powers[0]))
            queues = state.worth_trying(g, finite, share=QUEUED)
            _exchange_queues(g, *queues, powers[0], loads, weights, *state.arrays)
        _reread(powers[0], loads, weights, *state.arrays)
        if float(loads.max()) > before * (1 - STILL):
            powers.pop(0)
    return state.placement(placement)


def _descend(
    problem: PlacementProblem,
    rows: ObjectiveRows,
    placement: Placement,
    seconds: NDArray[np.float64] | None,
    powers: tuple[int, ...],
) -> tuple[Placement, float]:
    """Go pass after pass; without `seconds`, try what gains most at the present loads."""
    state = _State(problem, placement)
    loads = rows.values(read_bytes(problem, placement))
    weights = np.ascontiguousarray(rows.weights)
    for power in powers:
        for _ in range(PASSES):
            priced = _seconds_at(rows, loads, power) if seconds is None else seconds
            finite = state.finite(priced)
            top = float(loads.max())
            before = cast(float, _sum_of_powers(loads, power, top))
            for g in range(problem.num_devices):
                wanted, missed = state.worth_trying(g, finite)
                _exchange(g, wanted, missed, power, loads, weights, *state.arrays)
            for g, h in itertools.combinations(range(problem.num_devices), 2):
                if state.clique[g] == state.clique[h]:
                    mine, theirs = state.differ(g, h), state.differ(h, g)
                    _trade(g, h, mine, theirs, power, loads, weights, *state.arrays)
            _reread(power, loads, weights, *state.arrays)
            if cast(float, _sum_of_powers(loads, power, top)) >= before * (1 - 1e-6):
                break
    return state.placement(placement), float(loads.max())


def _seconds_at(rows: ObjectiveRows, loads: NDArray[np.float64], power: int) -> NDArray[np.float64]:
    """Compute seconds per byte [T, G, 5], rows weighed as the sum of their powers rises."""
    most = max(float(loads.max()), 1e-300)
    weights = (loads / most) ** ((power or max(POWERS)) - 1)
    return np.einsum("k,ktgs->tgs", weights / max(float(weights.sum()), 1e-300), rows.weights)


def _least_first(values: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Sort the places of the least values, at most so many; ties by place."""
    if len(values) > 8 * most:
        few = np.flatnonzero(values <= np.partition(values, most)[most])
        return few[np.argsort(values[few], kind="stable")[:most]]
    return np.argsort(values, kind="stable")[:most]


class _State:
    """All kinds' items in one row: who holds a copy, and who reads it from where.

    own [G, items] says who holds a copy, code [cliques, items] the source of a clique that holds
    none, far [items] that of what no clique holds. reads [G, items], size [items] and free [G] are
    bytes that a device reads, of a copy, and left on a device.
    """

    def __init__(self, problem: PlacementProblem, placement: Placement) -> None:
        self.problem = problem
        num = [kind.num_items for kind in problem.kinds]
        self.ends = np.cumsum([0, *num])
        total, devices = int(self.ends[-1]), problem.num_devices
        self.kind = np.repeat(np.arange(len(num)), num)
        self.size = np.concatenate([k.sizes(np.arange(k.num_items)) for k in problem.kinds])
        self.own = np.zeros((devices, total), np.bool_)
        self.code = np.empty((len(problem.cliques), total), np.uint8)
        self.far = np.empty(total, np.uint8)
        self.reads = np.empty((devices, total))
        self.free = np.array(problem.device_bytes, np.int64)
        for t, (kind, held) in enumerate(zip(problem.kinds, placement.items, strict=True)):
            span = slice(int(self.ends[t]), int(self.ends[t + 1]))
            for g, ids in enumerate(held.own):
                self.own[g, self.ends[t] + ids] = True
                self.reads[g, span] = kind.heat[kind.laws[g]] * kind.read_bytes
                self.free[g] -= kind.bytes_of(ids)
            for c, codes in enumerate(held.fallback_places or ()):
                self.code[c, span] = codes
            self.far[span] = 3 if held.on_host is None else np.where(held.on_host, 3, 4)
        self.clique = problem.clique_of()

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Arrays that the compiled loops read and change, in the order of their arguments."""
        return (self.own, self.code, self.far, self.reads, self.size, self.free, self.kind,
                self.clique)  # fmt: skip

    def worth_trying(
        self, g: int, seconds: NDArray[np.float64], *, share: int = 0
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """List the items g would gain most from, and its copies that would be missed least.

        With `share` they are as many as one in so many of its copies, if that is more.
        """
        gain = self.gains(g, seconds) / np.maximum(self.size, 1)
        lacks, holds = np.flatnonzero(~self.own[g]), np.flatnonzero(self.own[g])
        tried = max(TRIED, len(holds) // share) if share else TRIED
        wanted = lacks[_least_first(-gain[lacks], tried)]
        return wanted, holds[_least_first(gain[holds], tried)]

    def finite(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Price far above all what cannot be read."""
        known = np.isfinite(seconds) & np.isfinite(self.problem.network.alone)
        return np.where(known, seconds, 1e30)

    def read_bytes(self) -> NDArray[np.float64]:
        """Count the bytes read by kind, device and place, shape [T, G, 5]."""
        kinds, places = len(self.problem.kinds), len(PLACES)
        found = np.zeros((kinds, len(self.own), places))
        for g, own in enumerate(self.own):
            at = self.kind * places + np.where(own, OWN, self.code[self.clique[g]])
            sums = np.bincount(at, self.reads[g], minlength=kinds * places)
            found[:, g] = sums.reshape(kinds, places)
        return found

    def choose_host(
        self, rows: ObjectiveRows, loads: NDArray[np.float64], power: int
    ) -> NDArray[np.float64]:
        """Choose the host's items anew at the present loads; the loads, which never get worse."""
        if self.problem.host_bytes is None:
            return loads
        seconds = self.finite(_seconds_at(rows, loads, power))
        saved = np.zeros(len(self.size))
        for g, reads in enumerate(self.reads):
            gain = seconds[:, g, DISK] - seconds[:, g, HOST]
            lacks = (self.code[self.clique[g]] >= HOST) & ~self.own[g]
            saved += np.where(lacks, reads * gain[self.kind], 0.0)
        order = np.argsort(-saved / np.maximum(self.size, 1), kind="stable")
        kept = np.concatenate(fill_host(self.problem, order))
        before = self.far.copy(), self.code.copy()
        self.far[:] = np.where(kept, HOST, DISK)
        np.copyto(self.code, self.far, where=self.code >= HOST)
        found = rows.values(self.read_bytes())
        if _better(found, loads, power):
            return found
        self.far[:], self.code[:] = before
        return loads

    def gains(self, g: int, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Compute the priced seconds the clique would lose without g's copy, or gain by one."""
        members = np.flatnonzero(self.clique == self.clique[g])
        others = self.own[members].sum(axis=0) - self.own[g]
        code = self.code[self.clique[g]]
        code = np.where((code == PEER) & (others == 0), self.far, code)
        gain = self.reads[g] * (seconds[self.kind, g, code] - seconds[self.kind, g, OWN])
        lonely = others == 0
        for h in members:
            if h != g:
                saved = seconds[self.kind, h, code] - seconds[self.kind, h, PEER]
                gain += np.where(lonely, self.reads[h] * np.maximum(0.0, saved), 0.0)
        return gain

    def differ(self, g: int, h: int) -> NDArray[np.int64]:
        """List items that only g holds, evenly from most to least read, and -1 for none."""
        ids = np.flatnonzero(self.own[g] & ~self.own[h])
        ids = ids[np.argsort(-self.reads[g, ids], kind="stable")]
        if len(ids) > TRIED:
            ids = ids[np.linspace(0, len(ids) - 1, TRIED).astype(np.int64)]
        return np.append(ids, -1)

    def placement(self, start: Placement) -> Placement:
        found: list[ItemPlacement] = []
        for t, old in enumerate(start.items):
            span = slice(int(self.ends[t]), int(self.ends[t + 1]))
            own: list[NDArray[np.int64]] = []
            for g, ids in enumerate(old.own):
                mine = self.own[g, span]
                fresh = mine.copy()
                fresh[ids] = False
                own.append(np.concatenate([ids[mine[ids]], np.flatnonzero(fresh)]))
            codes = [row[span].copy() for row in self.code]
            on_host = None if old.on_host is None else self.far[span] == HOST
            found.append(ItemPlacement(own=own, fallback_places=codes, on_host=on_host))
        return replace(start, items=tuple(found))
