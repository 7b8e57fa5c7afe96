"""The candidates of one configuration of `prediction`: planned, priced and written."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gnnplan.planner.assemble import assemble
from gnnplan.planner.cost.model import fixed_parts
from gnnplan.planner.cost.request import row_bytes
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.pipeline import search_for, searches_for
from gnnplan.planner.placement.owned import OWNED
from gnnplan.planner.placement.place import code_bytes
from gnnplan.planner.queries.calibrate import calibrate_search
from gnnplan.planner.queries.tune import drop_alike
from gnnplan.planner.search.choose import PlacedCandidate, choose
from gnnplan.planner.search.dimensions.ranks import machine_candidates
from gnnplan.planner.search.search import Search, SearchResult
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.io import save_plan
from gnnplan.runtime.plan.schema import Plan
from tests.benchmarks.prediction_cases import Case

POLICIES = {
    "ram": ("none",),
    "samplers": ("none",),
    "disk": ("none", "random", "degree", "joint", "lru"),
    "link": ("none", "naive", "random", "degree", "song-jiang", "joint"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One candidate of one search; `raw` is that search without factors."""

    search: Search
    raw: Search
    priced: PlacedCandidate

    @property
    def key(self) -> dict[str, Any]:
        """What tells it from others of its configuration."""
        candidate = self.priced.candidate
        return {
            "policy": candidate.policy,
            "ranks": candidate.num_ranks,
            "compute": candidate.threads.compute,
            "loaders": candidate.threads.sample,
            "ahead": candidate.prefetch_depth,
            "sampler": self.search.settings.sampler,
            "stack": candidate.bulk_batches,
            "batching": candidate.batching,
        }


def options_of(
    case: Case, graph: Graph, machine: MachineModel, factors: Mapping[str, float]
) -> tuple[list[Option], int]:
    """Distinct candidates of a configuration, and the place of the one the planner chooses."""
    budget = None
    if case.share < 1.0:
        budget = device_budget(case, graph, machine)
    found: list[Option] = []
    choices: list[Option] = []
    requests = case.settings(budget_bytes=budget)
    searches = searches_for(graph, requests, machine)
    for settings, raw in zip(requests, searches, strict=True):
        if case.tier == "link":
            raw = over_the_link(raw)
        search = calibrate_search(raw, factors) if factors else raw
        priced = search.run()
        wanted = [choose(priced, machine.noise), *grid(case, search, settings, machine)]
        kept = drop_alike([p for p in wanted if p.eligible])
        mine = [Option(search=search, raw=raw, priced=p) for p in kept]
        choices.append(mine[0])
        found += mine
    best = min(choices, key=lambda option: option.priced.seconds)
    return found, next(i for i, option in enumerate(found) if option is best)


def over_the_link(search: Search) -> Search:
    """Gradients at the link's rates: the profile timed its sums between two ranks of one host."""
    profile = search.request.profile
    timing = {key: replace(each, all_reduce=None) for key, each in profile.timing.items()}
    request = replace(search.request, profile=replace(profile, timing=timing))
    return replace(search, request=request)


def grid(
    case: Case, search: Search, settings: PlanSettings, machine: MachineModel
) -> list[PlacedCandidate]:
    """Every split of the threads, and on the best of them every policy of the tier.

    Where there are two ranks, they share a batch in one more: what they exchange between two layers
    is measured nowhere else.
    """
    splits = [
        search.price(c)
        for c in machine_candidates(settings, machine, ("none",))
        if c.threads.sample == 0 or c.prefetch_depth == 2
    ]
    best = min(splits, key=lambda p: p.seconds).candidate
    others = [best.with_policy(policy) for policy in POLICIES[case.tier] if policy != "none"]
    if best.num_ranks > 1:
        kept = OWNED if others else "none"
        others.append(replace(best.with_policy(kept), batching="cooperative"))
    return [*splits, *(search.price(candidate) for candidate in others)]


def device_budget(case: Case, graph: Graph, machine: MachineModel) -> int:
    """Bytes of a rank that holds its own state and `share` of all rows."""
    needs, stored = list[int](), 0
    for settings in case.settings():
        search = search_for(graph, settings, machine)
        codes = code_bytes(graph.num_nodes)
        needs += [
            sum(fixed_parts(search.request, candidate, 0, codes).values())
            for candidate in machine_candidates(settings, machine, ("none",))
        ]
        stored = row_bytes(search.request.graph)
    return max(needs) + int(case.share * graph.num_nodes) * stored


def write(option: Option, folder: Path) -> Plan:
    """The plan folder that the ranks run."""
    alone = SearchResult(priced=[option.priced], left_out=[])
    plan, arrays = assemble(option.search, alone, option.priced)
    return save_plan(plan, arrays, folder)
