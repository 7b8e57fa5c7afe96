"""When no full-graph candidate fits: the sum that fails, and the cheapest changes that help."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.cost.memory import require_fit, size_text
from planner.errors import PlanDoesNotFit
from planner.fullgraph.candidate import Cut
from planner.fullgraph.keep import least_keep
from planner.fullgraph.memory import memory_use, rank_parts
from planner.fullgraph.price import FullPriced, FullRequest
from planner.fullgraph.profile import CutProfile
from planner.ways_out import WayOut, advice
from runtime.plan import MemoryUse


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
