"""Memory of validation and test: what a plan leaves free, and what its steps give back.

No part of a plan's sum is an evaluation's (DEC-192). Between epochs the memory of a step's
activations is free: with what the plan leaves, it is the room to which pieces and layers' outputs
are cut. The ids by which ranks find their vertices lie on the host and come first: on cores, where
the plan leaves too little for them, the rest comes off what its steps give back.
"""

from dataclasses import dataclass

from gnnplan.runtime.errors import InputError
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.plan.setting import FANOUTS, MOST_FANOUT

EXACT_EDGES = 500_000_000
"""Most edges of a graph that is evaluated with all neighbours unless fan-outs are given."""


def choose_fanouts(plan: Plan, asked: list[int] | None) -> list[int] | None:
    """Return the fan-outs of an evaluation; None: all neighbours, layer by layer.

    -1 for each hop asks for all neighbours of a graph of any size.
    """
    if asked is not None:
        return None if all(each == -1 for each in asked) else asked
    workload = plan.workload
    known = len(workload.fanouts) == workload.num_layers
    return workload.fanouts if known and plan.graph.num_edges > EXACT_EDGES else None


def check_eval_fanouts(asked: list[int] | None, num_layers: int) -> None:
    """Refuse fan-outs that no evaluation of a model with so many layers can draw.

    Otherwise they fail when an epoch is over, or score a model on fewer layers than it has.
    """
    if asked is None or all(each == -1 for each in asked):
        return
    if len(asked) != num_layers or any(each == 0 or not FANOUTS.has(each) for each in asked):
        raise InputError(
            f"--eval-fanouts: expected {num_layers} fan-outs (one per layer), each of at least 1 "
            f"and at most {MOST_FANOUT:,} (or -1 for all), found {','.join(map(str, asked))}; "
            "correct them"
        )


def name_sampling(plan: Plan, asked: list[int] | None) -> str:
    """Say that evaluations are sampled where nobody asked for it; empty where they are not."""
    chosen = choose_fanouts(plan, asked)
    if asked is not None or chosen is None:
        return ""
    return (
        f"validation and test are sampled with fan-outs {','.join(map(str, chosen))}: the graph "
        f"has more than {EXACT_EDGES:,} edges; --eval-fanouts "
        f"{','.join(['-1'] * len(chosen))} takes all neighbours"
    )


MOST_CHUNK_BYTES = 256 << 20
LEAST_CHUNK_BYTES = 4 << 20
"""Input of a piece below which it is only cut where a GPU has no room for it: slower to compute."""
COPIES, SAMPLED_COPIES = 4, 2
"""Memory of a piece (rows, products, messages, ids), in multiples of its rows' bytes: of one layer,
and of a sampled batch, whose inner blocks are smaller."""
EDGE_BYTES = 24
"""Memory of a sampled batch's edge: its place, its source, numbers in the batch and in a layer."""
TABLES = 2
"""Number of layers' outputs at once: one is read while the next is written."""


def most_sampled_bytes(chunk_bytes: int) -> int:
    """Return the most bytes of a sampled batch's rows and edges in the room of a layer's pieces."""
    return COPIES * chunk_bytes // SAMPLED_COPIES


def sampled_bytes(rows: float, edges: float, feature_dim: int) -> float:
    """Return the bytes of a sampled batch that are held against `most_sampled_bytes`."""
    return 4 * max(1, feature_dim) * rows + EDGE_BYTES * edges


def index_bytes(plan: Plan, fanouts: list[int] | None) -> int:
    """Return the bytes of the host's memory in which one rank finds its vertices.

    (8 L + 20) N of L layers and N nodes: the vertices of each layer (8 B), a table of places (4 B),
    running sums of a layer's edges (8 B), and as much again while they are made. Of sampled batches
    8 N, a sampler's table. 12 N more for GCN's degrees and self-loops.
    """
    workload = plan.workload
    each = 8 if fanouts is not None else 8 * workload.num_layers + 20
    return plan.graph.num_nodes * (each + (12 if workload.model == "gcn" else 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRoom:
    """Memory that one rank's evaluation may take."""

    chunk_bytes: int = MOST_CHUNK_BYTES
    """Bytes of the input rows of one piece."""
    table_bytes: int | None = None
    """Most bytes of a layer's output in the rank's own memory; larger ones are files. None: any."""
    device_table_bytes: int = 0
    """Most bytes of a layer's output in the memory of the rank's GPU."""
    missing_bytes: int = 0
    """Bytes of ids for which the host has no room while the plan takes no step."""


def evaluation_room(plan: Plan, rank: int, fanouts: list[int] | None = None) -> EvaluationRoom:
    """Return a rank's room under a plan, by the `choose_fanouts` of its evaluations.

    Without a memory prediction nothing is bounded.
    """
    memories = plan.prediction.memory_bytes
    own = memories.get(f"rank{rank}")
    if own is None:
        return EvaluationRoom()
    hosts = [use for name, use in memories.items() if not name.startswith("rank")]
    ranks = -(-plan.num_ranks // max(1, len(hosts)))
    host = min((use.headroom // ranks for use in hosts), default=own.headroom)
    on_gpu = plan.strategy.devices[rank].kind == "cuda"
    free = (host if on_gpu else min(own.headroom, host)) - index_bytes(plan, fanouts)
    given_back = own.parts.get("activations", 0)
    half, left = max(0, free) // 2, 0
    spare = min(0, free)  # below 0: what the ids lack
    if on_gpu:
        left = own.headroom + given_back
        chunk = min(left, half)
    else:
        spare += given_back
        chunk = half + max(0, spare)
    chunk_bytes = min(MOST_CHUNK_BYTES, max(LEAST_CHUNK_BYTES, chunk // COPIES))
    return EvaluationRoom(
        chunk_bytes=chunk_bytes,
        table_bytes=half // TABLES,
        device_table_bytes=max(0, left - COPIES * chunk_bytes) // TABLES,
        missing_bytes=max(0, -spare),
    )
