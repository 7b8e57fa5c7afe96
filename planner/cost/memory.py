"""What must fit: bytes of every part at the batch-size tail, against a memory's capacity.

Peak means all parts alive at once; the text of a refusal is the sum itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gnnplan.planner.candidate import Candidate, PlacedRows
from gnnplan.planner.cost.pipeline_time import kappa
from gnnplan.planner.cost.rates import MachineTable, rate_per_rank, topology_bytes
from gnnplan.planner.errors import MachineError, PlanDoesNotFit
from gnnplan.planner.machine.hosts import prefix_of
from gnnplan.planner.machine.model import MachineModel, Memory
from gnnplan.planner.workload import BatchProfile, ModelTiming, ProcessCost, Spread
from gnnplan.runtime.plan.schema import GraphRef, MemoryUse
from gnnplan.runtime.sampling.memory import HEADROOM, BulkBytes

GIB = 2**30
ADAM_COPIES = 4
"""Parameter, gradient and two moments."""
MANY_BATCHES = 200
"""From here on the profile's own largest batch is trusted for the tail."""


def tail(spread: Spread, profiled: int, draws: int) -> float:
    """Largest of many batches to come.

    mu + sigma kappa_M over M draws, and never below the largest that was seen; with many profiled
    batches the seen 99th percentile's excess is scaled instead where it is the larger (skew).

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
    """Bytes of parameters, gradients and optimizer state."""
    return ADAM_COPIES * num_parameters * item_bytes


def activation_bytes(mean_bytes: int, tail_scale: float) -> int:
    """Bytes of activations and their gradients at the tail: proportional to the batch."""
    return round(mean_bytes * tail_scale)


def sampling_bytes(
    tail_vertices: float, tail_edges: float, num_nodes: int, loader_threads: int
) -> int:
    """Bytes of a sampler on cores: per thread a relabelling table and one batch in the making.

    W (8 N + 16 V + 8 E) for W threads (at least one), N nodes, V vertices and E edges of the
    largest batch: a stamp and a local id (4 B each) per node; a global id and a list's end (8 B
    each) per vertex; the drawn position (8 B) per edge.

    >>> sampling_bytes(100.0, 1000.0, 10_000, loader_threads=1)
    89600
    """
    each = 8 * num_nodes + 16 * tail_vertices + 8 * tail_edges
    return round(max(1, loader_threads) * each)


def live_batches(ahead: int, steps_per_epoch: int) -> int:
    """Batches alive at once: the one in use, and those that are ready or being filled meanwhile.

    An epoch's loader makes none of the next epoch, so there are never more than an epoch has.

    >>> live_batches(2, 100), live_batches(4, 3), live_batches(0, 3)
    (3, 3, 1)
    """
    return max(1, min(1 + ahead, steps_per_epoch))


def batch_bytes(tail_vertices: float, tail_edges: float, row_bytes: int, buffers: int) -> int:
    """Bytes of the batches alive at once, at the tail: rows, ids and edges of each.

    >>> batch_bytes(100.0, 1000.0, 400, 3)
    134400
    """
    return round(buffers * (tail_vertices * (row_bytes + 8) + 4 * tail_edges))


def location_bytes(num_nodes: int, code_bytes: int) -> int:
    """Bytes of a location table: one code per node; own rows are found by slot."""
    return num_nodes * code_bytes


def sum_parts(parts: Mapping[str, int], capacity: int) -> MemoryUse:
    """Sum up parts against a capacity."""
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
    """Write a memory's sum in words, largest part first.

    >>> sum_text("rank 0", sum_parts({"model": 3_000_000, "cache": 4_000_000}, 5_000_000))
    'rank 0: cache 4.0 MB + model 3.0 MB = 7.0 MB > 5.0 MB usable'
    """
    parts = sorted(memory.parts.items(), key=lambda item: (-item[1], item[0]))
    terms = " + ".join(f"{part} {size_text(size)}" for part, size in parts if size > 0)
    sign = ">" if memory.headroom < 0 else "<="
    total, capacity = size_text(memory.total), size_text(memory.capacity)
    return f"{name}: {terms} = {total} {sign} {capacity} usable"


def capacity_text(size_bytes: int) -> str:
    """Write a capacity in the powers of two that memories are sold in, where it is a whole number.

    >>> capacity_text(80 * 2**30), capacity_text(61_200_000_000)
    ('80 GiB', '61.2 GB')
    """
    whole, rest = divmod(size_bytes, 2**30)
    return f"{whole} GiB" if whole and not rest else size_text(size_bytes)


def size_text(size_bytes: float | int) -> str:
    """Write bytes in powers of ten; whole GiB as they are.

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
"""Bytes of a dynamic cache's slot beside its row: the node, its last touch, and the log of them."""
DIRECTORY_BYTES = 4
"""Bytes of a cache's directory per node: the slot its row is in."""
STAGING = 1.25
"""Rows of the buffer that misses are read into, over a batch's."""
TRAINING_BATCHES = 10_000
"""Batches times ranks that the memory of a batch must hold out for."""
ID_BYTES = 8
RESERVE = 0.05
"""Share of a GPU's usable memory that is left to the allocator's slack."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTail:
    """The largest batch that memory must hold."""

    vertices: float
    """Input vertices."""
    edges: float
    """Edges of the outermost block."""
    scale: float
    """Vertices over the mean batch's."""

    @staticmethod
    def of(batch: BatchProfile) -> "BatchTail":
        """Take the tail of a profiled batch size."""
        vertices = tail(batch.vertices[-1], batch.num_batches, TRAINING_BATCHES)
        mean = batch.vertices[-1].mean
        return BatchTail(
            vertices=vertices,
            edges=tail(batch.block_edges[0], batch.num_batches, TRAINING_BATCHES),
            scale=vertices / mean if mean > 0 else 1.0,
        )


def common_parts(
    candidate: Candidate,
    graph: GraphRef,
    batch: BatchProfile,
    timing: ModelTiming,
    code_bytes: int,
    steps_per_epoch: int,
) -> dict[str, int]:
    """Bytes of a rank on any processor, beside its context and its sampler's buffers.

    Threads and prefetch depth set how many batches, whose rows are float32, live at once.
    """
    largest = BatchTail.of(batch)
    ahead = candidate.prefetch_depth if candidate.threads.sample else 0
    buffers = live_batches(ahead, steps_per_epoch)
    row_bytes = 4 * graph.feature_dim
    return {
        "model and optimizer": model_bytes(timing.num_parameters),
        "activations": activation_bytes(timing.activation_bytes, largest.scale),
        "batches": batch_bytes(largest.vertices, largest.edges, row_bytes, buffers),
        "location table": location_bytes(graph.num_nodes, code_bytes),
    } | ({"stack of batches": candidate.bulk_bytes} if candidate.bulk_batches > 1 else {})


def core_parts(
    candidate: Candidate, graph: GraphRef, batch: BatchProfile, process: ProcessCost
) -> dict[str, int]:
    """Bytes of a rank on cores: what importing the libraries costs, its sampler, its cache."""
    largest, nodes = BatchTail.of(batch), graph.num_nodes
    parts = {
        "context": process.resident_bytes,
        "sampling": sampling_bytes(
            largest.vertices, largest.edges, nodes, candidate.threads.sample
        ),
    }
    if candidate.cache is not None:
        staged = round(STAGING * largest.vertices * 4 * graph.feature_dim)
        parts["cache directory"] = DIRECTORY_BYTES * nodes + staged
    return parts


def gpu_parts(
    candidate: Candidate,
    graph: GraphRef,
    batch: BatchProfile,
    machine: MachineModel,
    rank: int,
    budgets: Budgets,
    *,
    captured_bytes: int = 0,
) -> dict[str, int]:
    """Bytes of a rank on a GPU: its context, the allocator's slack, its sampler, its topology.

    Source: docs/formulas.md 8.10 [A10]; two ids of 8 bytes per drawn edge while a batch is drawn,
    and a relabelling table of two ids per vertex at half load.
    """
    largest = BatchTail.of(batch)
    drawn = round(2 * ID_BYTES * largest.edges + 2 * 2 * ID_BYTES * largest.vertices)
    return {
        "context": int(rate_per_rank(machine, MachineTable.GPU_CONTEXT, candidate)),
        "reserve": round(RESERVE * gpu_capacity(machine, candidate, rank, budgets)),
        "sampling": captured_bytes + drawn,
        "topology": topology_bytes(graph) if candidate.topology.policy == "replicated" else 0,
    }


def peer_bytes(candidate: Candidate, batch: BatchProfile, row_bytes: int) -> int:
    """Bytes of a rank's buffers for rows that ranks read of each other: received, and sent.

    2 (R - 1) / R V rows for R ranks and V vertices of the largest batch: a rank's share of all rows
    is its own, and as many are asked of it. Ranks that share a batch have their own
    (`exchange_parts`).
    """
    ranks = candidate.num_ranks
    if candidate.batching == "cooperative":
        return 0
    return round(2 * (ranks - 1) / ranks * BatchTail.of(batch).vertices * row_bytes)


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
    """Hold every rank's and the host's parts against their capacities.

    Args:
        parts: each rank's private bytes without own rows.
        graph: its adjacency is mapped once per host.
        placed: own rows of each rank, and rows that the shared mapping must hold.
        row_bytes: of a stored row.
        machine: capacity of the host.
        budgets: the user's limits.
        launcher_bytes: of what starts the ranks, once per host.
        mapped_topology: False where the adjacency lies in parts among the ranks' own bytes.
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
        found[f"rank{g}"] = sum_parts(whole, limit)
        private += sum(whole.values())
    shared = {
        "ranks": private,
        "features": placed.host_rows * row_bytes,
        "topology": topology_bytes(graph) if mapped_topology else 0,
        "launcher": launcher_bytes,
    }
    found[host] = sum_parts(shared, capacity)
    return found


def host_memory_of(machine: MachineModel, host: int, kind: str = "host") -> Memory | None:
    """Find the memory (or disk) of a host; the disk may be missing.

    Raises:
        MachineError: the machine has no such host memory.
    """
    name = f"{prefix_of(host)}{kind}0"
    for memory in machine.memories:
        if memory.kind == kind and memory.name == name:
            return memory
    if kind == "disk":
        return None
    raise MachineError(f"machine {machine.name}: expected a memory {name}, found none")


def gpu_capacity(
    machine: MachineModel, candidate: Candidate, rank: int, budgets: Budgets | None = None
) -> int:
    """Bytes of a rank's GPU, or the user's limit where that is less."""
    names = {p.name: p.memory for p in machine.gpus}
    size = machine.memory(names[candidate.gpus[rank]]).capacity_bytes
    limit = None if budgets is None else budgets.device_bytes
    return size if limit is None else min(size, limit)


def ranks_by_host(machine: MachineModel, candidate: Candidate) -> dict[int, list[int]]:
    """Ranks of each host whose GPUs take part."""
    hosts = {p.name: p.host for p in machine.gpus}
    found: dict[int, list[int]] = {}
    for rank, name in enumerate(candidate.gpus):
        found.setdefault(hosts[name], []).append(rank)
    return found


def host_bytes(machine: MachineModel, host: int, budgets: Budgets) -> tuple[str, int]:
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
    """Hold every GPU's and host's parts against its capacity.

    Args:
        parts: each GPU's bytes without own rows.
        candidate: which GPUs.
        graph: its adjacency is mapped once per host.
        placed: own rows of each GPU, and rows that each host's mapping must hold.
        row_bytes: of a stored row.
        machine: capacities, and table `gpu_process`.
        budgets: the user's limits.
    """
    found: dict[str, MemoryUse] = {}
    for g, (part, rows) in enumerate(zip(parts, placed.ranks, strict=True)):
        whole = {**part, "own rows": rows.own_rows * row_bytes}
        found[f"rank{g}"] = sum_parts(whole, gpu_capacity(machine, candidate, g, budgets))
    process = int(rate_per_rank(machine, MachineTable.GPU_PROCESS, candidate))
    for host, ranks in ranks_by_host(machine, candidate).items():
        name, size = host_bytes(machine, host, budgets)
        shared = {
            "ranks": process * len(ranks),
            "features": placed.host_rows * row_bytes,
            "topology": topology_bytes(graph),
        }
        found[name] = sum_parts(shared, size)
    return found


SPARE = 1.05
"""Bytes of a stack over those of its pilot: batches vary."""
IN_USE = 1
"""Batches in use beside those ready ahead."""


def stack_bytes(pilot: BulkBytes, bulk: int, depth: int) -> int:
    """Bytes that let the runtime stack k batches on cores while earlier ones are still in use.

    B = table + max_m (1.15 (k + 2 (d + 1)) batch_m + scratch_m), and 5% for batches that vary: the
    pilot tells the bytes at each moment m; d batches are ready ahead. Each stack gives d + 1
    batches arrays of their own, and as many may be left of the stack before
    (`runtime.loader.bulk`).

    Source: `runtime.sampling.memory`, solved for the budget.

    >>> stack_bytes(BulkBytes(table_bytes=1000, moments=((100.0, 50),)), 4, 2)
    2310
    """
    held = HEADROOM * (bulk + 2 * (depth + IN_USE))
    peak = max(held * batch + scratch for batch, scratch in pilot.moments)
    return int(SPARE * (pilot.table_bytes + peak))


HELD = 4
"""Bytes on a GPU while a stack is drawn, over those of its batches."""
VERTEX_BYTES, LIST_BYTES, EDGE_BYTES = 8, 8, 12
"""A vertex's id; the end of its list; an edge's end (int32) and position (int64)."""


def gpu_batch_bytes(batch: BatchProfile, *, every_hop: bool) -> int:
    """Bytes of a large batch's tensors; blocks that are parts of the outermost count once.

    Source: docs/formulas.md 8.10 [A10] for how large batches become.
    """

    def most(spread: Spread) -> float:
        return tail(spread, batch.num_batches, TRAINING_BATCHES)

    hops = len(batch.block_edges)
    # Block i, outermost first, has the vertices up to hop L - 1 - i as destinations.
    blocks = range(hops) if every_hop else range(1)
    edges = sum(most(batch.block_edges[i]) for i in blocks)
    lists = sum(most(batch.vertices[hops - 1 - i]) + 1 for i in blocks)
    return round(
        VERTEX_BYTES * most(batch.vertices[hops]) + LIST_BYTES * lists + EDGE_BYTES * edges
    )


def gpu_stack_bytes(batch: BatchProfile, bulk: int, depth: int, *, every_hop: bool) -> int:
    """As `stack_bytes`, on a GPU: B = 1.05 x 4 batch (k + 2 (d + 1))."""
    each = HELD * gpu_batch_bytes(batch, every_hop=every_hop)
    return int(SPARE * each * (bulk + 2 * (depth + IN_USE)))
