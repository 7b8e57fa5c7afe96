"""Compare two plans: what they decide differently, and what that does to what they predict."""

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, cast

from gnnplan.planner.candidate import topology_words
from gnnplan.planner.cost.memory import size_text
from gnnplan.planner.queries.explain import KEPT, PLACES
from gnnplan.planner.units import AUTO, by_number, counted, seconds_text
from gnnplan.runtime import codec
from gnnplan.runtime.plan.schema import Plan

DECIDED = ("graph", "machine", "workload", "strategy", "statistics_class", "epochs")
"""Parts of a plan that are decisions, or what they rest on."""
PLAIN = {
    "step": "steps",
    "owner": "owners of a shared batch's vertices by",
    "threads.capture": "CUDA graphs that draw a batch:",
    "threads.comm": "threads that exchange beside compute:",
    "features.peer_way": "rows of peers by way",
    "full_graph.draws": "draws per",
    "full_graph.rounding": "draws rounded by",
    "full_graph.precompute_first_layer": "first layer aggregated before training:",
}
"""Words for fields of a strategy that are told as they are."""


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
    sentences: list[str] = field(default_factory=list[str])
    """Sentences on what the second plan does otherwise."""


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
        sentences=_sentences(a, b),
    )


def _sentences(a: Plan, b: Plan) -> list[str]:
    """Say in words what the second plan decides otherwise; nothing where both decide alike."""
    found: list[str] = []
    for words in (_ranks, _sampling, _loading, _topology, _rows, _full_graph):
        one, other = words(a), words(b)
        if one != other:
            found.append(f"{other} instead of {one}")
    for name, word in PLAIN.items():
        one, other = attrgetter(name)(a.strategy), attrgetter(name)(b.strategy)
        if one != other:
            found.append(f"{word} {other} instead of {one}")
    if a.machine.name != b.machine.name:
        found.append(f"machine {b.machine.name} instead of {a.machine.name}")
    elif a.machine != b.machine:
        found.append(f"machine {a.machine.name} measured or calibrated anew")
    for part in ("workload", "graph"):
        one, other = (_flat(codec.to_plain(getattr(plan, part))) for plan in (a, b))
        found += [
            f"{part}: {name} {other.get(name)} instead of {one.get(name)}"
            for name in sorted({*one, *other})
            if one.get(name) != other.get(name)
        ]
    if a.statistics_class != b.statistics_class:
        found.append(f"statistics {b.statistics_class} instead of {a.statistics_class}")
    if a.epochs != b.epochs:
        found.append(f"planned for epochs {b.epochs or AUTO} instead of {a.epochs or AUTO}")
    return found


def _ranks(plan: Plan) -> str:
    strategy = plan.strategy
    hosts = len({device.host for device in strategy.devices})
    kind = "rank" if strategy.kind == "cpu" else "GPU"
    words = counted(plan.num_ranks, kind)
    if hosts > 1:
        words += f" on {hosts} hosts"
    cliques = {device.clique for device in strategy.devices}
    if strategy.kind != "cpu" and 1 < len(cliques) < plan.num_ranks:
        words += f" in {len(cliques)} cliques"
    return f"{words} with {counted(strategy.threads.compute, 'compute thread')} each"


def _sampling(plan: Plan) -> str:
    strategy = plan.strategy
    named = strategy.sampler
    options = ",".join(f"{name}={value}" for name, value in sorted(named.parameters.items()))
    words = f"sampler {named.name}{':' + options if options else ''} ({named.dialect})"
    words += " in batches that ranks share" if strategy.batching == "cooperative" else ""
    return words + (f" in stacks of {strategy.bulk_batches}" if strategy.bulk_batches > 1 else "")


def _loading(plan: Plan) -> str:
    threads, strategy = plan.strategy.threads, plan.strategy
    if strategy.draws_ahead:
        return "each batch drawn beside the step before it"
    if not threads.sample:
        return "batches made in line"
    loader = counted(threads.sample, "loader thread")
    return f"batches made {strategy.prefetch_depth} ahead by {loader}"


def _topology(plan: Plan) -> str:
    return f"topology {topology_words(plan.strategy.topology)}"


def _rows(plan: Plan) -> str:
    features = plan.strategy.features
    words = f"rows placed by {features.policy}"
    if features.cache.policy != "none":
        words += f" in a {features.cache.policy} cache of {features.cache.rows} rows"
    least, most = min(features.own_rows, default=0), max(features.own_rows, default=0)
    if most:
        words += f", {least if least == most else f'{least} to {most}'} on each rank"
    places = sorted({PLACES[source.kind] for source in features.sources if source.kind in PLACES})
    return f"{words}, read {' and '.join(places)}"


def _full_graph(plan: Plan) -> str:
    if plan.strategy.mode != "full-graph":
        partition = plan.strategy.partition
        return "mini-batches" if partition == "none" else f"mini-batches of {partition} parts"
    settings = plan.strategy.full_graph
    parts = f"the whole graph in {plan.strategy.partition} parts"
    if settings.exchange == "broadcast":
        return f"{parts}, whole slices"
    what = "boundary" if settings.drop == "nodes" else KEPT[settings.drop]
    return f"{parts}, {what} p {settings.keep:.3g}"


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
    untold = [c for c in found.decisions if not found.sentences]
    lines += [f"  {text}" for text in found.sentences]
    lines += [f"  {c.field}: {c.a} -> {c.b}" for c in untold]
    if not found.sentences and not untold:
        rows = any(name.startswith("feature_") for name in found.arrays)
        lines.append("  the same, of other rows" if rows else "  nothing differs")
    lines += ["predicted", *([] if found.numbers else ["  the same"])]
    step = next((pair for pair in found.numbers if pair.name == "step"), None)
    if step is not None and step.a > 0:
        lines.append(f"  {_change(step.b / step.a)}")
    for pair in found.numbers:
        text = seconds_text if pair.unit == "seconds" else _bytes_text
        lines.append(f"  {pair.name}: {text(pair.a)} -> {text(pair.b)}")
    return "\n".join(lines)


def _bytes_text(value: float) -> str:
    return size_text(round(value)) if value else "none"


def _change(ratio: float) -> str:
    """Say how a step's seconds change.

    >>> _change(0.8), _change(1.004), _change(3.0)
    ('a step is 20.0% shorter', 'a step is 0.4% longer', 'a step is 3.0 times as long')
    """
    if ratio >= 2:
        return f"a step is {ratio:.1f} times as long"
    return f"a step is {abs(ratio - 1):.1%} {'shorter' if ratio < 1 else 'longer'}"
