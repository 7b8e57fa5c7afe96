"""Choosing the edges of a row: Floyd's method on counter-based draws, as tests/reference has it.

A chosen edge is a position in the graph's `indices`; its cache line is asked for at once.
"""

from typing import no_type_check

import numpy as np

from runtime.sampling.compiled import inlined_kernel, kernel
from runtime.sampling.intrinsics import prefetch_read
from runtime.sampling.rng import bounded_kernel, key_kernel, value_kernel

AHEAD = 24
"""Rows between asking for a row's bounds and reading them."""
MAX_WORD = 64
"""Fan-outs up to this use a word of 64 bits as the filter of the offsets taken."""

_ONE = np.uint64(1)
_SIX_BITS = np.uint64(63)
_SIXTEEN = np.uint64(16)


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
    """Floyd's choices: a filter of 64 bits, exact up to degree 64, spares scans of those taken."""
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
    """Floyd's choices for wide fan-outs: a small hash set keeps the work linear in the fan-out."""
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


@kernel
@no_type_check
def choose_rows(
    indptr, indices, stream, fanout, node_ids, i, last, row, edge, enough, row_ptr, positions
):
    """Choose the edges of rows of nodes i .. last-1 until there are `enough`.

    Returns the first node whose row is left, and the edge end. `row` is the row of node i; fills
    row_ptr after each row, and positions.
    """
    while i < last and edge < enough:
        prefetch_read(indptr, node_ids[i + AHEAD])
        node = np.uint64(node_ids[i])
        start = indptr[node]
        degree = indptr[node + _ONE] - start
        to = np.uint64(edge)
        if 0 < fanout < degree:
            key = key_kernel(stream, node)
            if fanout <= MAX_WORD:
                _choose_some(indices, key, start, degree, fanout, positions, to)
            else:
                _choose_wide(indices, key, start, degree, fanout, positions, to)
            edge += fanout
        else:
            for offset in range(degree):
                positions[to + np.uint64(offset)] = start + offset
            for offset in range(0, degree, 16):
                prefetch_read(indices, start + offset)
            edge += degree
        i += 1
        row += 1
        row_ptr[row] = edge
    return i, edge


@kernel
@no_type_check
def edge_bound(indptr, fanout, node_ids, first, last):
    """At least the number of edges that nodes first .. last-1 choose, exact for fan-out -1."""
    if fanout > 0:
        return (last - first) * fanout
    total = 0
    for i in range(first, last):
        prefetch_read(indptr, node_ids[i + AHEAD])
        total += indptr[node_ids[i] + 1] - indptr[node_ids[i]]
    return total
