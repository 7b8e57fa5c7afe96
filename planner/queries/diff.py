"""Compare two plans: what they decide differently, and what that does to what they predict."""

from dataclasses import dataclass
from typing import Any, cast

from gnnplan.planner.queries.explain import seconds_text
from gnnplan.planner.units import by_number
from gnnplan.runtime import codec
from gnnplan.runtime.plan.schema import Plan

DECIDED = ("graph", "machine", "workload", "strategy", "statistics_class")
"""Parts of a plan that are decisions, or what they rest on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One field that differs."""

    field: str
    a: Any
    """Value of the first plan; None where it has no such field."""
    b: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberPair:
    """One predicted number of both plans."""

    name: str
    unit: str
    a: float
    b: float
    provenance_a: str
    provenance_b: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanDiff:
    """Two plans side by side."""

    plan_a: str
    plan_b: str
    decisions: list[Change]
    arrays: list[str]
    """Names of arrays that differ or that only one plan has."""
    numbers: list[NumberPair]


def diff(a: Plan, b: Plan) -> PlanDiff:
    """Return what two plans decide and predict differently."""
    flat_a, flat_b = _flat(codec.to_plain(a)), _flat(codec.to_plain(b))
    names = sorted(set(flat_a) | set(flat_b))
    decided = [n for n in names if n.split(".")[0] in DECIDED]
    return PlanDiff(
        plan_a=a.plan_id,
        plan_b=b.plan_id,
        decisions=[
            Change(field=n, a=flat_a.get(n), b=flat_b.get(n))
            for n in decided
            if flat_a.get(n) != flat_b.get(n)
        ],
        arrays=[
            name
            for name in sorted(set(a.arrays) | set(b.arrays))
            if name not in a.arrays
            or name not in b.arrays
            or a.arrays[name].sha256 != b.arrays[name].sha256
        ],
        numbers=[pair for pair in _numbers(a, b) if pair.a != pair.b],
    )


def _numbers(a: Plan, b: Plan) -> list[NumberPair]:
    found: list[NumberPair] = []
    first, second = a.prediction, b.prediction

    def add(name: str, unit: str, one: float, other: float, stage: str = "") -> None:
        found.append(
            NumberPair(
                name=name,
                unit=unit,
                a=one,
                b=other,
                provenance_a=first.provenance.get(stage, "derived"),
                provenance_b=second.provenance.get(stage, "derived"),
            )
        )

    add("step", "seconds", first.step_seconds.value, second.step_seconds.value)
    add("epoch", "seconds", first.epoch_seconds.value, second.epoch_seconds.value)
    add("startup", "seconds", first.startup_seconds, second.startup_seconds, "startup")
    for stage in sorted({*first.stages, *second.stages}):
        one, other = first.stages.get(stage, 0.0), second.stages.get(stage, 0.0)
        add(f"stage {stage}", "seconds", one, other, stage)
    for link in sorted({*first.traffic_bytes, *second.traffic_bytes}, key=by_number):
        one, other = first.traffic_bytes.get(link, 0.0), second.traffic_bytes.get(link, 0.0)
        add(f"traffic {link}", "bytes per step", one, other)
    for memory in sorted({*first.memory_bytes, *second.memory_bytes}, key=by_number):
        one, other = (
            float(p.memory_bytes[memory].total) if memory in p.memory_bytes else 0.0
            for p in (first, second)
        )
        add(f"memory {memory}", "bytes", one, other)
    return found


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a document by dotted name; lists of plain values are leaves."""
    items: list[tuple[str, Any]]
    if isinstance(value, dict) and value:
        inner = cast("dict[str, Any]", value)
        items = [(str(key), inner[key]) for key in inner]
    elif isinstance(value, list):
        elements = cast("list[Any]", value)
        if not any(isinstance(v, dict | list) for v in elements):
            return {prefix: elements}
        items = [(str(i), v) for i, v in enumerate(elements)]
    else:
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, part in items:
        found |= _flat(part, f"{prefix}.{key}" if prefix else key)
    return found


def render(found: PlanDiff) -> str:
    """Write the differences as text, decisions first."""
    if found.plan_a == found.plan_b:
        return "the plans are the same"
    lines = ["decided"]
    lines += [f"  {c.field}: {c.a} -> {c.b}" for c in found.decisions] or ["  nothing differs"]
    if found.arrays:
        lines.append(f"  arrays that differ: {', '.join(found.arrays)}")
    lines.append("predicted")
    for pair in found.numbers:
        if pair.unit == "seconds":
            lines.append(f"  {pair.name}: {seconds_text(pair.a)} -> {seconds_text(pair.b)}")
        else:
            lines.append(f"  {pair.name}: {pair.a:.4g} -> {pair.b:.4g} {pair.unit}")
    return "\n".join(lines)
