"""Pricing the candidates of one request: discrete choices first, policies on the fastest of them.

The placement changes only where rows are read from, so the candidates are first priced without any
copy of rows; the placements are then tried on the few that are fastest.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from planner.candidate import DYNAMIC, Candidate
from planner.cost.budget import host_memory
from planner.cost.model import Request, link_of, predict, seeds_per_rank, steps_per_epoch
from planner.machine_hosts import first_hosts, num_hosts
from planner.placement.policy import Parts
from planner.settings import PlanSettings
from planner.solver.choose import GIB, LINK_TABLES, Priced, faster, shadow_prices
from planner.solver.cooperative import OWNED, place_shared, shared_floor
from planner.solver.drawn import Draws
from planner.solver.dynamic import Sequences
from planner.solver.floor import least_share, reads_floor, scaled
from planner.solver.joined import joined_candidates
from planner.solver.locality import preferring_local
from planner.solver.placing import Placed, capacity, place_rows, row_costs
from planner.solver.placing_cache import place_behind_caches
from planner.solver.policies import NEEDS_DEGREE
from planner.solver.relaxed_gpu import relaxed_gpus
from planner.solver.stacking import at_stack_rate
from planner.solver.variants import LeftOut, variants
from planner.workload import Hotness

ALL_POLICIES = ("none", "song-jiang", "joint", "degree", "random", "naive", *DYNAMIC)
"""Placements that auto tries, the plain ones first: equal times keep the plainer."""
SHORTLIST = 3
"""Candidates on which every placement is tried, and placed ones on which other choices are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explored:
    """What a search priced and what it did not."""

    priced: list[Priced]
    left_out: list[LeftOut]


def shortest(priced: Iterable[Priced]) -> list[Candidate]:
    """The fastest that fit, and the others after them; of GPUs' lanes the best depth alone."""
    ordered = sorted(priced, key=lambda p: (bool(p.overflow), p.seconds))
    found: dict[Candidate, Candidate] = {}
    for p in ordered:
        c = p.candidate
        found.setdefault(replace(c, prefetch_depth=0) if c.kind == "cuda" else c, c)
    return list(found.values())[:SHORTLIST]


def other_policies(base: Candidate) -> list[str]:
    """Placements that auto tries beside none."""
    if base.batching == "cooperative":
        return [OWNED]
    alone = base.kind == "cpu" and base.hosts == 1
    return [p for p in ALL_POLICIES[1:] if alone or p not in DYNAMIC]


def _placed(p: Priced) -> bool:
    """Whether rows are placed that could be placed better."""
    return p.candidate.cache is None and p.candidate.las is None


def _shape(p: Priced) -> Candidate:
    """What placements are bounded for: the candidate without what leaves the reads as they are."""
    return replace(p.candidate, policy="", bulk=1, bulk_bytes=0, kappa=None)


def _longest(p: Priced) -> float:
    """Seconds of feature reads of the rank that reads longest, on the whole profile."""
    return p.placed.placement.evaluation.max_seconds


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
    draws: Draws | None = None
    """Sizes and sequences of batches; None: only what the profile holds is priced."""
    memo: dict[object, Placed] = field(default_factory=dict[object, Placed], compare=False)
    """Placements made so far: candidates that differ elsewhere share them."""

    def price(self, candidate: Candidate) -> Priced:
        """Place and price one candidate.

        Ranks that share a batch keep rows of their own vertices or none: with any other placement
        the candidate is priced, and named, as one of independent batches.
        """
        if candidate.batching == "cooperative" and candidate.policy not in ("none", OWNED):
            candidate = replace(candidate, batching="independent")
        request, placed = self._request(candidate), self._place(candidate)
        if candidate.las is not None and self.draws is not None:
            own = placed.placement.own[0]
            drawn = self.draws.local(candidate.num_ranks, candidate.las, own)
            if not isinstance(drawn, str):
                request, placed = preferring_local(request, candidate, placed, drawn)
        prediction = predict(request, candidate, placed.rows)
        return Priced(candidate=candidate, placed=placed, prediction=prediction)

    def _request(self, candidate: Candidate) -> Request:
        """The request on the hosts that the candidate uses, its stacks at their own rate."""
        machine = self.request.machine
        if candidate.kind == "cuda":
            return self.request
        if candidate.hosts == num_hosts(machine):
            return at_stack_rate(self.request, candidate, self.draws)
        found = replace(self.request, machine=first_hosts(machine, candidate.hosts))
        return at_stack_rate(found, candidate, self.draws)

    def _seeds(self, candidate: Candidate) -> int:
        """Seeds of the batches that a candidate's rows are read for."""
        batch_size = self.request.workload.batch_size
        shared = candidate.batching == "cooperative"
        return batch_size if shared else seeds_per_rank(batch_size, candidate.num_ranks)

    def _place(self, candidate: Candidate) -> Placed:
        """The candidate's rows; equal problems are solved once."""
        shared_host, request = self.settings.shared_host, self._request(candidate)
        seeds = self._seeds(candidate)
        hotness = self.hotness[seeds]
        room = capacity(request, candidate, shared_host=shared_host)
        costs = row_costs(request, candidate, hotness, room)
        kappa = candidate.kappa if candidate.cache else None
        key = (candidate.policy, candidate.cliques, candidate.hosts, kappa, seeds, room, costs,
               candidate.num_ranks, candidate.batching, id(hotness))  # fmt: skip
        if key not in self.memo:
            if candidate.cache is not None:
                batches = self._sequence(candidate)
                self.memo[key] = place_behind_caches(
                    request, candidate, hotness, batches, shared_host=shared_host
                )
            elif candidate.batching == "cooperative":
                self.memo[key] = place_shared(request, candidate, hotness, shared_host=shared_host)
            else:
                self.memo[key] = place_rows(
                    request,
                    candidate,
                    hotness,
                    shared_host=shared_host,
                    out_degree=self.out_degree() if candidate.policy in NEEDS_DEGREE else None,
                    parts=self.parts,
                )
        return self.memo[key]

    def _sequence(self, candidate: Candidate) -> Sequences | None:
        """Successive batches where they hang together; frequencies do for independent ones."""
        asked = self.settings.sampler_parameters.get("kappa", 1)
        if candidate.kappa is None and float(asked) == 1.0:
            return None
        if self.draws is None:
            return None
        found = self.draws.batches(candidate.num_ranks, candidate.kappa)
        return None if isinstance(found, str) else found

    def run(self) -> list[Priced]:
        """Every candidate priced, in order of preference where times are equal."""
        return self.explore().priced

    def explore(self) -> Explored:
        """Every candidate priced, and the kinds of choices that could not be."""
        policy, machine = self.settings.policy, self.request.machine
        policies = ("none",) if policy == "auto" else (policy,)
        graph, profile = self.request.graph, self.request.profile
        tried = joined_candidates(
            self.settings, machine, policies, task=graph.task, profile=profile
        )
        found = [self.price(c) for c in tried]
        if policy == "auto":
            for base in shortest(found):
                others = other_policies(base)
                found += [self.price(replace(base, policy=other)) for other in others]
        steps = steps_per_epoch(self.request.graph.num_train, self.request.workload.batch_size)
        more = variants(self.settings, self.draws, shortest(found), steps)
        found += [self.price(candidate) for candidate in more.candidates]
        return Explored(priced=found, left_out=more.left_out)

    def lower_bound(self, priced: list[Priced]) -> float:
        """Step seconds below which no placement brings any candidate, within the cost model."""
        found = [p.seconds for p in priced if not _placed(p)]
        best: dict[Candidate, Priced] = {}
        for p in filter(_placed, priced):
            known = best.get(_shape(p))
            if known is None or _longest(p) < _longest(known):
                best[_shape(p)] = p
        least = {
            shape: scaled(p.placed.rows, least_share(self._floor(p), _longest(p)))
            for shape, p in best.items()
        }
        for p in filter(_placed, priced):
            again = predict(self._request(p.candidate), p.candidate, least[_shape(p)])
            found.append(again.step_seconds.value)
        return min(found)

    def _floor(self, p: Priced) -> float:
        """Least seconds of feature reads of a candidate's slowest rank."""
        request, hotness = self._request(p.candidate), self.hotness[self._seeds(p.candidate)]
        room = capacity(request, p.candidate, shared_host=self.settings.shared_host)
        if p.candidate.batching == "cooperative":
            return shared_floor(hotness, p.placed.costs, room.own_rows, p.candidate.num_ranks)
        cliques = p.placed.placement.cliques
        return reads_floor(hotness, p.placed.costs, room.own_rows, room.host_rows, cliques)

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
