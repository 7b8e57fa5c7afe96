"""From global ids to local ones: a dense table, or a hash table of the batch's size.

Both are one uint32 array and give the same local ids: a node's rank of first appearance. An entry
is `base + local`, and `base` moves past all entries of a batch before the next one starts, so
nothing is cleared between two: with t = entry - base modulo 2^32, a node is known if t < known, and
min(t, known) is its local id whether it is known or new.

- dense: entry of node v at v. 4 bytes per node of the graph.
- hashed: multiplicative hashing, linear probing, at most half full; the key of a slot is looked up
  in `node_ids` at its local id, so a slot takes 4 bytes too.

`shift` tells them apart: 0 is dense, otherwise a hash is the top 64 - shift bits of a product.
"""

from typing import no_type_check

import numpy as np

from runtime.sampling.compiled import inlined_kernel, kernel
from runtime.sampling.placed_indices import prefetch_write
from runtime.sampling.rng import ODD

_ZERO, _ONE = np.uint64(0), np.uint64(1)


@inlined_kernel
@no_type_check
def _slot_of(node, shift):
    return (np.uint64(node) * ODD) >> np.uint64(shift)


@inlined_kernel
@no_type_check
def _find_or_add(table, mask, shift, base, node_ids, node, known):
    """Local id of a node in the hashed table; it is `known`, and entered, where the node is new."""
    slot = _slot_of(node, shift)
    name = np.uint64(np.uint32(table[slot] - base))
    # One test for both ends of the probing: they alternate too irregularly to be guessed.
    while (name < known) & (np.uint64(node_ids[name if name < known else _ZERO]) != node):
        slot = (slot + _ONE) & mask
        name = np.uint64(np.uint32(table[slot] - base))
    name = min(name, known)
    table[slot] = np.uint32(base + name)
    return name


@kernel
@no_type_check
def add_seeds(seeds, num_nodes, node_ids, table, shift, base):
    """Enter the seeds as local 0 .. n-1; return the position of the first bad one, or -1.

    A seed is bad when it is out of range or has occurred before.
    """
    mask = np.uint64(table.shape[0] - 1)
    for i in range(seeds.shape[0]):
        node = seeds[i]
        known = np.uint64(i)
        if node < 0 or node >= num_nodes:
            return i
        if shift == 0:
            if np.uint64(np.uint32(table[node] - base)) < known:
                return i
            table[node] = np.uint32(base + known)
        elif _find_or_add(table, mask, shift, base, node_ids, np.uint64(node), known) != known:
            return i
        node_ids[i] = node
    return -1


@kernel
@no_type_check
def refill(node_ids, num_local, table, shift, base):
    """Enter the nodes known so far into a new, larger hashed table."""
    mask = np.uint64(table.shape[0] - 1)
    for i in range(num_local):
        _find_or_add(table, mask, shift, base, node_ids, np.uint64(node_ids[i]), np.uint64(i))


@kernel
@no_type_check
def gather(indices, positions, values, first, last, table, shift):
    """Read the chosen neighbours of edges first .. last-1 and ask for their table entries."""
    for e in range(np.uint64(first), np.uint64(last)):
        node = indices[np.uint64(positions[e])]
        values[e] = node
        prefetch_write(table, np.int64(node) if shift == 0 else np.int64(_slot_of(node, shift)))


@kernel
@no_type_check
def relabel_chunk(values, local, first, last, node_ids, known, table, shift, base):
    """Local ids of edges first .. last-1, whose global ids start `values`; the number of nodes."""
    count = np.uint64(last - first)
    if shift == 0:
        return relabel_dense(values, local[first:], 0, count, node_ids, known, table, base)
    return relabel_hashed(values, local[first:], 0, count, node_ids, known, table, shift, base)


@kernel
@no_type_check
def relabel_dense(values, local, first, last, node_ids, known, table, base):
    """Local ids of edges first .. last-1; return the new number of nodes."""
    for e in range(np.uint64(first), np.uint64(last)):
        node = np.uint64(values[e])
        # No branch: whether a node is new is a coin flip that no predictor guesses.
        name = min(np.uint64(np.uint32(table[node] - base)), known)
        table[node] = np.uint32(base + name)
        node_ids[known] = node
        local[e] = name
        known += np.uint64(name == known)
    return known


@kernel
@no_type_check
def relabel_hashed(values, local, first, last, node_ids, known, table, shift, base):
    """`relabel_dense` over the hashed table."""
    mask = np.uint64(table.shape[0] - 1)
    for e in range(np.uint64(first), np.uint64(last)):
        node = np.uint64(values[e])
        name = _find_or_add(table, mask, shift, base, node_ids, node, known)
        node_ids[known] = node
        local[e] = name
        known += np.uint64(name == known)
    return known


@kernel
@no_type_check
def relabel_range(values, local, first, last, node_ids, known, table, shift, base):
    """`relabel_dense` or `relabel_hashed`, whichever the table is for."""
    if shift == 0:
        return relabel_dense(values, local, first, last, node_ids, known, table, base)
    return relabel_hashed(values, local, first, last, node_ids, known, table, shift, base)
