"""Assemble the chosen candidate into a plan and its arrays."""

from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.candidate import Candidate, make_candidate
from gnnplan.planner.cost.backends.gpu_lanes import has_lanes
from gnnplan.planner.cost.host_memory import DISK_BUDGET_BYTES
from gnnplan.planner.cost.request import row_bytes
from gnnplan.planner.cost.stages.exchange_gpu import peer_way
from gnnplan.planner.cost.stages.gather_gpu import gather_programs
from gnnplan.planner.cost.step import mark_estimated
from gnnplan.planner.errors import PlanDoesNotFit
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.placement.place import CandidatePlacement
from gnnplan.planner.placement.placement import (
    build_list_locations,
    build_locations,
    check_locations,
    sources,
)
from gnnplan.planner.search.choose import PlacedCandidate, alternatives, certificate
from gnnplan.planner.search.samplers import plan_sampler, statistics_of
from gnnplan.planner.search.search import Search, SearchResult
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.features.location import Codes, LocationTable, renumber
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import (
    Alternative,
    Certificate,
    DynamicCache,
    FeaturePlacement,
    GraphRef,
    Plan,
    Prediction,
    Sampler,
    Source,
    Strategy,
    Threads,
)
from gnnplan.runtime.plan.setting import flat_values, setting_fields
from gnnplan.runtime.sampling.registry import DEFAULT_SAMPLER
from gnnplan.runtime.sampling.statistics import StatisticsClass

PIPELINES = {
    "cpu": ("seeds", "sample", "gather", "batch"),
    "cuda": ("seeds", "sample", "gather", "copy", "batch"),
}
"""Loader stages by kind of processor."""


def planned_pipeline(candidate: Candidate) -> list[str]:
    """Return the loader's stages, with the exchanges of ranks that share a batch."""
    stages = list(PIPELINES[candidate.kind])
    if candidate.batching == "cooperative":
        stages.insert(stages.index("sample") + 1, "exchange_ids")
        stages.insert(stages.index("gather") + 1, "exchange_rows")
    return stages


def plan_arrays(
    placed: CandidatePlacement, num_nodes: int
) -> tuple[list[Source], dict[str, NDArray[Any]]]:
    """Return the sources in use, by number, and location tables and own ids by array name.

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
    return kept, arrays | _list_arrays(placed, num_nodes)


def _list_arrays(placed: CandidatePlacement, num_nodes: int) -> dict[str, NDArray[Any]]:
    """Return location tables and ids of the adjacency lists that ranks keep, by array name."""
    if placed.lists is None:
        return {}
    own, cliques = placed.lists.own, placed.list_cliques
    tables = build_list_locations(own, num_nodes, cliques)
    found = {f"topology_location_{g}": codes for g, codes in enumerate(tables)}
    return found | {f"topology_own_ids_{g}": ids for g, ids in enumerate(own)}


def used_sources(tables: list[Codes], named: list[Source]) -> tuple[list[Source], list[Codes]]:
    """Drop the sources that no table points to, and renumber the rest in place.

    A listed peer would make every read an exchange between ranks.
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


def assemble(
    search: Search,
    explored: SearchResult,
    chosen: PlacedCandidate,
    *,
    elsewhere: Sequence[float] = (),
) -> tuple[Plan, dict[str, NDArray[Any]]]:
    """Return the plan and its arrays.

    Where few nodes stood for all, every node gets its place here, and the plan predicts what that
    costs; candidates are compared, and bounded, on the few. The bound is also below `elsewhere`,
    the step seconds of other searches' candidates that fit.
    """
    request, few = search.request, chosen
    bound, prices = search.lower_bound(explored.priced), search.shadow_prices(few)
    bound = min(bound, *elsewhere) if elsewhere else bound
    chosen = search.place_every_node(few)
    listed, arrays = plan_arrays(chosen.placed, request.graph.num_nodes)
    parts = search.shards_of(chosen.candidate)
    if parts is not None:
        arrays["partition"] = parts
    result = make_plan(
        request.graph,
        request.machine,
        search.settings,
        _strategy(search, chosen, listed),
        prediction=chosen.prediction,
        certificate=certificate(
            chosen,
            bound,
            complete=search.settings.policy != "auto",
            stride=search.stride(chosen.candidate),
        ),
        shadow_prices=prices,
        alternatives=alternatives(explored.priced, few, explored.left_out),
        statistics=statistics_of(search.settings, chosen.candidate),
    )
    return result, arrays


def make_plan(
    graph: GraphRef,
    machine: MachineModel,
    settings: PlanSettings,
    strategy: Strategy,
    *,
    prediction: Prediction,
    certificate: Certificate,
    shadow_prices: dict[str, float],
    alternatives: list[Alternative],
    statistics: StatisticsClass,
) -> Plan:
    """Make the plan of a strategy; plans of mini-batches and of full graphs are made here alone."""
    made = Plan(
        version=metadata.version("gnnplan"),
        graph=graph,
        machine=machine.reference(),
        workload=settings.workload,
        strategy=strategy,
        prediction=mark_estimated(prediction) if settings.quick else prediction,
        certificate=certificate,
        shadow_prices=shadow_prices,
        alternatives=alternatives,
        statistics_class=statistics.value,
        gpu_uuids=uuids_of(machine, strategy),
    )
    return fill_in(made, settings)


def fill_in(plan: Plan, settings: PlanSettings) -> Plan:
    """Return the plan with the fields whose values the request gives (`Setting.plan_field`)."""
    asked = flat_values(settings)
    for each in setting_fields(PlanSettings):
        if path := each.setting.plan_field:
            plan = _with_field(plan, path.split("."), asked[each.name])
    return plan


def _with_field(owner: Any, path: Sequence[str], value: Any) -> Any:
    """Replace one field of a dataclass, or of one that lies in it."""
    name, *rest = path
    inner = _with_field(getattr(owner, name), rest, value) if rest else value
    return replace(owner, **{name: inner})


def uuids_of(machine: MachineModel, strategy: Strategy) -> list[str]:
    """Return the UUID of each rank's GPU; empty where they are not known, as a preset's."""
    known = {gpu.name: gpu.uuid for gpu in machine.gpus}
    found = [known.get(name, "") for name in strategy.gpus]
    return found if all(found) else []


def _strategy(search: Search, chosen: PlacedCandidate, listed: list[Source]) -> Strategy:
    """Return the chosen candidate with what its placement and the user's sampler add."""
    candidate, placement = chosen.candidate, chosen.placed.placement
    graph = search.request.graph
    on_disk = chosen.placed.rows.host_rows < graph.num_nodes
    gpus = candidate.kind == "cuda"
    own_lists = [graph.num_nodes if candidate.topology.policy == "replicated" else 0]
    own_lists *= candidate.num_ranks
    if chosen.placed.lists is not None:
        own_lists = [len(ids) for ids in chosen.placed.lists.own]
    return replace(
        candidate,
        sampler=plan_sampler(search.settings, candidate),
        features=FeaturePlacement(
            policy=candidate.policy,
            sources=listed,
            own_rows=[len(ids) for ids in placement.own],
            row_bytes=row_bytes(graph),
            storage_dtype=graph.feature_dtype,
            disk_budget_bytes=DISK_BUDGET_BYTES if on_disk else 0,
            cache=_cache(chosen),
            peer_way="exchange" if gpus and _peer_way(search, chosen) == "exchange" else "mapped",
        ),
        topology=replace(candidate.topology, own_rows=own_lists),
        pipeline=planned_pipeline(candidate),
        threads=_threads(search, chosen) if gpus else candidate.threads,
    )


def _threads(search: Search, chosen: PlacedCandidate) -> Threads:
    """Return the candidate's threads, with the grid that a GPU's gather needs."""
    machine, graph = search.request.machine, search.request.graph
    most = gather_programs(machine, chosen.candidate, chosen.placed.rows, row_bytes(graph))
    return replace(chosen.candidate.threads, gather_programs=most)


def _peer_way(search: Search, chosen: PlacedCandidate) -> str:
    """Return how peers are read; batches loaded ahead map rows, since training uses NCCL."""
    if has_lanes(chosen.candidate):
        return "mapped"
    machine, graph = search.request.machine, search.request.graph
    return peer_way(machine, chosen.candidate, chosen.placed.rows, row_bytes(graph))


def _cache(chosen: PlacedCandidate) -> DynamicCache:
    policy = chosen.candidate.cache
    if policy is None:
        return DynamicCache()
    return DynamicCache(policy=policy, rows=[r.cache_rows for r in chosen.placed.rows.ranks])


def candidate_of(plan: Plan, settings: PlanSettings) -> Candidate:
    """Return the candidate that a plan of mini-batches was assembled from.

    Parameters that `settings` fix are no choice of the candidate.
    """
    strategy, asked = plan.strategy, settings.sampler_parameters
    chosen = {name: v for name, v in strategy.sampler.parameters.items() if name not in asked}
    local = strategy.las is not None and "factor" in chosen
    plain = make_candidate(
        strategy.devices,
        threads=strategy.threads,
        prefetch_depth=strategy.prefetch_depth,
        policy=strategy.policy,
        sampler=Sampler(
            name=strategy.sampler.name if local else DEFAULT_SAMPLER, parameters=chosen
        ),
    )
    return replace(
        plain,
        batching=strategy.batching,
        bulk_batches=strategy.bulk_batches,
        bulk_bytes=strategy.bulk_bytes,
        topology=replace(strategy.topology, own_rows=[]),
        owner=strategy.owner,
        partition=strategy.partition if strategy.owner == "partition" else "none",
        step=strategy.step,
        shapes=strategy.shapes,
    )


def refuse_disk(graph: Graph, made: Plan) -> None:
    """Refuse a plan that reads from disk what its runs can read from memory alone.

    Raises:
        PlanDoesNotFit: the features are sparse, or lie in a table per node type.
    """
    kinds = {source.kind for source in made.strategy.features.sources}
    if "disk" not in kinds or (graph.x_csr is None and not graph.x_by_type):
        return
    found = "sparse ones" if graph.x_csr is not None else "features by node type"
    raise PlanDoesNotFit(
        f"{graph.name}: expected dense features where rows are read from the disk, found {found}, "
        "which the host must hold whole; raise --host-memory, drop --no-shared-host, or import the "
        "graph with --features dense"
    )
