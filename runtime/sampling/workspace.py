"""What one thread keeps between batches: buffers that only grow, and its relabelling table.

All arrays come from numpy, which asks for huge pages where it helps.

Room for a hop in the batch's buffers: what it may need, and whether the buffers hold it.

A kernel that lacks room says how much it needs in the state vector that it shares with the
workspace, and returns; called again with larger buffers it goes on with the hop where it stopped.
"""

from typing import Any, no_type_check

import numpy as np
from numpy.typing import NDArray

from runtime.sampling.compiled import kernel
from runtime.sampling.relabel import refill

SPARE = 64
"""Entries that buffers have beyond the last one used, which prefetches read ahead."""

# Entries of the state vector.
HOP, ROWS_NEEDED, EDGES_NEEDED, NODES_NEEDED = 0, 1, 2, 3
STATE_LENGTH = 4


@kernel
@no_type_check
def has_room(state, hop, rows, edges, nodes, row_ptr, local, node_ids, table, shift):
    """Note that the hop may need so many rows, edges and nodes in all; False where room lacks."""
    state[HOP] = hop
    state[ROWS_NEEDED] = rows + 1
    state[EDGES_NEEDED] = edges + SPARE
    state[NODES_NEEDED] = nodes + SPARE
    return (
        state[ROWS_NEEDED] <= row_ptr.shape[0]
        and state[EDGES_NEEDED] <= local.shape[0]
        and state[NODES_NEEDED] <= node_ids.shape[0]
        and (shift == 0 or 2 * nodes <= table.shape[0])
    )


_ENTRIES = 1 << 32
_SMALLEST_TABLE = 1024


class Workspace:
    """Buffers of one thread; contents are valid until that thread's next batch."""

    def __init__(
        self, num_nodes: int, num_hops: int, value_dtype: np.dtype, *, dense: bool
    ) -> None:
        self.dense = dense
        self.num_nodes = num_nodes
        self.table = np.zeros(num_nodes if dense else _SMALLEST_TABLE, dtype=np.uint32)
        self.base = 1
        self.used = 0
        self.node_ids = np.zeros(SPARE, dtype=np.int64)
        self.row_ptr = np.zeros(1, dtype=np.int64)
        self.positions = np.zeros(SPARE, dtype=np.int64)
        self.values = np.zeros(SPARE, dtype=value_dtype)
        self.local = np.zeros(SPARE, dtype=np.int32)
        self.node_ends = np.zeros(num_hops + 1, dtype=np.int64)
        self.row_ends = np.zeros(num_hops + 1, dtype=np.int64)
        self.edge_ends = np.zeros(num_hops + 1, dtype=np.int64)
        self.state = np.zeros(STATE_LENGTH, dtype=np.int64)

    @property
    def shift(self) -> int:
        """0 for the dense table, 64 - log2(slots) for the hashed one."""
        return 0 if self.dense else 65 - int(self.table.shape[0]).bit_length()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, the table included."""
        return sum(a.nbytes for a in vars(self).values() if isinstance(a, np.ndarray))

    def begin(self, num_seeds: int) -> None:
        """Start a batch: entries of earlier ones become void, totals zero, room for the seeds."""
        self.base += self.used
        # Until `finish` says better: whatever happens, no more entries than nodes are written.
        self.used = self.num_nodes + 1
        if self.base + self.used >= _ENTRIES:
            self.table[:] = 0
            self.base = 1
        self.state[:] = 0
        self.node_ends[0] = num_seeds
        self.row_ends[0] = self.edge_ends[0] = 0
        self.node_ids = _grown(self.node_ids, num_seeds + SPARE, keep=0)
        if not self.dense and self.table.shape[0] < 2 * num_seeds:
            self.table = np.zeros(_slots(num_seeds), dtype=np.uint32)

    def arrays(self) -> tuple[Any, ...]:
        """The table's shift and everything a kernel of stacked batches works on."""
        return (
            self.shift, self.table, self.node_ids, self.row_ptr, self.positions, self.values,
            self.local, self.node_ends, self.row_ends, self.edge_ends, self.state,
        )  # fmt: skip

    def make_room(self, num_seeds: int) -> None:
        """Make the buffers large enough to start the batch, and as a kernel asked, anew."""
        self.node_ids = _grown(self.node_ids, num_seeds + SPARE, keep=0)
        self.node_ends[0] = 0
        self.state[NODES_NEEDED] = max(int(self.state[NODES_NEEDED]), num_seeds + SPARE)
        self.grow(0)

    def finish(self) -> None:
        """End a batch that succeeded: only its own entries need to be passed by the next one."""
        self.used = int(self.node_ends[-1])

    def grow(self, hop: int) -> None:
        """Make the buffers as large as the kernel asked for, keeping what hops < `hop` wrote."""
        edges, nodes = int(self.state[EDGES_NEEDED]), int(self.state[NODES_NEEDED])
        known, kept_edges = int(self.node_ends[hop]), int(self.edge_ends[hop])
        kept_rows = int(self.row_ends[hop]) + 1
        self.row_ptr = _grown(self.row_ptr, int(self.state[ROWS_NEEDED]), keep=kept_rows)
        self.positions = _grown(self.positions, edges, keep=kept_edges)
        self.values = _grown(self.values, edges, keep=0)
        self.local = _grown(self.local, edges, keep=kept_edges)
        self.node_ids = _grown(self.node_ids, nodes, keep=known)
        if not self.dense and self.table.shape[0] < 2 * nodes:
            self.table = np.zeros(_slots(nodes), dtype=np.uint32)
            refill(self.node_ids, known, self.table, self.shift, np.uint64(self.base))


def _slots(nodes: int) -> int:
    """Slots of a hashed table that holds `nodes` nodes at most half full, a power of two."""
    return 1 << (2 * nodes - 1).bit_length()


def _grown(buffer: NDArray, size: int, *, keep: int) -> NDArray:
    """`buffer`, or a larger one with its first `keep` entries."""
    if buffer.shape[0] >= size:
        return buffer
    # Zeros, not garbage: prefetches read some entries beyond the end as indices.
    larger = np.zeros(size + size // 4, dtype=buffer.dtype)
    larger[: min(keep, buffer.shape[0])] = buffer[:keep]
    return larger
