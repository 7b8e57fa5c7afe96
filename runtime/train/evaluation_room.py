"""Memory that an evaluation may take beside what training keeps: by the plan's own sums.

An evaluation comes between epochs: what steps held (activations) is free then, the rest stays where
it is. With what the plan leaves free of its memories that is an evaluation's room, for chunks of
rows on their way through a layer, and for the layers' outputs. So a plan that fills its budget is
evaluated in smaller chunks, with outputs in a file, and not ended by its limit.
"""

from dataclasses import dataclass

from runtime.plan import Plan

MOST_CHUNK_BYTES = 256 << 20
LEAST_CHUNK_BYTES = 4 << 20
"""Some thousand rows: fewer are not faster to hold, only slower to compute."""
COPIES = 4
"""A chunk's rows, their products, what is sent along edges, ids: times the rows' own bytes."""
TABLES = 2
"""Layers' outputs that are there at once: one is read while the next is written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRoom:
    """What one rank's evaluation may take."""

    chunk_bytes: int = MOST_CHUNK_BYTES
    """Of the input rows of one chunk."""
    table_bytes: int | None = None
    """Of one layer's output in the rank's own memory; larger ones are files. None: any."""


def evaluation_room(plan: Plan, rank: int) -> EvaluationRoom:
    """The room of a rank under a plan; one without a memory prediction bounds nothing.

    Args:
        plan: its predicted memories.
        rank: whose room.
    """
    memories = plan.prediction.memory_bytes
    own = memories.get(f"rank{rank}")
    if own is None:
        return EvaluationRoom()
    hosts = [use for name, use in memories.items() if not name.startswith("rank")]
    ranks = -(-plan.num_ranks // max(1, len(hosts)))
    host = min((use.headroom // ranks for use in hosts), default=own.headroom)
    given_back = own.parts.get("activations", 0)
    if plan.strategy.devices[rank].kind == "cuda":
        chunk, tables = min(own.headroom + given_back, host // 2), host // 2
    else:
        free = min(own.headroom, host)
        chunk, tables = free // 2 + given_back, free // 2
    return EvaluationRoom(
        chunk_bytes=min(MOST_CHUNK_BYTES, max(LEAST_CHUNK_BYTES, chunk // COPIES)),
        table_bytes=max(0, tables) // TABLES,
    )
