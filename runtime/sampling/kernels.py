"""The neighbour sampler's kernel: all hops of one batch in one call, without the GIL.

A hop runs in chunks of rows. A chunk passes through three stages, choose, gather, relabel; each
asks for the cache lines that the next one needs, and works on the chunk before while they arrive.
What one stage leaves for the next lies in two chunks of scratch used in turns, so that it stays in
the first-level cache; wide fan-outs and whole neighbourhoods, whose rows have any length, use the
batch's buffers instead. When a buffer is too small the kernel says how much it needs
and returns; called again with larger buffers it goes on with the hop where it stopped.
"""

from typing import no_type_check

import numpy as np

from runtime.sampling.choose import choose_rows, edge_bound
from runtime.sampling.choose_lanes import MAX_EDGES, MAX_FANOUT, choose_lanes, make_lanes
from runtime.sampling.compiled import kernel
from runtime.sampling.hop_room import HOP, has_room
from runtime.sampling.relabel import gather, relabel_chunk, relabel_range

CHUNK = 256
"""Edges per chunk, or one row where that is longer."""


@kernel
@no_type_check
def make_scratch(indices):
    """Scratch of `expand_hop`: that of the lanes, and two chunks of positions and of values."""
    return make_lanes(), np.zeros((2, MAX_EDGES), np.int64), np.zeros((2, MAX_EDGES), indices.dtype)


@kernel
@no_type_check
def expand_hop(
    indptr, indices, stream, fanout, table, shift, base, node_ids, first, last, row, edge,
    row_ptr, positions, values, local, keep_positions, scratch,
):  # fmt: skip
    """Sample the rows of nodes first .. last-1; return the edge end and the number of nodes.

    `positions` is filled where `keep_positions` says so, and otherwise of any length for fan-outs
    up to `MAX_FANOUT`.
    """
    if 0 < fanout <= MAX_FANOUT:
        return _expand_narrow(
            indptr, indices, stream, fanout, table, shift, base, node_ids, first, last, row, edge,
            row_ptr, positions, local, keep_positions, scratch,
        )  # fmt: skip
    return _expand_wide(
        indptr, indices, stream, fanout, table, shift, base, node_ids, first, last, row, edge,
        row_ptr, positions, values, local,
    )  # fmt: skip


@kernel
@no_type_check
def _expand_narrow(
    indptr, indices, stream, fanout, table, shift, base, node_ids, first, last, row, edge,
    row_ptr, positions, local, keep_positions, scratch,
):  # fmt: skip
    lanes, both_positions, both_values = scratch
    row_ptr[row] = edge
    known = np.uint64(last)
    i = first
    turn = 0
    # Edges [relabelled, gathered) wait for relabelling, [gathered, edge) for gathering.
    relabelled = gathered = edge
    while relabelled < edge or i < last:
        begin, chosen, waiting = edge, both_positions[turn], both_positions[1 - turn]
        if i < last:
            stop, edge = choose_lanes(
                indptr, indices, stream, fanout, node_ids, i, last, row, edge, row_ptr, chosen,
                lanes,
            )  # fmt: skip
            row += stop - i
            i = stop
        if keep_positions:
            positions[begin:edge] = chosen[: edge - begin]
        read, ready = both_values[turn], both_values[1 - turn]
        gather(indices, waiting, read, 0, begin - gathered, table, shift)
        known = relabel_chunk(
            ready, local, relabelled, gathered, node_ids, known, table, shift, base
        )
        relabelled, gathered = gathered, begin
        turn = 1 - turn
    return edge, np.int64(known)


@kernel
@no_type_check
def _expand_wide(
    indptr, indices, stream, fanout, table, shift, base, node_ids, first, last, row, edge,
    row_ptr, positions, values, local,
):  # fmt: skip
    row_ptr[row] = edge
    known = np.uint64(last)
    i = first
    relabelled = gathered = chosen = edge
    while relabelled < chosen or i < last:
        before = chosen
        i, chosen = choose_rows(
            indptr, indices, stream, fanout, node_ids, i, last, row + i - first, before,
            before + CHUNK, row_ptr, positions,
        )  # fmt: skip
        done, gathered_before = relabelled, gathered
        gather(indices, positions, values, gathered, before, table, shift)
        gathered = before
        known = relabel_range(
            values, local, done, gathered_before, node_ids, known, table, shift, base
        )
        relabelled = gathered_before
    return chosen, np.int64(known)


@kernel
@no_type_check
def expand_hops(
    indptr, indices, streams, fanouts, every_hop, table, shift, base, node_ids, row_ptr,
    positions, values, local, node_ends, row_ends, edge_ends, state, keep_positions,
):  # fmt: skip
    """Sample hop after hop; return True when done, False when a buffer is too small.

    The graph is `indptr`, `indices`; per hop there is a uint64 stream and an int64 fan-out. The
    relabelling table is described in `relabel`. `node_ids` (local to global) starts with the seeds;
    `row_ptr` has one entry per expanded row of all hops and one more; `positions`, `values` and
    `local` one entry per edge of all hops: its place in `indices`, its global and its local source.
    The `*_ends` are totals after each hop, int64 [L + 1], with node_ends[0] set to the number of
    seeds. `state` says where to start (HOP) and, on return, what is needed. Without
    `keep_positions` the contents of `positions` and `values` are anything.
    """
    scratch = make_scratch(indices)
    num_nodes = indptr.shape[0] - 1
    for hop in range(state[HOP], fanouts.shape[0]):
        first = 0 if every_hop or hop == 0 else node_ends[hop - 1]
        last, row, edge = node_ends[hop], row_ends[hop], edge_ends[hop]
        more = edge_bound(indptr, fanouts[hop], node_ids, first, last)
        nodes = min(last + more, num_nodes)
        rows = row + last - first
        if not has_room(
            state, hop, rows, edge + more, nodes, row_ptr, local, node_ids, table, shift
        ):
            return False
        edge_ends[hop + 1], node_ends[hop + 1] = expand_hop(
            indptr, indices, streams[hop], fanouts[hop], table, shift, base, node_ids, first,
            last, row, edge, row_ptr, positions, values, local, keep_positions, scratch,
        )  # fmt: skip
        row_ends[hop + 1] = rows
    return True
