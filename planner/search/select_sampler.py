"""Choose the best plan over several samplers, each of which is searched by itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gnnplan.planner.errors import PlanDoesNotFit
from gnnplan.planner.search.choose import Evaluated
from gnnplan.planner.search.search import Search, SearchResult
from gnnplan.runtime.plan.schema import Alternative


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerSearch:
    """Search of one sampler, what it priced and what it chose."""

    search: Search
    explored: SearchResult
    chosen: Evaluated

    @property
    def sampler(self) -> str:
        """Return the sampler's name."""
        return self.search.settings.sampler


@dataclass(frozen=True, kw_only=True, slots=True)
class BestSampler:
    """Search of the best sampler, and what the others came to."""

    best: SamplerSearch
    lost: list[Alternative]
    elsewhere: list[float]
    """Step seconds of the other samplers' candidates that fit."""


def best_over_samplers(
    searches: Sequence[Search],
    pick: Callable[[Search, list[Evaluated]], Evaluated],
) -> BestSampler:
    """Explore every search and keep the one whose choice is the fastest.

    The user's first sampler stays unless another wins by more than the machine's noise.

    Args:
        searches: one per sampler, the user's first one first.
        pick: returns the best of a search's candidates.

    Raises:
        PlanDoesNotFit: nothing fits with any sampler; as the first one says.
    """
    found, failed = list[SamplerSearch](), list[tuple[Search, PlanDoesNotFit]]()
    for search in searches:
        explored = search.explore()
        try:
            chosen = pick(search, explored.priced)
        except PlanDoesNotFit as error:
            failed.append((search, error))
        else:
            found.append(SamplerSearch(search=search, explored=explored, chosen=chosen))
    if not found:
        raise failed[0][1]
    best = min(found, key=lambda each: each.chosen.seconds)
    first = found[0]
    if first.search is searches[0] and not _worth(best, first):
        best = first
    lost = [_alternative(each, best) for each in found if each is not best]
    lost += [
        Alternative(name=_name(search), step_seconds=None, why=str(error))
        for search, error in failed
    ]
    others = [p for each in found if each is not best for p in each.explored.priced]
    elsewhere = [p.seconds for p in others if not p.overflow]
    return BestSampler(best=best, lost=lost, elsewhere=elsewhere)


def _worth(best: SamplerSearch, first: SamplerSearch) -> bool:
    noise = first.search.request.machine.noise
    return best.chosen.seconds < first.chosen.seconds * (1.0 - noise)


def _alternative(found: SamplerSearch, best: SamplerSearch) -> Alternative:
    ratio = found.chosen.seconds / best.chosen.seconds
    why = (
        f"{ratio - 1.0:.1%} slower than with sampler {best.sampler}"
        if ratio >= 1.0
        else f"{1.0 - ratio:.1%} faster than with sampler {best.sampler}, within the noise"
    )
    name = f"{_name(found.search)}: {found.chosen.name}"
    return Alternative(name=name, step_seconds=found.chosen.seconds, why=why)


def _name(search: Search) -> str:
    return f"sampler {search.settings.sampler}"
