"""Kernels of weighted neighbour sampling: a row's law, its draws, and the relabelling of a hop.

The law of a row is w_e = A_e (f if the source is local else 1), A_e the edge's weight or 1. The
three ways of drawing from it, and the inclusion probabilities they report, are defined in
`reference_weighted`, which these equal bit for bit.
"""

import math
from typing import no_type_check

import numpy as np

from runtime.sampling.compiled import inlined_kernel, kernel
from runtime.sampling.intrinsics import prefetch_read
from runtime.sampling.poisson import offer, unit
from runtime.sampling.relabel import gather, relabel_dense, relabel_hashed
from runtime.sampling.rng import bounded_kernel, key_kernel, value_kernel

WITHOUT, REPLACEMENT, POISSON = 0, 1, 2
"""How a row is drawn, as the kernels are told."""
CHUNK = 256
AHEAD = 24
"""Rows between asking for a row's bounds and reading them; at most the spare entries."""


@inlined_kernel
@no_type_check
def _fill_law(indices, edge_weight, ring, level, factor, start, degree, law):
    """Write the row's weights to law[0 .. degree-1]; return how many are positive, and the sum."""
    positive, total = 0, 0.0
    for j in range(degree):
        w = np.float64(edge_weight[start + j]) if edge_weight.shape[0] > 0 else 1.0
        if ring.shape[0] > 0 and ring[indices[start + j]] <= level:
            w *= factor
        law[j] = w
        total += w
        positive += w > 0.0
    return positive, total


@kernel
@no_type_check
def _take_all(law, degree, positive, start, positions, weight, edge):
    """All edges that can be drawn, each with probability 1."""
    for j in range(degree):
        if law[j] > 0.0:
            positions[edge] = start + j
            weight[edge] = 1.0 / positive
            edge += 1
    return edge


@kernel
@no_type_check
def _draw_uniform(key, degree, fanout, start, indices, positions, weight, edge):
    """Independent draws, all edges alike."""
    for i in range(fanout):
        offset = bounded_kernel(value_kernel(key, i), degree)
        positions[edge] = start + offset
        weight[edge] = 1.0 / fanout
        prefetch_read(indices, start + offset)
        edge += 1
    return edge


@kernel
@no_type_check
def _draw_replacement(key, law, sums, degree, positive, fanout, start, positions, weight, edge):
    """Independent draws by inverse transform on the row's running sums."""
    running, last = 0.0, 0
    for j in range(degree):
        running += law[j]
        sums[j] = running
        if law[j] > 0.0:
            last = j
    for i in range(fanout):
        target = unit(value_kernel(key, i)) * running
        low, high = 0, degree
        while low < high:
            middle = (low + high) >> 1
            if sums[middle] > target:
                high = middle
            else:
                low = middle + 1
        j = min(low, last)
        positions[edge] = start + j
        weight[edge] = running / (np.float64(positive) * fanout * law[j])
        edge += 1
    return edge


@kernel
@no_type_check
def _draw_race(key, law, first, places, degree, positive, fanout, start, positions, weight, edge):
    """The `fanout` first arrivals of independent exponential times with rates `law`."""
    count = 0
    first, places = first[: fanout + 1], places[: fanout + 1]
    for j in range(degree):
        if law[j] > 0.0:
            time = -math.log1p(-unit(value_kernel(key, j))) / law[j]
            count = offer(first, places, count, time, j)
    # The root of the heap arrived last of these: it is not taken, it says what the others beat.
    taken = np.sort(places[1:])
    for i in range(fanout):
        j = taken[i]
        positions[edge] = start + j
        weight[edge] = 1.0 / (-math.expm1(-law[j] * first[0]) * positive)
        edge += 1
    return edge


@inlined_kernel
@no_type_check
def _water_level(law, degree, fanout, total):
    """The c with sum min(1, c w) = fanout; needs more positive weights than `fanout`."""
    level, clipped = fanout / total, -1
    while True:
        count, mass = 0, 0.0
        for j in range(degree):
            if level * law[j] >= 1.0:
                count += 1
            else:
                mass += law[j]
        if count <= clipped or count >= fanout:
            return level
        clipped = count
        level = (fanout - count) / mass


@kernel
@no_type_check
def _draw_poisson(key, law, degree, positive, total, fanout, start, positions, weight, edge):
    """Each edge by itself with probability min(1, c w)."""
    level = _water_level(law, degree, fanout, total)
    for j in range(degree):
        pi = min(1.0, level * law[j])
        if unit(value_kernel(key, j)) < pi:
            positions[edge] = start + j
            weight[edge] = 1.0 / (pi * positive)
            edge += 1
    return edge


@kernel
@no_type_check
def choose_hop(
    indptr, indices, edge_weight, ring, level, factor, stream, fanout, draws, hajek, node_ids,
    first, last, row, edge, row_ptr, positions, weight, law, sums, first_times, places,
):  # fmt: skip
    """Choose the edges of nodes first .. last-1; return the edge end, or minus the room needed.

    `law` and `sums` are float64 scratch of the graph's largest degree, `first_times` (float64) and
    `places` (int64) of the fan-out and one more. Empty `edge_weight` or `ring` stand for all ones
    and for no local set; a source is local where its `ring` is at most `level`.
    """
    plain = edge_weight.shape[0] == 0 and (ring.shape[0] == 0 or factor == 1.0)
    row_ptr[row] = edge
    for i in range(first, last):
        prefetch_read(indptr, node_ids[i + AHEAD])
        node = node_ids[i]
        start = indptr[node]
        degree = indptr[node + 1] - start
        room = edge + max(degree, fanout)
        if room > positions.shape[0]:
            return -room
        key, before = key_kernel(stream, node), edge
        if plain and draws == REPLACEMENT and fanout > 0 and degree > 0:
            edge = _draw_uniform(key, degree, fanout, start, indices, positions, weight, edge)
        elif degree > 0:
            positive, total = _fill_law(
                indices, edge_weight, ring, level, factor, start, degree, law
            )
            if fanout < 0 or (positive <= fanout and (draws != REPLACEMENT or positive == 0)):
                edge = _take_all(law, degree, positive, start, positions, weight, edge)
            elif draws == REPLACEMENT:
                edge = _draw_replacement(
                    key, law, sums, degree, positive, fanout, start, positions, weight, edge
                )
            elif draws == WITHOUT:
                edge = _draw_race(
                    key,
                    law,
                    first_times,
                    places,
                    degree,
                    positive,
                    fanout,
                    start,
                    positions,
                    weight,
                    edge,
                )
            else:
                edge = _draw_poisson(
                    key, law, degree, positive, total, fanout, start, positions, weight, edge
                )
        if hajek:
            _normalise(weight, before, edge)
        row += 1
        row_ptr[row] = edge
    return edge


@inlined_kernel
@no_type_check
def _normalise(weight, first, last):
    total = 0.0
    for e in range(first, last):
        total += weight[e]
    for e in range(first, last):
        weight[e] /= total


@kernel
@no_type_check
def relabel_hop(indices, positions, values, local, edge, end, node_ids, known, table, shift, base):
    """Local ids of edges edge .. end-1; return the number of nodes known then."""
    known = np.uint64(known)
    done, gathered = edge, edge
    while done < end:
        until = min(gathered + CHUNK, end)
        gather(indices, positions, values, gathered, until, table, shift)
        if shift == 0:
            known = relabel_dense(values, local, done, gathered, node_ids, known, table, base)
        else:
            known = relabel_hashed(
                values, local, done, gathered, node_ids, known, table, shift, base
            )
        done, gathered = gathered, until
    return np.int64(known)
