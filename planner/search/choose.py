"""Choose among priced candidates; say why the others lost and what more memory would save."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.memory import sum_text
from gnnplan.planner.errors import PlanDoesNotFit
from gnnplan.planner.placement.place import CandidatePlacement
from gnnplan.planner.search.dimensions.dimension import Omission
from gnnplan.planner.search.dimensions.registry import (
    count_changes,
    explain_no_gain,
    family_of,
    name_of,
)
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.plan.schema import (
    Alternative,
    Certificate,
    MemoryUse,
    Prediction,
    TopologyPlacement,
)
from gnnplan.runtime.stages import LOADER_STAGES, Stage

MOST_ALTERNATIVES = 12
MOST_REFUSED = 3
"""Refused candidates that would win and are shown beside as many alternatives as there may be."""


def find_refusal(settings: PlanSettings, candidate: Candidate, prediction: Prediction) -> str:
    """Say why a candidate may not be chosen; empty where it may.

    A limit that users set on plans is a condition here, before memory: every search, what-if and
    tuning asks it.
    """
    return _lacks_memory(prediction)


def _lacks_memory(prediction: Prediction) -> str:
    for name, memory in prediction.memory_bytes.items():
        if memory.headroom < 0:
            return f"does not fit: {sum_text(name, memory)}"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedCandidate:
    """Candidate and its price."""

    candidate: Candidate
    prediction: Prediction
    refusal: str
    """Why it may not be chosen, as `find_refusal` says; empty where it may."""

    @property
    def seconds(self) -> float:
        """Return the predicted seconds per step."""
        return self.prediction.step_seconds.value

    @property
    def eligible(self) -> bool:
        """Return whether it may be chosen."""
        return not self.refusal

    @property
    def fits(self) -> bool:
        """Return whether each memory holds what it needs."""
        return not _lacks_memory(self.prediction)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedCandidate(PricedCandidate):
    """Candidate with its rows placed, and its price."""

    placed: CandidatePlacement

    @property
    def own_rows(self) -> int:
        """Return the copies of rows over all ranks, with the slots of caches."""
        return sum(r.own_rows + r.cache_rows for r in self.placed.rows.ranks)

    @property
    def copies(self) -> int:
        """Return the copies of rows in host memory; those on GPUs cost nothing."""
        return 0 if self.candidate.gpus else self.own_rows

    @property
    def loaders(self) -> int:
        """Return the loader threads on cores, which pay only where loading overlaps the model."""
        return 0 if self.candidate.gpus else self.candidate.threads.sample

    @property
    def plainness(self) -> tuple[int, int, int]:
        """Return the sort key of candidates whose times are equal; the least is kept."""
        return self.changes, self.copies, self.loaders

    @property
    def hidden(self) -> float:
        """Return the seconds per step of loader stages, which should hide beside the model."""
        return sum(self.prediction.stages.get(stage, 0.0) for stage in LOADER_STAGES)

    @property
    def far_rows(self) -> float:
        """Return the rows per step that are read outside the ranks' own memories."""
        ranks = self.placed.rows.ranks
        return sum(n for rank in ranks for place, n in rank.rows.items() if place != "own")

    @property
    def changes(self) -> int:
        """Return the number of choices that are not the default."""
        return count_changes(self.candidate)

    @property
    def name(self) -> str:
        """Return the name that plans and tables show."""
        return name_of(self.candidate)


Priced = TypeVar("Priced", bound=PricedCandidate)


def nearest_to_fit(priced: Sequence[Priced]) -> Priced:
    """Return the candidate that lacks least memory, whose sum a refusal shows."""
    return max(priced, key=lambda p: fullest_memory(p)[1].headroom)


def fullest_memory(p: PricedCandidate) -> tuple[str, MemoryUse]:
    """Return the memory that has least left or lacks most, by name, and its sum."""
    return min(p.prediction.memory_bytes.items(), key=lambda item: item[1].headroom)


def lacking_memory(priced: Sequence[Priced]) -> list[Priced]:
    """Return the candidates that memory alone refuses."""
    return [p for p in priced if p.refusal and p.refusal == _lacks_memory(p.prediction)]


def make_refusal(priced: Sequence[PricedCandidate]) -> PlanDoesNotFit:
    """Make the error for candidates none of which may be chosen.

    Its text is the memory sum of the one that lacks least, among those that lack nothing else, and
    why the fastest that fits is refused; where all are beyond another limit, that of the fastest.
    """
    if not priced:
        return PlanDoesNotFit("no candidate was priced")
    short, best = lacking_memory(priced), min(priced, key=lambda p: (not p.fits, p.seconds))
    if not short:
        return PlanDoesNotFit(best.refusal)
    name, memory = fullest_memory(nearest_to_fit(short))
    return PlanDoesNotFit(
        sum_text(name, memory) + (f"; what would fit: {best.refusal}" if best.fits else ""),
        constraint=name,
        needed_bytes=memory.total,
        available_bytes=memory.capacity,
    )


def choose(priced: Sequence[PlacedCandidate], noise: float) -> PlacedCandidate:
    """Return the fastest eligible candidate; within the relative noise of it, the plainest.

    Plainer are fewer choices that are not the default, then fewer copies of rows in host memory,
    then fewer loader threads on cores. On GPUs, rows and lists fill memory that holds nothing else:
    there the least seconds to hide beside the model decide, then the fewest rows read elsewhere. Of
    ties the first candidate wins.

    Raises:
        PlanDoesNotFit: none may be chosen, as `make_refusal` says.
    """
    feasible = [p for p in priced if p.eligible]
    if not feasible:
        raise make_refusal(priced)
    best = min(feasible, key=lambda p: p.seconds)
    plainer = [
        p
        for p in feasible
        if p.plainness < best.plainness and p.seconds <= best.seconds * (1.0 + noise)
    ]
    chosen = min(plainer, key=lambda p: (*p.plainness, p.seconds)) if plainer else best
    alike = [
        p
        for p in feasible
        if _where_it_runs(p) == _where_it_runs(chosen) and p.seconds <= best.seconds * (1.0 + noise)
    ]
    if not chosen.candidate.gpus:
        return chosen
    return min(alike, key=lambda p: (round(p.hidden, 6), p.far_rows, p.seconds))


def _where_it_runs(p: PlacedCandidate) -> Candidate:
    return replace(p.candidate.with_policy(""), topology=TopologyPlacement())


def pick_shown(
    others: Sequence[Priced],
    chosen: Priced,
    most: int,
    *,
    shape_of: Callable[[Priced], Hashable],
    family_of: Callable[[Priced], Hashable] = lambda _: None,
) -> list[Priced]:
    """Pick the candidates to show beside the chosen one: eligible ones first, then by time.

    One of each shape, but all of the chosen one's shape, up to `most`; before those the first of
    every family. A few of the fastest refused ones that would win come besides.
    """
    ranked = sorted(others, key=lambda p: (not p.eligible, p.seconds))
    kept, seen = list[Priced](), set[Hashable]()
    families, firsts = {family_of(chosen)}, list[Priced]()
    refused: dict[Hashable, Priced] = {}
    for p in ranked:
        shape, family = shape_of(p), family_of(p)
        if family not in families:
            firsts.append(p)
        elif shape not in seen or shape == shape_of(chosen):
            kept.append(p)
        if p.refusal and p.seconds < chosen.seconds:
            refused.setdefault(shape, p)
        families.add(family)
        seen.add(shape)
    named = firsts + kept[: max(0, most - len(firsts))]
    besides = [p for p in refused.values() if p not in named]
    return sorted([*named, *besides[:MOST_REFUSED]], key=lambda p: (not p.eligible, p.seconds))


def alternatives(
    priced: Sequence[PlacedCandidate], chosen: PlacedCandidate, left_out: Sequence[Omission] = ()
) -> list[Alternative]:
    """List the candidates that lost, with why: fastest first, those that may not be chosen last.

    Of each ranks and threads one is listed, but every policy on the chosen ones. The best of every
    family is listed, however slow; dimensions that were not priced come last.
    """
    named = pick_shown(
        [p for p in priced if p.candidate != chosen.candidate],
        chosen,
        MOST_ALTERNATIVES,
        shape_of=lambda p: p.candidate.with_policy(""),
        family_of=lambda p: family_of(p.candidate),
    )
    told = [
        Alternative(
            name=p.name,
            step_seconds=p.seconds if p.eligible else None,
            why=why_it_lost(p, chosen),
        )
        for p in named
    ]
    return told + [
        Alternative(name=each.name, step_seconds=None, why=f"not priced: {each.why}")
        for each in left_out
    ]


def why_it_lost(other: PlacedCandidate, chosen: PlacedCandidate) -> str:
    """Say in one sentence why it is refused, which copies do not pay, or which stage is slower."""
    if other.refusal:
        return other.refusal
    ratio = other.seconds / chosen.seconds - 1 if chosen.seconds > 0 else 0.0
    if ratio <= 0 or (abs(ratio) < 1e-9):
        if other.changes > chosen.changes:
            return _no_gain(other.candidate, -ratio)
        if other.copies > chosen.copies:
            more = other.copies - chosen.copies
            return f"{_faster(-ratio)}, for {more} copies of rows"
        if other.loaders > chosen.loaders:
            return f"{_faster(-ratio)}, if loading hides beside the model as it should"
        if chosen.candidate.gpus and other.hidden > chosen.hidden:
            later = (other.hidden - chosen.hidden) * 1e3
            more = f"{later:.2f}" if later >= 0.005 else "under 0.01"
            return f"{_faster(-ratio)}, with {more} ms more to hide beside the model"
        if chosen.candidate.gpus and other.far_rows > chosen.far_rows:
            more = other.far_rows - chosen.far_rows
            return f"{_faster(-ratio)}, with {more:,.0f} more rows of a step read elsewhere"
        return "as fast; the simpler one is kept"
    stage, slower = find_slower_stage(other, chosen)
    pace = f"{ratio:.1%}" if ratio >= 5e-4 else "under 0.1%"
    more = f"{slower:.2f}" if slower >= 0.005 else "under 0.01"
    return f"{pace} slower: {stage} takes {more} ms more"


def find_slower_stage(other: PricedCandidate, chosen: PricedCandidate) -> tuple[str, float]:
    """Return the stage in which another candidate loses most, and by how many milliseconds.

    Where both load ahead of training, loading counts as far as training waits longer; where most of
    a wait is one stage of loading, that stage is named.
    """
    ours, theirs = chosen.prediction.stages, other.prediction.stages
    slower = {n: theirs.get(n, 0.0) - ours.get(n, 0.0) for n in sorted(set(ours) | set(theirs))}
    ahead = other.candidate.threads.sample and chosen.candidate.threads.sample
    shown = {n: each for n, each in slower.items() if not (ahead and n in HIDDEN)} or slower
    stage = max(shown, key=lambda n: shown[n])
    if stage == Stage.WAIT:
        loading = max((n for n in slower if n in HIDDEN), key=lambda n: slower[n], default=stage)
        stage = loading if slower[loading] >= slower[stage] / 2 else stage
    return stage, slower[stage] * 1e3


HIDDEN = frozenset(stage.value for stage in LOADER_STAGES)
"""Stages that a loader thread hides beside training."""


def _faster(gain: float) -> str:
    return "as fast" if gain < 5e-4 else f"{gain:.1%} faster, which is within the noise"


def _no_gain(candidate: Candidate, gain: float) -> str:
    return f"{_faster(gain)}: {explain_no_gain(candidate) or 'the simpler one is kept'}"


def certificate(
    chosen: PlacedCandidate, lower_bound: float, complete: bool, stride: int = 1
) -> Certificate:
    """State how far the plan can be from the best, within the cost model.

    No candidate is below `lower_bound` (`Search.lower_bound`). With `complete`, every candidate was
    priced with every policy; each compared node stood for `stride` nodes.
    """
    objective = chosen.seconds
    bound = min(lower_bound, objective)
    gap = (objective - bound) / objective if objective > 0 else 0.0
    extent = (
        "with every placement policy" if complete else "the fastest with every placement policy"
    )
    status = f"{'fastest of those priced' if gap < 1e-9 else 'feasible'}: "
    status += (
        f"every candidate was priced, {extent}; how fast other placements of rows could be "
        "is an estimate, no proof, which leaves out other samplers and caches that fill themselves"
    )
    if stride > 1:
        status += f"; one of every {stride} vertices by hotness stood for the others"
    return Certificate(
        objective=objective,
        lower_bound=bound,
        gap=gap,
        solver="enumeration with song-jiang placement",
        status=status,
    )


def shadow_prices(
    seconds: float, priced_with: Callable[[str], float | None], names: Sequence[str]
) -> dict[str, float]:
    """Return the seconds per step that each named relaxation saves.

    `priced_with` returns the step's seconds under a relaxation; None where it does not apply.
    """
    saved: dict[str, float] = {}
    for name in names:
        again = priced_with(name)
        if again is not None:
            saved[name] = max(0.0, seconds - again)
    return saved
