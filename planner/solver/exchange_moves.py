"""Moves of single copies, kept where they lower the loads; in place, compiled.

Every move changes `loads` [rows of the objective] by what the clique's reads of its items weigh,
and is taken back where a sum of the loads' powers does not fall.
"""

import typing
from typing import NamedTuple, cast

import numba
import numpy as np
from numpy.typing import NDArray

Loads = NDArray[np.float64]
"""Of each row of the objective."""
Ids = NDArray[np.int64]
"""Items; -1 stands for none."""


class Items(NamedTuple):
    """Items of all kinds in one row: who holds what, and who reads it from where."""

    own: NDArray[np.bool_]
    """[G, items]: who holds a copy."""
    code: NDArray[np.uint8]
    """[cliques, items]: the source of those of a clique that hold none."""
    far: NDArray[np.uint8]
    """[items]: the source of what no clique holds."""
    reads: NDArray[np.float64]
    """[G, items]: bytes."""
    size: NDArray[np.int64]
    """[items]: bytes of a copy."""
    free: NDArray[np.int64]
    """[G]: bytes left."""
    kind: NDArray[np.int64]
    """[items]: features or lists."""
    clique: NDArray[np.int64]
    """[G]: of each device."""


def spread(loads: Loads, power: int, top: float) -> float:
    """Sum of (loads / top)^power; for power 0 their maximum / top."""
    return cast(float, _sum_of_powers(loads, power, top))


def exchange_copies(
    g: int, wanted: Ids, missed: Ids, power: int, loads: Loads, weights: Loads, items: Items
) -> None:
    """Copies of the wanted items for g, added or in place of copies that are missed least.

    Args:
        g: the device.
        wanted: items it lacks.
        missed: items it holds.
        power: of the sum that must fall; 0: the maximum.
        loads: of each row of the objective; changed.
        weights: [rows, kinds, G, 5], what a byte read adds to each row.
        items: changed.
    """
    _exchange(g, wanted, missed, power, loads, weights, *items)


def trade_copies(
    g: int, h: int, mine: Ids, theirs: Ids, power: int, loads: Loads, weights: Loads, items: Items
) -> None:
    """Copies of g against copies of h in the same clique, or given away for none."""
    _trade(g, h, mine, theirs, power, loads, weights, *items)


def reread_items(power: int, loads: Loads, weights: Loads, items: Items) -> None:
    """Read items that a clique holds from the host instead, or the other way round."""
    _reread(power, loads, weights, *items)


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
