"""`gnnplan why-not`: what the plan would cost under a placement it did not take, and why."""

from dataclasses import dataclass, field, replace

from planner.errors import PlanDoesNotFit
from planner.queries.explain import PLACES, seconds_text
from planner.queries.whatif import Outcome, outcome, reopen
from planner.search.choose import Evaluated, choose, why_it_lost
from planner.units import in_order
from runtime.plan.schema import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class WhyNot:
    """A policy held against the plan."""

    plan_id: str
    policy: str
    chosen: Outcome
    same_shape: Outcome | None
    """The policy on the plan's own ranks and threads; None where it does not fit."""
    best: Outcome | None
    """The policy on the ranks and threads that suit it best; None where it fits on none."""
    why: str
    """Why it lost, or the sum that does not fit."""
    stage_seconds: dict[str, float]
    """Seconds by stage that the policy adds to the plan's (same ranks and threads)."""
    provenance: str
    not_tried: list[str] = field(default_factory=list[str])
    """Kinds of choices that this request or machine has not, each with why."""


def why_not(plan: Plan, policy: str) -> WhyNot:
    """Price a plan under another policy, from the cached profile.

    Raises:
        SettingsError: no such policy, or no record or profile of the plan is left.
        PlanError: the dataset has moved or is another one.
    """
    search = reopen(plan)
    named = replace(search, settings=replace(search.settings, policy=policy))
    noise = search.request.machine.noise
    explored = search.explore()
    chosen = choose(explored.priced, noise)
    here = search.price(chosen.candidate.with_policy(policy))
    try:
        best: Evaluated | None = choose(named.run(), noise)
    except PlanDoesNotFit:
        best = None
    stages, theirs = chosen.prediction.stages, here.prediction.stages
    same = here.candidate == chosen.candidate
    return WhyNot(
        plan_id=plan.plan_id,
        policy=policy,
        chosen=outcome(chosen),
        same_shape=None if here.overflow else outcome(here),
        best=None if best is None else outcome(best),
        why="it is the plan's own policy" if same else why_it_lost(here, chosen),
        stage_seconds={
            name: theirs.get(name, 0.0) - stages.get(name, 0.0)
            for name in sorted({*stages, *theirs})
        },
        provenance="derived: both priced by the same model from the cached profile",
        not_tried=[f"{each.name}: {each.why}" for each in (*explored.refused, *explored.left_out)],
    )


def render(found: WhyNot) -> str:
    """The answer as a few lines."""
    chosen = found.chosen
    lines = [
        f"plan: {chosen.name}, predicted step {seconds_text(chosen.step_seconds.value)}",
        f"with {found.policy}: {found.why}",
    ]
    if found.same_shape is not None:
        other = found.same_shape
        lines.append(f"  predicted step {seconds_text(other.step_seconds.value)}; by stage:")
        for stage, more in found.stage_seconds.items():
            sign = "+" if more >= 0 else "-"
            lines.append(f"    {stage:<17}{sign}{seconds_text(abs(more))}")
        for device, rates in in_order(other.hit_rates):
            shares = ", ".join(f"{s:.1%} {PLACES.get(k, k)}" for k, s in sorted(rates.items()))
            lines.append(f"    {device}: {shares}")
    if found.best is not None:
        step = seconds_text(found.best.step_seconds.value)
        lines.append(f"best plan with {found.policy}: {found.best.name}, predicted step {step}")
    else:
        lines.append(f"no plan with {found.policy} fits")
    lines += [f"not tried: {words}" for words in found.not_tried]
    lines.append(f"predicted; {found.provenance}")
    return "\n".join(lines)
