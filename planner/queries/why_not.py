"""Say why a plan is not another one: `gnnplan why-not`.

Another placement policy is priced from the cached profile. Any other setting of a plan, or of its
machine, is searched with anew, as by `whatif`. Nothing is timed: what would have to be is the
answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gnnplan.planner.errors import MachineError, PlanDoesNotFit, SettingsError
from gnnplan.planner.profile.cache import load_record
from gnnplan.planner.queries.explain import PLACES
from gnnplan.planner.queries.simulate import open_plan_graph
from gnnplan.planner.queries.whatif import (
    Outcome,
    apply_changes,
    caution_of,
    find_best,
    list_left_out,
    make_outcome,
    outcome_of_plan,
    priced_as,
    reopen,
)
from gnnplan.planner.search.choose import (
    PlacedCandidate,
    PricedCandidate,
    choose,
    find_slower_stage,
    why_it_lost,
)
from gnnplan.planner.units import in_order, seconds_text
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.plan.schema import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class WhyNot:
    """Comparison of a policy, or of other settings, with the plan's."""

    plan_id: str
    policy: str
    """Policy that was asked for; empty where other settings were."""
    chosen: Outcome
    same_shape: Outcome | None
    """Policy on the plan's own ranks and threads; None where it does not fit."""
    best: Outcome | None
    """Best plan under what was asked for; None where there is none."""
    why: str
    """Reason why it lost, or cannot be."""
    stage_seconds: dict[str, float]
    """Seconds that it adds to each stage, of a policy on the same ranks and threads."""
    provenance: str
    not_tried: list[str] = field(default_factory=list[str])
    """Dimensions that this request or machine has not, each with the reason."""
    settings: list[str] = field(default_factory=list[str])
    """Settings that were asked for, KEY=VALUE each; empty where a policy alone was."""

    @property
    def words(self) -> str:
        """Return what was asked for."""
        return ", ".join(self.settings) or self.policy


def why_not(plan: Plan, policy: str = "", changes: Sequence[str] = ()) -> WhyNot:
    """Price a plan under another policy, or with other settings (KEY=VALUE each).

    Raises:
        SettingsError: no such policy or setting, one that the dataset cannot have, or no record or
            profile of the plan is left.
        PlanError: the dataset has moved or is another one.
    """
    if changes or plan.strategy.mode == "full-graph":
        asked = [*([f"policy={policy}"] if policy else []), *changes]
        return _with_settings(plan, policy, asked)
    search, named = reopen(plan), reopen(plan, [f"policy={policy}"])
    noise = search.request.machine.noise
    explored = search.explore()
    chosen = choose(explored.priced, noise)
    here = search.price(chosen.candidate.with_policy(policy))
    try:
        best: PlacedCandidate | None = choose(named.run(), noise)
    except PlanDoesNotFit:
        best = None
    stages, theirs = chosen.prediction.stages, here.prediction.stages
    same = here.candidate == chosen.candidate
    return WhyNot(
        plan_id=plan.plan_id,
        policy=policy,
        chosen=make_outcome(chosen),
        same_shape=make_outcome(here) if here.eligible else None,
        best=None if best is None else make_outcome(best),
        why="it is the plan's own policy" if same else why_it_lost(here, chosen),
        stage_seconds=_added(stages, theirs),
        provenance="derived: both priced by the same model from the cached profile",
        not_tried=list_left_out(explored),
    )


def _added(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    return {n: theirs.get(n, 0.0) - ours.get(n, 0.0) for n in sorted({*ours, *theirs})}


def _with_settings(plan: Plan, policy: str, asked: Sequence[str]) -> WhyNot:
    """Search again with other settings, and compare what is best then with the plan."""
    record = load_record(plan)
    changed = apply_changes(record, asked)
    found = WhyNot(
        plan_id=plan.plan_id,
        policy=policy,
        settings=list(asked),
        chosen=outcome_of_plan(plan, record.settings),
        same_shape=None,
        best=None,
        why="",
        stage_seconds={},
        provenance="derived: priced by the same model; nothing was timed",
    )
    graph = open_plan_graph(plan)
    try:
        best = find_best(graph, record, changed)
    except (InputError, SettingsError, PlanDoesNotFit, MachineError) as error:
        return replace(found, why=str(error))
    return replace(
        found,
        best=best.outcome,
        why=_compare(best.chosen, priced_as(plan, record.settings), record.machine.noise),
        stage_seconds=_added(plan.prediction.stages, best.chosen.prediction.stages),
        not_tried=best.left_out,
    )


def _compare(other: PricedCandidate, chosen: PricedCandidate, noise: float) -> str:
    """Say in one sentence how another plan's seconds stand to the plan's."""
    if caution := caution_of(other, chosen):
        return caution
    gain = 1 - other.seconds / chosen.seconds
    if abs(gain) < 5e-4:
        return "as fast"
    if gain > 0:
        words = "which is within the noise" if gain <= noise else "plan again with it to have that"
        return f"{gain:.1%} faster, {words}"
    stage, slower = find_slower_stage(other, chosen)
    return f"{-gain:.1%} slower: {stage} takes {slower:.2f} ms more"


def render_why_not(found: WhyNot) -> str:
    """Write the answer as a few lines."""
    chosen = found.chosen
    lines = [
        f"plan: {chosen.name}, predicted step {seconds_text(chosen.step_seconds.value)}",
        f"with {found.words}: {found.why}",
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
        lines.append(f"best plan with {found.words}: {found.best.name}, predicted step {step}")
    elif not found.settings:
        lines.append(f"no plan with {found.policy} fits")
    lines += [f"not tried: {words}" for words in found.not_tried]
    lines.append(f"predicted; {found.provenance}")
    return "\n".join(lines)
