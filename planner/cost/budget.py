"""Memory of a candidate, part by part: each rank's private bytes, and the host they all share."""

from dataclasses import dataclass

from planner.candidate import Candidate, PlacedRows
from planner.cost import memory
from planner.cost.rates import topology_bytes
from planner.machine import MachineModel
from planner.workload import BatchProfile, ModelTiming, ProcessCost
from runtime.plan import GraphRef, MemoryUse

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
    vertices = memory.tail(batch.vertices[-1], batch.num_batches, TRAINING_BATCHES)
    edges = memory.tail(batch.block_edges[0], batch.num_batches, TRAINING_BATCHES)
    scale = vertices / batch.vertices[-1].mean if batch.vertices[-1].mean > 0 else 1.0
    ahead = candidate.prefetch_depth if candidate.threads.sample else 0
    buffers = memory.live_batches(ahead, steps_per_epoch)
    return {
        "context": process.resident_bytes,
        "model and optimizer": memory.model_bytes(timing.num_parameters),
        "activations": memory.activation_bytes(timing.activation_bytes, scale),
        "sampling": memory.sampling_bytes(
            vertices, edges, graph.num_nodes, candidate.threads.sample
        ),
        "batches": memory.batch_bytes(vertices, edges, batch_row_bytes, buffers),
        "location table": memory.location_bytes(graph.num_nodes, code_bytes),
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
    vertices = memory.tail(batch.vertices[-1], batch.num_batches, TRAINING_BATCHES)
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
        found[f"rank{g}"] = memory.use(whole, limit)
        private += sum(whole.values())
    shared = {
        "ranks": private,
        "features": placed.host_rows * row_bytes,
        "topology": topology_bytes(graph) if mapped_topology else 0,
        "launcher": launcher_bytes,
    }
    found[host] = memory.use(shared, capacity)
    return found
