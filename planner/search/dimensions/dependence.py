"""Dependent batches: kappa of them share random numbers, so that rows are found again."""

from collections.abc import Iterator
from dataclasses import replace

from planner.candidate import Candidate
from planner.cost.request import Request
from planner.search.dimensions.dimension import Ask, Kind, LeftOut
from planner.search.dimensions.stacks import at_dependent_rate
from planner.search.drawn import Draws
from planner.search.samplers import forbidden
from runtime.plan.schema import DYNAMIC
from runtime.sampling.parameters import PARAMETERS

KAPPAS = (4, 16, 64, 256)
"""Batches that hang together, beside 1: the user's own."""


def share_draws(base: Candidate, kappa: int | None) -> Candidate:
    """Return a candidate whose sampler draws kappa batches with the same random numbers.

    Args:
        base: any candidate.
        kappa: number of batches; None: as the user's sampler says.
    """
    others = {k: v for k, v in base.sampler.parameters.items() if k != "kappa"}
    chosen = others if kappa is None else {**others, "kappa": float(kappa)}
    return replace(base, sampler=replace(base.sampler, parameters=chosen))


class Dependence(Kind):
    """Batches that hang together, behind the base's placement and behind caches."""

    name = "dependent batches"

    def taken(self, candidate: Candidate) -> bool:
        """Whether kappa is the planner's choice."""
        return candidate.kappa is not None

    def words(self, candidate: Candidate) -> str:
        """How many batches."""
        one = candidate.kappa == 1
        return "batches independent" if one else f"{candidate.kappa} batches hang together"

    def changes(self, candidate: Candidate) -> int:
        """One."""
        del candidate
        return 1

    def idle(self, candidate: Candidate) -> str:
        """That nothing is found again where rows stay at their places."""
        if candidate.cache is not None:
            return ""
        return "rows at fixed places gain nothing from batches that hang together"

    def propose(self, ask: Ask, base: Candidate | None) -> Iterator[Candidate | LeftOut]:
        """Every kappa, on the base's own placement and on each cache."""
        if base is None:
            return
        why = self._refused(ask, base)
        if why:
            yield LeftOut(name=self.name, why=why)
            return
        for kappa in KAPPAS:
            dependent = share_draws(base, kappa)
            why = forbidden(ask.settings, dependent) or _undrawn(ask, base.num_ranks, kappa)
            if why:
                yield LeftOut(name=self.name, why=why)
                return
            for policy in dict.fromkeys((base.policy, *DYNAMIC)):
                yield dependent.with_policy(policy)

    def request(self, request: Request, candidate: Candidate, draws: Draws | None) -> Request:
        """The machine with the rate that such batches were timed at."""
        return at_dependent_rate(request, candidate, draws)

    def shape(self, candidate: Candidate) -> Candidate:
        """Rows at fixed places are read as often."""
        return share_draws(candidate, None)

    def _refused(self, ask: Ask, base: Candidate) -> str:
        """Why nothing is proposed; empty where something may be."""
        if "kappa" not in PARAMETERS.get(ask.settings.sampler, {}):
            others = "(labor, ladies and pladies need not)"
            return f"sampler {ask.settings.sampler} draws each batch afresh {others}"
        if base.kind == "cuda":
            return "only a cache that fills itself gains, none is on GPUs"
        return "kappa is the user's own" if "kappa" in ask.settings.sampler_parameters else ""


def _undrawn(ask: Ask, num_ranks: int, kappa: int) -> str:
    """Why there are no such batches to look at; empty where there are."""
    if ask.draws is None:
        return "nothing was drawn"
    found = ask.draws.batches(num_ranks, kappa)
    return found if isinstance(found, str) else ""
