"""Price a plan's request otherwise: `gnnplan whatif`, and `why-not` with settings.

The request is priced again with changed settings, links or memories: on its own profile, on another
cached one, or on batches drawn for GPUs that are elsewhere. Nothing is timed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gnnplan.planner.assemble import candidate_of
from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.link_use import link_of
from gnnplan.planner.errors import PlanDoesNotFit, SettingsError
from gnnplan.planner.fullgraph.candidate import cuts_of, describe_whole_graph
from gnnplan.planner.machine.model import Link, MachineModel
from gnnplan.planner.pipeline import (
    combinations_of,
    graph_ref,
    joined_candidates,
    search_for,
    searches_for,
)
from gnnplan.planner.probe.presets import on_hosts
from gnnplan.planner.profile.cache import PlanRecord, load_record
from gnnplan.planner.queries.calibrate import calibrate_search
from gnnplan.planner.queries.simulate import open_plan_graph
from gnnplan.planner.request import check_graph, check_settings, no_estimate, read_changes
from gnnplan.planner.search.choose import (
    PlacedCandidate,
    PricedCandidate,
    choose,
)
from gnnplan.planner.search.dimensions.ranks import (
    LINK_TABLES,
    faster,
    faster_link,
    machine_of_ranks,
    plans_gpus,
)
from gnnplan.planner.search.dimensions.registry import name_of
from gnnplan.planner.search.samplers import fix_placement, with_samplers
from gnnplan.planner.search.search import Search, SearchResult, best_over_samplers
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.units import counted, scale_number, seconds_text
from gnnplan.runtime.errors import did_you_mean
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Interval, MemoryUse, Plan, Prediction
from gnnplan.runtime.plan.setting import own_fields

TABLES_OF_KIND = {"host": "memory", "disk": "disk", "all_reduce": "exchange"}
"""Group of measured tables that a link shortens, by its kind of traffic (`link_of`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Plan that was priced, not written."""

    name: str
    step_seconds: Interval
    epoch_seconds: Interval
    num_ranks: int
    policy: str
    stages: dict[str, float]
    memory_bytes: dict[str, MemoryUse]
    hit_rates: dict[str, dict[str, float]]
    bottleneck: str
    provenance: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """Plan as it is, and as it would be."""

    plan_id: str
    changes: list[str]
    before: Outcome
    after: Outcome | None
    """Plan with the changes; None where none may be chosen."""
    refusal: str
    """Why none may be chosen; empty where one may."""
    speedup: float
    """Step seconds before over after; 0 where there is none after."""
    provenance: str
    caution: str = ""
    """Reason why seconds do not decide between the two; empty where they do."""


def reopen(plan: Plan, changes: Sequence[str] = ()) -> Search:
    """Return the planner's search of a plan, from its record and a cached profile.

    `changes` are KEY=VALUE each, as in `--set`.

    Raises:
        SettingsError: as `search_with`, or the changes ask for several samplers.
    """
    record = load_record(plan)
    found = search_with(open_plan_graph(plan), record, apply_changes(record, changes))
    if len(found) != 1:
        raise SettingsError(
            f"--set sampler: expected one sampler to search under, found {len(found)}"
        )
    return found[0]


def search_with(graph: Graph, record: PlanRecord, changed: PlanRecord) -> list[Search]:
    """Return a search for each sampler of a plan's request with changes; nothing is timed.

    The plan's own profile is taken where it holds what is asked for. Else one is taken from the
    cache, or drawn for GPUs that are elsewhere.

    Raises:
        SettingsError: bad settings, or the profile is not there and would have to be timed.
    """
    settings = with_samplers(graph, changed.settings)
    machine, shown = (
        machine_of_ranks(on_hosts(each.machine, settings.hosts), settings)
        for each in (record, changed)
    )
    for each in settings.by_sampler():
        check_settings(graph, each, gpus=plans_gpus(machine))
    measure = not settings.quick and plans_gpus(machine)
    if measure:
        from gnnplan.planner.profile.profile import is_timed  # on use: with torch

        measure = not is_timed(graph, settings, machine)  # batches are drawn alone
    own = _search_own_profile(graph, record, settings, measure=measure)
    if own is None:
        found = searches_for(graph, settings.by_sampler(), machine, measure=measure)
    else:
        found = [own]
    return [
        calibrate_search(
            replace(each, request=replace(each.request, machine=shown)), record.factors
        )
        for each in found
    ]


PROFILED_APART = [x.name for x in own_fields(PlanSettings) if not x.setting.profiled]
"""Settings by which a profile is not made otherwise, but for the numbers of ranks that it holds."""


def _search_own_profile(
    graph: Graph, record: PlanRecord, settings: PlanSettings, *, measure: bool
) -> Search | None:
    """Return a search with other settings on the plan's own profile; None where it lacks some."""
    kept = {name: getattr(record.settings, name) for name in PROFILED_APART}
    if replace(settings, **kept) != with_samplers(graph, record.settings):
        return None
    planned, tried = (
        combinations_of(joined_candidates(each, record.machine, ("none",), task=str(graph.task)))
        for each in (record.settings, settings)
    )
    if not set(tried) <= set(planned):
        return None
    search = search_for(graph, record.settings, record.machine, measure=measure)
    budgets = replace(
        search.request.budgets,
        device_bytes=settings.device_memory_bytes,
        host_bytes=settings.host_memory_bytes,
    )
    settings = replace(search.settings, **{name: getattr(settings, name) for name in kept})
    return replace(search, request=replace(search.request, budgets=budgets), settings=settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class BestPlan:
    """Fastest plan of a request, which is not written."""

    chosen: PricedCandidate
    name: str
    left_out: list[str]
    """Dimensions that were not tried, each with the reason."""

    @property
    def outcome(self) -> Outcome:
        """Return what is shown of it."""
        return outcome_of(self.name, self.chosen.candidate, self.chosen.prediction)


def find_best(graph: Graph, record: PlanRecord, changed: PlanRecord) -> BestPlan:
    """Return the fastest plan of a plan's request with changes; nothing is timed.

    Raises:
        PlanDoesNotFit: none fits.
        SettingsError: as `search_with`; or what is asked for cannot be, or not without timing it.
        InputError: the dataset or its model cannot be used.
    """
    check_changed(graph, changed)
    if changed.settings.mode == "full-graph":
        return _find_best_whole(graph, changed)
    found = best_over_samplers(
        search_with(graph, record, changed),
        lambda search, priced: choose(priced, search.request.machine.noise),
    ).best
    left_out = list_left_out(found.explored)
    return BestPlan(chosen=found.chosen, name=found.chosen.name, left_out=left_out)


def check_changed(graph: Graph, changed: PlanRecord) -> None:
    """Refuse what no candidate can be made of, or what would have to be timed on these cores.

    Raises:
        SettingsError, InputError: the line says what was expected.
    """
    settings = changed.settings
    if settings.quick and (unknown := no_estimate(graph, with_samplers(graph, settings))):
        raise SettingsError(
            "expected what can be priced before anything is measured, as this plan was, found "
            f"{unknown}; plan it without --quick to have seconds"
        )
    check_graph(graph, settings)
    machine = machine_of_ranks(on_hosts(changed.machine, settings.hosts), settings)
    gpus = plans_gpus(machine)
    if settings.mode == "full-graph":
        cuts_of(settings, machine)
        if not (gpus or settings.quick):
            raise SettingsError(
                "expected what needs no timing, found mode full-graph, whose parts would be timed "
                "on these cores; plan it to have seconds"
            )
        return
    for each in with_samplers(graph, settings).by_sampler():
        check_settings(graph, each, gpus=gpus)
        asked = fix_placement(graph, each, gpus=gpus)
        joined_candidates(asked, machine, ("none",), task=str(graph.task))


def list_left_out(explored: SearchResult) -> list[str]:
    """List the dimensions that a search did not try, each with the reason."""
    return [f"{each.name}: {each.why}" for each in (*explored.refused, *explored.left_out)]


def _find_best_whole(graph: Graph, changed: PlanRecord) -> BestPlan:
    from gnnplan.planner.fullgraph.plan import plan_full_graph  # on use: few questions need it

    settings = changed.settings
    machine = machine_of_ranks(on_hosts(changed.machine, settings.hosts), settings)
    made = plan_full_graph(graph, graph_ref(graph), settings, machine, None, calibrate=False)[0]
    return BestPlan(chosen=priced_as(made, settings), name=name_plan(made, settings), left_out=[])


def priced_as(plan: Plan, settings: PlanSettings) -> PricedCandidate:
    """Return the candidate that a plan of these settings was made from, with its prediction."""
    whole = plan.strategy.mode == "full-graph"
    candidate = plan.strategy if whole else candidate_of(plan, settings)
    return PricedCandidate(candidate=candidate, prediction=plan.prediction, refusal="")


def name_plan(plan: Plan, settings: PlanSettings) -> str:
    """Return the words for what a plan chose."""
    if plan.strategy.mode == "full-graph":
        return describe_whole_graph(plan.strategy)
    return name_of(candidate_of(plan, settings))


def outcome_of_plan(plan: Plan, settings: PlanSettings) -> Outcome:
    """Return what is shown of a plan as it is."""
    return outcome_of(
        name_plan(plan, settings), priced_as(plan, settings).candidate, plan.prediction
    )


def caution_of(other: PricedCandidate, chosen: PricedCandidate) -> str:
    """Say why seconds do not decide between plans that train differently; empty where they do."""
    new, old = other.prediction, chosen.prediction
    if other.candidate.mode == chosen.candidate.mode and new.steps_per_epoch == old.steps_per_epoch:
        return ""
    return (
        f"it trains differently: an epoch takes {seconds_text(new.epoch_seconds.value)} in "
        f"{counted(new.steps_per_epoch, 'update')}, not {seconds_text(old.epoch_seconds.value)} in "
        f"{old.steps_per_epoch}; seconds do not say which reaches a score sooner: train both, as "
        "gnnplan tune --to-accuracy does"
    )


def whatif(plan: Plan, changes: Sequence[str]) -> WhatIf:
    """Price a plan's request with some things changed.

    Raises:
        SettingsError: as `find_best`, or a change that cannot be.
        PlanError: the dataset has moved or is another one.
    """
    record = load_record(plan)
    changed, graph = apply_changes(record, changes), open_plan_graph(plan)
    after, refusal, caution = None, "", ""
    try:
        best = find_best(graph, record, changed)
        after, caution = best.outcome, caution_of(best.chosen, priced_as(plan, record.settings))
    except PlanDoesNotFit as error:
        refusal = str(error)
    before = outcome_of_plan(plan, record.settings)
    return WhatIf(
        plan_id=plan.plan_id,
        changes=list(changes),
        before=before,
        after=after,
        refusal=refusal,
        speedup=0.0 if after is None else before.step_seconds.value / after.step_seconds.value,
        caution=caution,
        provenance="derived: priced again from the cached profile; nothing was measured",
    )


def make_outcome(priced: PlacedCandidate) -> Outcome:
    """Return a priced candidate as an outcome."""
    return outcome_of(priced.name, priced.candidate, priced.prediction)


def outcome_of(name: str, candidate: Candidate, prediction: Prediction) -> Outcome:
    """Return what is shown of a candidate with its prediction."""
    return Outcome(
        name=name,
        step_seconds=prediction.step_seconds,
        epoch_seconds=prediction.epoch_seconds,
        num_ranks=candidate.num_ranks,
        policy=candidate.policy,
        stages=prediction.stages,
        memory_bytes=prediction.memory_bytes,
        hit_rates=prediction.hit_rates,
        bottleneck=prediction.bottleneck,
        provenance=prediction.provenance,
    )


def apply_changes(record: PlanRecord, changes: Sequence[str]) -> PlanRecord:
    """Return the request with each KEY=VALUE applied: of links, of memories, or a setting.

    Raises:
        SettingsError: an unknown key, name or value.
    """
    machine, of_settings = record.machine, list[str]()
    for change in changes:
        key, _, value = (part.strip() for part in change.partition("="))
        if value and (match := re.fullmatch(r"link\.(.+)\.(bandwidth|latency)", key)):
            machine = _with_link(machine, match[1], match[2], value)
        elif value and (match := re.fullmatch(r"memory\.(.+)\.capacity", key)):
            machine = _with_memory(machine, match[1], value)
        else:
            of_settings.append(change)
    return replace(record, machine=machine, settings=read_changes(record.settings, of_settings))


def _with_link(machine: MachineModel, name: str, what: str, value: str) -> MachineModel:
    """Change the links of a name, or of all names that begin with it and a dot."""
    links = [x for x in machine.links if x.name == name or x.name.startswith(f"{name}.")]
    if not links:
        known = sorted(x.name for x in machine.links)
        raise SettingsError(
            f"--set: expected a link of {machine.name} ({', '.join(known)}), found {name!r}"
            f"{did_you_mean(name, known)}"
        )
    key, rated, changed = f"link.{name}.{what}", machine, dict[str, Link]()
    for link in links:
        if what == "latency":
            new = scale_number(value, link.latency_seconds, key, size=False)
            changed[link.name] = replace(link, latency_seconds=new)
            continue
        old = link.bandwidth_bytes_per_second
        factor = scale_number(value, old, key, size=True) / old
        changed[link.name] = faster_link(link, factor)
        for kind, group in TABLES_OF_KIND.items():
            if link_of(machine, kind) == link.name:
                rated = faster(rated, LINK_TABLES[group], factor)
    return replace(rated, links=[changed.get(x.name, x) for x in machine.links])


def _with_memory(machine: MachineModel, name: str, value: str) -> MachineModel:
    known = [m.name for m in machine.memories]
    if name not in known:
        raise SettingsError(
            f"--set: expected a memory of {machine.name} ({', '.join(known)}), found {name!r}"
            f"{did_you_mean(name, known)}"
        )
    old = float(machine.memory(name).capacity_bytes)
    new = round(scale_number(value, old, f"memory.{name}.capacity", size=True))
    memories = [replace(m, capacity_bytes=new) if m.name == name else m for m in machine.memories]
    return replace(machine, memories=memories)


def render_whatif(found: WhatIf) -> str:
    """Write before and after side by side."""
    before, after = found.before, found.after
    lines = [f"with {', '.join(found.changes)}"]
    if after is None:
        return "\n".join([*lines, f"no plan fits: {found.refusal}"])
    lines += [
        f"  step   {seconds_text(before.step_seconds.value)} -> "
        f"{seconds_text(after.step_seconds.value)} (x{found.speedup:.2f})",
        f"  epoch  {seconds_text(before.epoch_seconds.value)} -> "
        f"{seconds_text(after.epoch_seconds.value)}",
        f"  plan   {before.name} -> {after.name}",
        f"  bound by {before.bottleneck} -> {after.bottleneck}",
        *([f"  {found.caution}"] if found.caution else []),
    ]
    for stage in sorted(set(before.stages) | set(after.stages)):
        old, new = before.stages.get(stage, 0.0), after.stages.get(stage, 0.0)
        lines.append(f"  {stage:<17}{seconds_text(old):>10} -> {seconds_text(new):>10}")
    lines.append(f"predicted; {found.provenance}")
    return "\n".join(lines)
