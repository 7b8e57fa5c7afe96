"""Memory of a candidate on GPUs, part by part: each GPU's own, and every host's."""

from planner.candidate import Candidate, PlacedRows
from planner.cost import memory
from planner.cost.memory import TRAINING_BATCHES, Budgets
from planner.cost.rates import topology_bytes
from planner.cost.stages.gather_gpu import host_memory_of
from planner.machine.model import MachineModel
from planner.workload import BatchProfile, ModelTiming
from runtime.plan.schema import GraphRef, MemoryUse

RESERVE = 0.05
"""Share of a GPU's usable memory that is left to the allocator's slack."""
ID_BYTES = 8


def gpu_parts(
    candidate: Candidate,
    graph: GraphRef,
    batch: BatchProfile,
    timing: ModelTiming,
    machine: MachineModel,
    rank: int,
    batch_row_bytes: int,
    code_bytes: int,
    budgets: Budgets,
    *,
    steps_per_epoch: int,
    captured_bytes: int = 0,
) -> dict[str, int]:
    """Bytes of one GPU before it keeps any feature row.

    Args:
        candidate: where the topology lies, and batches made ahead.
        graph: sizes of the dataset.
        batch: sizes and their tail.
        timing: parameters and activations.
        machine: the GPU's memory, and table `gpu_context`.
        rank: which GPU.
        batch_row_bytes: bytes of one feature row in a batch (float32).
        code_bytes: bytes of one entry of the location table.
        budgets: the user's limits; the reserve is a share of what may be used.
        steps_per_epoch: batches of a rank in an epoch.
        captured_bytes: of the buffers of the graph that samples.

    Source: docs/formulas.md 8.10 [A10]; two ids of 8 bytes per drawn edge while a batch is drawn,
    and a relabelling table of two ids per vertex at half load.
    """
    vertices = memory.tail(batch.vertices[-1], batch.num_batches, TRAINING_BATCHES)
    edges = memory.tail(batch.block_edges[0], batch.num_batches, TRAINING_BATCHES)
    scale = vertices / batch.vertices[-1].mean if batch.vertices[-1].mean > 0 else 1.0
    ahead = candidate.prefetch_depth if candidate.threads.sample else 0
    buffers = memory.live_batches(ahead, steps_per_epoch)
    stack = (
        {"stack of batches": candidate.bulk_bytes}
        if candidate.bulk_batches > 1
        else dict[str, int]()
    )
    return stack | {
        "context": int(machine.table("gpu_context").at(ranks=float(candidate.num_ranks))),
        "reserve": round(RESERVE * gpu_capacity(machine, candidate, rank, budgets)),
        "model and optimizer": memory.model_bytes(timing.num_parameters),
        "activations": memory.activation_bytes(timing.activation_bytes, scale),
        "sampling": captured_bytes + round(2 * ID_BYTES * edges + 2 * 2 * ID_BYTES * vertices),
        "batches": memory.batch_bytes(vertices, edges, batch_row_bytes, buffers),
        "location table": memory.location_bytes(graph.num_nodes, code_bytes),
        "topology": topology_bytes(graph) if candidate.topology.policy == "replicated" else 0,
    }


def gpu_capacity(
    machine: MachineModel, candidate: Candidate, rank: int, budgets: Budgets | None = None
) -> int:
    """Bytes of a rank's GPU, or the user's limit where that is less."""
    names = {p.name: p.memory for p in machine.gpus}
    size = machine.memory(names[candidate.gpus[rank]]).capacity_bytes
    limit = None if budgets is None else budgets.device_bytes
    return size if limit is None else min(size, limit)


def ranks_by_host(machine: MachineModel, candidate: Candidate) -> dict[int, list[int]]:
    """Ranks of each host that takes part."""
    hosts = {p.name: p.host for p in machine.gpus}
    found: dict[int, list[int]] = {}
    for rank, name in enumerate(candidate.gpus):
        found.setdefault(hosts[name], []).append(rank)
    return found


def host_bytes(
    machine: MachineModel, candidate: Candidate, host: int, budgets: Budgets
) -> tuple[str, int]:
    """Name and usable bytes of a host's memory."""
    found = host_memory_of(machine, host)
    assert found is not None  # only a disk may be missing
    limit = budgets.host_bytes
    size = found.capacity_bytes if limit is None else min(limit, found.capacity_bytes)
    return found.name, size


def gpu_memory_use(
    parts: list[dict[str, int]],
    candidate: Candidate,
    graph: GraphRef,
    placed: PlacedRows,
    row_bytes: int,
    machine: MachineModel,
    budgets: Budgets,
) -> dict[str, MemoryUse]:
    """Every GPU's and host's parts against its capacity.

    Args:
        parts: each GPU's bytes without own rows.
        candidate: which GPUs.
        graph: its adjacency is mapped once per host.
        placed: own rows of each GPU, and rows that each host's mapping must hold.
        row_bytes: bytes of a stored row.
        machine: capacities, and table `gpu_process`.
        budgets: the user's limits.

    Returns:
        By memory: rank0, rank1, ... for the GPUs, then the hosts.
    """
    found: dict[str, MemoryUse] = {}
    for g, (part, rows) in enumerate(zip(parts, placed.ranks, strict=True)):
        whole = {**part, "own rows": rows.own_rows * row_bytes}
        found[f"rank{g}"] = memory.use(whole, gpu_capacity(machine, candidate, g, budgets))
    process = int(machine.table("gpu_process").at(ranks=float(candidate.num_ranks)))
    for host, ranks in ranks_by_host(machine, candidate).items():
        name, size = host_bytes(machine, candidate, host, budgets)
        shared = {
            "ranks": process * len(ranks),
            "features": placed.host_rows * row_bytes,
            "topology": topology_bytes(graph),
        }
        found[name] = memory.use(shared, size)
    return found


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
        depth: d, batches ready ahead; as in `planner.cost.batching.stack_bytes`.
        every_hop: the dialect.
    """
    each = HELD * gpu_batch_bytes(batch, every_hop=every_hop)
    return int(SPARE * each * (bulk + 2 * (depth + 1)))
