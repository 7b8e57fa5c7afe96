"""Explain a plan: where a step's time goes, what fills memory, which candidate came second.

`explain` returns data, `render` text; nothing is computed that the plan does not hold.
"""

from dataclasses import dataclass, field

from gnnplan.planner.candidate import topology_words
from gnnplan.planner.cost.memory import size_text
from gnnplan.planner.units import counted, in_order
from gnnplan.runtime.plan.schema import Alternative, MemoryUse, Plan
from gnnplan.runtime.stages import TRAINING_STAGES

WORDS = ("keep", "partition")
"""Entries of a prediction's provenance that are sentences of their own."""
KEPT = {
    "nodes": "boundary rows",
    "edges": "edges (DropEdge)",
    "boundary-edges": "edges over the boundary (BES)",
}
"""What full-graph training keeps a share of."""


def _full_graph_summary(plan: Plan) -> str:
    """Write ranks, partition, p and overlap of full-graph training in one line."""
    threads, settings = plan.strategy.threads, plan.strategy.full_graph
    gpus = bool(plan.strategy.gpus)
    words = [f"the whole graph on {counted(plan.num_ranks, 'GPU' if gpus else 'rank')}"]
    if len(hosts := {device.host for device in plan.strategy.devices}) > 1:
        words[0] += f" of {len(hosts)} hosts"
    if not gpus:
        words.append(f"{counted(threads.compute, 'compute thread')} each")
    if plan.num_ranks > 1:
        words.append(f"cut by {plan.strategy.partition}")
    if settings.exchange == "broadcast" and plan.num_ranks > 1:
        words.append("whole slices sent to every rank")
    elif plan.num_ranks > 1 or settings.drop == "edges":
        words.append(f"{KEPT[settings.drop]} kept with p {settings.keep:.3g}")
        if settings.keep < 1:
            drawn = "for each layer" if settings.draws == "layer" else "once for all layers"
            words.append(f"drawn {drawn} ({settings.rounding})")
    if plan.num_ranks > 1:
        words.append("exchanged beside compute" if threads.comm else "exchanged in line")
    if settings.precompute_first_layer:
        words.append("first layer aggregated once")
    return ", ".join(words)


def _full_graph_details(plan: Plan) -> list[str]:
    """Write the lines that only a full-graph plan has."""
    if plan.strategy.mode != "full-graph":
        return []
    said, memory = plan.prediction.provenance, plan.prediction.memory_bytes
    lines = [f"  {said[name]}" for name in WORDS if name in said]
    ranks = {name: use for name, use in memory.items() if name.startswith("rank")}
    totals = [use.total for use in ranks.values()]
    fullest = max(ranks, key=lambda name: ranks[name].total)
    mean = sum(totals) / len(totals)
    lines.append(
        f"  fullest: {fullest} with {size_text(max(totals))}, {max(totals) / mean:.2f} of the mean"
    )
    return lines


def _list_details(plan: Plan) -> list[str]:
    """Say how many lists and rows each GPU keeps, and why so many."""
    strategy, memory = plan.strategy, plan.prediction.memory_bytes
    if strategy.mode == "full-graph" or strategy.topology.policy != "cached":
        return []
    lines = [f"  {plan.prediction.provenance[name]}" for name in ("lists",)]
    for rank, name in enumerate(strategy.gpus):
        parts = memory[f"rank{rank}"].parts
        lists, rows = strategy.topology.own_rows[rank], strategy.features.own_rows[rank]
        lines.append(
            f"  {name}: {lists:,} lists ({size_text(parts.get('cached lists', 0))}) and {rows:,} "
            f"rows ({size_text(parts['own rows'])})"
        )
    if strategy.topology.peers:
        lines.append("  a clique's GPUs read each other's lists in place, each kept once")
    if strategy.partition != "none":
        lines.append(
            "  each GPU draws the seeds of its part: the fewest edges cut between cliques, hashed "
            "within"
        )
    return lines


BAR = 30
"""Characters of a full bar."""
PLACES = {
    "own": "in each rank's own memory",
    "cache": "in a cache that fills itself",
    "peer": "in another rank's memory",
    "host": "in the host's shared memory",
    "disk": "on disk",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRow:
    """One stage of a step."""

    stage: str
    seconds: float
    share: float
    """Share of the step; shares may sum to more than 1, since loader stages may be hidden."""
    hidden: bool
    """Whether another thread does the stage ahead of the training thread."""
    provenance: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Residence:
    """Where one device's rows are read from."""

    device: str
    share: dict[str, float]
    """Expected share of rows by source."""
    own_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Everything the plan says of itself, in reading order."""

    plan_id: str
    summary: str
    step_seconds: float
    step_low: float
    step_high: float
    epoch_seconds: float
    steps_per_epoch: int
    startup_seconds: float
    bottleneck: str
    statistics_class: str
    stages: list[StageRow]
    memory: dict[str, MemoryUse]
    residence: list[Residence]
    traffic_bytes: dict[str, float]
    gap: float
    lower_bound: float
    status: str
    shadow_prices: dict[str, float]
    runner_up: Alternative | None
    alternatives: list[Alternative]
    details: list[str] = field(default_factory=list[str])
    """Lines on full-graph training: why this p, the partition's volume, the fullest part; or on
    what each GPU keeps of lists and rows, and why."""

    @property
    def details_title(self) -> str:
        """Return what the details are of."""
        return "lists and rows of each GPU" if "lists get" in self.details[0] else "parts and p"


def explain(plan: Plan) -> Explanation:
    """Put a plan's own numbers in reading order."""
    prediction = plan.prediction
    others = plan.alternatives
    return Explanation(
        plan_id=plan.plan_id,
        summary=_summary(plan),
        step_seconds=prediction.step_seconds.value,
        step_low=prediction.step_seconds.low,
        step_high=prediction.step_seconds.high,
        epoch_seconds=prediction.epoch_seconds.value,
        steps_per_epoch=prediction.steps_per_epoch,
        startup_seconds=prediction.startup_seconds,
        bottleneck=prediction.bottleneck,
        statistics_class=plan.statistics_class,
        stages=_stages(plan),
        memory=prediction.memory_bytes,
        residence=[
            Residence(device=name, share=rates, own_rows=plan.strategy.features.own_rows[i])
            for i, (name, rates) in enumerate(in_order(prediction.hit_rates))
        ],
        traffic_bytes=prediction.traffic_bytes,
        gap=plan.certificate.gap,
        lower_bound=plan.certificate.lower_bound,
        status=plan.certificate.status,
        shadow_prices=plan.shadow_prices,
        runner_up=others[0] if others else None,
        alternatives=others,
        details=_full_graph_details(plan) + _list_details(plan),
    )


def _summary(plan: Plan) -> str:
    threads, strategy = plan.strategy.threads, plan.strategy
    if strategy.mode == "full-graph":
        return _full_graph_summary(plan)
    if strategy.devices[0].kind == "cuda":
        return _gpu_summary(plan)
    ranks, compute = counted(plan.num_ranks, "rank"), counted(threads.compute, "compute thread")
    placed = f"rows placed by {strategy.features.policy}"
    return f"{ranks}, {compute} each, {_loading(plan)}, {placed}"


def _loading(plan: Plan) -> str:
    threads, strategy = plan.strategy.threads, plan.strategy
    if not threads.sample:
        return "batches made in line"
    return f"{counted(threads.sample, 'loader thread')} {strategy.prefetch_depth} batches ahead"


def _gpu_summary(plan: Plan) -> str:
    """Say how many GPUs in which cliques, where the topology is, and what placed the rows."""
    devices = plan.strategy.devices
    cliques: dict[int, list[str]] = {}
    for device in devices:
        # A memory `gpu0.memory` is that of gpu0.
        cliques.setdefault(device.clique, []).append(device.memory.removesuffix(".memory"))
    groups = "; ".join("+".join(names) for names in cliques.values())
    where = topology_words(plan.strategy.topology)
    kind = "emulated GPU" if plan.strategy.emulated else "GPU"
    count = f"{counted(len(devices), kind)} ({groups})"
    policy = plan.strategy.features.policy
    return (
        f"{count} of {plan.machine.name}, topology {where}, {_loading(plan)}, rows placed by "
        f"{policy}"
    )


def _stages(plan: Plan) -> list[StageRow]:
    """List loader stages first; a synchronous loader's stages stand for the wait."""
    prediction, inline = plan.prediction, plan.strategy.threads.sample == 0
    training = {stage.value for stage in TRAINING_STAGES}
    step = prediction.step_seconds.value
    rows: list[StageRow] = []
    for name in sorted(prediction.stages, key=lambda n: (n in training, -prediction.stages[n])):
        if inline and name == "wait":
            continue
        rows.append(
            StageRow(
                stage=name,
                seconds=prediction.stages[name],
                share=prediction.stages[name] / step if step > 0 else 0.0,
                hidden=not inline and name not in training,
                provenance=prediction.provenance.get(name, "derived"),
            )
        )
    return rows


def render(explanation: Explanation) -> str:
    """Write the explanation as plain text, in sections of a few lines."""
    e = explanation
    sections = [
        [
            e.summary,
            f"predicted step {seconds_text(e.step_seconds)} "
            f"({seconds_text(e.step_low)} to {seconds_text(e.step_high)}, 90%), "
            f"epoch {seconds_text(e.epoch_seconds)} in {e.steps_per_epoch} steps, "
            f"start-up {seconds_text(e.startup_seconds)}",
            f"bound by {e.bottleneck}; statistics {e.statistics_class}; "
            f"within {e.gap:.1%} of the bound {seconds_text(e.lower_bound)} ({e.status})",
        ],
        ["stage               seconds   share", *map(_stage_line, e.stages)],
        ["memory", *_memory_lines(e.memory)],
        ["where rows are read", *map(_residence_line, e.residence)],
        ["runner-up", _runner_line(e.runner_up)],
        ["one more would save, per step", *_price_lines(e.shadow_prices)],
        ["where the numbers come from", *(f"  {r.stage}: {r.provenance}" for r in e.stages)],
    ]
    if e.details:
        sections.insert(1, [e.details_title, *e.details])
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _stage_line(row: StageRow) -> str:
    note = "  (ahead of the training thread)" if row.hidden else ""
    return f"  {row.stage:<17}{seconds_text(row.seconds):>9}  {row.share:>5.1%}{note}"


def _memory_lines(memory: dict[str, MemoryUse]) -> list[str]:
    lines: list[str] = []
    for name, use in memory.items():
        share = min(1.0, use.total / use.capacity) if use.capacity > 0 else 1.0
        bar = "#" * round(BAR * share)
        total = f"{size_text(use.total)} of {size_text(use.capacity)}"
        lines.append(f"  {name:<7}[{bar:<{BAR}}] {total}")
        parts = sorted(use.parts.items(), key=lambda item: -item[1])
        lines.append("          " + ", ".join(f"{k} {size_text(v)}" for k, v in parts if v > 0))
    return lines


def _residence_line(place: Residence) -> str:
    shares = ", ".join(
        f"{share:.1%} {PLACES.get(source, source)}"
        for source, share in sorted(place.share.items(), key=lambda item: -item[1])
    )
    return f"  {place.device}: {shares or 'no rows'}; keeps {place.own_rows} copies"


def _runner_line(runner: Alternative | None) -> str:
    if runner is None:
        return "  none: nothing else was possible"
    seconds = "does not run" if runner.step_seconds is None else seconds_text(runner.step_seconds)
    return f"  {runner.name}: {seconds}; {runner.why}"


def _price_lines(prices: dict[str, float]) -> list[str]:
    return [f"  {name}: {seconds_text(saved)}" for name, saved in prices.items()] or ["  nothing"]


def seconds_text(seconds: float) -> str:
    """Write seconds in s, ms or us.

    >>> seconds_text(0.0), seconds_text(4.2e-6), seconds_text(0.0123), seconds_text(75.0)
    ('0 s', '4.2 us', '12.3 ms', '75.0 s')
    """
    if seconds == 0:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds / 1e-6:.1f} us"
