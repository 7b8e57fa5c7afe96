"""Vertices from hot to cold, ties by ascending id.

Every placement starts here. Probabilities are non-negative, and the bit patterns of non-negative
floats sort like the floats themselves, so ascending (largest bits - bits) is descending
probability. In float32 that number and the id fit one int64, and a plain sort of integers, which
numpy vectorises, does it all; float64 takes a stable radix sort. Orders of final arrays are
kept: a plan asks for the same one for many candidates.
"""

import typing

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.array_cache import make_once
from gnnplan.planner.parallel import LONG, side_by_side
from gnnplan.runtime.errors import InputError

Probabilities = NDArray[np.float32] | NDArray[np.float64]
"""p(v): share of a rank's batches whose input set holds v. Shape [N], or [G, N] per GPU."""

SPARSE = 0.5
"""Share of values above 0 up to which they are sorted by themselves."""
_DIGIT_BITS = 11


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _radix_order(keys: np.ndarray, num_passes: int) -> np.ndarray:
    """Stable ascending argsort of non-negative integer keys [N], by digits of 11 bits."""
    n = keys.size
    mask = 2047
    counts = np.zeros((num_passes, 2048), np.int64)
    for i in range(n):
        key = keys[i]
        for j in range(num_passes):
            counts[j, (key >> (11 * j)) & mask] += 1
    ids = np.arange(n).astype(np.int32)
    next_keys = np.empty_like(keys)
    next_ids = np.empty_like(ids)
    for j in range(num_passes):
        shift = 11 * j
        if n == 0 or counts[j, (keys[0] >> shift) & mask] == n:
            continue  # all keys share this digit
        start = 0
        for d in range(2048):
            count = counts[j, d]
            counts[j, d] = start
            start += count
        for i in range(n):
            key = keys[i]
            digit = (key >> shift) & mask
            to = counts[j, digit]
            counts[j, digit] = to + 1
            next_keys[to] = key
            next_ids[to] = ids[i]
        keys, next_keys = next_keys, keys
        ids, next_ids = next_ids, ids
    return ids


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _pack(bits: np.ndarray, top: int) -> np.ndarray:
    """Each key, the top bits less its own, above its id; int64 [N]."""
    packed = np.empty(bits.size, np.int64)
    for v in range(bits.size):
        packed[v] = (np.int64(top - bits[v]) << 32) | v
    return packed


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _unpack(packed: np.ndarray, top: int, bits: np.ndarray) -> None:
    """Sorted numbers [N] into ids, in place, and their bits, written to `bits` [N]."""
    for i in range(packed.size):
        bits[i] = top - (packed[i] >> 32)
        packed[i] &= 0xFFFFFFFF


def check_hotness(hotness: Probabilities) -> None:
    """Raise where a probability is negative, infinite or not a number.

    Raises:
        InputError: says how many values are at fault.
    """
    low, high = hotness.min(initial=0), hotness.max(initial=0)  # NaN passes through min and max
    if not (low >= 0 and high < np.inf):
        bad = int(np.count_nonzero(~(np.isfinite(hotness) & (hotness >= 0))))
        raise InputError(
            f"expected hotness values that are finite and at least 0, found {bad} others; "
            "profile the graph again"
        )


def hot_to_cold(hotness: Probabilities) -> tuple[NDArray[np.int64], Probabilities]:
    """Ids sorted by (p descending, id ascending), formulas 1.2, and the values in that order.

    Args:
        hotness: p(v) >= 0, shape [N], N < 2^31.

    Returns:
        Ids and sorted values, both of shape [N].

    Raises:
        InputError: a value is negative or not finite.

    Example:
        >>> ids, values = hot_to_cold(np.array([0.5, 1.0, 0.5, 0.0]))
        >>> ids.tolist(), values.tolist()
        ([1, 0, 2, 3], [1.0, 0.5, 0.5, 0.0])
    """
    ids, values = make_once((hotness,), "hot to cold", lambda: _hot_to_cold(hotness))
    return ids, values


def _hot_to_cold(hotness: Probabilities) -> tuple[NDArray[np.int64], Probabilities]:
    """Those above 0 are sorted; the others, of large graphs nearly all, stand in order already."""
    check_hotness(hotness)
    hot = np.flatnonzero(hotness)
    if hot.size > SPARSE * hotness.size:
        return _sorted(hotness)
    order, values = np.empty(hotness.size, np.int64), np.zeros_like(hotness)
    ids, values[: hot.size] = _sorted(hotness[hot])
    np.take(hot, ids, out=order[: hot.size])
    order[hot.size :] = np.flatnonzero(hotness == 0)
    return order, values


def _sorted(hotness: Probabilities) -> tuple[NDArray[np.int64], Probabilities]:
    """As `hot_to_cold`, of all values."""
    integer = np.int32 if hotness.dtype == np.float32 else np.int64
    bits = (hotness + hotness.dtype.type(0)).view(integer)  # + 0 turns -0.0 into 0.0
    top = bits.max(initial=0)
    if hotness.dtype != np.float32:
        num_passes = -(-int(top).bit_length() // _DIGIT_BITS)
        order = _radix_order(top - bits, num_passes).astype(np.int64)
        return order, hotness[order]
    packed = np.asarray(_pack(bits, top))
    packed.sort()
    _unpack(packed, top, bits)
    return packed, bits.view(np.float32)


def hotness_order(hotness: Probabilities) -> NDArray[np.int64]:
    """Ids sorted by (p descending, id ascending); the first of `hot_to_cold`."""
    return hot_to_cold(hotness)[0]


def degree_order(degrees: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ids sorted by (degree descending, id ascending), shape [N].

    >>> degree_order(np.array([1, 3, 0, 3])).tolist()
    [1, 3, 0, 2]
    """
    return make_once((degrees,), "by degree", lambda: (_by_degree(degrees),))[0]


def _by_degree(degrees: NDArray[np.int64]) -> NDArray[np.int64]:
    """Whole numbers have few digits: fewer passes than the floats they would make."""
    top = int(degrees.max(initial=0))
    below = (top - degrees).astype(np.int32 if top < 2**31 else np.int64)
    return np.asarray(_radix_order(below, -(-top.bit_length() // _DIGIT_BITS))).astype(np.int64)


def count_out_degree(
    indices: NDArray[np.int32] | NDArray[np.int64], num_nodes: int
) -> NDArray[np.int64]:
    """Count the lists each vertex stands in, shape [num_nodes]."""
    narrow = indices.size < 2**31  # half the memory that is written to at random

    def counted(part: NDArray[np.integer]) -> NDArray[np.integer]:
        total = np.zeros(num_nodes, np.int32 if narrow else np.int64)
        _count(part, total)
        return total

    parts = np.array_split(indices, 2 if indices.size >= LONG else 1)
    first, *rest = side_by_side(counted, parts, items=indices.size)
    total = first.astype(np.int64)
    for part in rest:
        total += part
    return total


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _count(indices: np.ndarray, total: np.ndarray) -> None:
    """Add to total [N] how often each of its places stands in indices [E]."""
    for e in range(indices.size):
        total[indices[e]] += 1
