"""The relabelling table that the stacked kernels share: dense or hashed, as in `relabel`.

Batches are entered one after another in the same table, each with its own `base`, so that k stacked
batches need no k times larger table (4 bytes per node of the graph, or 8 per node of the largest
batch) and nothing is cleared between two. An entry is `base + local`; an entry below `base` is of
an earlier batch.
"""

from typing import no_type_check

import numpy as np
from numpy.typing import NDArray

from runtime.sampling.compiled import kernel
from runtime.sampling.rng import ODD

_ONE = np.uint64(1)
_SMALLEST = 1024
ENTRIES = 1 << 32


class Table:
    """One thread's table and scratch; `stamp` holds the base of the next batch.

    Args:
        num_nodes: Nodes of the graph.
        dense: One entry per node of the graph, or a hash table that `reserve` makes large enough.
    """

    def __init__(self, num_nodes: int, *, dense: bool) -> None:
        self.dense = dense
        self.entries: NDArray[np.uint32] = np.zeros(num_nodes if dense else _SMALLEST, np.uint32)
        self.stamp = np.ones(1, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of the table and the scratch."""
        return self.entries.nbytes

    @property
    def shift(self) -> int:
        """0 for the dense table, 64 - log2(slots) for the hashed one."""
        return 0 if self.dense else 65 - int(self.entries.shape[0]).bit_length()

    def reserve(self, nodes: int) -> None:
        """Make room for a batch of this many distinct nodes, at most half full."""
        if not self.dense and self.entries.shape[0] < 2 * nodes:
            self.entries = np.zeros(1 << (2 * nodes - 1).bit_length(), dtype=np.uint32)
            self.stamp[0] = 1


@kernel
@no_type_check
def begin(table, stamp, nodes):
    """Base of a batch with up to `nodes` distinct nodes; the table is cleared when stamps end."""
    if stamp[0] + nodes + 1 >= ENTRIES:
        table[:] = 0
        stamp[0] = 1
    return np.uint64(stamp[0])


@kernel
@no_type_check
def find(table, shift, base, node_ids, node, known):
    """Local id of a node, or `known` where it has not been entered."""
    if shift == 0:
        return min(np.uint64(np.uint32(table[node] - base)), known)
    mask = np.uint64(table.shape[0] - 1)
    slot = (np.uint64(node) * ODD) >> np.uint64(shift)
    name = np.uint64(np.uint32(table[slot] - base))
    while name < known and np.uint64(node_ids[name]) != np.uint64(node):
        slot = (slot + _ONE) & mask
        name = np.uint64(np.uint32(table[slot] - base))
    return min(name, known)


@kernel
@no_type_check
def find_or_add(table, shift, base, node_ids, node, known):
    """Local id of a node; where it is new that is `known`, and the node is entered.

    The caller writes node_ids[known] and counts on where `known` is returned.
    """
    if shift == 0:
        name = min(np.uint64(np.uint32(table[node] - base)), known)
        table[node] = np.uint32(base + name)
        return name
    mask = np.uint64(table.shape[0] - 1)
    slot = (np.uint64(node) * ODD) >> np.uint64(shift)
    name = np.uint64(np.uint32(table[slot] - base))
    while name < known and np.uint64(node_ids[name]) != np.uint64(node):
        slot = (slot + _ONE) & mask
        name = np.uint64(np.uint32(table[slot] - base))
    name = min(name, known)
    table[slot] = np.uint32(base + name)
    return name


@kernel
@no_type_check
def find_bad_seed(nodes, ends, num_nodes, table, shift, stamp):
    """Position in `nodes` of the first seed out of range or twice in its batch, or -1."""
    for b in range(ends.shape[0] - 1):
        ids = nodes[ends[b] : ends[b + 1]]
        base = begin(table, stamp, ids.shape[0])
        stamp[0] += ids.shape[0] + 1
        for i in range(ids.shape[0]):
            if ids[i] < 0 or ids[i] >= num_nodes:
                return ends[b] + i
            if find_or_add(table, shift, base, ids, ids[i], np.uint64(i)) != np.uint64(i):
                return ends[b] + i
    return -1
