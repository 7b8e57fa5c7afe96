"""Pricing the candidates of one request: discrete choices first, policies on the fastest of them.

The placement changes only where rows are read from, so the candidates are first priced without any
copy of rows; the placements are then tried on the few that are fastest.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.candidate import Candidate
from planner.cost.budget import host_memory
from planner.cost.model import Request, link_of, predict, seeds_per_rank
from planner.placement.policy import Parts
from planner.settings import PlanSettings
from planner.solver.candidates_gpu import machine_candidates
from planner.solver.choose import GIB, LINK_TABLES, Priced, faster, shadow_prices
from planner.solver.floor import reads_floor, scaled_to
from planner.solver.placing import capacity, place_rows
from planner.solver.policies import NEEDS_DEGREE
from planner.solver.relaxed_gpu import relaxed_gpus
from planner.workload import Hotness

ALL_POLICIES = ("none", "song-jiang", "joint", "degree", "random", "naive")
"""Placements that auto tries, the plain ones first: equal times keep the plainer."""
SHORTLIST = 3
"""Candidates on which every placement is tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """One planning request with what placements need."""

    request: Request
    settings: PlanSettings
    hotness: dict[int, Hotness]
    """By seeds per rank."""
    out_degree: Callable[[], NDArray[np.int64]]
    """Lists each vertex stands in; counted only where a policy needs it."""
    parts: Parts | None = None
    """Partitions of the graph, made only where a policy needs one."""

    def price(self, candidate: Candidate) -> Priced:
        """Place and price one candidate."""
        seeds = seeds_per_rank(self.request.workload.batch_size, candidate.num_ranks)
        placed = place_rows(
            self.request,
            candidate,
            self.hotness[seeds],
            shared_host=self.settings.shared_host,
            out_degree=self.out_degree() if candidate.policy in NEEDS_DEGREE else None,
            parts=self.parts,
        )
        prediction = predict(self.request, candidate, placed.rows)
        return Priced(candidate=candidate, placed=placed, prediction=prediction)

    def run(self) -> list[Priced]:
        """Every candidate priced, in order of preference where times are equal."""
        policy, machine = self.settings.policy, self.request.machine
        policies = ("none",) if policy == "auto" else (policy,)
        found = [self.price(c) for c in machine_candidates(self.settings, machine, policies)]
        if policy != "auto":
            return found
        fastest = sorted(found, key=lambda p: (bool(p.overflow), p.seconds))[:SHORTLIST]
        for priced in fastest:
            for other in ALL_POLICIES[1:]:
                found.append(self.price(replace(priced.candidate, policy=other)))
        return found

    def lower_bound(self, priced: list[Priced]) -> float:
        """Step seconds below which no placement brings any candidate, within the cost model."""
        floors: dict[Candidate, float] = {}
        found: list[float] = []
        for p in priced:
            shape = replace(p.candidate, policy="")
            if shape not in floors:
                room = capacity(self.request, p.candidate, shared_host=self.settings.shared_host)
                seeds = seeds_per_rank(self.request.workload.batch_size, p.candidate.num_ranks)
                floors[shape] = reads_floor(
                    self.hotness[seeds],
                    p.placed.costs,
                    room.own_rows,
                    room.host_rows,
                    p.placed.placement.cliques,
                )
            rows = scaled_to(p.placed.rows, p.placed.costs, floors[shape])
            found.append(predict(self.request, p.candidate, rows).step_seconds.value)
        return min(found)

    def prices(self, chosen: Priced) -> dict[str, float]:
        """Shadow prices of memories and links, by placing and pricing the candidate again."""
        if chosen.candidate.kind == "cuda":
            more = relaxed_gpus(self.request)
            return shadow_prices(
                chosen.seconds,
                lambda name: replace(self, request=more[name]).price(chosen.candidate).seconds,
                list(more),
            )
        machine, budgets = self.request.machine, self.request.budgets
        host, capacity = host_memory(machine)
        device_limit, host_limit = budgets.device_bytes, budgets.host_bytes
        more: dict[str, Request] = {}
        if device_limit is not None:
            wider = replace(budgets, device_bytes=device_limit + GIB)
            more["device memory +1 GiB"] = replace(self.request, budgets=wider)
        memories = [
            replace(m, capacity_bytes=m.capacity_bytes + GIB) if m.name == host else m
            for m in machine.memories
        ]
        wider = replace(budgets, host_bytes=(host_limit or capacity) + GIB)
        more[f"{host} +1 GiB"] = replace(
            self.request, machine=replace(machine, memories=memories), budgets=wider
        )
        for kind, name in (("host", "memory"), ("disk", "disk"), ("all_reduce", "exchange")):
            link = link_of(machine, kind)
            quicker = faster(machine, LINK_TABLES[name])
            more[f"{link} +10%"] = replace(self.request, machine=quicker)

        def again(name: str) -> float | None:
            return replace(self, request=more[name]).price(chosen.candidate).seconds

        return shadow_prices(chosen.seconds, again, list(more))
