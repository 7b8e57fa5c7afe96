"""Keep a thread's buffers, which only grow, and its relabelling table between batches.

A kernel that lacks room says how much it needs in the state vector that it shares with the
workspace, and returns; called again with larger buffers it goes on with the hop where it stopped.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, no_type_check

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.sampling.checks import RELABEL_BUDGET_BYTES, fits_densely
from gnnplan.runtime.sampling.compiled import kernel
from gnnplan.runtime.sampling.relabel import ENTRIES, Table, TableArrays, refill, table_entries

SPARE = 64
"""Entries that buffers have beyond the last one used, which prefetches read ahead."""

# Entries of the state vector.
HOP, ROWS_NEEDED, EDGES_NEEDED, NODES_NEEDED = 0, 1, 2, 3
STATE_LENGTH = 4


class Buffers(NamedTuple):
    """A workspace as kernels take it."""

    table: TableArrays
    node_ids: NDArray[np.int64]
    """Global id of each local one, the seeds first."""
    row_ptr: NDArray[np.int64]
    """Edge ends of the expanded rows of all hops."""
    positions: NDArray[np.int64]
    """Place in `indices` of each edge of all hops."""
    values: NDArray[np.integer]
    local: NDArray[np.int32]
    node_ends: NDArray[np.int64]
    """Nodes after each hop, the seeds first. Shape (L + 1,), as the other ends."""
    row_ends: NDArray[np.int64]
    edge_ends: NDArray[np.int64]
    state: NDArray[np.int64]
    """Hop to start at (`HOP`) and, on return, what is needed."""


@kernel
@no_type_check
def has_room(w, hop, rows, edges, nodes):
    """Note the rows, edges and nodes that a hop may need in all; return whether there is room."""
    w.state[HOP] = hop
    w.state[ROWS_NEEDED] = rows + 1
    w.state[EDGES_NEEDED] = edges + SPARE
    w.state[NODES_NEEDED] = nodes + SPARE
    return (
        w.state[ROWS_NEEDED] <= w.row_ptr.shape[0]
        and w.state[EDGES_NEEDED] <= w.local.shape[0]
        and w.state[NODES_NEEDED] <= w.node_ids.shape[0]
        and (w.table.shift == 0 or 2 * nodes <= w.table.entries.shape[0])
    )


def workspace_bytes(
    num_nodes: int, value_bytes: int, *, rows: int, edges: int, nodes: int, chosen: bool = True
) -> int:
    """Return the bytes of a workspace that grew for so many rows, edges and nodes in all.

    >>> workspace_bytes(1000, 4, rows=100, edges=400, nodes=300)
    17928
    """
    dense = fits_densely(num_nodes, RELABEL_BUDGET_BYTES)
    entries = num_nodes if dense else table_entries(nodes + SPARE)
    edges = _roomy(edges + SPARE)
    by_id = _roomy(rows + 1) + _roomy(nodes + SPARE)
    return 4 * entries + 8 * by_id + 4 * edges + (8 + value_bytes) * (edges if chosen else SPARE)


def _roomy(size: int) -> int:
    """Return the entries of a buffer that is made where so many are needed."""
    return size + size // 4


class Workspace:
    """Buffers of one thread; contents are valid until that thread's next batch.

    Those of chosen edges, `positions` and `values`, grow only where kernels need them (`chosen`).
    """

    def __init__(
        self,
        num_nodes: int,
        num_hops: int,
        value_dtype: np.dtype,
        *,
        dense: bool,
        chosen: bool = True,
    ) -> None:
        self.num_nodes, self._chosen = num_nodes, chosen
        self.table = Table(num_nodes, dense=dense)
        self.used = 0
        """By how much the table's base moves before the next batch."""
        self.node_ids = np.zeros(SPARE, dtype=np.int64)
        self.row_ptr = np.zeros(1, dtype=np.int64)
        self.positions = np.zeros(SPARE, dtype=np.int64)
        self.values = np.zeros(SPARE, dtype=value_dtype)
        self.local = np.zeros(SPARE, dtype=np.int32)
        self.node_ends, self.row_ends, self.edge_ends = np.zeros((3, num_hops + 1), dtype=np.int64)
        self.state = np.zeros(STATE_LENGTH, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all buffers, the table included."""
        own = sum(a.nbytes for a in vars(self).values() if isinstance(a, np.ndarray))
        return own + self.table.nbytes

    def buffers(self) -> Buffers:
        """Return all of it for kernels, until it grows."""
        return Buffers(
            self.table.arrays(), self.node_ids, self.row_ptr, self.positions, self.values,
            self.local, self.node_ends, self.row_ends, self.edge_ends, self.state,
        )  # fmt: skip

    def begin(self, num_seeds: int) -> None:
        """Start a batch: entries of earlier ones become void, totals zero, room for the seeds."""
        self.forget_batch()
        if self.table.stamp[0] + self.used >= ENTRIES:
            self.table.entries[:] = 0
            self.table.stamp[0] = 1
        self.state[:] = 0
        self.node_ends[0] = num_seeds
        self.row_ends[0] = self.edge_ends[0] = 0
        self.node_ids = _grown(self.node_ids, num_seeds + SPARE, keep=0)
        self.table.reserve(num_seeds)

    def forget_batch(self) -> None:
        """Move the table's base past the last batch; the next may enter each node of the graph."""
        self.table.stamp[0] += self.used
        self.used = self.num_nodes + 1

    def finish(self) -> None:
        """End a batch that succeeded: the next one need only pass its entries."""
        self.used = int(self.node_ends[-1])

    def make_room(self, num_seeds: int) -> None:
        """Make the buffers large enough to start the batch, and as a kernel asked, anew."""
        self.node_ids = _grown(self.node_ids, num_seeds + SPARE, keep=0)
        self.node_ends[0] = 0
        self.state[NODES_NEEDED] = max(int(self.state[NODES_NEEDED]), num_seeds + SPARE)
        self.grow(0)

    def reserve(self, hop: int, rows: int, edges: int, nodes: int) -> None:
        """Make room for so many rows, edges and nodes in all, keeping what hops < `hop` wrote."""
        self.state[ROWS_NEEDED] = rows + 1
        self.state[EDGES_NEEDED] = edges + SPARE
        self.state[NODES_NEEDED] = nodes + SPARE
        self.grow(hop)

    def grow(self, hop: int) -> None:
        """Make the buffers as large as the kernel asked for, keeping what hops < `hop` wrote."""
        edges, nodes = int(self.state[EDGES_NEEDED]), int(self.state[NODES_NEEDED])
        known, kept_edges = int(self.node_ends[hop]), int(self.edge_ends[hop])
        kept_rows = int(self.row_ends[hop]) + 1
        self.row_ptr = _grown(self.row_ptr, int(self.state[ROWS_NEEDED]), keep=kept_rows)
        if self._chosen:
            self.positions = _grown(self.positions, edges, keep=kept_edges)
            self.values = _grown(self.values, edges, keep=0)
        self.local = _grown(self.local, edges, keep=kept_edges)
        self.node_ids = _grown(self.node_ids, nodes, keep=known)
        if self.table.reserve(nodes):
            refill(self.table.arrays(), self.node_ids, known)


def of_thread(held: threading.local, name: str, make: Callable[[], Any]) -> Any:
    """Return what the calling thread holds under a name; make it where it holds nothing."""
    found = getattr(held, name, None)
    if found is None:
        found = make()
        setattr(held, name, found)
    return found


def _grown(buffer: NDArray, size: int, *, keep: int) -> NDArray:
    if buffer.shape[0] >= size:
        return buffer
    # Zeros, not garbage: prefetches read some entries beyond the end as indices.
    larger = np.zeros(_roomy(size), dtype=buffer.dtype)
    larger[: min(keep, buffer.shape[0])] = buffer[:keep]
    return larger
