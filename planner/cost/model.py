"""The price of a candidate: seconds per optimiser step with an interval, memory, traffic.

Three familiar systems are points of this space: a data-parallel loop that loads in line (one
training thread per rank, nothing prefetched), a loader with worker threads (bounded prefetch), and
a static cache of hot rows (own rows per rank). All are priced by the same few sums, and cores are
shared capacity, so prefetching on a full machine is not predicted to be free.
"""

from planner.candidate import Candidate, PlacedRows
from planner.cost.all_reduce import gradient_bytes
from planner.cost.budget import memory_use, peer_bytes, rank_parts
from planner.cost.choices import choice_parts
from planner.cost.gpu_capture import captured_bytes
from planner.cost.gpu_lanes import has_lanes, lanes_words
from planner.cost.gpu_memory import gpu_memory_use, gpu_parts
from planner.cost.gpu_model import gpu_ranks, gpu_traffic
from planner.cost.gpu_reads import copy_seconds_per_byte
from planner.cost.hosts import card_bytes, hosts_memory_use
from planner.cost.interval import relative_half_width, spanned
from planner.cost.on_cores import batch_and_timing, exchanged_bytes, joined_parts, on_cores
from planner.cost.rank_seconds import RankSeconds
from planner.cost.rates import topology_bytes
from planner.cost.request import (
    Request as Request,
    row_bytes as row_bytes,
    seeds_per_rank as seeds_per_rank,
    steps_per_epoch as steps_per_epoch,
)
from planner.cost.startup import startup_seconds
from planner.cost.step import StepSeconds, step_seconds
from planner.machine import MachineModel
from planner.workload import ProcessCost
from runtime.plan import MemoryUse, Prediction


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
            sampler=request.sampler,
            every_hop=request.every_hop,
            captured_bytes=captured_bytes(request, candidate),
        )
    else:
        ranks = [
            on_cores(request, candidate, placed, rank, batch, timing)
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
        provenance=_provenance(request.machine, step, candidate, timing.warmup_seconds),
    )


def fixed_parts(
    request: Request, candidate: Candidate, rank: int, code_bytes: int
) -> dict[str, int]:
    """Bytes of a rank's own memory before it keeps any feature row."""
    batch, timing = batch_and_timing(request, candidate)
    graph, in_batch = request.graph, 4 * request.graph.feature_dim
    steps = steps_per_epoch(graph.num_train, request.workload.batch_size)
    if candidate.kind == "cuda":
        machine = request.machine
        limits = request.budgets
        return gpu_parts(
            candidate, graph, batch, timing, machine, rank, in_batch, code_bytes, limits,
            steps_per_epoch=steps, captured_bytes=captured_bytes(request, candidate),
        )  # fmt: skip
    process = request.profile.process or ProcessCost(start_seconds=0.0, resident_bytes=0)
    parts = rank_parts(candidate, graph, batch, timing, process, in_batch, code_bytes, steps)
    parts |= choice_parts(candidate, batch, graph.num_nodes, graph.feature_dim)
    return parts | joined_parts(request, candidate)


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
    if any(rank.rows.get(kind, 0.0) > 0 for rank in placed.ranks for kind in ("peer", "remote")):
        batch, _ = batch_and_timing(request, candidate)
        parts = [{**each, "rows of peers": peer_bytes(candidate, batch, stored)} for each in parts]
    launcher = launcher_bytes(request)
    if candidate.hosts > 1:
        return hosts_memory_use(
            parts, candidate, request.graph, placed, stored, machine, budgets,
            launcher_bytes=launcher,
        )  # fmt: skip
    return memory_use(
        parts, request.graph, placed, stored, machine, budgets, launcher_bytes=launcher
    )


def launcher_bytes(request: Request) -> int:
    """Bytes that starting ranks takes of every host; 0 where they were not measured."""
    process = request.profile.process
    return 0 if process is None else process.launcher_bytes


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
    exchanged = exchanged_bytes(request, candidate)
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


def _provenance(
    machine: MachineModel, step: StepSeconds, candidate: Candidate, warmup_seconds: float
) -> dict[str, str]:
    words = dict(step.slowest.provenance)
    words["wait"] = "derived: what the training thread cannot hide of the loader's work"
    if has_lanes(candidate):
        words["wait"] += f"; {lanes_words(machine, candidate)}"
    words["startup"] = (
        "measured: process start; derived: bytes over copy bandwidth; the first steps then cost "
        f"{warmup_seconds:.2f} s more than steady ones"
        if candidate.kind == "cpu"
        else "derived: the preset's process start, bytes over the links to the GPUs"
    )
    return {name: words[name] for name in sorted(words) if name in {*step.stages, "startup"}}
