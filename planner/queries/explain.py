"""Explain a plan: what its owner asks first, where a step's time goes, what came second.

`explain` returns data, `render` text. Nothing is priced: what a plan does not hold, the runners-up
by number of ranks among it, its search kept beside the plan's request (`RunnersUp`).
"""

import re
from dataclasses import dataclass, field

from gnnplan.planner.candidate import topology_words
from gnnplan.planner.cost.memory import size_text
from gnnplan.planner.queries.answers import (
    Answers,
    answer,
    evaluation_words,
    memory_lines,
    name_bottleneck,
)
from gnnplan.planner.queries.rivals import (
    ALIKE,
    RunnersUp,
    SystemToday,
    load_runners_up,
    tell_today,
)
from gnnplan.planner.units import counted, in_order, seconds_text
from gnnplan.runtime.plan.schema import Alternative, MemoryUse, Plan
from gnnplan.runtime.stages import TRAINING_STAGES

WORDS = ("keep", "partition")
"""Entries of a prediction's provenance that are sentences of their own."""
KEPT = {
    "nodes": "boundary rows",
    "edges": "edges (DropEdge)",
    "boundary-edges": "edges over the boundary (BES)",
}
"""Words for what full-graph training samples, by `FullGraph.drop`."""


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
    totals = {name: use.total for name, use in memory.items() if name.startswith("rank")}
    fullest = max(totals, key=lambda name: totals[name])
    most, mean = totals[fullest], sum(totals.values()) / len(totals)
    return [*lines, f"  fullest: {fullest} with {size_text(most)}, {most / mean:.2f} of the mean"]


def _list_details(plan: Plan) -> list[str]:
    """Say how many lists and rows each GPU keeps, and why so many."""
    strategy, memory = plan.strategy, plan.prediction.memory_bytes
    if strategy.mode == "full-graph" or strategy.topology.policy != "cached":
        return []
    lines = [f"  {plan.prediction.provenance['lists']}"]
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


def _owner_details(plan: Plan) -> list[str]:
    """Say what parts of the graph deal to ranks that share a batch."""
    return [f"  {words}"] if (words := plan.prediction.provenance.get("owners")) else []


REPLAYED = "replayed as one graph"
"""First words of a prediction's sentence on a captured step."""


def _captured_details(plan: Plan) -> list[str]:
    """Say what a captured step saves, what its padding costs, and how large its shapes are."""
    shapes, said = plan.strategy.shapes, plan.prediction.provenance.get("forward_backward", "")
    if shapes is None or REPLAYED not in said:
        return []
    size = max(use.parts.get("captured step", 0) for use in plan.prediction.memory_bytes.values())
    rows, edges = (", ".join(f"{n:,}" for n in found) for found in (shapes.rows, shapes.edges))
    return [
        f"  {said[said.index(REPLAYED) :]}",
        f"  its shapes have {rows} rows and {edges} edges, seeds first, and take "
        f"{size_text(size)} of each GPU",
    ]


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
    answers: Answers
    runners_up: RunnersUp
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
    """Lines on full-graph training: why this p, the partition's volume, the fullest part; on what
    each GPU keeps of lists and rows, and why; on who owns the nodes of a shared batch; or on what a
    captured step saves and its padding costs."""
    estimated: bool = False
    """Whether nothing was drawn or timed for these numbers."""
    today: SystemToday | None = None
    """Estimated epoch of what the user runs today; None where it cannot be estimated."""
    evaluation: str = ""
    """How validation and test run beside the plan's memory; empty where that is not predicted."""

    @property
    def details_title(self) -> str:
        """Return what the details are of."""
        if "owners by" in self.details[0]:
            return "who owns a node"
        if REPLAYED in self.details[0]:
            return "captured step"
        return "lists and rows of each GPU" if "lists get" in self.details[0] else "parts and p"


def explain(plan: Plan, today: str | None = None) -> Explanation:
    """Put a plan's own numbers in reading order, after answers to what is asked first.

    `today` is what the user runs, as SYSTEM or SYSTEM:workers=N; None for PyG's loader.

    Raises:
        SettingsError: there is no such system, or it cannot do what the plan does.
    """
    prediction, runners = plan.prediction, load_runners_up(plan.plan_id)
    beside, today_line = tell_today(plan, runners, today)
    return Explanation(
        plan_id=plan.plan_id,
        summary=_summary(plan),
        answers=answer(plan, runners, today_line),
        today=beside,
        runners_up=runners,
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
        runner_up=next(iter(plan.alternatives), None),
        alternatives=plan.alternatives,
        details=[
            line
            for of_plan in (_full_graph_details, _list_details, _owner_details, _captured_details)
            for line in of_plan(plan)
        ],
        estimated=prediction.estimated,
        evaluation=evaluation_words(plan),
    )


def _summary(plan: Plan) -> str:
    threads, strategy = plan.strategy.threads, plan.strategy
    if strategy.mode == "full-graph":
        return _full_graph_summary(plan)
    if strategy.kind == "cuda":
        return _gpu_summary(plan)
    ranks, compute = counted(plan.num_ranks, "rank"), counted(threads.compute, "compute thread")
    return f"{ranks}, {compute} each, {_loading(plan)}, rows placed by {strategy.policy}"


def _loading(plan: Plan) -> str:
    threads, strategy = plan.strategy.threads, plan.strategy
    if strategy.draws_ahead:
        return "each batch drawn beside the step before it"
    if not threads.sample:
        return "batches made in line"
    ahead = counted(strategy.prefetch_depth, "batch")
    return f"{counted(threads.sample, 'loader thread')} {ahead} ahead"


def _gpu_summary(plan: Plan) -> str:
    """Say how many GPUs in which cliques, where the topology is, and what placed the rows."""
    strategy, policy = plan.strategy, plan.strategy.policy
    cliques = sorted(strategy.cliques)  # the first rank's first
    groups = "; ".join("+".join(strategy.gpus[rank] for rank in clique) for clique in cliques)
    kind = "emulated GPU" if strategy.emulated else "GPU"
    captured = ", steps captured" if strategy.step == "captured" else ""
    if (stored := plan.graph.feature_dtype) == plan.workload.precision != "float32":
        policy += f" in {stored}, which the first product reads as they are"
    return (
        f"{counted(plan.num_ranks, kind)} ({groups}) of {plan.machine.name}, topology "
        f"{topology_words(strategy.topology)}, {_loading(plan)}, rows placed by {policy}{captured}"
    )


def _stages(plan: Plan) -> list[StageRow]:
    """List loader stages first; a synchronous loader's stages stand for the wait."""
    prediction, inline = plan.prediction, not plan.strategy.loads_ahead
    training = {stage.value for stage in TRAINING_STAGES}
    step, seconds = prediction.step_seconds.value, prediction.stages
    return [
        StageRow(
            stage=name,
            seconds=seconds[name],
            share=seconds[name] / step if step > 0 else 0.0,
            hidden=not inline and name not in training,
            provenance=prediction.provenance.get(name, "derived"),
        )
        for name in sorted(seconds, key=lambda n: (n in training, -seconds[n]))
        if not (inline and name == "wait")
    ]


def render(explanation: Explanation, alternatives: int | None = None) -> str:
    """Write the explanation as plain text, in sections of a few lines.

    `alternatives` is how many of them are listed, in the plan's order; None for the runner-up and
    the first that differs from it in earnest.
    """
    e = explanation
    sections = [
        [
            e.summary,
            f"{'estimated' if e.estimated else 'predicted'} step {seconds_text(e.step_seconds)} "
            f"({seconds_text(e.step_low)} to {seconds_text(e.step_high)}, 90%), "
            f"epoch {seconds_text(e.epoch_seconds)} in {counted(e.steps_per_epoch, 'step')}, "
            f"start-up {seconds_text(e.startup_seconds)}",
            f"{name_bottleneck(e.bottleneck)} sets the pace; training statistics are "
            f"{e.statistics_class}",
            gap_words(e.gap, e.lower_bound, e.status),
        ],
        ["asked first", *_answer_lines(e)],
        ["stage               seconds   share", *map(_stage_line, e.stages)],
        ["memory", *memory_lines(e.memory), *([f"  {e.evaluation}"] if e.evaluation else [])],
        ["where rows are read", *map(_residence_line, e.residence)],
        _alternatives_section(e, alternatives),
        ["more of a memory or a link would save, per step", *_price_lines(e.shadow_prices)],
        ["where the numbers come from", *(f"  {r.stage}: {r.provenance}" for r in e.stages)],
    ]
    if e.details:
        sections.insert(1, [e.details_title, *e.details])
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def gap_words(gap: float, lower_bound: float, status: str) -> str:
    """Say how much faster than a plan anything that was priced can be, and what was."""
    most = f"more than {gap:.1%} faster, {seconds_text(lower_bound)} a step"
    known = f"nothing that was priced is {'faster' if gap <= 1e-9 else most}"
    return f"as far as the model sees, {known}: {status.split(': ', 1)[-1]}"


def _stage_line(row: StageRow) -> str:
    note = "  (ahead of the training thread)" if row.hidden else ""
    return f"  {row.stage:<17}{seconds_text(row.seconds):>9}  {row.share:>5.1%}{note}"


def _residence_line(place: Residence) -> str:
    shares = ", ".join(
        f"{share:.1%} {PLACES.get(source, source)}"
        for source, share in sorted(place.share.items(), key=lambda item: -item[1])
    )
    return f"  {place.device}: {shares or 'no rows'}; keeps {place.own_rows} copies"


def _answer_lines(e: Explanation) -> list[str]:
    many = " ".join(e.summary.split()[:2]).rstrip(",")
    many = "the whole graph so" if e.summary.startswith("the whole") else many
    return [
        f"  why {many}: {e.answers.why_so_many}",
        f"  what fills the memory: {e.answers.what_fills_memory}",
        f"  what would be faster: {e.answers.what_is_faster}",
        f"  what it gains: {e.answers.what_it_gains}",
        f"  what you run today: {e.answers.what_you_run_today}",
        *([f"  how long the training is: {e.answers.how_long}"] if e.answers.how_long else []),
    ]


def _alternatives_section(e: Explanation, most: int | None) -> list[str]:
    """Write the first alternatives, at most so many; nothing for 0, the runner-up for None."""
    if most == 0:
        return []
    if most is None or not e.alternatives:
        return ["runner-up", *_runner_lines(e)]
    listed = e.alternatives[:most]
    title = f"alternatives, {len(listed)} of {len(e.alternatives)}"
    return [title, *map(_runner_line, listed)]


def _runner_lines(e: Explanation) -> list[str]:
    """Write the next best, how many more are like it, and the first that differs in earnest."""
    if e.runner_up is None:
        return ["  none: nothing else was possible"]
    alike = [each for each in e.alternatives if _is_alike(each, e)]
    others = [each for each in e.alternatives if each not in alike]
    if not alike:
        return [_runner_line(e.runner_up)]
    more = f" ({len(alike) - 1} more as fast, placed or loaded otherwise)" if alike[1:] else ""
    return [_runner_line(alike[0]) + more, *map(_runner_line, others[:1])]


def _is_alike(other: Alternative, e: Explanation) -> bool:
    """Return whether an alternative has the ranks and step of the plan."""
    ranks = re.match(r"\d+ (emulated )?\w+", e.summary)
    if other.step_seconds is None or ranks is None or not other.name.startswith(ranks[0]):
        return False
    return abs(other.step_seconds / e.step_seconds - 1) < ALIKE


def _runner_line(runner: Alternative) -> str:
    seconds = "does not run" if runner.step_seconds is None else seconds_text(runner.step_seconds)
    return f"  {runner.name}: {seconds}; {runner.why}"


def _price_lines(prices: dict[str, float]) -> list[str]:
    return [f"  {name}: {seconds_text(saved)}" for name, saved in prices.items()] or ["  nothing"]
