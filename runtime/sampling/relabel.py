"""Relabel global ids to local ones, by a dense table or a hash table of the batch's size.

Both are one uint32 array and give the same local ids: a node's rank of first appearance. An entry
is `base + local`, and `base` moves past all entries of a batch before the next one starts, so
nothing is cleared between two: with t = entry - base modulo 2^32, a node is known if t < known, and
min(t, known) is its local id whether it is known or new.

- dense: entry of node v at v. 4 bytes per node of the graph.
- hashed: multiplicative hashing, linear probing, at most half full; the key of a slot is looked up
  in `node_ids` at its local id, so a slot takes 4 bytes too.
"""

from typing import NamedTuple, no_type_check

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.sampling.compiled import inlined_kernel, kernel
from gnnplan.runtime.sampling.placed_indices import prefetch_write
from gnnplan.runtime.sampling.rng import ODD

CHUNK = 256
"""Edges that are relabelled while the table's entries of the next ones are on their way."""
ENTRIES = 1 << 32
"""Bound of bases and local ids, at which the table is cleared."""
_SMALLEST = 1024
_ZERO, _ONE = np.uint64(0), np.uint64(1)


class TableArrays(NamedTuple):
    """A table as kernels take it."""

    entries: NDArray[np.uint32]
    shift: int
    """0 if dense; else a hash is the top 64 - shift bits of a product."""
    stamp: NDArray[np.int64]
    """Base of this batch or, between two, of the next. Shape (1,)."""


class Table:
    """One thread's table: dense, or a hash table that `reserve` makes large enough."""

    def __init__(self, num_nodes: int, *, dense: bool) -> None:
        self.dense = dense
        self.entries: NDArray[np.uint32] = np.zeros(num_nodes if dense else _SMALLEST, np.uint32)
        self.stamp = np.ones(1, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the table."""
        return self.entries.nbytes

    def arrays(self) -> TableArrays:
        """Return the table for kernels, until it grows."""
        shift = 0 if self.dense else 65 - int(self.entries.shape[0]).bit_length()
        return TableArrays(self.entries, shift, self.stamp)

    def reserve(self, nodes: int) -> bool:
        """Make room for so many nodes, at most half full; return True for a new table."""
        if self.dense or self.entries.shape[0] >= 2 * nodes:
            return False
        self.entries = np.zeros(table_entries(nodes), dtype=np.uint32)
        return True


def table_entries(nodes: int) -> int:
    """Return the entries of a hash table that so many nodes fill to the half at most.

    >>> table_entries(1000), table_entries(3)
    (2048, 1024)
    """
    return max(_SMALLEST, 1 << (2 * nodes - 1).bit_length())


@kernel
@no_type_check
def begin_batch(table, nodes):
    """Return the base of a batch of up to `nodes` nodes; clear the table when bases end."""
    if table.stamp[0] + nodes + 1 >= ENTRIES:
        table.entries[:] = 0
        table.stamp[0] = 1
    return np.uint64(table.stamp[0])


@inlined_kernel
@no_type_check
def _slot_of(node, shift):
    return (np.uint64(node) * ODD) >> np.uint64(shift)


@inlined_kernel
@no_type_check
def _find_slot(entries, shift, base, node_ids, node, known):
    """Find the slot of a node in a hashed table, and its local id or at least `known`."""
    mask = np.uint64(entries.shape[0] - 1)
    slot = _slot_of(node, shift)
    name = np.uint64(np.uint32(entries[slot] - base))
    # One test for both ends of the probing: they alternate too irregularly to be guessed.
    while (name < known) & (np.uint64(node_ids[name if name < known else _ZERO]) != node):
        slot = (slot + _ONE) & mask
        name = np.uint64(np.uint32(entries[slot] - base))
    return slot, name


@kernel
@no_type_check
def find(entries, shift, base, node_ids, node, known):
    """Return the local id of a node, or `known` where it has not been entered."""
    if shift == 0:
        return min(np.uint64(np.uint32(entries[node] - base)), known)
    _, name = _find_slot(entries, shift, base, node_ids, np.uint64(node), known)
    return min(name, known)


@kernel
@no_type_check
def find_or_add(entries, shift, base, node_ids, node, known):
    """Return the local id of a node; where it is new that is `known`, and the node is entered.

    The caller writes node_ids[known] and counts on where `known` is returned.
    """
    if shift == 0:
        name = min(np.uint64(np.uint32(entries[node] - base)), known)
        entries[node] = np.uint32(base + name)
        return name
    slot, name = _find_slot(entries, shift, base, node_ids, np.uint64(node), known)
    name = min(name, known)
    entries[slot] = np.uint32(base + name)
    return name


@kernel
@no_type_check
def add_seeds(table, node_ids, seeds, num_nodes):
    """Enter the seeds as local 0 .. n-1; return the position of the first bad one, or -1.

    A seed is bad when it is out of range or has occurred before.
    """
    entries, shift, stamp = table
    base = np.uint64(stamp[0])
    for i in range(seeds.shape[0]):
        node, known = seeds[i], np.uint64(i)
        if node < 0 or node >= num_nodes:
            return i
        if find_or_add(entries, shift, base, node_ids, node, known) != known:
            return i
        node_ids[i] = node
    return -1


@kernel
@no_type_check
def refill(table, node_ids, num_local):
    """Enter the nodes known so far into a new, larger table."""
    entries, shift, stamp = table
    base = np.uint64(stamp[0])
    for i in range(num_local):
        find_or_add(entries, shift, base, node_ids, node_ids[i], np.uint64(i))


@kernel
@no_type_check
def ask_entries(table, values, first, last):
    """Ask for the table's entries of values[first:last]."""
    entries, shift, _ = table
    for e in range(first, last):
        node = np.uint64(values[e])
        prefetch_write(entries, np.int64(node if shift == 0 else _slot_of(node, shift)))


@kernel
@no_type_check
def gather(table, indices, positions, values, first, last):
    """Read the chosen neighbours of edges first .. last-1 and ask for their table entries."""
    entries, shift, _ = table
    for e in range(np.uint64(first), np.uint64(last)):
        node = indices[np.uint64(positions[e])]
        values[e] = node
        prefetch_write(entries, np.int64(node) if shift == 0 else np.int64(_slot_of(node, shift)))


@kernel
@no_type_check
def relabel_range(table, values, local, first, last, node_ids, known):
    """Write local ids of values[first:last], adding new nodes; return the number of nodes then."""
    entries, shift, stamp = table
    base = np.uint64(stamp[0])
    if shift == 0:
        for e in range(np.uint64(first), np.uint64(last)):
            node = np.uint64(values[e])
            # No branch: whether a node is new is a coin flip that no predictor guesses.
            name = min(np.uint64(np.uint32(entries[node] - base)), known)
            entries[node] = np.uint32(base + name)
            node_ids[known] = node
            local[e] = name
            known += np.uint64(name == known)
        return known
    for e in range(np.uint64(first), np.uint64(last)):
        node = np.uint64(values[e])
        slot, name = _find_slot(entries, shift, base, node_ids, node, known)
        name = min(name, known)
        entries[slot] = np.uint32(base + name)
        node_ids[known] = node
        local[e] = name
        known += np.uint64(name == known)
    return known


@kernel
@no_type_check
def relabel_values(table, values, local, first, last, node_ids, known):
    """Relabel many values as `relabel_range` does, chunk by chunk."""
    known = np.uint64(known)
    ask_entries(table, values, first, min(first + CHUNK, last))
    while first < last:
        stop = min(first + CHUNK, last)
        ask_entries(table, values, stop, min(stop + CHUNK, last))
        known = relabel_range(table, values, local, first, stop, node_ids, known)
        first = stop
    return np.int64(known)


@kernel
@no_type_check
def relabel_chosen(table, indices, positions, values, local, first, last, node_ids, known):
    """Relabel the neighbours at positions[first:last], which it reads into `values`."""
    known = np.uint64(known)
    done, gathered = first, first
    while done < last:
        until = min(gathered + CHUNK, last)
        gather(table, indices, positions, values, gathered, until)
        known = relabel_range(table, values, local, done, gathered, node_ids, known)
        done, gathered = gathered, until
    return np.int64(known)


@kernel
@no_type_check
def find_bad_seed(table, nodes, ends, num_nodes):
    """Find the first seed in `nodes` that is out of range or twice in its batch; -1 if none."""
    for b in range(ends.shape[0] - 1):
        ids = nodes[ends[b] : ends[b + 1]]
        begin_batch(table, ids.shape[0])
        bad = add_seeds(table, ids, ids, num_nodes)
        table.stamp[0] += ids.shape[0] + 1
        if bad >= 0:
            return ends[b] + bad
    return -1
