"""GraphSAGE over k stacked batches in one launch, equal to `NeighborSampler` edge for edge.

Q has one 1 per row, so a row of P = QA is a vertex's neighbour list and NORM makes it 1/d all over:
gathering, normalising and drawing by floor(r d) collapse into choosing positions of the list,
with the numbers that `NeighborSampler` draws for the same (epoch, step, hop, vertex). EXTRACT drops
the empty columns of each batch. Row r of the stack needs nothing but its own batch's table, so all
layers of all batches fit one launch.

The hops themselves are `kernels.expand_hops`, in the workspace of a per-batch sampler: it stays in
the second-level cache, and a batch that is done is copied once to the end of the stack.
"""

from typing import no_type_check

import numpy as np

from runtime.sampling.compiled import kernel
from runtime.sampling.kernels import expand_hops
from runtime.sampling.relabel import add_seeds
from runtime.sampling.rng import GOLDEN, mix_kernel

NODES, EDGES, ROWS = 0, 1, 2
"""What is counted: entries of `node_ids`, of `local` and of `row_ptr`."""
DONE, GROW_WORKSPACE, GROW_STACK, BAD_SEED = 0, 1, 2, 3
"""Why the kernel returned."""

_ENTRIES = 1 << 32


@kernel
@no_type_check
def expand_stack(
    indptr, indices, streams, fanouts, every_hop, keep_positions, seeds, seed_ends, batch, stamp,
    workspace, node_ids, local, e_id, row_ptr, starts, known, edges, needed,
):  # fmt: skip
    """Sample batches `batch` .. k-1; return the first that is not done, why, and the bad seed.

    The graph is `indptr`, `indices`; there are uint64 streams [L, k] and int64 fan-outs [L].
    `seeds` are those of all batches, `seed_ends` [k + 1]. `workspace` holds a `Workspace`'s arrays,
    `stamp` [1] the next base of its table. The result is `node_ids`, `local`, `row_ptr` and, with
    `keep_positions`, `e_id`, batch after batch: `starts` [k + 1, 3] says where each begins, `known`
    and `edges` [k, L + 1] are a batch's totals after each hop. `needed` [3] says on return what the
    result must hold.
    """
    num_nodes, num_hops = indptr.shape[0] - 1, fanouts.shape[0]
    shift, table, ids, rows, positions, values, drawn, node_ends, row_ends, edge_ends, state = (
        workspace
    )
    for b in range(batch, seed_ends.shape[0] - 1):
        mine = seeds[seed_ends[b] : seed_ends[b + 1]]
        if ids.shape[0] < mine.shape[0] or (shift != 0 and table.shape[0] < 2 * mine.shape[0]):
            return b, GROW_WORKSPACE, 0
        if stamp[0] + num_nodes + 1 >= _ENTRIES:
            table[:] = 0
            stamp[0] = 1
        base = np.uint64(stamp[0])
        state[:] = 0
        node_ends[0] = mine.shape[0]
        bad = add_seeds(mine, num_nodes, ids, table, shift, base)
        if bad >= 0:
            stamp[0] += mine.shape[0] + 1
            return b, BAD_SEED, bad
        if not expand_hops(
            indptr, indices, streams[:, b].copy(), fanouts, every_hop, table, shift, base, ids,
            rows, positions, values, drawn, node_ends, row_ends, edge_ends, state, keep_positions,
        ):  # fmt: skip
            stamp[0] += num_nodes + 1
            return b, GROW_WORKSPACE, 0
        stamp[0] += node_ends[num_hops] + 1
        node, edge, row = starts[b]
        num_rows = row_ends[num_hops] + (num_hops if every_hop else 1)
        starts[b + 1, NODES] = node + node_ends[num_hops]
        starts[b + 1, EDGES] = edge + edge_ends[num_hops]
        starts[b + 1, ROWS] = row + num_rows
        needed[:] = starts[b + 1]
        if (
            needed[NODES] > node_ids.shape[0]
            or needed[EDGES] > local.shape[0]
            or needed[ROWS] > row_ptr.shape[0]
        ):
            return b, GROW_STACK, 0
        node_ids[node : starts[b + 1, NODES]] = ids[: node_ends[num_hops]]
        local[edge : starts[b + 1, EDGES]] = drawn[: edge_ends[num_hops]]
        if keep_positions:
            e_id[edge : starts[b + 1, EDGES]] = positions[: edge_ends[num_hops]]
        if every_hop:  # the hops count their own edges from 0
            for hop in range(num_hops):
                first, last = row_ends[hop], row_ends[hop + 1] + 1
                row_ptr[row : row + last - first] = rows[first:last] - edge_ends[hop]
                row += last - first
        else:
            row_ptr[row : row + num_rows] = rows[:num_rows]
        known[b] = node_ends
        edges[b] = edge_ends
    return seed_ends.shape[0] - 1, DONE, 0


@kernel
@no_type_check
def stream_words(seed, epochs, steps, purpose, out):
    """`rng.stream` of all hops and steps: uint64 out[hop, b] of epochs[b], steps[b] (int64)."""
    for hop in range(out.shape[0]):
        for b in range(out.shape[1]):
            state = mix_kernel(np.uint64(seed) + GOLDEN)
            for word in (np.uint64(epochs[b]), np.uint64(steps[b]), np.uint64(hop)):
                state = mix_kernel((state ^ word) + GOLDEN)
            out[hop, b] = mix_kernel((state ^ np.uint64(purpose)) + GOLDEN)
