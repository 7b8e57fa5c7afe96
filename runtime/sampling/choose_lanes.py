"""Choosing the edges of many rows side by side, in the processor's vector lanes.

The draws and choices are those of `choose` (Floyd's method as tests/reference has it), worked out
for up to `MAX_ROWS` rows at once: draw j of every row, then whether any row has taken it before,
then draw j + 1. Inside a loop over rows nothing depends on the row before, so the compiler uses
vector instructions, and no branch waits for a collision that no predictor guesses.
"""

from typing import no_type_check

import numpy as np

from runtime.sampling.choose import AHEAD, choose_rows
from runtime.sampling.compiled import kernel
from runtime.sampling.intrinsics import prefetch_read
from runtime.sampling.rng import GOLDEN, key_kernel, mix_kernel

MAX_FANOUT = 64
"""Beyond it comparing every draw with those before costs more than a hash set."""
MAX_ROWS = 128
MAX_EDGES = 1024
"""Of one call: what its cache lines take then still fits the second-level cache easily."""
_WIDTH = 16

_ONE = np.uint64(1)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFF_FFFF)


@kernel
@no_type_check
def rows_per_call(fanout):
    """Rows that one call takes: a multiple of the lanes, at most `MAX_EDGES` edges."""
    return max(_WIDTH, min(MAX_ROWS, MAX_EDGES // fanout // _WIDTH * _WIDTH))


@kernel
@no_type_check
def make_lanes():
    """Scratch of `choose_lanes`: keys, degrees, starts and ends of rows, draws, collisions."""
    return (
        np.zeros(MAX_ROWS, np.uint64),
        np.ones(MAX_ROWS, np.uint64),
        np.zeros((2, MAX_ROWS), np.int64),
        np.zeros(MAX_EDGES, np.uint32),
        np.zeros(MAX_ROWS, np.uint32),
    )


@kernel
@no_type_check
def _draw(keys, degrees, rows, stride, fanout, drawn, collided):
    """Floyd's offsets: drawn[j * stride + r] is choice j of row r, uint32."""
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
            last = np.uint32(degrees[r] - left - _ONE)
            mine[r] = last if collided[r] else mine[r]


@kernel
@no_type_check
def choose_lanes(
    indptr, indices, stream, fanout, node_ids, i, last, row, edge, row_ptr, positions, lanes
):
    """Choose the edges of the next rows of nodes i .. last-1; fan-out 1 to `MAX_FANOUT`.

    `row` is the row of node i and `edge` its first edge. Fills row_ptr after each row, and
    `positions` from its beginning. Returns the first node whose row is left, and the edge end.
    """
    keys, degrees, bounds, drawn, collided = lanes
    stride = rows_per_call(fanout)
    starts, ends = bounds[0], bounds[1]
    first, many = edge, 0
    for node_at in range(i, min(last, i + stride)):
        prefetch_read(indptr, node_ids[node_at + AHEAD])
        node = np.uint64(node_ids[node_at])
        start = indptr[node]
        degree = indptr[node + _ONE] - start
        to = edge - first
        if degree > fanout and degree <= np.int64(_LOW):
            keys[many] = key_kernel(stream, node)
            degrees[many] = np.uint64(degree)
            starts[many] = start
            ends[many] = to
            many += 1
            edge += fanout
        elif degree > fanout:
            choose_rows(
                indptr, indices, stream, fanout, node_ids, node_at, node_at + 1, row, to, to + 1,
                row_ptr, positions,
            )  # fmt: skip
            edge += fanout
        else:
            for offset in range(degree):
                positions[np.uint64(to + offset)] = start + offset
            for offset in range(0, degree, 16):
                prefetch_read(indices, start + offset)
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
            to += _ONE
            at += step
    return min(last, i + stride), edge
