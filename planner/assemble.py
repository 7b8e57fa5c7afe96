"""The chosen candidate as a plan: what the runtime reads, and what lost to it."""

from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.candidate import Candidate
from planner.cost.backends.gpu_lanes import has_lanes
from planner.cost.request import row_bytes
from planner.cost.stages.gather_gpu import gather_programs, peer_way
from planner.machine.hosts import prefix_of
from planner.machine.model import MachineModel
from planner.placement.location import build_locations, check_locations, sources
from planner.placement.place import Placed
from planner.search.choose import Priced, alternatives, certificate
from planner.search.samplers import plan_sampler, statistics_of
from planner.search.search import Explored, Search
from planner.settings import PlanSettings
from runtime.features.location import Codes, LocationTable, renumber
from runtime.plan.schema import (
    Device,
    DynamicCache,
    FeaturePlacement,
    Plan,
    Source,
    Strategy,
    Threads,
    TopologyPlacement,
)

PIPELINES = {
    "cpu": ("seeds", "sample", "gather", "batch"),
    "cuda": ("seeds", "sample", "gather", "copy", "batch"),
}
"""The loader's stages by what the ranks compute on."""


def planned_topology(candidate: Candidate, num_nodes: int) -> TopologyPlacement:
    """Where adjacency lists live."""
    own = num_nodes if candidate.topology == "replicated" else 0
    return TopologyPlacement(
        policy=candidate.topology,
        own_rows=[own] * candidate.num_ranks,
        replication=candidate.replication,
    )


def planned_devices(candidate: Candidate, machine: MachineModel) -> list[Device]:
    """Every rank's place: a process on cores, or a GPU of its host and clique."""
    if candidate.kind == "cpu":
        return [_on_cores(r, candidate) for r in range(candidate.num_ranks)]
    known = {gpu.name: gpu for gpu in machine.gpus}
    first = {
        h: [g.name for g in machine.gpus if g.host == h] for h in {g.host for g in machine.gpus}
    }
    clique = {r: number for number, ranks in enumerate(candidate.groups) for r in ranks}
    return [
        Device(
            rank=r,
            kind="cuda",
            host=known[name].host,
            clique=clique[r],
            memory=known[name].memory,
            index=first[known[name].host].index(name),
        )
        for r, name in enumerate(candidate.gpus)
    ]


def _on_cores(rank: int, candidate: Candidate) -> Device:
    """A process on the cores of its host; hosts hold equal numbers of ranks, one after another."""
    here = candidate.num_ranks // candidate.hosts
    host = rank // here
    memory = f"{prefix_of(host)}host0"
    return Device(rank=rank, kind="cpu", host=host, clique=host, memory=memory, index=rank % here)


def planned_pipeline(candidate: Candidate) -> list[str]:
    """The loader's stages, the exchanges of ranks that share a batch among them."""
    stages = list(PIPELINES[candidate.kind])
    if candidate.batching == "cooperative":
        stages.insert(stages.index("sample") + 1, "exchange_ids")
        stages.insert(stages.index("gather") + 1, "exchange_rows")
    return stages


def plan_arrays(placed: Placed, num_nodes: int) -> tuple[list[Source], dict[str, NDArray[Any]]]:
    """Location tables and own ids, under the names the runtime looks for.

    Args:
        placed: the placement and the costs it was made for.
        num_nodes: of the graph.

    Returns:
        The sources that some table uses, in the order of their numbers, and the arrays.

    Raises:
        PlanError: a code does not address the row it stands for.
    """
    placement = placed.placement
    own = [np.ascontiguousarray(ids, dtype=np.int64) for ids in placement.own]
    tables = build_locations(
        own, num_nodes, placed.memories.costs, cliques=placement.cliques, on_host=placement.on_host
    )
    check_locations(tables, own, num_nodes)
    kept, tables = used_sources(tables, sources(len(own)))
    arrays: dict[str, NDArray[Any]] = {}
    for g, (codes, ids) in enumerate(zip(tables, own, strict=True)):
        arrays[f"feature_location_{g}"] = codes
        arrays[f"feature_own_ids_{g}"] = ids
    return kept, arrays


def used_sources(tables: list[Codes], named: list[Source]) -> tuple[list[Source], list[Codes]]:
    """Drop the sources no table points to, and renumber the rest in place.

    A listed peer makes every read an exchange between ranks, so it matters that none is listed
    for nothing.
    """
    distinct = list({id(codes): codes for codes in tables}.values())
    counts = np.sum([LocationTable(codes, named).count() for codes in distinct], axis=0)
    kept = np.flatnonzero(counts)
    numbers = np.zeros(len(counts), dtype=np.int64)
    numbers[kept] = np.arange(kept.size)
    if (numbers[kept] != kept).any():
        for codes in distinct:
            renumber(codes, numbers)
    return [named[i] for i in kept], tables


DISK_BUDGET_BYTES = 64 * 2**20
"""Most bytes of direct reads a rank holds in flight and staged."""


def assemble(
    search: Search, explored: Explored, chosen: Priced, *, elsewhere: Sequence[float] = ()
) -> tuple[Plan, dict[str, NDArray[Any]]]:
    """The plan and its arrays.

    Where few vertices stand for all, every vertex gets its place here, and what that costs is what
    the plan predicts; candidates are compared, and bounded, on the few.

    Args:
        search: the request.
        explored: its candidates, priced.
        chosen: the one to be planned.
        elsewhere: step seconds of candidates of other searches, with other samplers, that fit; the
            plan's bound is below them too.
    """
    request, few = search.request, chosen
    bound, prices = search.lower_bound(explored.priced), search.prices(few)
    bound = min(bound, *elsewhere) if elsewhere else bound
    chosen = search.whole(few)
    listed, arrays = plan_arrays(chosen.placed, request.graph.num_nodes)
    machine = request.machine
    result = Plan(
        version=metadata.version("gnnplan"),
        graph=request.graph,
        machine=machine.reference(),
        workload=request.workload,
        strategy=_strategy(search, chosen, listed),
        prediction=chosen.prediction,
        certificate=certificate(
            chosen,
            bound,
            complete=search.settings.policy != "auto",
            stride=search.stride(chosen.candidate),
        ),
        shadow_prices=prices,
        alternatives=alternatives(explored.priced, few, explored.left_out),
        statistics_class=statistics_of(search.settings, chosen.candidate).value,
    )
    return result, arrays


def _strategy(search: Search, chosen: Priced, listed: list[Source]) -> Strategy:
    """The chosen candidate as the runtime reads it."""
    candidate, placement = chosen.candidate, chosen.placed.placement
    request, settings = search.request, search.settings
    on_disk = chosen.placed.rows.host_rows < request.graph.num_nodes
    gpus = candidate.kind == "cuda"
    return Strategy(
        sampler=plan_sampler(settings, candidate),
        batching=candidate.batching,
        bulk_batches=candidate.bulk,
        bulk_bytes=candidate.bulk_bytes,
        features=FeaturePlacement(
            policy=candidate.policy,
            sources=listed,
            own_rows=[len(ids) for ids in placement.own],
            row_bytes=row_bytes(request.graph),
            storage_dtype=request.graph.feature_dtype,
            disk_budget_bytes=DISK_BUDGET_BYTES if on_disk else 0,
            cache=_cache(chosen),
            peer_way="exchange" if gpus and _peer_way(search, chosen) == "exchange" else "mapped",
        ),
        topology=planned_topology(candidate, request.graph.num_nodes),
        pipeline=planned_pipeline(candidate),
        prefetch_depth=candidate.prefetch_depth,
        devices=planned_devices(candidate, request.machine),
        threads=_threads(search, chosen) if gpus else candidate.threads,
    )


def _threads(search: Search, chosen: Priced) -> Threads:
    """The candidate's, with the grid that a GPU's gather needs."""
    machine, graph = search.request.machine, search.request.graph
    most = gather_programs(machine, chosen.candidate, chosen.placed.rows, row_bytes(graph))
    return replace(chosen.candidate.threads, gather_programs=most)


def _peer_way(search: Search, chosen: Priced) -> str:
    """Batches that are made ahead map their peers' rows: NCCL is training's alone then."""
    if has_lanes(chosen.candidate):
        return "mapped"
    machine, graph = search.request.machine, search.request.graph
    return peer_way(machine, chosen.candidate, chosen.placed.rows, row_bytes(graph))


def _cache(chosen: Priced) -> DynamicCache:
    """The slots of every rank's dynamic cache, where the placement is one."""
    policy = chosen.candidate.cache
    if policy is None:
        return DynamicCache()
    return DynamicCache(policy=policy, rows=[r.cache_rows for r in chosen.placed.rows.ranks])


def candidate_of(plan: Plan, settings: PlanSettings) -> Candidate:
    """The candidate that `assemble` made a plan of.

    Args:
        plan: of mini-batches.
        settings: the request; what it fixes of the sampler is no choice of the candidate.
    """
    strategy = plan.strategy
    gpus = strategy.devices[0].kind == "cuda"
    hosts = 1 if gpus else len({d.host for d in strategy.devices})
    cliques: dict[int, list[int]] = {}
    for device in strategy.devices:
        cliques.setdefault(device.clique, []).append(device.rank)
    sampler, asked = strategy.sampler, settings.sampler_parameters
    kappa, factor = sampler.parameters.get("kappa"), sampler.parameters.get("factor")
    local = sampler.name == "las" and (settings.sampler != "las" or "factor" not in asked)
    return Candidate(
        num_ranks=plan.num_ranks,
        threads=strategy.threads,
        prefetch_depth=strategy.prefetch_depth,
        policy=strategy.features.policy,
        # A memory `gpu0.memory` is that of gpu0.
        gpus=tuple(d.memory.removesuffix(".memory") for d in strategy.devices) if gpus else (),
        cliques=tuple(map(tuple, cliques.values())) if gpus or hosts > 1 else (),
        topology="partitioned" if strategy.topology.policy == "partitioned" else
        "replicated" if strategy.topology.policy == "replicated" else "host",
        replication=strategy.topology.replication,
        bulk=strategy.bulk_batches,
        bulk_bytes=strategy.bulk_bytes,
        kappa=None if kappa is None or "kappa" in asked else int(kappa),
        las=float(factor) if local and factor is not None else None,
        batching=strategy.batching,
        hosts=hosts,
    )  # fmt: skip
