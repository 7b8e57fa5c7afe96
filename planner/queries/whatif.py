"""Price a plan's request otherwise: `gnnplan whatif`.

The request is priced again on its cached profile: with changed settings, links or memories; or for
the fewest devices and the least memory that keep an epoch within a target. Nothing is measured.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gnnplan.planner.assemble import candidate_of
from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.link_use import link_of
from gnnplan.planner.cost.memory import host_memory, size_text
from gnnplan.planner.errors import PlanDoesNotFit, SettingsError
from gnnplan.planner.machine.model import Link, MachineModel
from gnnplan.planner.pipeline import search_for
from gnnplan.planner.profile.cache import PlanRecord, load_record
from gnnplan.planner.queries.calibrate import calibrate_search
from gnnplan.planner.queries.simulate import open_plan_graph
from gnnplan.planner.search.choose import PlacedCandidate, choose
from gnnplan.planner.search.dimensions.ranks import LINK_TABLES, faster, faster_link
from gnnplan.planner.search.dimensions.registry import name_of
from gnnplan.planner.search.search import Search
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.units import parse_bytes, seconds_text
from gnnplan.runtime.errors import did_you_mean
from gnnplan.runtime.plan.schema import Interval, MemoryUse, Plan, Prediction

TABLES_OF_KIND = {"host": "memory", "disk": "disk", "all_reduce": "exchange"}
"""Group of measured tables that a link shortens, by its kind of traffic (`link_of`)."""
SETTINGS = ("devices", "device_memory", "host_memory", "policy")


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
    """Plan with the changes; None where nothing fits."""
    refusal: str
    """Memory sum that does not fit; empty where something does."""
    speedup: float
    """Step seconds before over after; 0 where nothing fits."""
    provenance: str


def reopen(plan: Plan, changes: Sequence[str] = ()) -> Search:
    """Return the planner's search of a plan, from its record and the cached profile.

    `changes` are KEY=VALUE each, as in `--set`.
    """
    record = load_record(plan)
    graph = open_plan_graph(plan)
    search = search_for(graph, record.settings, record.machine, measure=False)
    changed = apply_changes(PlanRecord(settings=search.settings, machine=record.machine), changes)
    settings = changed.settings
    budgets = replace(
        search.request.budgets,
        device_bytes=settings.device_memory_bytes,
        host_bytes=settings.host_memory_bytes,
    )
    request = replace(search.request, machine=changed.machine, budgets=budgets)
    return calibrate_search(replace(search, request=request, settings=settings), record.factors)


def whatif(plan: Plan, changes: Sequence[str]) -> WhatIf:
    """Price a plan's request with some things changed.

    Raises:
        SettingsError: as `reopen`.
        PlanError: as `reopen`.
    """
    search = reopen(plan, changes)
    after, refusal = None, ""
    try:
        after = make_outcome(best_of(search))
    except PlanDoesNotFit as error:
        refusal = str(error)
    candidate = candidate_of(plan, load_record(plan).settings)
    before = outcome_of(name_of(candidate), candidate, plan.prediction)
    return WhatIf(
        plan_id=plan.plan_id,
        changes=list(changes),
        before=before,
        after=after,
        refusal=refusal,
        speedup=0.0 if after is None else before.step_seconds.value / after.step_seconds.value,
        provenance="derived: priced again from the cached profile; nothing was measured",
    )


def best_of(search: Search) -> PlacedCandidate:
    """Return the candidate that a search would choose.

    Raises:
        PlanDoesNotFit: none fits.
        SettingsError: it needs a profile that was not made.
    """
    return choose(search.run(), search.request.machine.noise)


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
    """Return the request with each KEY=VALUE applied.

    Raises:
        SettingsError: an unknown key, name or value.
    """
    machine, settings = record.machine, record.settings
    for change in changes:
        key, equals, value = change.partition("=")
        key, value = key.strip(), value.strip()
        if not equals or not value:
            raise SettingsError(f"--set: expected KEY=VALUE, found {change!r}")
        if match := re.fullmatch(r"link\.(.+)\.(bandwidth|latency)", key):
            machine = _with_link(machine, match[1], match[2], value)
        elif match := re.fullmatch(r"memory\.(.+)\.capacity", key):
            machine = _with_memory(machine, match[1], value)
        elif key in SETTINGS:
            settings = _with_setting(settings, key, value)
        else:
            raise SettingsError(
                "--set: expected link.NAME.bandwidth, link.NAME.latency, memory.NAME.capacity, "
                f"{', '.join(SETTINGS)}, found {key!r}{did_you_mean(key, SETTINGS)}; what "
                "changes the workload needs a new plan"
            )
    return replace(record, machine=machine, settings=settings)


def _scaled(value: str, old: float, key: str, *, size: bool) -> float:
    """Read a new number from xF (a factor of the old one) or from a plain number or size."""
    try:
        if value.startswith("x"):
            found = old * float(value[1:])
        else:
            found = float(parse_bytes(value, f"--set {key}") or 0) if size else float(value)
    except ValueError:
        found = float("nan")
    if not 0 < found < float("inf"):
        what = "a size such as 16GiB" if size else "a number"
        raise SettingsError(f"--set {key}: expected {what} or a factor such as x2, found {value!r}")
    return found


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
            new = _scaled(value, link.latency_seconds, key, size=False)
            changed[link.name] = replace(link, latency_seconds=new)
            continue
        old = link.bandwidth_bytes_per_second
        factor = _scaled(value, old, key, size=True) / old
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
    new = round(_scaled(value, old, f"memory.{name}.capacity", size=True))
    memories = [replace(m, capacity_bytes=new) if m.name == name else m for m in machine.memories]
    return replace(machine, memories=memories)


def _with_setting(settings: PlanSettings, key: str, value: str) -> PlanSettings:
    if key == "policy":
        return replace(settings, policy=value)
    if key == "devices":
        if value != "auto" and not value.isdigit():
            raise SettingsError(f"--set devices: expected a number or auto, found {value!r}")
        return replace(settings, devices=None if value == "auto" else int(value))
    old = getattr(settings, f"{key}_bytes")
    if value.startswith("x") and old is None:
        raise SettingsError(
            f"--set {key}: expected a size (the plan had no limit), found {value!r}"
        )
    new = round(_scaled(value, float(old or 0), key, size=True))
    if key == "device_memory":
        return replace(settings, device_memory_bytes=new)
    return replace(settings, host_memory_bytes=new)


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
    ]
    for stage in sorted(set(before.stages) | set(after.stages)):
        old, new = before.stages.get(stage, 0.0), after.stages.get(stage, 0.0)
        lines.append(f"  {stage:<17}{seconds_text(old):>10} -> {seconds_text(new):>10}")
    lines.append(f"predicted; {found.provenance}")
    return "\n".join(lines)


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
    fits = [p for p in search.run() if not p.overflow]
    if not fits:
        raise PlanDoesNotFit("no candidate fits into the memory there is; see gnnplan plan")
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
            if not tried.overflow and (
                tried.prediction.epoch_seconds.value <= target_epoch_seconds
            ):
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
