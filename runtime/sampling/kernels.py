"""The neighbour sampler's kernel: all hops of one batch in one call, without the GIL.

Per hop: rows (degree and number of choices of each frontier node), positions (Floyd's choices, as
positions in the graph's `indices`), then gather and relabel. When a buffer is too small the kernel
says how much it needs and returns; called again with larger buffers it goes on where it stopped.
"""

from typing import no_type_check

import numba
import numpy as np

from runtime.sampling.intrinsics import prefetch_read
from runtime.sampling.relabel import AHEAD, relabel_dense, relabel_hashed
from runtime.sampling.rng import bounded_kernel, key_kernel, value_kernel

# Entries of the state vector shared with the workspace.
HOP, ROWS_NEEDED, EDGES_NEEDED, NODES_NEEDED = 0, 1, 2, 3
STATE_LENGTH = 4

_ONE = np.uint64(1)
_SIX_BITS = np.uint64(63)


@numba.njit(cache=True, nogil=True)
@no_type_check
def plan_rows(indptr, node_ids, first, last, fanout, row, edge, row_start, row_degree, row_ptr):
    """Fill start, degree and pointer of the rows of nodes first .. last-1; return the edge end."""
    for i in range(first, last):
        prefetch_read(indptr, node_ids[i + AHEAD])
        node = node_ids[i]
        start = indptr[node]
        degree = indptr[node + 1] - start
        row_start[row] = start
        row_degree[row] = degree
        row_ptr[row] = edge
        edge += degree if fanout < 0 else min(degree, fanout)
        row += 1
    row_ptr[row] = edge
    return edge


@numba.njit(cache=True, nogil=True, inline="always")
@no_type_check
def _choose_few(key, start, degree, fanout, positions, edge):
    """Floyd's choices where degree <= 64: the set of those taken is one machine word."""
    taken = np.uint64(0)
    for i in range(fanout):
        last = degree - fanout + i
        offset = bounded_kernel(value_kernel(key, i), last + 1)
        if (taken >> np.uint64(offset)) & _ONE:
            offset = last
        taken |= _ONE << np.uint64(offset)
        positions[edge + i] = start + offset


@numba.njit(cache=True, nogil=True, inline="always")
@no_type_check
def _choose_many(key, start, degree, fanout, positions, edge):
    """Floyd's choices at any degree: a 64-bit filter spares nearly all scans of those taken."""
    taken = np.uint64(0)
    for i in range(fanout):
        last = degree - fanout + i
        offset = bounded_kernel(value_kernel(key, i), last + 1)
        bit = _ONE << (np.uint64(offset) & _SIX_BITS)
        if taken & bit:
            for other in range(i):
                if positions[edge + other] == start + offset:
                    offset = last
                    bit = _ONE << (np.uint64(offset) & _SIX_BITS)
                    break
        taken |= bit
        positions[edge + i] = start + offset


@numba.njit(cache=True, nogil=True)
@no_type_check
def _choose_wide(key, start, degree, fanout, positions, edge):
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
        positions[edge + i] = start + offset


@numba.njit(cache=True, nogil=True)
@no_type_check
def choose_positions(
    stream, node_ids, first, last, fanout, row, row_start, row_degree, row_ptr, positions
):
    """Positions in the graph's `indices` of the edges chosen for nodes first .. last-1."""
    for i in range(first, last):
        start, degree, edge = row_start[row], row_degree[row], row_ptr[row]
        row += 1
        if fanout < 0 or degree <= fanout:
            for offset in range(degree):
                positions[edge + offset] = start + offset
            continue
        key = key_kernel(stream, node_ids[i])
        if degree <= 64:
            _choose_few(key, start, degree, fanout, positions, edge)
        elif fanout <= 64:
            _choose_many(key, start, degree, fanout, positions, edge)
        else:
            _choose_wide(key, start, degree, fanout, positions, edge)


@numba.njit(cache=True, nogil=True)
@no_type_check
def expand_hops(
    indptr,
    indices,
    streams,
    fanouts,
    every_hop,
    table,
    shift,
    stamp,
    node_ids,
    row_start,
    row_degree,
    row_ptr,
    positions,
    values,
    local,
    node_ends,
    row_ends,
    edge_ends,
    state,
):
    """Sample hop after hop; return True when done, False when a buffer is too small.

    The graph is `indptr`, `indices`; per hop there is a uint64 stream and an int64 fan-out. The
    relabelling table is described in `relabel`. `node_ids` (local to global) starts with the seeds;
    `row_*` have one int64 per expanded row of all hops; `positions`, `values` and `local` one entry
    per edge of all hops: its place in `indices`, its global and its local source. The `*_ends` are
    totals after each hop, int64 [L + 1], with node_ends[0] set to the number of seeds. `state` says
    where to start (HOP) and, on return, what is needed.
    """
    spare = 2 * AHEAD
    num_nodes = indptr.shape[0] - 1
    for hop in range(state[HOP], fanouts.shape[0]):
        state[HOP] = hop
        first = 0 if every_hop or hop == 0 else node_ends[hop - 1]
        last, row, edge = node_ends[hop], row_ends[hop], edge_ends[hop]
        state[ROWS_NEEDED] = row + last - first + 1
        if state[ROWS_NEEDED] > row_ptr.shape[0]:
            return False
        edge_end = plan_rows(
            indptr, node_ids, first, last, fanouts[hop], row, edge, row_start, row_degree, row_ptr
        )
        nodes = min(last + edge_end - edge, num_nodes)
        state[EDGES_NEEDED] = edge_end + spare
        state[NODES_NEEDED] = nodes + spare
        if state[EDGES_NEEDED] > local.shape[0] or state[NODES_NEEDED] > node_ids.shape[0]:
            return False
        if shift != 0 and 4 * nodes > table.shape[0]:
            return False
        choose_positions(
            streams[hop], node_ids, first, last, fanouts[hop], row, row_start, row_degree, row_ptr,
            positions,
        )  # fmt: skip
        if shift == 0:
            known = relabel_dense(
                indices, positions, values, local, edge, edge_end, node_ids, last, table, stamp
            )
        else:
            known = relabel_hashed(
                indices, positions, values, local, edge, edge_end, node_ids, last, table,
                np.uint64(shift), stamp,
            )  # fmt: skip
        row_ends[hop + 1] = row + last - first
        edge_ends[hop + 1] = edge_end
        node_ends[hop + 1] = known
    return True
