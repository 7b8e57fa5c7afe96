"""The chosen candidate as a plan: what the runtime reads, and what lost to it."""

from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

from numpy.typing import NDArray

from planner.cost.gpu_gather import gather_programs, peer_way
from planner.cost.gpu_lanes import has_lanes
from planner.cost.model import row_bytes
from planner.ranks import planned_devices, planned_pipeline, planned_topology
from planner.solver.arrays import plan_arrays
from planner.solver.choose import Priced, alternatives, certificate
from planner.solver.sampling import plan_sampler, statistics_of
from planner.solver.search import Explored, Search
from runtime.plan import (
    DynamicCache,
    FeaturePlacement,
    Plan,
    Source,
    Strategy,
    Threads,
)

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
