"""Room for stacks of batches on a GPU, as the runtime counts it (runtime.sampling.device_stack)."""

from planner.cost import memory
from planner.cost.budget import TRAINING_BATCHES
from planner.workload import BatchProfile

HELD = 4
"""Bytes while a stack is drawn, over those of its batches."""
SPARE = 1.05
"""Batches vary: what the runtime measures of its first one may be larger."""
VERTEX_BYTES, LIST_BYTES, EDGE_BYTES = 8, 8, 12
"""A vertex's id; the end of its list; an edge's end (int32) and position (int64)."""


def gpu_batch_bytes(batch: BatchProfile, *, every_hop: bool) -> int:
    """Bytes of a large batch's tensors; blocks that are parts of the outermost count once.

    Source: docs/formulas.md 8.10 [A10] for how large batches become.
    """

    def most(index: int) -> float:
        return memory.tail(batch.vertices[index], batch.num_batches, TRAINING_BATCHES)

    hops = len(batch.block_edges)
    # Block i, outermost first, has the vertices up to hop L - 1 - i as destinations.
    blocks = range(hops) if every_hop else range(1)
    edges = sum(
        memory.tail(batch.block_edges[i], batch.num_batches, TRAINING_BATCHES) for i in blocks
    )
    lists = sum(most(hops - 1 - i) + 1 for i in blocks)
    return round(VERTEX_BYTES * most(hops) + LIST_BYTES * lists + EDGE_BYTES * edges)


def gpu_stack_bytes(batch: BatchProfile, bulk: int, depth: int, *, every_hop: bool) -> int:
    """Bytes that let the runtime stack k batches while earlier ones are still in use.

    B = 1.05 x 4 batch (k + 2 (d + 1))

    Args:
        batch: sizes and their tail.
        bulk: k.
        depth: d, batches ready ahead; as in `planner.cost.choices.stack_bytes`.
        every_hop: the dialect.
    """
    each = HELD * gpu_batch_bytes(batch, every_hop=every_hop)
    return int(SPARE * each * (bulk + 2 * (depth + 1)))
