"""From global ids to local ones: a dense stamped table, or a hash table of the batch's size.

Both are one uint64 array and give the same local ids: a node's rank of first appearance. A stamp,
new for every batch, says which entries are of this batch, so that nothing is cleared between two.

- dense: entry `id` is stamp << 32 | local. 8 bytes per node of the graph.
- hashed: slot s is (id, stamp << 32 | local) at 2s and 2s+1; multiplicative hashing, linear
  probing, at most half full. 16 bytes per slot.

`shift` tells them apart: 0 is dense, otherwise a hash is the top 64 - shift bits of a product.
"""

from typing import no_type_check

import numba
import numpy as np

from runtime.sampling.intrinsics import prefetch_read, prefetch_write
from runtime.sampling.rng import ODD

AHEAD = 32
"""Entries between asking for a cache line and using it: a miss lasts about this many entries."""

_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)


@numba.njit(cache=True, nogil=True, inline="always")
@no_type_check
def _find_or_add(table, mask, shift, stamp, node, new_local):
    """Local id of a node in the hashed table, which is `new_local` where it was not there yet."""
    slot = (np.uint64(node) * ODD) >> shift
    while True:
        entry = table[2 * slot + _ONE]
        if entry >> _HALF != stamp:
            table[2 * slot] = np.uint64(node)
            table[2 * slot + _ONE] = stamp << _HALF | np.uint64(new_local)
            return new_local
        if table[2 * slot] == np.uint64(node):
            return np.int64(entry & _LOW)
        slot = (slot + _ONE) & mask


@numba.njit(cache=True, nogil=True)
@no_type_check
def add_seeds(seeds, num_nodes, node_ids, table, shift, stamp):
    """Enter the seeds as local 0 .. n-1; return the position of the first bad one, or -1.

    A seed is bad when it is out of range or has occurred before.
    """
    mask = np.uint64(table.shape[0] // 2 - 1)
    for i in range(seeds.shape[0]):
        node = seeds[i]
        if node < 0 or node >= num_nodes:
            return i
        if shift == 0:
            if table[node] >> _HALF == stamp:
                return i
            table[node] = stamp << _HALF | np.uint64(i)
        elif _find_or_add(table, mask, shift, stamp, node, i) != i:
            return i
        node_ids[i] = node
    return -1


@numba.njit(cache=True, nogil=True)
@no_type_check
def refill(node_ids, num_local, table, shift, stamp):
    """Enter the nodes known so far into a new, larger hashed table."""
    mask = np.uint64(table.shape[0] // 2 - 1)
    for i in range(num_local):
        _find_or_add(table, mask, shift, stamp, node_ids[i], i)


@numba.njit(cache=True, nogil=True)
@no_type_check
def relabel_dense(indices, positions, values, local, first, last, node_ids, known, table, stamp):
    """Gather edges first .. last-1 and relabel them; return the new number of nodes.

    A software pipeline of three stages, AHEAD entries apart: ask for indices[position], read it and
    ask for its table entry, look it up. `positions` and `values` have 2 AHEAD entries to spare.
    """
    high = stamp << _HALF
    for e in range(first, min(first + 2 * AHEAD, last)):
        prefetch_read(indices, positions[e])
    for e in range(first, min(first + AHEAD, last)):
        values[e] = indices[positions[e]]
        prefetch_write(table, values[e])
    for e in range(first, last):
        prefetch_read(indices, positions[e + 2 * AHEAD])
        if e + AHEAD < last:
            ahead = indices[positions[e + AHEAD]]
            values[e + AHEAD] = ahead
            prefetch_write(table, ahead)
        node = values[e]
        entry = table[node]
        # No branch: whether a node is new is a coin flip that no predictor guesses.
        is_new = entry >> _HALF != stamp
        name = known if is_new else np.int64(entry & _LOW)
        table[node] = high | np.uint64(name)
        node_ids[known] = node
        local[e] = name
        known += np.int64(is_new)
    return known


@numba.njit(cache=True, nogil=True)
@no_type_check
def relabel_hashed(
    indices, positions, values, local, first, last, node_ids, known, table, shift, stamp
):
    """`relabel_dense` over the hashed table."""
    mask = np.uint64(table.shape[0] // 2 - 1)
    for e in range(first, min(first + 2 * AHEAD, last)):
        prefetch_read(indices, positions[e])
    for e in range(first, last + AHEAD):
        prefetch_read(indices, positions[e + AHEAD])
        if e < last:
            ahead = indices[positions[e]]
            values[e] = ahead
            prefetch_write(table, np.int64(2 * ((np.uint64(ahead) * ODD) >> shift)))
        if e - AHEAD >= first:
            node = values[e - AHEAD]
            name = _find_or_add(table, mask, shift, stamp, node, known)
            node_ids[known] = node
            local[e - AHEAD] = name
            known += np.int64(name == known)
    return known
