"""The price of a candidate: seconds per optimiser step with an interval, memory, traffic.

Three familiar systems are points of this space: a data-parallel loop that loads in line (one
training thread per rank, nothing prefetched), a loader with worker threads (bounded prefetch), and
a static cache of hot rows (own rows per rank). All are priced by the same few sums, and cores are
shared capacity, so prefetching on a full machine is not predicted to be free.
"""

from dataclasses import dataclass

from planner.candidate import Candidate, PlacedRows
from planner.cost.all_reduce import gradient_bytes
from planner.cost.budget import Budgets, memory_use, rank_parts
from planner.cost.choices import choice_parts, with_choices
from planner.cost.cooperative import (
    Part,
    cooperative_rank,
    exchange_parts,
    feature_bytes,
    hidden_bytes,
    id_bytes,
    part_of,
    part_profile,
)
from planner.cost.gpu_memory import gpu_memory_use, gpu_parts
from planner.cost.gpu_model import gpu_ranks, gpu_traffic
from planner.cost.gpu_reads import copy_seconds_per_byte
from planner.cost.hosts import card_bytes, hosts_memory_use
from planner.cost.interval import relative_half_width, spanned
from planner.cost.partitioned import Fetched, fetched, grid_parts, grid_rank, sent_bytes
from planner.cost.rank_seconds import RankSeconds, rank_seconds
from planner.cost.rates import ranks_here, topology_bytes
from planner.cost.startup import startup_seconds
from planner.cost.step import StepSeconds, step_seconds
from planner.errors import SettingsError
from planner.machine import MachineModel
from planner.machine_hosts import one_host
from planner.workload import BatchProfile, ModelTiming, ProcessCost, WorkloadProfile, timing_key
from runtime.plan import GraphRef, MemoryUse, Prediction, Workload

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def row_bytes(graph: GraphRef) -> int:
    """Bytes of one stored feature row."""
    return graph.feature_dim * ITEM_BYTES.get(graph.feature_dtype, 4)


def seeds_per_rank(batch_size: int, num_ranks: int) -> int:
    """The largest share of the global batch, which is what a step waits for.

    >>> seeds_per_rank(1024, 3)
    342
    """
    return -(-batch_size // num_ranks)


def steps_per_epoch(num_train: int, batch_size: int) -> int:
    """Optimiser steps that show each training seed once.

    >>> steps_per_epoch(2500, 1024)
    3
    """
    return -(-num_train // batch_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What every candidate of one planning request has in common."""

    graph: GraphRef
    workload: Workload
    profile: WorkloadProfile
    machine: MachineModel
    budgets: Budgets
    sampler: str = "neighbor"
    every_hop: bool = False
    """Each hop expands every vertex so far (dialect every_hop)."""


def predict(request: Request, candidate: Candidate, placed: PlacedRows) -> Prediction:
    """Price one candidate under one placement.

    Raises:
        SettingsError: this batch size was not profiled.
        MachineError: the machine was not measured for something the candidate needs.
    """
    batch, timing = batch_and_timing(request, candidate)
    stored = row_bytes(request.graph)
    if candidate.kind == "cuda":
        ranks = gpu_ranks(
            request.machine,
            candidate,
            placed,
            batch,
            timing,
            stored,
            every_hop=request.every_hop,
        )
    else:
        ranks = [
            _on_cores(request, candidate, placed, rank, batch, timing)
            for rank in range(candidate.num_ranks)
        ]
    step = step_seconds(candidate, request.machine, ranks)
    half = relative_half_width(
        step.seconds,
        step.stages,
        step.slowest.spreads,
        noise=request.machine.noise,
        profile_error=batch.input_standard_error,
        oversubscribed=candidate.busy_threads > request.machine.num_cores,
    )
    steps = steps_per_epoch(request.graph.num_train, request.workload.batch_size)
    epoch = epoch_seconds(
        request.graph.num_train, request.workload.batch_size, step.seconds, step.fill_seconds
    )
    return Prediction(
        step_seconds=spanned(step.seconds, half),
        epoch_seconds=spanned(epoch, half),
        steps_per_epoch=steps,
        startup_seconds=_startup(request, candidate, placed),
        stages=step.stages,
        stage_core_seconds=step.core_seconds,
        traffic_bytes=_traffic(request, candidate, placed, ranks, timing.num_parameters),
        hit_rates={f"rank{g}": dict(rows.shares) for g, rows in enumerate(placed.ranks)},
        memory_bytes=_memory(request, candidate, placed),
        bottleneck=step.bottleneck,
        provenance=_provenance(step, candidate, timing.warmup_seconds),
    )


def batch_and_timing(request: Request, candidate: Candidate) -> tuple[BatchProfile, ModelTiming]:
    """One rank's batches, and the model's time on them.

    Raises:
        SettingsError: they were not profiled.
    """
    work, profile = request.workload, request.profile
    seeds = seeds_per_rank(work.batch_size, candidate.num_ranks)
    shared = candidate.batching == "cooperative"
    hosts = candidate.hosts if candidate.kind == "cpu" else 1  # GPUs share nothing of a host
    try:
        timing = profile.timing[timing_key(seeds, shared=shared, hosts=hosts)]
        if shared:
            return part_profile(profile.batch(work.batch_size), _part(request, candidate)), timing
        return profile.batch(seeds), timing
    except KeyError:
        raise SettingsError(
            f"expected a profile of {seeds} seeds per rank, found none; profile the graph again"
        ) from None


def _part(request: Request, candidate: Candidate) -> Part:
    """One rank's part of a batch that all share."""
    profile = request.profile
    if profile.shared is None:
        raise KeyError(candidate.num_ranks)
    return part_of(
        profile.batch(request.workload.batch_size),
        profile.shared,
        candidate.num_ranks,
        every_hop=request.every_hop,
    )


def _on_cores(
    request: Request,
    candidate: Candidate,
    placed: PlacedRows,
    rank: int,
    batch: BatchProfile,
    timing: ModelTiming,
) -> RankSeconds:
    """Price a rank on the cores of its host."""
    machine, rows, stored = request.machine, placed.ranks[rank], row_bytes(request.graph)
    if candidate.hosts > 1:
        machine = one_host(machine, rank // ranks_here(candidate))
    if candidate.batching == "cooperative":
        return cooperative_rank(
            candidate,
            request.graph,
            batch,
            _part(request, candidate),
            timing,
            machine,
            rows,
            stored,
            hidden=request.workload.hidden,
            sampler=request.sampler,
        )
    found = rank_seconds(
        candidate, request.graph, batch, timing, machine, rows, stored, sampler=request.sampler
    )
    if candidate.topology == "partitioned":
        fetches = _fetched(request, candidate)
        return grid_rank(found, candidate, request.graph, batch, fetches, machine)
    return with_choices(found, candidate, machine, rows, batch, request.graph.num_nodes, stored)


def _fetched(request: Request, candidate: Candidate) -> Fetched:
    """What a process row of the candidate's grid fetches for a stack.

    Raises:
        SettingsError: stacks were not profiled.
    """
    work = request.workload
    seeds = seeds_per_rank(work.batch_size, candidate.num_ranks)
    stack = request.profile.stacks.get(str(seeds))
    if stack is None:
        raise SettingsError(
            f"expected a profile of stacks of {seeds} seeds, found none; profile the graph again"
        )
    steps = steps_per_epoch(request.graph.num_train, work.batch_size)
    return fetched(stack, candidate, steps)


def fixed_parts(
    request: Request, candidate: Candidate, rank: int, code_bytes: int
) -> dict[str, int]:
    """Bytes of a rank's own memory before it keeps any feature row."""
    batch, timing = batch_and_timing(request, candidate)
    graph, in_batch = request.graph, 4 * request.graph.feature_dim
    if candidate.kind == "cuda":
        machine = request.machine
        limits = request.budgets
        return gpu_parts(
            candidate, graph, batch, timing, machine, rank, in_batch, code_bytes, limits
        )
    process = request.profile.process or ProcessCost(start_seconds=0.0, resident_bytes=0)
    parts = rank_parts(candidate, graph, batch, timing, process, in_batch, code_bytes)
    parts |= choice_parts(candidate, batch, graph.num_nodes, graph.feature_dim)
    if candidate.topology == "partitioned":
        parts |= grid_parts(candidate, graph, _fetched(request, candidate))
    if candidate.batching == "cooperative":
        part = _part(request, candidate)
        parts |= exchange_parts(part, row_bytes(graph), graph.num_nodes)
    return parts


def _memory(
    request: Request,
    candidate: Candidate,
    placed: PlacedRows,
) -> dict[str, MemoryUse]:
    stored, machine, budgets = row_bytes(request.graph), request.machine, request.budgets
    parts = [
        fixed_parts(request, candidate, rank, placed.code_bytes)
        for rank in range(candidate.num_ranks)
    ]
    if candidate.kind == "cuda":
        return gpu_memory_use(parts, candidate, request.graph, placed, stored, machine, budgets)
    if candidate.hosts > 1:
        return hosts_memory_use(parts, candidate, request.graph, placed, stored, machine, budgets)
    return memory_use(parts, request.graph, placed, stored, machine, budgets)


def _startup(request: Request, candidate: Candidate, placed: PlacedRows) -> float:
    machine, ranks = request.machine, float(candidate.num_ranks)
    process = request.profile.process
    started = 0.0 if process is None else process.start_seconds
    if "process_start" in machine.tables:
        started = machine.table("process_start").at(ranks=ranks)
    if candidate.kind == "cuda":
        copy = 1 / max(copy_seconds_per_byte(machine, candidate))
    else:
        copy = machine.table("copy").at(readers=ranks)
    return startup_seconds(
        process_seconds=started,
        own_row_bytes=float(max(r.own_rows for r in placed.ranks) * row_bytes(request.graph)),
        topology_bytes=float(topology_bytes(request.graph)),
        copy_bytes_per_second=copy,
    )


def epoch_seconds(
    num_train: int, batch_size: int, step_seconds: float, fill_seconds: float
) -> float:
    """A steady epoch: whole steps, the share of a step that the last batch is, and the first fill.

    >>> epoch_seconds(2500, 1000, 2.0, 0.5)
    5.5
    """
    whole, rest = divmod(num_train, batch_size)
    # A batch size beyond the training set was profiled as the one small batch it is.
    steps = whole + rest / batch_size if whole else 1.0
    return fill_seconds + steps * step_seconds


def link_of(machine: MachineModel, kind: str) -> str:
    """Name of the link that a kind of traffic crosses; the kind itself where none is known."""
    kinds = {m.name: m.kind for m in machine.memories}
    cpus = {p.name for p in machine.processors if p.kind == "cpu"}
    for link in machine.links:
        source = kinds.get(link.source)
        crossed = {
            "own": source == "host" and link.target in cpus,
            "cache": source == "host" and link.target in cpus,
            "host": source == "host" and link.target in cpus,
            "disk": source == "disk",
            "peer": source == "host" and link.target == link.source,
            "all_reduce": source == "host" and link.target == link.source,
        }
        if crossed.get(kind, False):
            return link.name
    return kind


def _traffic(
    request: Request,
    candidate: Candidate,
    placed: PlacedRows,
    ranks: list[RankSeconds],
    num_parameters: int,
) -> dict[str, float]:
    """Bytes per step over all ranks by link: feature rows, and the gradient's ring."""
    stored, total = row_bytes(request.graph), dict[str, float]()
    if candidate.kind == "cuda":
        return gpu_traffic(request.machine, candidate, placed, stored)
    moved = [(kind, rows * stored) for rank in placed.ranks for kind, rows in rank.rows.items()]
    exchanged = _exchanged_bytes(request, candidate)
    if candidate.hosts > 1:
        remote = sum(size for kind, size in moved if kind in ("peer", "remote"))
        total |= card_bytes(candidate, num_parameters, exchanged + remote)
    elif len(ranks) > 1:
        # Ring: all ranks together send 2 (P - 1) times the gradient.
        moved.append(("all_reduce", 2.0 * (len(ranks) - 1) * gradient_bytes(num_parameters)))
        moved += [("peer", exchanged)] if exchanged else []
    for kind, size in moved:
        link = link_of(request.machine, kind)
        total[link] = total.get(link, 0.0) + size
    return total


def _exchanged_bytes(request: Request, candidate: Candidate) -> float:
    """Bytes per step that all ranks send each other for a shared batch, or a shared topology."""
    ranks = candidate.num_ranks
    if candidate.batching == "cooperative":
        part = _part(request, candidate)
        rows = feature_bytes(part, row_bytes(request.graph))
        rows += hidden_bytes(part, request.workload.hidden)
        return ranks * (id_bytes(part, ranks) + rows)
    if candidate.topology == "partitioned":
        found = _fetched(request, candidate)
        return ranks * sent_bytes(found, ranks, candidate.replication) / found.steps
    return 0.0


def _provenance(step: StepSeconds, candidate: Candidate, warmup_seconds: float) -> dict[str, str]:
    words = dict(step.slowest.provenance)
    words["wait"] = "derived: what the training thread cannot hide of the loader's work"
    words["startup"] = (
        "measured: process start; derived: bytes over copy bandwidth; the first steps then cost "
        f"{warmup_seconds:.2f} s more than steady ones"
        if candidate.kind == "cpu"
        else "derived: the preset's process start, bytes over the links to the GPUs"
    )
    return {name: words[name] for name in sorted(words) if name in {*step.stages, "startup"}}
