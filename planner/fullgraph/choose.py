"""Choose p, the share of the boundary that is kept, and the fastest full-graph candidate.

    p_mem   largest p that fits every rank and the host
    p_bw    largest p whose exchange the work beside it hides; 0 without overlap
    p_var   smallest p whose added variance is tolerated, for the planned partition
    p     = min(min(1, p_mem), max(p_var, min(1, p_bw)))

Epochs of different p are not comparable by their seconds: another p may need other epochs. So the
sampled candidates meet at one p, the largest p_var over the planned cuts; the best of them is then
raised to its own p_bw, which costs it nothing. An exact candidate that is no slower wins, since it
gives up nothing; a slower one is listed as not comparable.

Source: docs/formulas.md 3.6.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.errors import PlanDoesNotFit
from gnnplan.planner.fullgraph.candidate import (
    DROPPED,
    PLANNED,
    Cut,
    cut_of,
    describe_whole_graph,
    exact_candidates,
    sampled_candidates,
    with_keep,
)
from gnnplan.planner.fullgraph.exchange import (
    ITEM_BYTES,
    busiest_rows,
    call_times,
    exchanged_widths,
    overlap_share,
)
from gnnplan.planner.fullgraph.formulas import choose_keep, columns_per_row, p_bandwidth, p_memory
from gnnplan.planner.fullgraph.memory import memory_use
from gnnplan.planner.fullgraph.price import FullRequest, PricedEpoch, price, rank_seconds
from gnnplan.planner.fullgraph.profile import CutProfile
from gnnplan.planner.queries.remedies import Remedy, add_remedies, find_runners_up, rank_remedies
from gnnplan.planner.queries.rivals import RunnersUp
from gnnplan.planner.search.choose import (
    MOST_ALTERNATIVES,
    find_slower_stage,
    fullest_memory,
    lacking_memory,
    make_refusal,
    nearest_to_fit,
    pick_shown,
)
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.plan.schema import Alternative, MemoryUse
from gnnplan.runtime.sampling.statistics import StatisticsClass, full_graph_class

LARGEST_SAMPLED = 0.999
"""p that stands for 1 where a slope is taken: sampled epochs hold more lists than whole ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """A candidate's bounds on p, and what the rule makes of them."""

    value: float | None
    """p; None: none fits."""
    p_mem: float
    p_bw: float
    p_var: float
    refusal: str = ""
    """Why a candidate that keeps as much as the bounds allow may not be chosen."""

    @property
    def accurate(self) -> bool:
        """Whether the accuracy budget is met."""
        return self.value is not None and self.value >= self.p_var - 1e-12

    @property
    def words(self) -> str:
        """Why this p, in one sentence."""
        if self.value is None:
            return f"no p fits: memory allows {self.p_mem:.3g}"
        if self.refusal:
            return f"p = {self.value:.3g}; one that keeps more is refused: {self.refusal}"
        bounds = f"p_var {self.p_var:.3g}, p_mem {self.p_mem:.3g}, p_bw {self.p_bw:.3g}"
        if not self.accurate:
            return (
                f"p = {self.value:.3g}, all that memory allows ({bounds}): accuracy budget not met"
            )
        if self.value >= 1:
            return f"p = 1: the whole exchange hides behind compute ({bounds})"
        if self.p_bw > self.p_var:
            return f"p = {self.value:.3g}, the largest whose exchange is hidden ({bounds})"
        return f"p = {self.value:.3g}, the least that the accuracy budget allows ({bounds})"


def least_keep(profiles: Sequence[CutProfile]) -> float:
    """Find the p_var that all candidates are compared at: the largest over the planned cuts."""
    found = [p.variance.least_keep for p in profiles if p.cut.partitioner == PLANNED]
    return max(found, default=0.0)


def keep_of(request: FullRequest, profile: CutProfile, candidate: Candidate, p_var: float) -> Keep:
    """Apply the rule to one candidate, whose own p does not matter."""
    p_mem = memory_keep(request, profile, candidate)
    p_bw = bandwidth_keep(request, profile, candidate)
    chosen = choose_keep(p_var, p_mem, p_bw)
    value = None if chosen is None else float(chosen)
    return Keep(value=value, p_mem=p_mem, p_bw=p_bw, p_var=p_var)


def memory_keep(request: FullRequest, profile: CutProfile, candidate: Candidate) -> float:
    """Find p_mem, the largest p that fits; negative where even p = 0 does not.

    Bytes are convex in p, so the chord that the rule takes is on the safe side.
    """
    none, most = (
        _memory_of(request, profile, with_keep(candidate, keep)) for keep in (0.0, LARGEST_SAMPLED)
    )
    bounds: list[float] = []
    for name, use in none.items():
        slope = (most[name].total - use.total) / LARGEST_SAMPLED
        bounds.append(float(p_memory(use.capacity, use.total, use.total + slope)))
    return min(bounds)


def _memory_of(
    request: FullRequest, profile: CutProfile, candidate: Candidate
) -> dict[str, MemoryUse]:
    return memory_use(
        profile, candidate, request.workload, request.graph, request.machine, request.budgets
    )


def bandwidth_keep(request: FullRequest, profile: CutProfile, candidate: Candidate) -> float:
    """Find p_bw by [C13], with the work beside an epoch that keeps nothing (which is safe)."""
    sizes, eta = profile.sizes, overlap_share(request.machine, candidate)
    known = candidate.full_graph.precompute_first_layer
    row = ITEM_BYTES * columns_per_row(profile.widths, precomputed=known)
    if candidate.num_ranks == 1 or row == 0 or busiest_rows(sizes, 1.0) == 0:
        return 1.0
    idle = rank_seconds(profile, with_keep(candidate, 0.0).full_graph)
    speed = _bytes_per_second(request, profile, candidate)
    found = [
        p_bandwidth(part, eta * sum(mine.windows), speed, row)
        for part, mine in zip(sizes, idle, strict=True)
    ]
    return min((float(p) for p in found if p is not None), default=1.0)


def _bytes_per_second(request: FullRequest, profile: CutProfile, candidate: Candidate) -> float:
    """Find the rate of the all-to-all at the mean size of an epoch's exchanges."""
    known = candidate.full_graph.precompute_first_layer
    columns = exchanged_widths(profile.widths, precomputed=known)
    size = busiest_rows(profile.sizes, 1.0) * ITEM_BYTES * sum(columns) / len(columns)
    return size / call_times(request.machine, candidate).seconds(size)


def _refusal(
    request: FullRequest, profiles: Mapping[Cut, CutProfile], priced: Sequence[PricedEpoch]
) -> PlanDoesNotFit:
    """Make the error for candidates none of which may be chosen, with the remedies."""
    return add_remedies(make_refusal(priced), lambda: find_remedies(request, profiles, priced))


def find_remedies(
    request: FullRequest, profiles: Mapping[Cut, CutProfile], priced: Sequence[PricedEpoch]
) -> list[Remedy]:
    """List changes that lower the memory that the nearest candidate does not fit into.

    Those that are enough come first, then those that save most, more memory last.
    """
    priced = lacking_memory(priced) or priced
    found = nearest_to_fit(priced)
    name, use = fullest_memory(found)
    profile = profiles[cut_of(found.candidate)]
    changed = {
        **_sampled(request, profile, found),
        **_fewer_hidden(request, profile, found),
        **_other_ranks(priced, found, name),
    }
    saved = {what: use.total - other[name].total for what, other in changed.items()}
    return rank_remedies(saved, name, use, request.budgets)


def _sampled(
    request: FullRequest, profile: CutProfile, found: PricedEpoch
) -> dict[str, dict[str, MemoryUse]]:
    """Sample boundary nodes, where the user has not allowed it yet."""
    if request.workload.allow != "exact" or profile.volume == 0:
        return {}
    keep = least_keep([profile]) or 0.1
    return {
        f"--allow unbiased (p {keep:.2g})": _memory_of(
            request, profile, with_keep(found.candidate, keep)
        )
    }


def _fewer_hidden(
    request: FullRequest, profile: CutProfile, found: PricedEpoch
) -> dict[str, dict[str, MemoryUse]]:
    hidden = request.workload.hidden
    if hidden < 2 or len(profile.widths) < 3:
        return {}
    widths = [profile.widths[0], *(w // 2 for w in profile.widths[1:-1]), profile.widths[-1]]
    answers = [replace(answer, widths=widths) for answer in profile.ranks]
    narrower = replace(profile, ranks=answers)
    keep = found.candidate.full_graph.keep
    return {
        f"--hidden {hidden // 2}": _memory_of(request, narrower, with_keep(found.candidate, keep))
    }


def _other_ranks(
    priced: Sequence[PricedEpoch], found: PricedEpoch, name: str
) -> dict[str, dict[str, MemoryUse]]:
    """Take other numbers of ranks that were priced."""
    ranks = found.candidate.num_ranks
    return {
        f"--devices {p.candidate.num_ranks}": p.prediction.memory_bytes
        for p in priced
        if p.candidate.num_ranks != ranks and name in p.prediction.memory_bytes
    }


OTHER_KEEPS = 3
"""Alternatives that may be of another p: a reader asks what they would have cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FullGraphChoice:
    """The chosen candidate, why its p, and all that were priced."""

    chosen: PricedEpoch
    why_keep: str
    exact: list[PricedEpoch]
    sampled: list[PricedEpoch] = field(default_factory=list[PricedEpoch])
    """Candidates at the p they are compared at."""


def choose(
    request: FullRequest, profiles: Mapping[Cut, CutProfile], allowed: StatisticsClass
) -> FullGraphChoice:
    """Price every candidate and choose; cuts stand simplest first.

    Raises:
        PlanDoesNotFit: none may be chosen; with the sum that lacks least, and the remedies.
    """
    asked = request.settings
    if asked.keep is not None and asked.keep < 1:
        return _choose_at(request, profiles, allowed, asked.keep)
    exact = [price(request, profiles[cut_of(c)], c) for c in exact_candidates(profiles, asked)]
    best_exact = _fastest(exact)
    sampled, best = list[PricedEpoch](), None
    if asked.keep is None and asked.exchange == "boundary":
        sampled, best = _best_sampled(request, profiles, allowed)
    if best is not None:
        priced, keep = best
        if best_exact is None or priced.seconds < best_exact.seconds:
            return FullGraphChoice(chosen=priced, why_keep=keep.words, exact=exact, sampled=sampled)
    if best_exact is None:
        raise _refusal(request, profiles, [*exact, *sampled])
    return FullGraphChoice(
        chosen=best_exact,
        why_keep=_why_asked(asked) or _why_exact(best_exact, best, allowed),
        exact=exact,
        sampled=sampled,
    )


def _choose_at(
    request: FullRequest, profiles: Mapping[Cut, CutProfile], allowed: StatisticsClass, keep: float
) -> FullGraphChoice:
    """Choose among all candidates at the user's p; one rank drops nothing but by DropEdge."""
    asked = request.settings
    alone = [cut for cut in profiles if cut.ranks == 1 and asked.drop != "edges"]
    exact = [price(request, profiles[cut_of(c)], c) for c in exact_candidates(alone, asked)]
    tried = sampled_candidates(profiles, request.workload, allowed, asked)
    sampled = [price(request, profiles[cut_of(c)], c) for c in tried]
    best = _fastest([*exact, *sampled])
    if best is None:
        raise _refusal(request, profiles, [*exact, *sampled])
    why = f"p = {keep:.3g} of {DROPPED[asked.drop]}, as asked for"
    if best.candidate.full_graph.keep >= 1:
        why = f"p = 1: one rank has no boundary, whose p was asked for as {keep:.3g}"
    return FullGraphChoice(chosen=best, why_keep=why, exact=exact, sampled=sampled)


def _why_asked(asked: PlanSettings) -> str:
    if asked.exchange == "broadcast":
        return "p = 1: whole slices are sent, as asked for"
    return "" if asked.keep is None else "p = 1, as asked for"


def _best_sampled(
    request: FullRequest, profiles: Mapping[Cut, CutProfile], allowed: StatisticsClass
) -> tuple[list[PricedEpoch], tuple[PricedEpoch, Keep] | None]:
    """Price every sampled candidate at one p, and the best of them at its own."""
    tried = sampled_candidates(
        [cut for cut in profiles if profiles[cut].volume > 0],
        request.workload,
        allowed,
        request.settings,
    )
    p_var = least_keep([profiles[cut_of(c)] for c in tried])
    found: list[tuple[PricedEpoch, bool]] = []
    for candidate in tried:
        profile = profiles[cut_of(candidate)]
        at = choose_keep(p_var, memory_keep(request, profile, candidate), 0.0)
        keep = float(at or 0.0)
        if keep >= 1:
            continue  # the exact candidate of that cut
        priced = price(request, profile, with_keep(candidate, keep))
        enough = profile.variance.least_keep <= keep + 1e-12
        if at is not None and _allows(allowed, request, priced.candidate):
            found.append((priced, enough))
    fitting = [f for f in found if f[0].eligible]
    if not fitting:
        return [p for p, _ in found], None
    # Those within the accuracy budget first; else those that keep most.
    priced, _ = min(
        fitting, key=lambda f: (not f[1], 0.0 if f[1] else -f[0].candidate.full_graph.keep,
                                f[0].seconds)
    )  # fmt: skip
    profile = profiles[cut_of(priced.candidate)]
    keep, more = keep_of(request, profile, priced.candidate, p_var), priced
    if keep.value is not None and priced.candidate.full_graph.keep < keep.value < 1:
        more = price(request, profile, with_keep(priced.candidate, keep.value))
    elif keep.value is not None and keep.value >= 1:
        settings = replace(
            priced.candidate.full_graph, keep=1.0, draws="layer", rounding="bernoulli"
        )
        more = price(request, profile, replace(priced.candidate, full_graph=settings))
    if more.refusal:
        keep = replace(keep, value=priced.candidate.full_graph.keep, refusal=more.refusal)
    else:
        priced = more
    return [p for p, _ in found], (priced, keep)


def _allows(allowed: StatisticsClass, request: FullRequest, candidate: Candidate) -> bool:
    work = request.workload
    return allowed.allows(full_graph_class(candidate.full_graph, work.model, work.num_layers))


def _fastest(priced: Sequence[PricedEpoch]) -> PricedEpoch | None:
    """Return the fastest that may be chosen; the first of equals."""
    return min((p for p in priced if p.eligible), key=lambda p: p.seconds, default=None)


def _why_exact(
    chosen: PricedEpoch, sampled: tuple[PricedEpoch, Keep] | None, allowed: StatisticsClass
) -> str:
    if chosen.candidate.num_ranks == 1 and sampled is None:
        return "p = 1: one rank has no boundary"
    if sampled is not None:
        other = sampled[0].candidate.full_graph.keep
        if other >= 1:
            return sampled[1].words
        return f"p = 1: no slower than p = {other:.3g}, and it drops nothing"
    if allowed is StatisticsClass.EXACT:
        return "p = 1: --allow exact permits no sampling of the boundary"
    return f"p = 1: no way of sampling this model is {allowed.value} and fits"


def alternatives(choice: FullGraphChoice) -> list[Alternative]:
    """List the others, comparable ones first, each with why it lost."""
    chosen = choice.chosen
    others = [p for p in (*choice.exact, *choice.sampled) if p.candidate != chosen.candidate]
    same = [p for p in others if _comparable(p, chosen)]
    rest = [p for p in others if not _comparable(p, chosen)]

    def shape(p: PricedEpoch) -> Hashable:
        # One of each cut and p, but every variant of the chosen cut.
        cut = cut_of(p.candidate)
        return cut if cut == cut_of(chosen.candidate) else (cut, p.candidate.full_graph.keep)

    found = [
        Alternative(
            name=describe_whole_graph(p.candidate),
            step_seconds=p.seconds if p.eligible else None,
            why=why_it_lost(p, chosen),
        )
        for p in (
            *pick_shown(same, chosen, MOST_ALTERNATIVES - OTHER_KEEPS, shape_of=shape),
            *pick_shown(rest, chosen, OTHER_KEEPS, shape_of=shape),
        )
    ]
    batches = "not comparable by epoch time: many updates per epoch where this has one"
    return [*found, Alternative(name="mini-batches", step_seconds=None, why=batches)]


def runners_up(choice: FullGraphChoice, *, asked: bool) -> RunnersUp:
    """Find the best of each number of ranks at the plan's own p, and the plainest."""
    chosen = choice.chosen
    return find_runners_up(
        [p for p in (*choice.exact, *choice.sampled) if _comparable(p, chosen)],
        chosen,
        asked=asked,
        name_of=lambda p: describe_whole_graph(p.candidate),
        why=why_it_lost,
    )


def _comparable(other: PricedEpoch, chosen: PricedEpoch) -> bool:
    return other.candidate.full_graph.keep == chosen.candidate.full_graph.keep


def why_it_lost(other: PricedEpoch, chosen: PricedEpoch) -> str:
    """Say in one sentence why it is refused, that p differs, or which stage is slower."""
    if other.refusal:
        return other.refusal
    ratio = other.seconds / chosen.seconds - 1 if chosen.seconds > 0 else 0.0
    pace = f"{abs(ratio):.1%} {'slower' if ratio > 0 else 'faster'} per epoch"
    if not _comparable(other, chosen):
        return f"{pace}, but at another p: comparable by time to target only"
    if ratio <= 1e-9:
        return "as fast; the simpler one is kept"
    stage, slower = find_slower_stage(other, chosen)
    return f"{pace}: {stage} takes {slower:.2f} ms more"
