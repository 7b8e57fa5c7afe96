"""Pricing the candidates of one request: discrete choices first, policies on the fastest of them.

The placement changes only where rows are read from, so the candidates are first priced without any
copy of rows; the placements are then tried on the few that are fastest.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.candidate import Candidate, PlacedRows
from planner.cost.budget import host_memory
from planner.cost.model import Request, link_of, predict, seeds_per_rank
from planner.settings import PlanSettings
from planner.solver.candidates import candidates
from planner.solver.choose import GIB, LINK_TABLES, Priced, faster, shadow_prices
from planner.solver.placing import place_rows
from planner.workload import Hotness

ALL_POLICIES = ("none", "song-jiang", "degree", "random", "naive")
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

    def price(self, candidate: Candidate) -> Priced:
        """Place and price one candidate."""
        seeds = seeds_per_rank(self.request.workload.batch_size, candidate.num_ranks)
        placed = place_rows(
            self.request,
            candidate,
            self.hotness[seeds],
            shared_host=self.settings.shared_host,
            out_degree=self.out_degree() if candidate.policy == "degree" else None,
        )
        prediction = predict(self.request, candidate, placed.rows)
        return Priced(candidate=candidate, placed=placed, prediction=prediction)

    def run(self) -> list[Priced]:
        """Every candidate priced, in order of preference where times are equal."""
        policy, cores = self.settings.policy, self.request.machine.num_cores
        policies = ("none",) if policy == "auto" else (policy,)
        found = [self.price(c) for c in candidates(self.settings, cores, policies)]
        if policy != "auto":
            return found
        fastest = sorted(found, key=lambda p: (bool(p.overflow), p.seconds))[:SHORTLIST]
        for priced in fastest:
            for other in ALL_POLICIES[1:]:
                found.append(self.price(replace(priced.candidate, policy=other)))
        return found

    def lower_bound(self, priced: list[Priced]) -> float:
        """Least step seconds of any candidate if all rows came from its cheapest place.

        Memory does not bind and every row is as near as it can be: no placement does better within
        the model.
        """
        return min(
            predict(self.request, p.candidate, _ideal(p.placed.rows, kind)).step_seconds.value
            for p in {replace(p.candidate, policy=""): p for p in priced}.values()
            for kind in ("own", "host")
        )

    def prices(self, chosen: Priced) -> dict[str, float]:
        """Shadow prices of memories and links, by placing and pricing the candidate again."""
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


def _ideal(placed: PlacedRows, kind: str) -> PlacedRows:
    """The same reads, all from one kind of place."""
    ranks = [
        replace(
            r,
            rows={kind: sum(r.rows.values())},
            working_rows={kind: min(r.working_rows.values(), default=0.0)},
            shares={kind: 1.0},
        )
        for r in placed.ranks
    ]
    return replace(placed, ranks=ranks)
