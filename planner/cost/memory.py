"""Sum up the bytes of each memory at the largest batch, and hold them against its capacity.

All parts are taken to be alive at once. The text of a refusal is the sum itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gnnplan.planner.candidate import Candidate, PlacedRows
from gnnplan.planner.cost.pipeline_time import kappa
from gnnplan.planner.cost.rates import MachineTable, rate_per_rank
from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import MachineModel, Memory, prefix_of
from gnnplan.planner.machine.routes import Wiring
from gnnplan.planner.workload import BatchProfile, ModelTiming, ProcessCost, Spread
from gnnplan.runtime.plan.schema import GraphRef, MemoryUse
from gnnplan.runtime.sampling.memory import HEADROOM, BulkBytes

GIB = 2**30
ADAM_COPIES = 4
"""Copies of each parameter: itself, its gradient and two moments."""
MANY_BATCHES = 200
"""Number of profiled batches above which their 99th percentile is used for the tail."""


def tail(spread: Spread, profiled: int, draws: int) -> float:
    """Estimate the largest value of a quantity over many batches to come.

    mu + sigma kappa_M over M draws, and at least the largest value seen. With many profiled batches
    the excess of the 99th percentile is scaled instead where that is larger (skewed tails).

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
    """Return the bytes of parameters, gradients and optimizer state."""
    return ADAM_COPIES * num_parameters * item_bytes


def live_batches(ahead: int, steps_per_epoch: int) -> int:
    """Return the batches alive at once: the one in use and those made ahead, at most an epoch's.

    >>> live_batches(2, 100), live_batches(4, 3), live_batches(0, 3)
    (3, 3, 1)
    """
    return max(1, min(1 + ahead, steps_per_epoch))


def batch_bytes(
    tail_vertices: float, block_bytes: float | int, row_bytes: int, buffers: int
) -> int:
    """Return the bytes of rows, ids and blocks of the batches alive at once, at the tail.

    >>> batch_bytes(100.0, 4000.0, 400, 3)
    134400
    """
    return round(buffers * (tail_vertices * (row_bytes + 8) + block_bytes))


def sum_parts(parts: Mapping[str, int], capacity: int) -> MemoryUse:
    """Sum up parts and compare them with a capacity."""
    total = sum(parts.values())
    return MemoryUse(parts=dict(parts), total=total, capacity=capacity, headroom=capacity - total)


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


NARROW_CODE_BYTES, WIDE_CODE_BYTES = 4, 8
NARROW_SLOTS = 1 << 24
"""Slots a 32-bit location code can name beside its source."""
SLOT_BYTES = 24
"""Bytes of a cache slot beside its row: the node, its last touch, and the log of them."""
SWEPT_BYTES = 64
"""Bytes per slot in which CLOCK on a GPU orders the slots of its cache, for each batch."""
FIRST_BYTES = 8
"""Bytes of a GPU's cache directory per node beside its codes: the first place in a batch."""
DECIDED_BYTES = 128
"""Bytes per row of a batch in which a GPU decides what its cache keeps."""
CORE_DECIDED_BYTES = 56
"""Bytes per row of a batch in which cores decide that, and put the rows together."""
DIRECTORY_BYTES = 4
"""Bytes of a cache's directory per node: its slot."""
STAGING = 1.25
"""Rows of the buffer for missed rows, over the rows of a batch."""
TRAINING_BATCHES = 10_000
"""Number of batches over all ranks whose largest must fit."""
ID_BYTES = 8
RESERVE = 0.05
"""Share of a GPU's usable memory that is left to the allocator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budgets:
    """Bytes that the user allows; None for what the machine has."""

    device_bytes: int | None = None
    host_bytes: int | None = None


def host_memory(machine: MachineModel) -> tuple[str, int]:
    """Return the name and capacity of the first host's memory."""
    for found in machine.memories:
        if found.kind == "host":
            return found.name, found.capacity_bytes
    return "host0", 0


def least_host_bytes(machine: MachineModel) -> int:
    """Return the capacity of the smallest host's memory."""
    return min((m.capacity_bytes for m in machine.memories if m.kind == "host"), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTail:
    """Sizes of the largest batch that memory must hold."""

    vertices: float
    """Number of input vertices."""
    edges: float
    """Number of edges of the outermost block."""
    scale: float
    """Ratio of its vertices to the mean batch's."""

    @staticmethod
    def of(batch: BatchProfile) -> "BatchTail":
        """Estimate the tail of a profiled batch size."""
        vertices = tail(batch.vertices[-1], batch.num_batches, TRAINING_BATCHES)
        mean = batch.vertices[-1].mean
        return BatchTail(
            vertices=vertices,
            edges=tail(batch.block_edges[0], batch.num_batches, TRAINING_BATCHES),
            scale=vertices / mean if mean > 0 else 1.0,
        )


def code_bytes(num_nodes: int) -> int:
    """Return the bytes of one location code.

    >>> code_bytes(1000), code_bytes(1 << 25)
    (4, 8)
    """
    return NARROW_CODE_BYTES if num_nodes <= NARROW_SLOTS else WIDE_CODE_BYTES


def slot_bytes(candidate: Candidate) -> int:
    """Return the bytes of a slot of a candidate's cache beside its row."""
    return SLOT_BYTES + (SWEPT_BYTES if candidate.gpus and candidate.cache == "clock" else 0)


def common_parts(
    candidate: Candidate,
    graph: GraphRef,
    batch: BatchProfile,
    timing: ModelTiming,
    code_bytes: int,
    steps_per_epoch: int,
    *,
    handed_row_bytes: int,
    block_bytes: float,
) -> dict[str, int]:
    """Return the bytes of a rank that do not depend on its processor.

    Threads and prefetch depth set how many batches, with rows of `handed_row_bytes` and blocks of
    `block_bytes` in all, live at once.
    """
    largest = BatchTail.of(batch)
    ahead = candidate.prefetch_depth if candidate.threads.sample else 0
    buffers = live_batches(ahead, steps_per_epoch)
    return {
        "model and optimizer": model_bytes(timing.num_parameters),
        "activations": round(timing.activation_bytes * largest.scale),
        "batches": batch_bytes(largest.vertices, block_bytes, handed_row_bytes, buffers),
        "location table": graph.num_nodes * code_bytes,
    } | ({"stack of batches": candidate.bulk_bytes} if candidate.bulk_batches > 1 else {})


def core_parts(
    candidate: Candidate, graph: GraphRef, batch: BatchProfile, process: ProcessCost
) -> dict[str, int]:
    """Return the bytes of a rank on cores: its process and its cache's directory."""
    largest, nodes = BatchTail.of(batch), graph.num_nodes
    parts = {"context": process.resident_bytes}
    if candidate.cache is not None:
        staged = round(STAGING * largest.vertices * 4 * graph.feature_dim)
        decided = round(CORE_DECIDED_BYTES * largest.vertices)
        parts["cache directory"] = DIRECTORY_BYTES * nodes + staged + decided
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
    draw_bytes: int = 0,
) -> dict[str, int]:
    """Return the bytes of a rank on a GPU: context, allocator's reserve, and a batch being drawn.

    A batch being drawn takes two ids per edge, and a relabelling table of two ids per vertex at
    half load (docs/formulas.md 8.10 [A10]); the sampler's own draws `draw_bytes`. A cache keeps the
    codes of its rows beside those of the table that it replaces. What it keeps of the graph is
    `graph_memory.graph_parts`.
    """
    largest = BatchTail.of(batch)
    drawn = round(2 * ID_BYTES * largest.edges + 2 * 2 * ID_BYTES * largest.vertices)
    directory: dict[str, int] = {}
    if candidate.cache is not None:
        each = code_bytes(graph.num_nodes) + FIRST_BYTES
        decided = round(DECIDED_BYTES * largest.vertices)
        directory["cache directory"] = each * graph.num_nodes + decided
    return directory | {
        "context": int(rate_per_rank(machine, MachineTable.GPU_CONTEXT, candidate)),
        "reserve": round(RESERVE * gpu_capacity(machine, candidate, rank, budgets)),
        "sampling": captured_bytes + drawn + draw_bytes,
    }


def peer_bytes(candidate: Candidate, batch: BatchProfile, row_bytes: int) -> int:
    """Return the bytes of a rank's buffers for rows that independent ranks read of each other.

    2 (R - 1) / R V rows for R ranks and V vertices of the largest batch: as many rows are sent as
    received. Ranks that share a batch have buffers of their own (`exchange_parts`).
    """
    ranks = candidate.num_ranks
    if candidate.batching == "cooperative":
        return 0
    return round(2 * (ranks - 1) / ranks * BatchTail.of(batch).vertices * row_bytes)


def memory_use(
    parts: list[dict[str, int]],
    held: Mapping[str, int],
    placed: PlacedRows,
    row_bytes: int,
    machine: MachineModel,
    budgets: Budgets,
    *,
    launcher_bytes: int,
) -> dict[str, MemoryUse]:
    """Hold every rank's and the host's parts against their capacities.

    `parts` are each rank's private bytes without own rows. The host maps features once, and holds
    of the graph what `held` says (`graph_memory.host_parts`).
    """
    host, capacity = host_memory(machine)
    capacity = _limited(capacity, budgets.host_bytes)
    limit = capacity if budgets.device_bytes is None else budgets.device_bytes
    found = _rank_uses(parts, placed, row_bytes, [limit] * len(parts), SLOT_BYTES)
    shared = _host_parts(sum(use.total for use in found.values()), placed, row_bytes, held)
    return {**found, host: sum_parts({**shared, "launcher": launcher_bytes}, capacity)}


def _limited(size_bytes: int, limit_bytes: int | None) -> int:
    return size_bytes if limit_bytes is None else min(size_bytes, limit_bytes)


def _rank_uses(
    parts: list[dict[str, int]],
    placed: PlacedRows,
    row_bytes: int,
    capacities: Sequence[int],
    slot_bytes: int,
) -> dict[str, MemoryUse]:
    """Hold each rank's parts with its own rows and cache against its capacity."""
    found: dict[str, MemoryUse] = {}
    for g, (part, rows, size) in enumerate(zip(parts, placed.ranks, capacities, strict=True)):
        whole = {**part, "own rows": rows.own_rows * row_bytes}
        if rows.list_bytes:
            whole["cached lists"] = rows.list_bytes
        if rows.cache_rows:
            whole["cache rows"] = rows.cache_rows * (row_bytes + slot_bytes)
        found[f"rank{g}"] = sum_parts(whole, size)
    return found


def _host_parts(
    ranks: int, placed: PlacedRows, row_bytes: int, held: Mapping[str, int]
) -> dict[str, int]:
    return {"ranks": ranks, "features": placed.host_rows * row_bytes, **held}


def host_memory_of(machine: MachineModel | Wiring, host: int, kind: str = "host") -> Memory | None:
    """Return the memory of a kind on a host; None where the host has no disk."""
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
    """Return the bytes of a rank's GPU, or the user's limit where that is less."""
    size = machine.memory(candidate.devices[rank].memory).capacity_bytes
    return _limited(size, None if budgets is None else budgets.device_bytes)


def ranks_by_host(machine: MachineModel, candidate: Candidate) -> dict[int, list[int]]:
    """Return the ranks of each host, by the host's number."""
    hosts = {p.name: p.host for p in machine.gpus}
    found: dict[int, list[int]] = {}
    for rank, name in enumerate(candidate.gpus):
        found.setdefault(hosts[name], []).append(rank)
    return found


def host_bytes(machine: MachineModel, host: int, budgets: Budgets) -> tuple[str, int]:
    """Return the name and usable bytes of a host's memory."""
    found = host_memory_of(machine, host)
    assert found is not None  # only a disk may be missing
    return found.name, _limited(found.capacity_bytes, budgets.host_bytes)


def gpu_memory_use(
    parts: list[dict[str, int]],
    candidate: Candidate,
    held: Mapping[str, int],
    passing: Sequence[Mapping[str, int]],
    placed: PlacedRows,
    row_bytes: int,
    machine: MachineModel,
    budgets: Budgets,
) -> dict[str, MemoryUse]:
    """Hold every GPU's and host's parts against its capacity, as `memory_use`.

    `passing` are the parts of each rank's host that its batches pass through.
    """
    sizes = [gpu_capacity(machine, candidate, g, budgets) for g in range(candidate.num_ranks)]
    found = _rank_uses(parts, placed, row_bytes, sizes, slot_bytes(candidate))
    process = int(rate_per_rank(machine, MachineTable.GPU_PROCESS, candidate))
    for host, ranks in ranks_by_host(machine, candidate).items():
        name, size = host_bytes(machine, host, budgets)
        shared = _host_parts(process * len(ranks), placed, row_bytes, held)
        for part in sorted({part for rank in ranks for part in passing[rank]}):
            shared[part] = sum(passing[rank].get(part, 0) for rank in ranks)
        found[name] = sum_parts(shared, size)
    return found


SPARE = 1.05
"""Ratio of a stack's bytes to its pilot's, since batches vary."""
IN_USE = 1
"""Number of batches in use beside those made ahead."""


def stack_bytes(pilot: BulkBytes, bulk: int, depth: int) -> int:
    """Return the bytes for stacks of k batches on cores while earlier ones are still in use.

    B = 1.05 (table + max_m (1.15 (k + 2 (d + 1)) batch_m + scratch_m)), with the pilot's bytes at
    each moment m and d batches made ahead. Each stack gives d + 1 batches arrays of their own, and
    as many may be left of the stack before (`runtime.loader.bulk`).

    Source: `runtime.sampling.memory`, solved for the budget.

    >>> stack_bytes(BulkBytes(table_bytes=1000, moments=((100.0, 50),)), 4, 2)
    2310
    """
    held = HEADROOM * (bulk + 2 * (depth + IN_USE))
    peak = max(held * batch + scratch for batch, scratch in pilot.moments)
    return int(SPARE * (pilot.table_bytes + peak))


HELD = 4
"""Ratio of a GPU's bytes while a stack is drawn to those of its batches."""
VERTEX_BYTES, LIST_BYTES, EDGE_BYTES = 8, 8, 12
"""A vertex's id; the end of its list; an edge's end (int32) and position (int64)."""


def gpu_batch_bytes(batch: BatchProfile, *, every_hop: bool) -> int:
    """Return the bytes of a large batch's tensors; blocks within the outermost count once.

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
    """Return `stack_bytes` on a GPU: B = 1.05 x 4 batch (k + 2 (d + 1))."""
    each = HELD * gpu_batch_bytes(batch, every_hop=every_hop)
    return int(SPARE * each * (bulk + 2 * (depth + IN_USE)))
