"""The neighbour sampler's kernels for a graph without some edges; `exclusion` says what for.

In a row of degree d with m edges out, Floyd's method chooses among d - m offsets, with the draws of
`choose`, and each offset then passes over the edges that are out before it.
"""

from typing import no_type_check

import numpy as np

from runtime.sampling.choose import choose_rows, edge_bound
from runtime.sampling.compiled import kernel
from runtime.sampling.hop_room import HOP, has_room
from runtime.sampling.kernels import CHUNK
from runtime.sampling.relabel import gather, relabel_range
from runtime.sampling.rng import ODD, bounded_kernel, key_kernel, value_kernel


@kernel
@no_type_check
def fill_slots(rows, slots):
    """Enter the number of each row into an empty hash table, -1 everywhere."""
    mask = np.uint64(slots.shape[0] - 1)
    for number in range(rows.shape[0]):
        slot = (np.uint64(rows[number]) * ODD >> np.uint64(32)) & mask
        while slots[slot] >= 0:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = number


@kernel
@no_type_check
def _row_number(rows, slots, node):
    mask = np.uint64(slots.shape[0] - 1)
    slot = (np.uint64(node) * ODD >> np.uint64(32)) & mask
    while slots[slot] >= 0 and rows[slots[slot]] != node:
        slot = (slot + np.uint64(1)) & mask
    return slots[slot]


@kernel
@no_type_check
def _choose_without(key, start, degree, fanout, out, positions, edge):
    """Choose among the edges of a row that are not `out` (ascending); return the edge end."""
    left = degree - out.shape[0]
    if fanout < 0 or fanout >= left:
        skipped = 0
        for offset in range(degree):
            if skipped < out.shape[0] and out[skipped] == start + offset:
                skipped += 1
            else:
                positions[edge + offset - skipped] = start + offset
        return edge + left
    taken = np.zeros(left, np.bool_)
    for i in range(fanout):
        last = left - fanout + i
        offset = bounded_kernel(value_kernel(key, i), last + 1)
        offset = last if taken[offset] else offset
        taken[offset] = True
        place = start + offset
        for passed in out:
            if passed > place:
                break
            place += 1
        positions[edge + i] = place
    return edge + fanout


@kernel
@no_type_check
def _choose_rows_without(
    indptr, indices, stream, fanout, excluded, node_ids, i, last, row, edge, enough, row_ptr,
    positions,
):  # fmt: skip
    """`choose_rows` with edges out."""
    rows, ends, places, slots = excluded
    while i < last and edge < enough:
        node = node_ids[i]
        number = _row_number(rows, slots, node)
        if number < 0:
            _, edge = choose_rows(
                indptr, indices, stream, fanout, node_ids, i, i + 1, row, edge, edge + 1, row_ptr,
                positions,
            )  # fmt: skip
        else:
            out = places[ends[number] : ends[number + 1]]
            start = indptr[node]
            edge = _choose_without(
                key_kernel(stream, node), start, indptr[node + 1] - start, fanout, out, positions,
                edge,
            )  # fmt: skip
        i += 1
        row += 1
        row_ptr[row] = edge
    return i, edge


@kernel
@no_type_check
def _expand_hop_without(
    indptr, indices, stream, fanout, excluded, table, shift, base, node_ids, first, last, row,
    edge, row_ptr, positions, values, local,
):  # fmt: skip
    row_ptr[row] = edge
    known = np.uint64(last)
    i = first
    while i < last:
        begin = edge
        i, edge = _choose_rows_without(
            indptr, indices, stream, fanout, excluded, node_ids, i, last, row + i - first, begin,
            begin + CHUNK, row_ptr, positions,
        )  # fmt: skip
        gather(indices, positions, values, begin, edge, table, shift)
        known = relabel_range(values, local, begin, edge, node_ids, known, table, shift, base)
    return edge, np.int64(known)


@kernel
@no_type_check
def expand_hops_without(
    indptr, indices, streams, fanouts, every_hop, excluded, table, shift, base, node_ids, row_ptr,
    positions, values, local, node_ends, row_ends, edge_ends, state,
):  # fmt: skip
    """`expand_hops` with edges out; its buffers hold the rows with all their edges."""
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
        edge_ends[hop + 1], node_ends[hop + 1] = _expand_hop_without(
            indptr, indices, streams[hop], fanouts[hop], excluded, table, shift, base, node_ids,
            first, last, row, edge, row_ptr, positions, values, local,
        )  # fmt: skip
        row_ends[hop + 1] = rows
    return True
