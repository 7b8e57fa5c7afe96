"""A rank on the cores of its host: alone, sharing a batch, or sharing the topology."""

from planner.candidate import Candidate, PlacedRows
from planner.cost.backends.cooperative import (
    Part,
    cooperative_rank,
    exchange_parts,
    feature_bytes,
    hidden_bytes,
    id_bytes,
    part_of,
    part_profile,
)
from planner.cost.backends.cpu import RankSeconds, rank_seconds
from planner.cost.backends.grid import Fetched, fetched, grid_parts, grid_rank, sent_bytes
from planner.cost.batching import with_choices
from planner.cost.rates import ranks_here
from planner.cost.request import Request, row_bytes, seeds_per_rank, steps_per_epoch
from planner.errors import SettingsError
from planner.machine.hosts import one_host
from planner.workload import BatchProfile, ModelTiming, timing_key


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
            return part_profile(
                profile.batch(work.batch_size), part_for(request, candidate)
            ), timing
        return profile.batch(seeds), timing
    except KeyError:
        raise SettingsError(
            f"expected a profile of {seeds} seeds per rank, found none; profile the graph again"
        ) from None


def part_for(request: Request, candidate: Candidate) -> Part:
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


def on_cores(
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
            part_for(request, candidate),
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
    if candidate.topology.policy == "partitioned":
        fetches = fetched_for(request, candidate)
        return grid_rank(found, candidate, request.graph, batch, fetches, machine)
    return with_choices(found, candidate, machine, rows, batch, request.graph.num_nodes, stored)


def fetched_for(request: Request, candidate: Candidate) -> Fetched:
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


def exchanged_bytes(request: Request, candidate: Candidate) -> float:
    """Bytes per step that all ranks send each other for a shared batch, or a shared topology."""
    ranks = candidate.num_ranks
    if candidate.batching == "cooperative":
        part = part_for(request, candidate)
        rows = feature_bytes(part, row_bytes(request.graph))
        rows += hidden_bytes(part, request.workload.hidden)
        return ranks * (id_bytes(part, ranks) + rows)
    if candidate.topology.policy == "partitioned":
        found = fetched_for(request, candidate)
        return ranks * sent_bytes(found, ranks, candidate.topology.replication) / found.steps
    return 0.0


def joined_parts(request: Request, candidate: Candidate) -> dict[str, int]:
    """Private bytes of a rank for what it shares with others: a batch, or the topology."""
    graph, found = request.graph, dict[str, int]()
    if candidate.topology.policy == "partitioned":
        found |= grid_parts(candidate, graph, fetched_for(request, candidate))
    if candidate.batching == "cooperative":
        part = part_for(request, candidate)
        found |= exchange_parts(part, row_bytes(graph), graph.num_nodes)
    return found
