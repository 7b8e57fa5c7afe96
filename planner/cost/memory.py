"""What must fit: bytes of every part at the batch-size tail, against a memory's capacity.

Peak means all parts alive at once; the text of a refusal is the sum itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.candidate import Candidate, PlacedRows
from planner.cost.pipeline_time import kappa
from planner.cost.rates import topology_bytes
from planner.errors import PlanDoesNotFit
from planner.machine.model import MachineModel
from planner.workload import BatchProfile, ModelTiming, ProcessCost, Spread
from runtime.plan.schema import GraphRef, MemoryUse

GIB = 2**30
ADAM_COPIES = 4
"""Parameter, gradient and two moments."""
MANY_BATCHES = 200
"""From here on the profile's own largest batch is trusted for the tail."""


def tail(spread: Spread, profiled: int, draws: int) -> float:
    """Largest of many batches to come.

    mu + sigma * kappa_M, and never below the largest that was seen; with many profiled batches the
    seen 99th percentile's excess is scaled instead where it is the larger (skew).

    Args:
        spread: the per-batch quantity over the profiled batches.
        profiled: batches that the spread was taken from.
        draws: M, batches times ranks that memory must hold.

    Source: docs/formulas.md 8.10 [A10].

    >>> s = Spread(mean=100.0, std=10.0, p99=120.0, largest=121.0)
    >>> round(tail(s, profiled=50, draws=1000), 1)
    132.4
    """
    normal = spread.mean + spread.std * kappa(draws)
    if profiled > MANY_BATCHES:
        # The 99th percentile of a normal lies 2.326 sigma out: a skewed tail lies farther.
        skew = (spread.p99 - spread.mean) / 2.326
        normal = max(normal, spread.mean + skew * kappa(draws))
    return max(normal, spread.largest)


def model_bytes(num_parameters: int, item_bytes: int = 4) -> int:
    """Parameters, gradients and optimizer state.

    >>> model_bytes(1000)
    16000
    """
    return ADAM_COPIES * num_parameters * item_bytes


def activation_bytes(mean_bytes: int, tail_scale: float) -> int:
    """Activations and their gradients at the tail: proportional to the batch.

    >>> activation_bytes(1000, 1.5)
    1500
    """
    return round(mean_bytes * tail_scale)


def sampling_bytes(
    tail_vertices: float, tail_edges: float, num_nodes: int, loader_threads: int
) -> int:
    """Buffers of the sampler: per thread a relabelling table and one batch in the making.

    W * (8 N + 16 V + 8 E): a stamp and a local id (4 B each) per node; a global id and a list's
    end (8 B each) per vertex of the batch; the drawn position (8 B) per edge.

    Args:
        tail_vertices: V, vertices of the largest batch.
        tail_edges: E, edges of its outermost block.
        num_nodes: N of the graph.
        loader_threads: W, threads that sample; with none the training thread does.

    >>> sampling_bytes(100.0, 1000.0, 10_000, loader_threads=1)
    89600
    """
    each = 8 * num_nodes + 16 * tail_vertices + 8 * tail_edges
    return round(max(1, loader_threads) * each)


def live_batches(ahead: int, steps_per_epoch: int) -> int:
    """Batches alive at once: the one in use, and those that are ready or being filled meanwhile.

    An epoch's loader makes none of the next epoch, so there are never more than an epoch has.

    Args:
        ahead: batches made ahead; 0: the training thread makes its own.
        steps_per_epoch: of one rank.

    >>> live_batches(2, 100), live_batches(4, 3), live_batches(0, 3)
    (3, 3, 1)
    """
    return max(1, min(1 + ahead, steps_per_epoch))


def batch_bytes(tail_vertices: float, tail_edges: float, row_bytes: int, buffers: int) -> int:
    """The ring of batches: rows, ids and edges of each buffer at the tail.

    Args:
        tail_vertices: input vertices of the largest batch.
        tail_edges: edges of its outermost block.
        row_bytes: bytes of one feature row in the batch.
        buffers: batches alive at once (`live_batches`).

    >>> batch_bytes(100.0, 1000.0, 400, 3)
    134400
    """
    return round(buffers * (tail_vertices * (row_bytes + 8) + 4 * tail_edges))


def location_bytes(num_nodes: int, code_bytes: int) -> int:
    """A location table: one code per node, and own rows are found by slot.

    >>> location_bytes(1000, 4)
    4000
    """
    return num_nodes * code_bytes


def use(parts: Mapping[str, int], capacity: int) -> MemoryUse:
    """The sum of the parts against the capacity.

    >>> use({"model": 3, "cache": 4}, 10).headroom
    3
    """
    total = sum(parts.values())
    return MemoryUse(parts=dict(parts), total=total, capacity=capacity, headroom=capacity - total)


def require_fit(name: str, memory: MemoryUse) -> None:
    """Refuse a memory whose parts pass its capacity.

    Raises:
        PlanDoesNotFit: the text is the sum with every part.
    """
    if memory.headroom < 0:
        raise PlanDoesNotFit(
            sum_text(name, memory),
            constraint=name,
            needed_bytes=memory.total,
            available_bytes=memory.capacity,
        )


def sum_text(name: str, memory: MemoryUse) -> str:
    """The memory's sum in words, largest part first.

    >>> sum_text("rank 0", use({"model": 3_000_000, "cache": 4_000_000}, 5_000_000))
    'rank 0: cache 4.0 MB + model 3.0 MB = 7.0 MB > 5.0 MB usable'
    """
    parts = sorted(memory.parts.items(), key=lambda item: (-item[1], item[0]))
    terms = " + ".join(f"{part} {size_text(size)}" for part, size in parts if size > 0)
    sign = ">" if memory.headroom < 0 else "<="
    total, capacity = size_text(memory.total), size_text(memory.capacity)
    return f"{name}: {terms} = {total} {sign} {capacity} usable"


def capacity_text(size_bytes: int) -> str:
    """What a memory holds, in the powers of two that it is sold in where it is a whole number.

    >>> capacity_text(80 * 2**30), capacity_text(61_200_000_000)
    ('80 GiB', '61.2 GB')
    """
    whole, rest = divmod(size_bytes, 2**30)
    return f"{whole} GiB" if whole and not rest else size_text(size_bytes)


def size_text(size_bytes: float | int) -> str:
    """Bytes for people, in powers of ten; memories of whole GiB as they are sold.

    >>> size_text(999), size_text(1.25e6), size_text(61.2e9), size_text(80 * 2**30)
    ('999 B', '1.2 MB', '61.2 GB', '80 GiB')
    """
    if size_bytes >= GIB and size_bytes % GIB == 0:
        return f"{size_bytes // GIB:.0f} GiB"
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if abs(size_bytes) >= scale:
            return f"{size_bytes / scale:.1f} {unit}"
    return f"{size_bytes:.0f} B"


SLOT_BYTES = 24
"""Of each slot of a dynamic cache beside its row: the node, its last touch, and the log of them."""
TRAINING_BATCHES = 10_000
"""Batches times ranks that the memory of a batch must hold out for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budgets:
    """Bytes the user allows; None leaves it to what the machine has."""

    device_bytes: int | None = None
    host_bytes: int | None = None


def host_memory(machine: MachineModel) -> tuple[str, int]:
    """Name and capacity of the host's memory."""
    for found in machine.memories:
        if found.kind == "host":
            return found.name, found.capacity_bytes
    return "host0", 0


def least_host_bytes(machine: MachineModel) -> int:
    """Capacity of the smallest host's memory."""
    return min((m.capacity_bytes for m in machine.memories if m.kind == "host"), default=0)


def rank_parts(
    candidate: Candidate,
    graph: GraphRef,
    batch: BatchProfile,
    timing: ModelTiming,
    process: ProcessCost,
    batch_row_bytes: int,
    code_bytes: int,
    steps_per_epoch: int,
) -> dict[str, int]:
    """Private bytes of one rank before it copies any feature row.

    Args:
        candidate: threads and prefetch depth set how many batches live at once.
        graph: number of nodes.
        batch: sizes and their tail.
        timing: parameters and activations.
        process: what importing the libraries costs.
        batch_row_bytes: bytes of one feature row in a batch (float32).
        code_bytes: bytes of one entry of the rank's location table.
        steps_per_epoch: batches of a rank in an epoch.
    """
    vertices = tail(batch.vertices[-1], batch.num_batches, TRAINING_BATCHES)
    edges = tail(batch.block_edges[0], batch.num_batches, TRAINING_BATCHES)
    scale = vertices / batch.vertices[-1].mean if batch.vertices[-1].mean > 0 else 1.0
    ahead = candidate.prefetch_depth if candidate.threads.sample else 0
    buffers = live_batches(ahead, steps_per_epoch)
    return {
        "context": process.resident_bytes,
        "model and optimizer": model_bytes(timing.num_parameters),
        "activations": activation_bytes(timing.activation_bytes, scale),
        "sampling": sampling_bytes(vertices, edges, graph.num_nodes, candidate.threads.sample),
        "batches": batch_bytes(vertices, edges, batch_row_bytes, buffers),
        "location table": location_bytes(graph.num_nodes, code_bytes),
    }


def peer_bytes(candidate: Candidate, batch: BatchProfile, row_bytes: int) -> int:
    """Buffers of a rank for rows that ranks read of each other: received, and sent.

    2 (R - 1) / R V rows: a rank's share of all rows is its own, and as many are asked of it as it
    asks for. Ranks that share a batch have their own (`exchange_parts`).

    Args:
        candidate: R ranks.
        batch: V, the tail of a batch's vertices.
        row_bytes: of a stored row.
    """
    ranks = candidate.num_ranks
    if candidate.batching == "cooperative":
        return 0
    vertices = tail(batch.vertices[-1], batch.num_batches, TRAINING_BATCHES)
    return round(2 * (ranks - 1) / ranks * vertices * row_bytes)


def memory_use(
    parts: list[dict[str, int]],
    graph: GraphRef,
    placed: PlacedRows,
    row_bytes: int,
    machine: MachineModel,
    budgets: Budgets,
    *,
    launcher_bytes: int,
    mapped_topology: bool = True,
) -> dict[str, MemoryUse]:
    """Every memory's parts against its capacity.

    Args:
        parts: each rank's private bytes without own rows.
        graph: its adjacency is mapped once per host.
        placed: own rows of each rank, and rows that the shared mapping must hold.
        row_bytes: bytes of a stored row.
        machine: capacity of the host.
        budgets: the user's limits.
        launcher_bytes: of what starts the ranks, once per host.
        mapped_topology: False where the adjacency lies in parts among the ranks' own bytes.

    Returns:
        By memory: rank0, rank1, ... (where a device budget was given) and the host.
    """
    host, capacity = host_memory(machine)
    capacity = capacity if budgets.host_bytes is None else min(capacity, budgets.host_bytes)
    found: dict[str, MemoryUse] = {}
    private = 0
    for g, (rank, rows) in enumerate(zip(parts, placed.ranks, strict=True)):
        whole = {**rank, "own rows": rows.own_rows * row_bytes}
        if rows.cache_rows:
            whole["cache rows"] = rows.cache_rows * (row_bytes + SLOT_BYTES)
        limit = capacity if budgets.device_bytes is None else budgets.device_bytes
        found[f"rank{g}"] = use(whole, limit)
        private += sum(whole.values())
    shared = {
        "ranks": private,
        "features": placed.host_rows * row_bytes,
        "topology": topology_bytes(graph) if mapped_topology else 0,
        "launcher": launcher_bytes,
    }
    found[host] = use(shared, capacity)
    return found
