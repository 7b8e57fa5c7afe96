"""Plan the same graph and workload for machines that are not here: predicted, never run.

Each preset is planned twice: with all of a GPU's memory, and with room for a share of the feature
rows alone, so that the choice of rows shows on a small graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.queries.explain import explain
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.units import seconds_text
from gnnplan.runtime.plan.schema import Plan

DEMO_MACHINES = ("siton", "dgx-v100")
DEMO_SHARE = 0.2
"""Share of the rows that a GPU has room for in the second plan; Song and Jiang's buffers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PresetPlan:
    """Plan for a machine that is not here."""

    machine: str
    room: str
    """Words for what a GPU's memory was taken to hold."""
    plan_id: str
    summary: str
    step_seconds: float
    read: dict[str, float]
    """Share of the rows by place, mean over the GPUs."""
    why: str


def plan_elsewhere(
    graph: Path, settings: PlanSettings, out: Path, machines: Sequence[str] = DEMO_MACHINES
) -> list[PresetPlan]:
    """Plan a graph for presets, each with whole GPUs and with room for some of the rows.

    Plans are written to `out`, as `<machine>` and `<machine>-tight`.

    Raises:
        InputError: as `plan`.
    """
    from gnnplan.planner.pipeline import plan

    found: list[PresetPlan] = []
    for name in machines:
        machine = load_preset(name)
        whole = plan(graph, replace(settings, devices=None), machine=machine, out=out / name)
        found.append(_told(whole, "all of a GPU's memory"))
        every = replace(settings, devices=len(machine.gpus))
        tight = replace(every, device_memory_bytes=_budget(graph, every, name, out))
        made = plan(graph, tight, machine=machine, out=out / f"{name}-tight")
        found.append(_told(made, f"all GPUs, each with room for {DEMO_SHARE:.0%} of the rows"))
    return found


def _budget(graph: Path, settings: PlanSettings, name: str, out: Path) -> int:
    """Return the device memory that leaves room for `DEMO_SHARE` of the rows beside all else."""
    from gnnplan.planner.pipeline import plan

    bare = plan(
        graph,
        replace(settings, policy="none"),
        machine=load_preset(name),
        out=out / f"{name}-tight",
    )
    uses = [u for k, u in bare.prediction.memory_bytes.items() if k.startswith("rank")]
    fixed = max(u.total - u.parts["reserve"] for u in uses)
    share = max(u.parts["reserve"] / u.capacity for u in uses)
    rows = round(DEMO_SHARE * bare.graph.num_nodes) * bare.strategy.features.row_bytes
    return int((fixed + rows) / (1 - share)) + 1


def _told(made: Plan, room: str) -> PresetPlan:
    told = explain(made)
    rates = list(made.prediction.hit_rates.values())
    read = {
        place: sum(r.get(place, 0.0) for r in rates) / len(rates)
        for place in ("own", "peer", "host", "disk")
    }
    other = told.runner_up
    why = f"bound by {told.bottleneck}; within {told.gap:.1%} of the bound"
    if other is not None:
        why += f"; next: {other.name}, {other.why}"
    return PresetPlan(
        machine=made.machine.name,
        room=room,
        plan_id=made.plan_id,
        summary=told.summary,
        step_seconds=told.step_seconds,
        read={place: share for place, share in read.items() if share > 0},
        why=why,
    )


def render_elsewhere(plans: Sequence[PresetPlan]) -> str:
    """Write four lines for each plan, marked as predicted."""
    lines = ["predicted from presets; nothing of this was measured on such machines:"]
    for each in plans:
        places = ", ".join(f"{share:.1%} {place}" for place, share in each.read.items())
        lines += [
            f"  {each.machine}, {each.room}: step {seconds_text(each.step_seconds)} (predicted)",
            f"    {each.summary}",
            f"    rows read: {places}",
            f"    why: {each.why}",
        ]
    return "\n".join(lines)
