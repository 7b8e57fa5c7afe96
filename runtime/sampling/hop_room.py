"""Room for a hop in the batch's buffers: what it may need, and whether the buffers hold it.

A kernel that lacks room says how much it needs in the state vector that it shares with the
workspace, and returns; called again with larger buffers it goes on with the hop where it stopped.
"""

from typing import no_type_check

from runtime.sampling.compiled import kernel

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
