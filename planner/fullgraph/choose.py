"""Ranking full-graph candidates: like with like, then the exact ones against the sampled ones.

Epochs of different p are not comparable by their seconds (another p may need other epochs), so
the sampled candidates meet at one p. An exact candidate that is no slower than the best of them
wins, since it gives up nothing; a slower one is listed as not comparable.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.cost.memory import require_fit, size_text
from planner.errors import PlanDoesNotFit
from planner.fullgraph.candidate import Cut, FullCandidate, exact_candidates, sampled_candidates
from planner.fullgraph.choose_rate import Keep, keep_of, least_keep, memory_keep
from planner.fullgraph.memory import memory_use, rank_parts
from planner.fullgraph.price import FullPriced, FullRequest, price
from planner.fullgraph.profile import CutProfile
from planner.fullgraph.sampling_rate import choose_keep
from planner.queries.remedies import WayOut, advice
from runtime.plan.schema import Alternative, MemoryUse
from runtime.sampling.statistics import StatisticsClass, full_graph_class


def nearest(priced: Sequence[FullPriced]) -> FullPriced:
    """The candidate that lacks least: the one whose sum a refusal shows."""
    return max(priced, key=lambda p: min(m.headroom for m in p.prediction.memory_bytes.values()))


def refusal(
    request: FullRequest, profiles: Mapping[Cut, CutProfile], priced: Sequence[FullPriced]
) -> PlanDoesNotFit:
    """The error for candidates none of which fits: the nearest one's sum, and the ways out.

    Args:
        request: budgets and machine.
        profiles: by cut.
        priced: at least one.
    """
    found = nearest(priced)
    memories = found.prediction.memory_bytes
    name = min(memories, key=lambda each: memories[each].headroom)
    words = advice(ways_out(request, profiles, priced))
    try:
        require_fit(name, memories[name])
    except PlanDoesNotFit as error:
        return PlanDoesNotFit(
            f"{error}; {words}",
            constraint=error.constraint,
            needed_bytes=error.needed_bytes,
            available_bytes=error.available_bytes,
        )
    raise ValueError(f"expected candidates that do not fit, found {found.candidate.name}")


def ways_out(
    request: FullRequest, profiles: Mapping[Cut, CutProfile], priced: Sequence[FullPriced]
) -> list[WayOut]:
    """Changes that lower the memory that the nearest candidate does not fit into.

    Returns:
        Those that are enough first, then those that save most; more memory comes last.
    """
    found = nearest(priced)
    memories = found.prediction.memory_bytes
    name = min(memories, key=lambda each: memories[each].headroom)
    use = memories[name]
    profile = profiles[found.candidate.cut]
    changed = {
        **_sampled(request, profile, found),
        **_fewer_hidden(request, profile, found),
        **_other_ranks(priced, found, name),
    }
    saved = {what: use.total - other[name].total for what, other in changed.items()}
    ways = [
        WayOut(what=what, saves_bytes=size, enough=size >= -use.headroom)
        for what, size in saved.items()
        if size > 0
    ]
    ways.sort(key=lambda way: (not way.enough, -way.saves_bytes))
    return [*ways, _more_memory(request, name, use)]


def _sampled(
    request: FullRequest, profile: CutProfile, found: FullPriced
) -> dict[str, dict[str, MemoryUse]]:
    """Boundary nodes sampled, where the user has not allowed it yet."""
    if request.workload.allow != "exact" or profile.volume == 0:
        return {}
    keep = least_keep([profile]) or 0.1
    return {f"--allow unbiased (p {keep:.2g})": _use(request, profile, found, keep=keep)}


def _fewer_hidden(
    request: FullRequest, profile: CutProfile, found: FullPriced
) -> dict[str, dict[str, MemoryUse]]:
    hidden = request.workload.hidden
    if hidden < 2 or len(profile.widths) < 3:
        return {}
    widths = [profile.widths[0], *(w // 2 for w in profile.widths[1:-1]), profile.widths[-1]]
    answers = [replace(answer, widths=widths) for answer in profile.ranks]
    narrower = replace(profile, ranks=answers)
    keep = found.candidate.settings.keep
    return {f"--hidden {hidden // 2}": _use(request, narrower, found, keep=keep)}


def _other_ranks(
    priced: Sequence[FullPriced], found: FullPriced, name: str
) -> dict[str, dict[str, MemoryUse]]:
    """Other numbers of ranks that were priced."""
    ranks = found.candidate.cut.ranks
    return {
        f"--devices {p.candidate.cut.ranks}": p.prediction.memory_bytes
        for p in priced
        if p.candidate.cut.ranks != ranks and name in p.prediction.memory_bytes
    }


def _use(
    request: FullRequest, profile: CutProfile, found: FullPriced, *, keep: float
) -> dict[str, MemoryUse]:
    candidate = found.candidate.with_keep(keep)
    parts = rank_parts(profile, candidate, request.workload)
    launcher = profile.process.launcher_bytes
    return memory_use(parts, request.graph, request.machine, request.budgets, launcher)


def _more_memory(request: FullRequest, name: str, use: MemoryUse) -> WayOut:
    """The memory itself: a higher limit, or a larger machine."""
    rank, budgets = name.startswith("rank"), request.budgets
    option = "--device-memory" if rank else "--host-memory"
    limited = budgets.device_bytes if rank else budgets.host_bytes
    what = option if limited is not None else f"a machine with more memory in {name}"
    return WayOut(what=f"{what} of {size_text(use.total)}", saves_bytes=-use.headroom, enough=True)


MOST_ALTERNATIVES = 12
OTHER_KEEPS = 3
"""Alternatives that may be of another p: a reader asks what they would have cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The chosen candidate, why its p, and all that were priced."""

    chosen: FullPriced
    why_keep: str
    exact: list[FullPriced]
    sampled: list[FullPriced] = field(default_factory=list[FullPriced])
    """At the p they are compared at."""


def choose(
    request: FullRequest, profiles: Mapping[Cut, CutProfile], allowed: StatisticsClass
) -> Choice:
    """Price every candidate and choose.

    Args:
        request: what all have in common.
        profiles: by cut, simplest first.
        allowed: the user's class.

    Raises:
        PlanDoesNotFit: none fits; the text is the sum of the one that lacks least.
    """
    exact = [price(request, profiles[c.cut], c) for c in exact_candidates(profiles)]
    best_exact = _fastest(exact)
    sampled, best = _best_sampled(request, profiles, allowed)
    if best is not None:
        priced, keep = best
        if best_exact is None or priced.seconds < best_exact.seconds:
            return Choice(chosen=priced, why_keep=keep.words, exact=exact, sampled=sampled)
    if best_exact is None:
        raise refusal(request, profiles, [*exact, *sampled])
    return Choice(
        chosen=best_exact,
        why_keep=_why_exact(best_exact, best, allowed),
        exact=exact,
        sampled=sampled,
    )


def _best_sampled(
    request: FullRequest, profiles: Mapping[Cut, CutProfile], allowed: StatisticsClass
) -> tuple[list[FullPriced], tuple[FullPriced, Keep] | None]:
    """Every sampled candidate at one p, and the best of them at its own."""
    tried = sampled_candidates(
        [cut for cut in profiles if profiles[cut].volume > 0], request.workload, allowed
    )
    p_var = least_keep([profiles[c.cut] for c in tried])
    found: list[tuple[FullPriced, bool]] = []
    for candidate in tried:
        profile = profiles[candidate.cut]
        at = choose_keep(p_var, memory_keep(request, profile, candidate), 0.0)
        keep = float(at.keep or 0.0)
        if keep >= 1:
            continue  # the exact candidate of that cut
        priced = price(request, profile, candidate.with_keep(keep))
        enough = profile.variance.least_keep <= keep + 1e-12
        if at.keep is not None and _allows(allowed, request, priced.candidate):
            found.append((priced, enough))
    fitting = [f for f in found if not f[0].overflow]
    if not fitting:
        return [p for p, _ in found], None
    # Those within the accuracy budget first; else those that keep most.
    priced, _ = min(
        fitting, key=lambda f: (not f[1], 0.0 if f[1] else -f[0].candidate.settings.keep,
                                f[0].seconds)
    )  # fmt: skip
    profile = profiles[priced.candidate.cut]
    keep = keep_of(request, profile, priced.candidate, p_var)
    if keep.value is not None and priced.candidate.settings.keep < keep.value < 1:
        priced = price(request, profile, priced.candidate.with_keep(keep.value))
    elif keep.value is not None and keep.value >= 1:
        settings = replace(priced.candidate.settings, keep=1.0, draws="layer", rounding="bernoulli")
        priced = price(request, profile, replace(priced.candidate, settings=settings))
    return [p for p, _ in found], (priced, keep)


def _allows(allowed: StatisticsClass, request: FullRequest, candidate: FullCandidate) -> bool:
    work = request.workload
    return allowed.allows(full_graph_class(candidate.settings, work.model, work.num_layers))


def _fastest(priced: Sequence[FullPriced]) -> FullPriced | None:
    """The fastest that fits; the first of equals."""
    return min((p for p in priced if not p.overflow), key=lambda p: p.seconds, default=None)


def _why_exact(
    chosen: FullPriced, sampled: tuple[FullPriced, Keep] | None, allowed: StatisticsClass
) -> str:
    if chosen.candidate.cut.ranks == 1 and sampled is None:
        return "p = 1: one rank has no boundary"
    if sampled is not None:
        other = sampled[0].candidate.settings.keep
        if other >= 1:
            return sampled[1].words
        return f"p = 1: no slower than p = {other:.3g}, and it drops nothing"
    if allowed is StatisticsClass.EXACT:
        return "p = 1: --allow exact permits no sampling of the boundary"
    return f"p = 1: no way of sampling this model is {allowed.value} and fits"


def alternatives(choice: Choice) -> list[Alternative]:
    """The others, comparable ones first, each with why it lost."""
    chosen = choice.chosen
    others = [p for p in (*choice.exact, *choice.sampled) if p.candidate != chosen.candidate]
    others.sort(key=lambda p: (bool(p.overflow), not _comparable(p, chosen), p.seconds))
    kept, seen = list[FullPriced](), set[tuple[Cut, float]]()
    for p in others:
        # One of each cut and p, but every variant of the chosen cut.
        shape = (p.candidate.cut, p.candidate.settings.keep)
        if shape not in seen or p.candidate.cut == chosen.candidate.cut:
            kept.append(p)
        seen.add(shape)
    found = [
        Alternative(
            name=p.candidate.name,
            step_seconds=None if p.overflow else p.seconds,
            why=why_it_lost(p, chosen),
        )
        for p in (
            *[p for p in kept if _comparable(p, chosen)][: MOST_ALTERNATIVES - OTHER_KEEPS],
            *[p for p in kept if not _comparable(p, chosen)][:OTHER_KEEPS],
        )
    ]
    batches = "not comparable by epoch time: many updates per epoch where this has one"
    return [*found, Alternative(name="mini-batches", step_seconds=None, why=batches)]


def _comparable(other: FullPriced, chosen: FullPriced) -> bool:
    return other.candidate.settings.keep == chosen.candidate.settings.keep


def why_it_lost(other: FullPriced, chosen: FullPriced) -> str:
    """One sentence: the sum that overflows, the other p, or the slower stage."""
    if other.overflow:
        return f"does not fit: {other.overflow}"
    ratio = other.seconds / chosen.seconds - 1 if chosen.seconds > 0 else 0.0
    pace = f"{abs(ratio):.1%} {'slower' if ratio > 0 else 'faster'} per epoch"
    if not _comparable(other, chosen):
        return f"{pace}, but at another p: comparable by time to target only"
    if ratio <= 1e-9:
        return "as fast; the simpler one is kept"
    ours, theirs = chosen.prediction.stages, other.prediction.stages
    names = sorted(set(ours) | set(theirs))
    stage = max(names, key=lambda n: theirs.get(n, 0.0) - ours.get(n, 0.0))
    slower = (theirs.get(stage, 0.0) - ours.get(stage, 0.0)) * 1e3
    return f"{pace}: {stage} takes {slower:.2f} ms more"
