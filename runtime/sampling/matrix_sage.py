"""GraphSAGE over k stacked batches in one launch, equal to `NeighborSampler` edge for edge.

Q has one 1 per row, so a row of P = QA is a vertex's neighbour list and NORM makes it 1/d all over:
gathering, normalising and drawing by floor(r d) collapse into choosing positions of the list,
with the numbers that `NeighborSampler` draws for the same (epoch, step, hop, vertex). EXTRACT drops
the empty columns of each batch. Row r of the stack needs nothing but its own batch's table, so all
layers of all batches fit one launch.

The hops themselves are `kernels.expand_hop`. It writes the local ids into the result; what it
needs besides fits the largest batch and is used again by the next one, so nothing is copied.
"""

from typing import no_type_check

import numpy as np

from runtime.sampling.choose import edge_bound
from runtime.sampling.compiled import kernel
from runtime.sampling.kernels import SPARE, expand_hop
from runtime.sampling.matrix_table import begin, find_or_add
from runtime.sampling.rng import GOLDEN, mix_kernel

NODES, EDGES, ROWS, SCRATCH = 0, 1, 2, 3
"""What is counted: entries of `node_ids`, of `local`, of `row_ptr`, and of `positions`."""


@kernel
@no_type_check
def expand_stack(
    indptr, indices, streams, fanouts, every_hop, seeds, seed_ends, first_batch, table, shift,
    stamp, positions, values, node_ids, local, e_id, row_ptr, starts, known, edges, needed, slack,
):  # fmt: skip
    """Sample batches first_batch .. k-1; return k, or the batch for which a buffer is too small.

    The graph is `indptr`, `indices`; there are uint64 streams [L, k] and int64 fan-outs [L].
    `seeds` are those of all batches, `seed_ends` [k + 1]; `table`, `shift`, `stamp` as in
    `matrix_table`. `positions` (int64) and `values` (as `indices`) are scratch of one batch's
    edges. The result is `node_ids`, `local`, `row_ptr` and, unless empty, `e_id`, batch after
    batch: `starts` [k + 1, 3] says where each begins, `known` and `edges` [k, L + 1] are a batch's
    totals after each hop. `needed` [4] says on return what was too small, `slack` [3] is raised to
    the most that was reserved for a batch and not used.
    """
    num_nodes, num_hops = indptr.shape[0] - 1, fanouts.shape[0]
    for b in range(first_batch, seed_ends.shape[0] - 1):
        ids, rows = node_ids[starts[b, NODES] :], row_ptr[starts[b, ROWS] :]
        num_seeds = seed_ends[b + 1] - seed_ends[b]
        base = begin(table, stamp, num_nodes)
        edge, row = 0, 0
        reserved = np.zeros(4, np.int64)
        known[b, 0] = num_seeds
        needed[NODES] = starts[b, NODES] + num_seeds + SPARE
        if needed[NODES] > node_ids.shape[0] or (shift != 0 and 2 * num_seeds > table.shape[0]):
            return b
        for i in range(num_seeds):
            ids[i] = seeds[seed_ends[b] + i]
            find_or_add(table, shift, base, ids, ids[i], np.uint64(i))
        for hop in range(num_hops):
            first = 0 if every_hop or hop == 0 else known[b, hop - 1]
            last = known[b, hop]
            more = edge_bound(indptr, fanouts[hop], ids, first, last)
            most = min(last + more, num_nodes)
            # Hops of one's own count their edges from 0, nested ones go on counting.
            start = 0 if every_hop else edge
            needed[NODES] = starts[b, NODES] + most + SPARE
            needed[EDGES] = starts[b, EDGES] + edge + more + SPARE
            needed[ROWS] = starts[b, ROWS] + row + last - first + 2
            needed[SCRATCH] = start + more + SPARE
            if (
                needed[NODES] > node_ids.shape[0]
                or needed[EDGES] > local.shape[0]
                or needed[ROWS] > row_ptr.shape[0]
                or needed[SCRATCH] > positions.shape[0]
                or (shift != 0 and 2 * most > table.shape[0])
            ):
                # Entries made so far are void for whoever enters next.
                stamp[0] += last + 1
                return b
            reserved = np.maximum(reserved, needed)
            begins = starts[b, EDGES] + edge - start
            end, count = expand_hop(
                indptr, indices, streams[hop, b], fanouts[hop], table, shift, base, ids, first,
                last, row, start, rows, positions, values, local[begins:],
            )  # fmt: skip
            if e_id.shape[0] > 0:
                e_id[begins + start : begins + end] = positions[start:end]
            edge += end - start
            row += last - first + (1 if every_hop else 0)
            known[b, hop + 1], edges[b, hop + 1] = count, edge
        starts[b + 1, NODES] = starts[b, NODES] + known[b, num_hops]
        starts[b + 1, EDGES] = starts[b, EDGES] + edge
        starts[b + 1, ROWS] = starts[b, ROWS] + row + (0 if every_hop else 1)
        for kind in range(3):
            slack[kind] = max(slack[kind], reserved[kind] - starts[b + 1, kind])
        stamp[0] += known[b, num_hops] + 1
    return seed_ends.shape[0] - 1


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
