"""Find the fewest devices and the least memory for an epoch within a target.

`gnnplan whatif --target-epoch-seconds`: priced from a cached profile, nothing is timed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gnnplan.planner.cost.memory import host_memory, size_text
from gnnplan.planner.errors import PlanDoesNotFit
from gnnplan.planner.queries.whatif import Outcome, make_outcome, reopen
from gnnplan.planner.search.choose import PlacedCandidate, make_refusal
from gnnplan.planner.search.search import Search
from gnnplan.planner.units import seconds_text
from gnnplan.runtime.plan.schema import Plan

TRIED = 6
"""Number of candidates, those that need least, whose least memory is searched for."""
PRECISION = 0.01
"""Relative width at which the search for the least memory ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cheapest:
    """Devices and memory that an epoch within the target needs."""

    plan_id: str
    target_epoch_seconds: float
    fewest_devices: Outcome
    """Fastest plan within the target among those with the fewest ranks."""
    least_memory: Outcome
    """Plan within the target under the smallest host budget found."""
    least_memory_bytes: int
    """Bytes of that budget."""
    fastest_epoch_seconds: float
    provenance: str


def cheapest_for(plan: Plan, target_epoch_seconds: float, changes: Sequence[str] = ()) -> Cheapest:
    """Find the fewest devices and the least memory for an epoch within the target.

    Raises:
        PlanDoesNotFit: no candidate is fast enough; the text says by how much.
        SettingsError: as `whatif.reopen`.
    """
    search = reopen(plan, changes)
    priced = search.run()
    fits = [p for p in priced if p.eligible]
    if not fits:
        raise make_refusal(priced)
    fastest = min(fits, key=lambda p: p.prediction.epoch_seconds.value)
    epoch = fastest.prediction.epoch_seconds.value
    within = [p for p in fits if p.prediction.epoch_seconds.value <= target_epoch_seconds]
    if not within:
        raise PlanDoesNotFit(
            f"epoch: fastest predicted {seconds_text(epoch)} ({fastest.name}) > "
            f"{seconds_text(target_epoch_seconds)} asked; more devices, a larger batch or smaller "
            "fan-outs would be needed"
        )
    fewest = min(within, key=lambda p: (p.candidate.num_ranks, p.seconds))
    lean, least = _least_memory(search, within, target_epoch_seconds)
    return Cheapest(
        plan_id=plan.plan_id,
        target_epoch_seconds=target_epoch_seconds,
        fewest_devices=make_outcome(fewest),
        least_memory=make_outcome(lean),
        least_memory_bytes=least,
        fastest_epoch_seconds=epoch,
        provenance="derived: priced again from the cached profile; nothing was measured",
    )


def _least_memory(
    search: Search, within: Sequence[PlacedCandidate], target_epoch_seconds: float
) -> tuple[PlacedCandidate, int]:
    """Bisect the host's budget for the candidates that need least as they are."""
    host, _ = host_memory(search.request.machine)

    def total(priced: PlacedCandidate) -> int:
        return priced.prediction.memory_bytes[host].total

    found: list[tuple[int, int, PlacedCandidate]] = []
    for order, start in enumerate(sorted(within, key=total)[:TRIED]):
        low, high, best = 0, total(start), start
        while high - low > PRECISION * high:
            middle = (low + high) // 2
            tried = _under(search, start, middle)
            if tried.eligible and (tried.prediction.epoch_seconds.value <= target_epoch_seconds):
                high, best = middle, tried
            else:
                low = middle
        found.append((high, order, best))
    least, _, best = min(found, key=lambda f: f[:2])
    return best, least


def _under(search: Search, priced: PlacedCandidate, host_bytes: int) -> PlacedCandidate:
    budgets = replace(search.request.budgets, host_bytes=host_bytes)
    return replace(search, request=replace(search.request, budgets=budgets)).price(priced.candidate)


def render_cheapest(found: Cheapest) -> str:
    """Write the answer as a few lines."""
    few, lean = found.fewest_devices, found.least_memory
    return "\n".join(
        [
            f"for an epoch within {seconds_text(found.target_epoch_seconds)} "
            f"(fastest predicted: {seconds_text(found.fastest_epoch_seconds)})",
            f"  fewest devices: {few.num_ranks} ({few.name}), "
            f"epoch {seconds_text(few.epoch_seconds.value)}",
            f"  least memory: {size_text(found.least_memory_bytes)} of the host ({lean.name}), "
            f"epoch {seconds_text(lean.epoch_seconds.value)}",
            f"predicted; {found.provenance}",
        ]
    )
