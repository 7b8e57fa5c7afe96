"""Pieces of Poisson and order sampling: thresholds, the k smallest keys, scales of a row.

A vertex t is drawn for s where its uniform number r_t lies below pi_ts (Poisson), or where r_t /
pi_ts is among the k smallest of the row (order sampling, "exact-k"). Formulas 5.1, 5.3 and 5.4.
"""

from typing import no_type_check

import numpy as np

from gnnplan.runtime.sampling.compiled import inlined_kernel, kernel

_HALF = np.uint64(32)
_ELEVEN = np.uint64(11)
_UNIT = 2.0**-53


@inlined_kernel
@no_type_check
def share_word(fanout, degree):
    """Return floor(2^64 fanout / degree), fanout < degree < 2^32: a word lies below it with k/d."""
    divisor = np.uint64(degree)
    first = np.uint64(fanout) << _HALF
    return ((first // divisor) << _HALF) | (((first % divisor) << _HALF) // divisor)


@inlined_kernel
@no_type_check
def unit(word):
    """Return a random word as a number in [0, 1), from its high 53 bits."""
    return np.float64(word >> _ELEVEN) * _UNIT


@kernel
@no_type_check
def offer(keys, places, count, key, place):
    """Offer an entry to a heap of the smallest (key, place); return how many it holds.

    `keys` and `places` are as long as the heap may become. Places must be offered in ascending
    order: among equal keys the first ones stay.
    """
    if count < keys.shape[0]:
        hole = count
        while hole > 0:
            above = (hole - 1) >> 1
            if keys[above] > key:
                break
            keys[hole], places[hole] = keys[above], places[above]
            hole = above
        keys[hole], places[hole] = key, place
        return count + 1
    if key < keys[0]:
        _replace_top(keys, places, key, place)
    return count


@inlined_kernel
@no_type_check
def _after(key, place, other_key, other_place):
    return key > other_key or (key == other_key and place > other_place)


@kernel
@no_type_check
def _replace_top(keys, places, key, place):
    count, hole = keys.shape[0], 0
    while True:
        below = 2 * hole + 1
        if below >= count:
            break
        if below + 1 < count and _after(
            keys[below + 1], places[below + 1], keys[below], places[below]
        ):
            below += 1
        if not _after(keys[below], places[below], key, place):
            break
        keys[hole], places[hole] = keys[below], places[below]
        hole = below
    keys[hole], places[hole] = key, place


@kernel
@no_type_check
def row_scale(inverse, count, target):
    """Return the c with sum_i 1 / min(1, c p_i) = target, for p_i = 1 / inverse[i], target > count.

    Closed form [C18]: with the m terms of the saturated set (c p_i >= 1) counted as 1, c is the sum
    of the other inverses over target - m. Starting with no term saturated, c is never too large, so
    each round adds terms of the set until none is left to add: no sort is needed.
    """
    saturated, scale = -1, 0.0
    while True:
        rest, below = 0.0, 0
        for i in range(count):
            if inverse[i] > scale:
                rest += inverse[i]
            else:
                below += 1
        if below <= saturated:
            return scale
        saturated = below
        scale = rest / (target - saturated)


@kernel
@no_type_check
def row_scale_weighted(inverse, squares, count, excess):
    """Solve `row_scale` with weights A: sum A_i^2 / min(1, c p_i) = sum A_i^2 + excess [R12].

    `squares` holds A_i^2 > 0; the excess is a^2/k - a^2/d, positive. The saturated terms count
    A_i^2 each, so their sum leaves the target, which is the excess and the squares of the others.
    """
    saturated, scale = -1, 0.0
    while True:
        rest, free, below = 0.0, excess, 0
        for i in range(count):
            if inverse[i] > scale:
                rest += squares[i] * inverse[i]
                free += squares[i]
            else:
                below += 1
        if below <= saturated:
            return scale
        saturated = below
        scale = rest / free


@inlined_kernel
@no_type_check
def water_level(values, size):
    """Return the c with sum of min(1, c * values) = size; infinite if size reaches the positives.

    Each pass spreads what the entries at 1 leave over the others; a few passes do. Where an entry
    is at 1 but for rounding, a level may come out a hair below the one before: that is the end,
    too.
    """
    saturated, positive, total = 0, 0, 0.0
    for value in values:
        positive += value > 0
        total += value
    if size >= positive:
        return np.inf
    level = size / total
    while True:
        count, rest = 0, 0.0
        for value in values:
            if value * level >= 1.0:
                count += 1
            else:
                rest += value
        if count <= saturated or count >= size:
            return level
        saturated = count
        level = (size - count) / rest
