"""Locality-aware sampling: neighbours whose rows a rank holds are preferred."""

from collections.abc import Iterator
from dataclasses import replace

from planner.candidate import Candidate
from planner.cost.model import Request
from planner.solver.drawn import Draws
from planner.solver.kinds.allowed import forbidden
from planner.solver.kinds.kind import Ask, Kind, LeftOut
from planner.solver.locality import preferring_local
from planner.solver.placing import Placed

FACTORS = (2.0, 4.0, 8.0, 16.0)
"""Preferences for local neighbours."""


class LocalNeighbours(Kind):
    """Fewer rows from elsewhere, for a little more variance."""

    name = "local neighbours"
    bounded = False

    def taken(self, candidate: Candidate) -> bool:
        """Whether the factor is the planner's choice."""
        return candidate.las is not None

    def words(self, candidate: Candidate) -> str:
        """By how much."""
        return f"local neighbours preferred {candidate.las:g}-fold"

    def changes(self, candidate: Candidate) -> int:
        """One."""
        del candidate
        return 1

    def propose(self, ask: Ask, base: Candidate | None) -> Iterator[Candidate | LeftOut]:
        """Every factor, where ranks hold rows that could be preferred."""
        if base is None:
            return
        why = _refused(ask, base)
        if why:
            yield LeftOut(name=self.name, why=why)
            return
        for factor in FACTORS:
            yield replace(base, las=factor)

    def adjusted(
        self, request: Request, candidate: Candidate, placed: Placed, draws: Draws | None
    ) -> tuple[Request, Placed]:
        """Sizes and shares as drawn with the preference."""
        if candidate.las is None or draws is None:
            return request, placed
        held = placed.spread(placed.placement.own[0])
        drawn = draws.local(candidate.num_ranks, candidate.las, held)
        if isinstance(drawn, str):
            return request, placed
        return preferring_local(request, candidate, placed, drawn)


def _refused(ask: Ask, base: Candidate) -> str:
    """Why nothing is proposed; empty where something is."""
    sampler, parameters = ask.settings.sampler, ask.settings.sampler_parameters
    if sampler == "las" and "factor" in parameters:
        return "the factor is the user's own"
    if sampler not in ("las", "neighbor") or "factor" in parameters:
        return f"sampler {sampler} has no form that prefers local neighbours"
    if sampler == "neighbor" and parameters:
        return "the sampler's parameters are the user's own"
    why = forbidden(ask.settings, replace(base, las=FACTORS[0]))
    if why:
        return why
    if base.kind == "cuda":
        return "not priced where ranks are GPUs"
    if ask.draws is None:
        return "nothing was drawn"
    if base.policy == "none" or base.cache is not None:
        return "no fast candidate keeps rows of its own"
    return ""
