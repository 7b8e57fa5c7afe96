"""Choose dependent batches: kappa of them share random draws, so that rows recur."""

from collections.abc import Iterator
from dataclasses import replace

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.request import Request
from gnnplan.planner.search.dimensions.dimension import Dimension, LeftOut, Proposing
from gnnplan.planner.search.dimensions.stacks import at_dependent_rate
from gnnplan.planner.search.drawn import Draws
from gnnplan.planner.search.samplers import forbidden
from gnnplan.runtime.plan.schema import DYNAMIC
from gnnplan.runtime.sampling.registry import find_sampler

KAPPAS = (4, 16, 64, 256)


def share_draws(base: Candidate, kappa: int | None) -> Candidate:
    """Return a candidate whose sampler draws kappa batches with the same random numbers.

    With kappa None the user's sampler decides.
    """
    others = {k: v for k, v in base.sampler.parameters.items() if k != "kappa"}
    chosen = others if kappa is None else {**others, "kappa": float(kappa)}
    return replace(base, sampler=replace(base.sampler, parameters=chosen))


class Dependence(Dimension):
    """Successive batches that share random draws."""

    name = "dependent batches"

    def applies(self, candidate: Candidate) -> bool:
        """Return whether kappa is the planner's choice."""
        return candidate.kappa is not None

    def describe(self, candidate: Candidate) -> str:
        """Name the number of batches."""
        one = candidate.kappa == 1
        return "batches independent" if one else f"{candidate.kappa} batches hang together"

    def no_gain_reason(self, candidate: Candidate) -> str:
        """Say that fixed rows gain nothing when nodes recur."""
        if candidate.cache is not None:
            return ""
        return "rows at fixed places gain nothing from batches that hang together"

    def propose(self, asked: Proposing, base: Candidate | None) -> Iterator[Candidate | LeftOut]:
        """Yield every kappa, on the base's own placement and on each cache."""
        if base is None:
            return
        why = self._refused(asked, base)
        if why:
            yield LeftOut(name=self.name, why=why)
            return
        for kappa in KAPPAS:
            dependent = share_draws(base, kappa)
            why = forbidden(asked.settings, dependent) or _undrawn(asked, base.num_ranks, kappa)
            if why:
                yield LeftOut(name=self.name, why=why)
                return
            for policy in dict.fromkeys((base.policy, *DYNAMIC)):
                yield dependent.with_policy(policy)

    def adapt_request(self, request: Request, candidate: Candidate, draws: Draws | None) -> Request:
        """Return the request at the measured rate of dependent batches."""
        return at_dependent_rate(request, candidate, draws)

    def read_shape(self, candidate: Candidate) -> Candidate:
        """Ignore kappa: fixed rows are read as often."""
        return share_draws(candidate, None)

    def _refused(self, asked: Proposing, base: Candidate) -> str:
        """Return why nothing is proposed; empty where something may be."""
        if not find_sampler(asked.settings.sampler).dependent:
            others = "(labor, ladies and pladies need not)"
            return f"sampler {asked.settings.sampler} draws each batch afresh {others}"
        if base.kind == "cuda":
            return "only a cache that fills itself gains, none is on GPUs"
        return "kappa is the user's own" if "kappa" in asked.settings.sampler_parameters else ""


def _undrawn(asked: Proposing, num_ranks: int, kappa: int) -> str:
    """Return why no such batches were drawn; empty where they were."""
    if asked.draws is None:
        return "nothing was drawn"
    found = asked.draws.batches(num_ranks, kappa)
    return found if isinstance(found, str) else ""
