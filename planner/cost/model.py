"""The price of a candidate: seconds per optimiser step with an interval, memory, traffic.

Three familiar systems are points of this space: a data-parallel loop that loads in line (one
training thread per rank, nothing prefetched), a loader with worker threads (bounded prefetch), and
a static cache of hot rows (own rows per rank). All are priced by the same few sums, and cores are
shared capacity, so prefetching on a full machine is not predicted to be free.
"""

from planner.candidate import Candidate, PlacedRows
from planner.cost.backends.cpu import RankSeconds
from planner.cost.backends.cpu_rank import batch_and_timing, exchanged_bytes, joined_parts, on_cores
from planner.cost.backends.gpu import gpu_ranks, gpu_traffic
from planner.cost.backends.gpu_lanes import captured_bytes, has_lanes, lanes_words
from planner.cost.backends.gpu_memory import gpu_memory_use, gpu_parts
from planner.cost.batching import choice_parts
from planner.cost.memory import Budgets, memory_use, peer_bytes, rank_parts
from planner.cost.rates import ranks_here, topology_bytes
from planner.cost.request import Request, row_bytes, steps_per_epoch
from planner.cost.stages.all_reduce import gradient_bytes
from planner.cost.stages.gather_gpu import copy_seconds_per_byte
from planner.cost.step import StepSeconds, relative_half_width, spanned, step_seconds
from planner.machine.hosts import one_host, prefix_of
from planner.machine.model import MachineModel
from planner.workload import ProcessCost
from runtime.plan.schema import GraphRef, MemoryUse, Prediction


def hosts_memory_use(
    parts: list[dict[str, int]],
    candidate: Candidate,
    graph: GraphRef,
    placed: PlacedRows,
    row_bytes: int,
    machine: MachineModel,
    budgets: Budgets,
    *,
    launcher_bytes: int,
) -> dict[str, MemoryUse]:
    """Every rank's and every host's parts against their capacities.

    Args:
        parts: each rank's private bytes without own rows.
        candidate: ranks and hosts.
        graph: mapped once on every host, unless its parts are the ranks' own.
        placed: own rows of each rank, and rows that each host's mapping must hold.
        row_bytes: bytes of a stored row.
        machine: the candidate's hosts.
        budgets: the user's limits, for every host alike.
        launcher_bytes: of what starts the ranks, on every host.

    Returns:
        By memory: rank0, rank1, ... over all hosts, then the hosts.
    """
    here, found, hosts = ranks_here(candidate), dict[str, MemoryUse](), dict[str, MemoryUse]()
    for host in range(candidate.hosts):
        first = host * here
        mine = memory_use(
            parts[first : first + here],
            graph,
            PlacedRows(
                policy=placed.policy,
                ranks=placed.ranks[first : first + here],
                host_rows=placed.host_rows,
                code_bytes=placed.code_bytes,
            ),
            row_bytes,
            one_host(machine, host),
            budgets,
            launcher_bytes=launcher_bytes,
            mapped_topology=candidate.topology.policy != "partitioned",
        )
        for rank in range(here):
            found[f"rank{first + rank}"] = mine.pop(f"rank{rank}")
        hosts |= {f"{prefix_of(host)}{name}": use for name, use in mine.items()}
    return found | hosts


def card_bytes(
    candidate: Candidate, num_parameters: int, exchanged_bytes: float
) -> dict[str, float]:
    """Bytes per step that leave each host by its card: its hop of the ring, and exchanged rows.

    2 (P - 1) / P n of the gradient; of what ranks send each other, what goes to other hosts.

    Args:
        candidate: ranks and hosts.
        num_parameters: of the model.
        exchanged_bytes: over all ranks, to other ranks.
    """
    ranks, here = candidate.num_ranks, ranks_here(candidate)
    ring = 2 * (ranks - 1) / ranks * gradient_bytes(num_parameters)
    away = (ranks - here) / max(1, ranks - 1)
    each = exchanged_bytes * away / candidate.hosts
    return {f"nic{host}.out": ring + each for host in range(candidate.hosts)}


def startup_seconds(
    *,
    process_seconds: float,
    own_row_bytes: float,
    topology_bytes: float,
    copy_bytes_per_second: float,
) -> float:
    """Start of the ranks until their first step, as a run reports it.

    T = process + (own rows + topology) / copy

    What the first steps cost above the steady ones (library warm-up, page faults) comes after that
    and is told apart, in the prediction's provenance.

    Args:
        process_seconds: start of an interpreter and import of the libraries, all ranks at once.
        own_row_bytes: rows copied into each rank's own memory.
        topology_bytes: adjacency read through the page cache once.
        copy_bytes_per_second: of one reader while all ranks read.

    Source: docs/modelling.md 9; process seconds are measured by the probe, or by the profile.

    >>> startup_seconds(process_seconds=3.0, own_row_bytes=2e9, topology_bytes=2e9,
    ...     copy_bytes_per_second=4e9)
    4.0
    """
    loaded = (own_row_bytes + topology_bytes) / copy_bytes_per_second
    return process_seconds + loaded


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
