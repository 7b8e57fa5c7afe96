"""Kernels of typed sampling: a row's edges by type, and one choice per vertex and type.

With R edge types, the edges of type r of vertex v are a row of their own, v * R + r; that number is
also the id that its draws are keyed by.
"""

from typing import no_type_check

import numpy as np

from runtime.sampling.choose import choose_rows
from runtime.sampling.compiled import kernel
from runtime.sampling.hop_room import HOP, SPARE, has_room
from runtime.sampling.kernels import CHUNK
from runtime.sampling.relabel import gather, relabel_range


@kernel
@no_type_check
def sort_by_type(indptr, indices, edge_type, num_types, ends, sorted_indices, order):
    """Stable sort of each vertex's edges by type.

    Fills ends [N * R + 1], the sorted in-neighbours and each one's former position. Returns the
    position of the first type out of range, or -1.
    """
    for v in range(indptr.shape[0] - 1):
        for e in range(indptr[v], indptr[v + 1]):
            if edge_type[e] < 0 or edge_type[e] >= num_types:
                return e
            ends[v * num_types + edge_type[e] + 1] += 1
    for row in range(1, ends.shape[0]):
        ends[row] += ends[row - 1]
    free = np.empty(num_types, np.int64)
    for v in range(indptr.shape[0] - 1):
        free[:] = ends[v * num_types : (v + 1) * num_types]
        for e in range(indptr[v], indptr[v + 1]):
            place = free[edge_type[e]]
            free[edge_type[e]] += 1
            sorted_indices[place] = indices[e]
            order[place] = e
    return -1


@kernel
@no_type_check
def _edge_bound(ends, fanouts, num_types, node_ids, first, last):
    total = 0
    for r in range(num_types):
        if fanouts[r] > 0:
            total += (last - first) * fanouts[r]
        else:
            for i in range(first, last):
                row = node_ids[i] * num_types + r
                total += ends[row + 1] - ends[row]
    return total


@kernel
@no_type_check
def _expand_hop(
    ends, indices, stream, fanouts, num_types, scratch, table, shift, base, node_ids, first, last,
    row, edge, row_ptr, positions, values, local,
):  # fmt: skip
    row_ptr[row] = edge
    known = np.uint64(last)
    i = first
    while i < last:
        begin = edge
        while i < last and edge < begin + CHUNK:
            for r in range(num_types):
                scratch[0] = node_ids[i] * num_types + r
                _, edge = choose_rows(
                    ends, indices, stream, fanouts[r], scratch, 0, 1, row, edge, edge + 1, row_ptr,
                    positions,
                )  # fmt: skip
                row += 1
            i += 1
        gather(indices, positions, values, begin, edge, table, shift)
        known = relabel_range(values, local, begin, edge, node_ids, known, table, shift, base)
    return edge, np.int64(known)


@kernel
@no_type_check
def expand_hops_typed(
    ends, indices, streams, fanouts, num_nodes, every_hop, table, shift, base, node_ids, row_ptr,
    positions, values, local, node_ends, row_ends, edge_ends, state,
):  # fmt: skip
    """`expand_hops` over rows of one type: `ends` [N * R + 1], `fanouts` [L, R]."""
    num_types = fanouts.shape[1]
    scratch = np.zeros(SPARE, np.int64)
    for hop in range(state[HOP], fanouts.shape[0]):
        first = 0 if every_hop or hop == 0 else node_ends[hop - 1]
        last, row, edge = node_ends[hop], row_ends[hop], edge_ends[hop]
        more = _edge_bound(ends, fanouts[hop], num_types, node_ids, first, last)
        nodes = min(last + more, num_nodes)
        rows = row + (last - first) * num_types
        if not has_room(
            state, hop, rows, edge + more, nodes, row_ptr, local, node_ids, table, shift
        ):
            return False
        edge_ends[hop + 1], node_ends[hop + 1] = _expand_hop(
            ends, indices, streams[hop], fanouts[hop], num_types, scratch, table, shift, base,
            node_ids, first, last, row, edge, row_ptr, positions, values, local,
        )  # fmt: skip
        row_ends[hop + 1] = rows
    return True
