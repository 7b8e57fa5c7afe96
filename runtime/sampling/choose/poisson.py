"""Poisson and order sampling: thresholds, the k smallest keys, scales of a row, a scan of rows.

A vertex t is drawn for s where its uniform number r_t lies below pi_ts (Poisson), or where r_t /
pi_ts is among the k smallest of the row (order sampling, "exact-k"). Formulas 5.1, 5.3 and 5.4.

Rows by LABOR-0 without weights, whose chances are equal, are chosen in one pass over the
neighbours, sixteen tested at once (`scan_rows`). A neighbour t of a row of degree d > k stays where
its word lies below floor(2^64 k/d). For exactly k neighbours, a somewhat higher threshold leaves a
few more than k, of which the k smallest are taken; rows with too few left (about one in 10^4) are
sorted whole. The result is that of sorting every row.

The test is plain LLVM vector code, so no compiler is needed at install time, and the bits are those
of `rng.draw(stream, id, 0)` on every processor. It costs about 3 instructions per neighbour with
512-bit registers: less than a look-up in a table of draws as large as the second-level cache.
"""

from typing import Any, no_type_check

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gnnplan.runtime.sampling.compiled import inlined_kernel, kernel
from gnnplan.runtime.sampling.placed_indices import PlacedType, load_lanes, prefetch_read
from gnnplan.runtime.sampling.rng import GOLDEN, MIX_1, MIX_2, ODD, key_kernel, value_kernel
from gnnplan.runtime.sampling.workspace import SPARE

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


LANES = 16


def _splat(value: Any, builder: Any) -> Any:
    vector = ir.VectorType(ir.IntType(64), LANES)
    if not isinstance(value, ir.Value):
        return ir.Constant(vector, [int(value)] * LANES)
    lane = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.IntType(32)(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(lane, ir.Constant(vector, ir.Undefined), zeros)


def _mix(builder: Any, z: Any) -> Any:
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        z = builder.xor(z, builder.lshr(z, _splat(shift, builder)))
        z = builder.mul(z, _splat(factor, builder))
    return builder.xor(z, builder.lshr(z, _splat(31, builder)))


@intrinsic
@no_type_check
def below_threshold(
    typing_context: Any, indices: Any, position: Any, stream: Any, threshold: Any
) -> Any:
    """Set bit i where draw(stream, indices[position + i], 0) < threshold, i = 0 .. 15.

    The caller sees to it that position + 16 does not pass the end of the array.
    """
    del typing_context, position, stream, threshold

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type = signature.args[0]
        bits = array_type.dtype.bitwidth
        if isinstance(array_type, PlacedType):
            ids = load_lanes(context, builder, array_type, arguments[:2], LANES)
        else:
            array = context.make_array(array_type)(context, builder, arguments[0])
            vector = ir.VectorType(ir.IntType(bits), LANES)
            pointer = builder.gep(array.data, [arguments[1]])
            pointer = builder.bitcast(pointer, vector.as_pointer())
            ids = builder.load(pointer)
            ids.align = bits // 8
        if bits < 64:
            ids = builder.zext(ids, ir.VectorType(ir.IntType(64), LANES))
        z = builder.xor(_splat(arguments[2], builder), builder.mul(ids, _splat(ODD, builder)))
        z = builder.add(_mix(builder, z), _splat(GOLDEN, builder))
        less = builder.icmp_unsigned("<", _mix(builder, z), _splat(arguments[3], builder))
        mask = builder.bitcast(less, ir.IntType(LANES))
        return builder.zext(mask, ir.IntType(64))

    return types.uint64(indices, types.int64, types.uint64, types.uint64), codegen


@intrinsic
@no_type_check
def trailing_zeros(typing_context: Any, word: Any) -> Any:
    """Return the position of the lowest set bit of a uint64 that is not zero."""
    del typing_context, word

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), codegen


_ONE = np.uint64(1)
_AHEAD = 16
_EDGES_AHEAD = 4
_LINE = 16
_WORD = 64
_SCAN_AHEAD = 8 * _LINE
"""Neighbours between asking for a cache line and testing it; rows are too short for the processor's
own prefetching."""


@inlined_kernel
@no_type_check
def _test_lanes(indices, place, stop, stream, threshold):
    """Return one test's mask; ask for the line that lies ahead in the row."""
    prefetch_read(indices, min(place + _SCAN_AHEAD, stop - 1))
    return below_threshold(indices, place, stream, threshold)


@inlined_kernel
@no_type_check
def _keep_marked(mask, place, positions, edge):
    while mask:
        positions[edge] = place + np.int64(trailing_zeros(mask))
        edge += 1
        mask &= mask - _ONE
    return edge


@kernel
@no_type_check
def _keep_below(indices, start, stop, stream, threshold, positions, edge):
    place = start
    while place + _WORD <= stop:
        # A word of bits at a time: how many neighbours stay in a stretch is chance,
        # so the loop over the bits is guessed wrong about once per turn, however long that is.
        mask = _test_lanes(indices, place, stop, stream, threshold)
        for part in range(LANES, _WORD, LANES):
            more = _test_lanes(indices, place + part, stop, stream, threshold)
            mask |= more << np.uint64(part)
        edge = _keep_marked(mask, place, positions, edge)
        place += _WORD
    while place < stop and place + LANES <= indices.shape[0]:
        mask = _test_lanes(indices, place, stop, stream, threshold)
        if stop - place < LANES:
            mask &= (_ONE << np.uint64(stop - place)) - _ONE
        edge = _keep_marked(mask, place, positions, edge)
        place += LANES
    while place < stop:
        if value_kernel(key_kernel(stream, indices[place]), 0) < threshold:
            positions[edge] = place
            edge += 1
        place += 1
    return edge


@kernel
@no_type_check
def keep_all(start, stop, positions, edge):
    """Write positions start .. stop-1; return the edge end."""
    for place in range(start, stop):
        positions[edge] = place
        edge += 1
    return edge


@kernel
@no_type_check
def _keep_smallest(indices, stream, positions, edge, end, keys, places):
    count = 0
    for e in range(edge, end):
        word = value_kernel(key_kernel(stream, indices[positions[e]]), 0)
        count = offer(keys, places, count, word, positions[e])
    for e in range(edge, end):
        place = positions[e]
        word = value_kernel(key_kernel(stream, indices[place]), 0)
        if word < keys[0] or (word == keys[0] and place <= places[0]):
            positions[edge] = place
            edge += 1
    return edge


@kernel
@no_type_check
def _keep_exactly(indices, start, stop, stream, positions, edge, keys, places):
    fanout, degree = keys.shape[0], stop - start
    wanted = fanout + 4 + int(4 * np.sqrt(fanout))
    end = edge
    if wanted < degree:
        threshold = share_word(wanted, degree)
        end = _keep_below(indices, start, stop, stream, threshold, positions, edge)
    if end - edge < fanout:
        end = keep_all(start, stop, positions, edge)
    return _keep_smallest(indices, stream, positions, edge, end, keys, places)


@kernel
@no_type_check
def scan_rows(
    indptr, indices, stream, fanout, exact, node_ids, i, last, row, edge, row_ptr, positions
):
    """Choose the edges of the rows of nodes i .. last-1 while `positions` has room.

    Fill row_ptr after each row. Return the first node whose row is left and the edge end.
    """
    keys = np.empty(max(fanout, 0), dtype=np.uint64)
    places = np.empty(max(fanout, 0), dtype=np.int64)
    while i < last:
        prefetch_read(indptr, node_ids[min(i + _AHEAD, last - 1)])
        later = indptr[node_ids[min(i + _EDGES_AHEAD, last - 1)]]
        for line in range(_SCAN_AHEAD // _LINE):
            prefetch_read(indices, later + line * _LINE)
        start, stop = indptr[node_ids[i]], indptr[node_ids[i] + 1]
        if edge + stop - start + SPARE > positions.shape[0]:
            break
        if fanout < 0 or stop - start <= fanout:
            edge = keep_all(start, stop, positions, edge)
        elif exact:
            edge = _keep_exactly(indices, start, stop, stream, positions, edge, keys, places)
        else:
            threshold = share_word(fanout, stop - start)
            edge = _keep_below(indices, start, stop, stream, threshold, positions, edge)
        i += 1
        row += 1
        row_ptr[row] = edge
    return i, edge
