"""Choose edges uniformly: Floyd's method on counter-based draws, as tests/reference has it.

A chosen edge is a position in the graph's `indices`; its cache line is asked for at once. Narrow
fan-outs are worked out for up to `MAX_ROWS` rows at once, in the processor's vector lanes: draw j
of every row, then whether any row has taken it before, then draw j + 1. Nothing depends on the row
before, so the compiler uses vector instructions, and no branch waits for a collision.
"""

from collections.abc import Iterable
from typing import NamedTuple, no_type_check

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.sampling.compiled import form_for, inlined_kernel, kernel
from gnnplan.runtime.sampling.frontier import (
    bound_edges,
    choose_rows,
    expand_chunks,
    expand_hop,
    rows_per_node,
)
from gnnplan.runtime.sampling.placed_indices import prefetch_read
from gnnplan.runtime.sampling.relabel import gather, relabel_range
from gnnplan.runtime.sampling.rng import (
    GOLDEN,
    bounded_kernel,
    key_kernel,
    mix_kernel,
    value_kernel,
)

AHEAD = 24
"""Rows between asking for a row's bounds and reading them."""
MAX_WORD = 64
"""Widest fan-out that uses a word of 64 bits as the filter of the offsets taken."""

_ONE = np.uint64(1)
_SIX_BITS = np.uint64(63)


@inlined_kernel
@no_type_check
def _is_taken(positions, edge, count, position):
    found = False
    for other in range(count):
        found |= positions[edge + np.uint64(other)] == position
    return found


@inlined_kernel
@no_type_check
def _choose_some(indices, key, start, degree, fanout, positions, edge):
    """Choose by Floyd; a filter of 64 bits, exact up to degree 64, spares scans of those taken."""
    taken = np.uint64(0)
    for i in range(fanout):
        last = degree - fanout + i
        offset = bounded_kernel(value_kernel(key, i), last + 1)
        hit = (taken >> (np.uint64(offset) & _SIX_BITS)) & _ONE
        if hit and degree > MAX_WORD:
            hit = np.uint64(_is_taken(positions, edge, i, start + offset))
        offset = last if hit else offset
        taken |= _ONE << (np.uint64(offset) & _SIX_BITS)
        positions[edge + np.uint64(i)] = start + offset
        prefetch_read(indices, start + offset)


@kernel
@no_type_check
def _choose_wide(indices, key, start, degree, fanout, positions, edge):
    """Choose by Floyd for wide fan-outs; a small hash set keeps the work linear in the fan-out."""
    bits = 3
    while (1 << bits) < 2 * fanout:
        bits += 1
    mask = (1 << bits) - 1
    taken = np.full(1 << bits, -1, dtype=np.int64)
    for i in range(fanout):
        last = degree - fanout + i
        offset = bounded_kernel(value_kernel(key, i), last + 1)
        slot = (offset * 40503) & mask
        while taken[slot] >= 0 and taken[slot] != offset:
            slot = (slot + 1) & mask
        if taken[slot] == offset:
            offset = last
            slot = (offset * 40503) & mask
            while taken[slot] >= 0:
                slot = (slot + 1) & mask
        taken[slot] = offset
        positions[edge + np.uint64(i)] = start + offset
        prefetch_read(indices, start + offset)


@inlined_kernel
@no_type_check
def choose_row(indptr, indices, stream, fanout, node, positions, edge):
    """Choose the edges of one row; return the edge end."""
    start = indptr[node]
    degree = indptr[node + _ONE] - start
    to = np.uint64(edge)
    if 0 < fanout < degree:
        key = key_kernel(stream, node)
        if fanout <= MAX_WORD:
            _choose_some(indices, key, start, degree, fanout, positions, to)
        else:
            _choose_wide(indices, key, start, degree, fanout, positions, to)
        return edge + fanout
    take_row(indices, start, degree, positions, to)
    return edge + degree


@inlined_kernel
@no_type_check
def take_row(indices, start, degree, positions, edge):
    """Choose all edges of a row."""
    for offset in range(degree):
        positions[edge + np.uint64(offset)] = start + offset
    for offset in range(0, degree, 16):
        prefetch_read(indices, start + offset)


MAX_FANOUT = 64
"""Widest fan-out of the lanes; beyond it a hash set costs less than comparing all draws."""


def in_lanes(fanouts: Iterable[int]) -> bool:
    """Tell whether all hops choose in lanes, which keep chosen edges in scratch of their own."""
    return all(0 < fanout <= MAX_FANOUT for fanout in fanouts)


class UniformRows(NamedTuple):
    """Rows of a graph that choose alike, uniformly and without replacement."""

    indptr: NDArray[np.integer]
    indices: NDArray[np.integer]
    fanouts: NDArray[np.int64]
    """Fan-out of each hop; -1 takes all."""


@form_for(rows_per_node, UniformRows)
@no_type_check
def _rows_per_node(rows):
    return 1


@form_for(bound_edges, UniformRows)
@no_type_check
def _bound_edges(rows, hop, node_ids, first, last):
    return bound_row_edges(rows.indptr, rows.fanouts[hop], node_ids, first, last)


@kernel
@no_type_check
def bound_row_edges(indptr, fanout, node_ids, first, last):
    """Bound the edges that nodes first .. last-1 choose from above; exact beyond the lanes."""
    if 0 < fanout <= MAX_FANOUT:
        return (last - first) * fanout
    total = 0
    for i in range(first, last):
        prefetch_read(indptr, node_ids[i + AHEAD])
        degree = indptr[node_ids[i] + 1] - indptr[node_ids[i]]
        total += degree if fanout < 0 else min(degree, fanout)
    return total


@form_for(choose_rows, UniformRows)
@no_type_check
def _choose_rows(rows, hop, stream, node_ids, i, last, row, edge, enough, row_ptr, positions):
    indptr, indices, fanout = rows.indptr, rows.indices, rows.fanouts[hop]
    while i < last and edge < enough:
        prefetch_read(indptr, node_ids[i + AHEAD])
        node = np.uint64(node_ids[i])
        edge = choose_row(indptr, indices, stream, fanout, node, positions, edge)
        i += 1
        row += 1
        row_ptr[row] = edge
    return i, edge


MAX_ROWS = 128
MAX_EDGES = 1024
"""Edges of one call; what its cache lines take then fits the second-level cache."""
_WIDTH = 16

_LANES_ONE = np.uint64(1)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFF_FFFF)


@kernel
@no_type_check
def rows_per_call(fanout):
    """Return the rows that one call takes: a multiple of the lanes, at most `MAX_EDGES` edges."""
    return max(_WIDTH, min(MAX_ROWS, MAX_EDGES // fanout // _WIDTH * _WIDTH))


@kernel
@no_type_check
def make_lanes():
    """Make scratch of vector lanes: keys, degrees, starts and ends of rows, draws, collisions."""
    return (
        np.empty(MAX_ROWS, np.uint64),
        np.empty(MAX_ROWS, np.uint64),
        np.empty((2, MAX_ROWS), np.int64),
        np.empty(MAX_EDGES, np.uint32),
        np.empty(MAX_ROWS, np.uint32),
    )


@kernel
@no_type_check
def _draw(keys, degrees, rows, stride, fanout, drawn, collided):
    """Draw Floyd's offsets: drawn[j * stride + r] is choice j of row r, uint32."""
    rows = np.uint64(rows)
    for j in range(fanout):
        step = np.uint64(j + 1) * GOLDEN
        left = np.uint64(fanout - j - 1)
        mine = drawn[j * stride : (j + 1) * stride]
        for r in range(rows):
            bits = mix_kernel(keys[r] + step)
            # The high word of bits * bound, as `bounded`, for a bound of 32 bits.
            bound = (degrees[r] - left) & _LOW
            high = (bits >> _HALF) * bound + (((bits & _LOW) * bound) >> _HALF)
            mine[r] = np.uint32(high >> _HALF)
            collided[r] = np.uint32(0)
        for i in range(j):
            other = drawn[i * stride : (i + 1) * stride]
            for r in range(rows):
                collided[r] |= np.uint32(other[r] == mine[r])
        for r in range(rows):
            last = np.uint32(degrees[r] - left - _LANES_ONE)
            mine[r] = last if collided[r] else mine[r]


@kernel
@no_type_check
def choose_lanes(
    indptr, indices, stream, fanout, node_ids, i, last, row, edge, row_ptr, positions, lanes
):
    """Choose the edges of the next rows of nodes i .. last-1; fan-out 1 to `MAX_FANOUT`.

    `row` is the row of node i and `edge` its first edge. Fill row_ptr after each row, and
    `positions` from its beginning. Return the first node whose row is left, and the edge end.
    """
    keys, degrees, bounds, drawn, collided = lanes
    stride = rows_per_call(fanout)
    starts, ends = bounds[0], bounds[1]
    first, many = edge, 0
    for node_at in range(i, min(last, i + stride)):
        prefetch_read(indptr, node_ids[node_at + AHEAD])
        node = np.uint64(node_ids[node_at])
        start = indptr[node]
        degree = indptr[node + _LANES_ONE] - start
        to = edge - first
        if degree > fanout and degree <= np.int64(_LOW):
            keys[many] = key_kernel(stream, node)
            degrees[many] = np.uint64(degree)
            starts[many] = start
            ends[many] = to
            many += 1
            edge += fanout
        elif degree > fanout:
            choose_row(indptr, indices, stream, fanout, node, positions, to)
            edge += fanout
        else:
            take_row(indices, start, degree, positions, np.uint64(to))
            edge += degree
        row += 1
        row_ptr[row] = edge
    _draw(keys, degrees, (many + _WIDTH - 1) // _WIDTH * _WIDTH, stride, fanout, drawn, collided)
    step = np.uint64(stride)
    for r in range(np.uint64(many)):
        start, to, at = starts[r], np.uint64(ends[r]), r
        for _ in range(fanout):
            position = start + np.int64(drawn[at])
            positions[to] = position
            prefetch_read(indices, position)
            to += _LANES_ONE
            at += step
    return min(last, i + stride), edge


@form_for(expand_hop, UniformRows)
@no_type_check
def _expand_hop(rows, hop, stream, w, first, last, row, edge, keep_positions):
    if 0 < rows.fanouts[hop] <= MAX_FANOUT:
        return _expand_lanes(rows, hop, stream, w, first, last, row, edge, keep_positions)
    return expand_chunks(rows, hop, stream, w, first, last, row, edge, keep_positions)


@kernel
@no_type_check
def _expand_lanes(rows, hop, stream, w, first, last, row, edge, keep_positions):
    """Expand as `expand_chunks` does, narrow fan-outs; two chunks of scratch stay in the cache."""
    indptr, indices, fanout = rows.indptr, rows.indices, rows.fanouts[hop]
    lanes = make_lanes()
    both_positions = np.empty((2, MAX_EDGES), np.int64)
    both_values = np.empty((2, MAX_EDGES), indices.dtype)
    w.row_ptr[row] = edge
    known = np.uint64(last)
    i = first
    turn = 0
    # Edges [relabelled, gathered) wait for relabelling, [gathered, edge) for gathering.
    relabelled = gathered = edge
    while relabelled < edge or i < last:
        begin, chosen, waiting = edge, both_positions[turn], both_positions[1 - turn]
        if i < last:
            stop, edge = choose_lanes(
                indptr, indices, stream, fanout, w.node_ids, i, last, row, edge, w.row_ptr, chosen,
                lanes,
            )  # fmt: skip
            row += stop - i
            i = stop
        if keep_positions:
            w.positions[begin:edge] = chosen[: edge - begin]
        read, ready = both_values[turn], both_values[1 - turn]
        gather(w.table, indices, waiting, read, 0, begin - gathered)
        local = w.local[relabelled:]
        known = relabel_range(w.table, ready, local, 0, gathered - relabelled, w.node_ids, known)
        relabelled, gathered = gathered, begin
        turn = 1 - turn
    return edge, np.int64(known)
