"""Answer what an owner of GPUs asks of a plan first: why so many ranks, what fills the memory.

And what would be faster, what the plan gains and how long it takes. Nothing is priced: the
runners-up lie beside the plan's request (`RunnersUp`). Validation and test are no part of a
memory's sum: they adapt to what the plan leaves and its steps give back
(`runtime.train.evaluation_room`).
"""

from dataclasses import dataclass

from gnnplan.planner.cost.memory import size_text
from gnnplan.planner.queries.rivals import ALIKE, ELSEWHERE, RunnersUp
from gnnplan.planner.units import by_number, counted, seconds_text
from gnnplan.runtime.plan.schema import Alternative, MemoryUse, Plan
from gnnplan.runtime.train.evaluation_room import (
    COPIES,
    TABLES,
    EvaluationRoom,
    choose_fanouts,
    evaluation_room,
    index_bytes,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What an owner of GPUs asks first, answered in a line each, by the seconds of the model."""

    why_so_many: str
    what_fills_memory: str
    what_is_faster: str
    what_it_gains: str
    what_you_run_today: str = ""
    """Estimated epoch of a framework beside the plan's, or why there is none and what to do."""
    how_long: str = ""
    """Seconds of the whole training; empty where the request did not say how many epochs."""


def answer(plan: Plan, runners: RunnersUp, today: str) -> Answers:
    """Answer what is asked of a plan first; `today` is the line on what the user runs today."""
    return Answers(
        why_so_many=_why_so_many(plan, runners),
        what_fills_memory=name_largest(plan),
        what_is_faster=_what_is_faster(plan),
        what_it_gains=_what_it_gains(plan, runners),
        what_you_run_today=today,
        how_long=_how_long(plan),
    )


def _how_long(plan: Plan) -> str:
    """Say what the epochs that were asked for take; empty where nobody said how many."""
    if plan.epochs is None:
        return ""
    made = plan.prediction
    seconds = made.startup_seconds + plan.epochs * made.epoch_seconds.value
    word = "estimated" if made.estimated else "predicted"
    return (
        f"{seconds_text(seconds)} for {counted(plan.epochs, 'epoch')} and the start-up ({word}, "
        "without validation)"
    )


def _why_so_many(plan: Plan, runners: RunnersUp) -> str:
    """List the best step of each number of ranks, and say why the next best number lost."""
    found = runners.by_ranks
    if not found:
        return ELSEWHERE
    unit = "an epoch" if plan.strategy.mode == "full-graph" else "a step"
    words = f"{unit} takes {', '.join(_on_ranks(n, each) for n, each in _some(found))}"
    lost = [(n, each) for n, each in found.items() if each.why and each.step_seconds is not None]
    if lost:
        number, second = min(lost, key=lambda item: item[1].step_seconds or 0.0)
        words += f"; {number} lost: {second.why}{_fewer_words(plan, lost)}"
    elif len(found) > 1:
        words += f"; {next(each.why for each in found.values() if each.why)}"
    else:
        only = "that number was asked for" if runners.asked else "there is no other number"
        words += f"; {only}, none else was priced"
    return words


def _fewer_words(plan: Plan, lost: list[tuple[str, Alternative]]) -> str:
    """Say that fewer ranks are as fast, where they are: the others could do something else."""
    step = plan.prediction.step_seconds.value
    alike = [
        int(number)
        for number, each in lost
        if number.isdecimal() and (each.step_seconds or 0.0) <= step * (1 + ALIKE)
    ]
    fewest = min(alike, default=plan.num_ranks)
    if fewest >= plan.num_ranks:
        return ""
    return f"; --devices {fewest} is as fast and leaves {plan.num_ranks - fewest} free"


def _on_ranks(number: str, best: Alternative) -> str:
    short = "too much memory" if best.why.startswith("does not fit") else "none to be chosen"
    step = short if best.step_seconds is None else seconds_text(best.step_seconds)
    return f"{step} on {number}{'' if best.why else ' (this plan)'}"


def _some(found: dict[str, Alternative]) -> list[tuple[str, Alternative]]:
    """Return the plan's number of ranks and the powers of two; all where they are few."""
    ordered = sorted(found.items(), key=lambda item: by_number(item[0]))
    if len(ordered) <= 5:
        return ordered
    return [(n, a) for n, a in ordered if not a.why or int(n.split()[0]).bit_count() == 1]


def _what_is_faster(plan: Plan) -> str:
    """Name the one relaxation that would save most of a step, and what sets the pace."""
    step, prices = plan.prediction.step_seconds.value, plan.shadow_prices
    pace = f"{name_bottleneck(plan.prediction.bottleneck)} sets the pace"
    best = max(prices, key=lambda name: prices[name], default="")
    share = prices[best] / step if best and step > 0 else 0.0
    if share < LEAST_SAVED:
        return f"more memory or a faster link would not help: {pace}"
    return f"{best} would save {seconds_text(prices[best])} a step ({share:.1%}); {pace}"


def name_bottleneck(bottleneck: str) -> str:
    """Return the words for what binds a step."""
    return PACE.get(bottleneck, bottleneck)


PACE = {"host": "starting kernels on the host", "GPU": "the GPU", "links": "the busiest link"}
"""Words for what binds a step, where it is no stage."""
LEAST_SAVED = 5e-4
"""Share of a step from which something is said to save it."""


def _what_it_gains(plan: Plan, runners: RunnersUp) -> str:
    """Compare the plan with the plainest way that was priced; say how to time one's own script."""
    plainest, step = runners.plainest, plan.prediction.step_seconds.value
    epoch = seconds_text(plan.prediction.epoch_seconds.value)
    known = "estimated" if plan.prediction.estimated else "predicted"
    own = f"against your own script: time an epoch, this plan's is {known} at {epoch}"
    if plainest is None:
        return f"{ELSEWHERE}; {own}" if not runners.by_ranks else f"no plainer way fits; {own}"
    if not plainest.why or plainest.step_seconds is None or step <= 0:
        return f"it is the plainest way itself, nothing that was priced gains enough; {own}"
    times = plainest.step_seconds / step
    return (
        f"{times:.1f} times as fast as the plainest way "
        f"({plainest.name}: {seconds_text(plainest.step_seconds)}, {known} too); {own}"
    )


BAR = 30
"""Characters of a full bar."""


def name_largest(plan: Plan) -> str:
    """Name the largest parts of the fullest rank and of the fullest memory that ranks share."""
    memory, words = plan.prediction.memory_bytes, list[str]()
    ranks = {name: use for name, use in memory.items() if name.startswith("rank")}
    shared = {name: use for name, use in memory.items() if name not in ranks}
    for group in filter(None, (ranks, shared)):
        name, use = min(group.items(), key=lambda item: item[1].headroom)
        parts = sorted(use.parts.items(), key=lambda item: -item[1])[:3]
        listed = ", ".join(f"{part} {size_text(size)}" for part, size in parts if size > 0)
        words.append(f"{name} {size_text(use.total)} of {size_text(use.capacity)} ({listed})")
    return "; ".join(words)


def memory_lines(memory: dict[str, MemoryUse]) -> list[str]:
    """Draw how full each memory is, with its parts from the largest down."""
    lines: list[str] = []
    for name, use in memory.items():
        share = min(1.0, use.total / use.capacity) if use.capacity > 0 else 1.0
        bar = "#" * round(BAR * share)
        total = f"{size_text(use.total)} of {size_text(use.capacity)}"
        lines.append(f"  {name:<7}[{bar:<{BAR}}] {total}")
        parts = sorted(use.parts.items(), key=lambda item: -item[1])
        lines.append("          " + ", ".join(f"{k} {size_text(v)}" for k, v in parts if v > 0))
    return lines


def evaluation_words(plan: Plan) -> str:
    """Say how an evaluation runs where the room is least; empty where no memory is predicted."""
    if not plan.prediction.memory_bytes:
        return ""
    fanouts = choose_fanouts(plan, None)
    rooms = [evaluation_room(plan, rank, fanouts) for rank in range(plan.num_ranks)]
    rank = min(range(plan.num_ranks), key=lambda each: rooms[each].chunk_bytes)
    room, ids = rooms[rank], size_text(index_bytes(plan, fanouts))
    words = [
        f"beside these, validation and test run {_way(plan, fanouts)} in pieces of at most "
        f"{size_text(COPIES * room.chunk_bytes)} on rank{rank}"
    ]
    if fanouts is None and plan.workload.model != "rgcn" and plan.workload.num_layers > 1:
        size = 4 * plan.graph.num_nodes * plan.workload.hidden
        number = min(TABLES, plan.workload.num_layers - 1)
        which = "a layer's output" if number == 1 else "two layers' outputs"
        verb = "lies" if number == 1 else "lie"
        words.append(f"{which} of {size_text(size)} {verb} {_place(plan, room, size)}")
    words.append(f"ids of {ids} lie on the host")
    if room.missing_bytes:
        words[-1] += f", which leaves {size_text(room.missing_bytes)} too little"
    return "; ".join(words)


def _way(plan: Plan, fanouts: list[int] | None) -> str:
    if fanouts is not None:
        return f"sampled with fan-outs {','.join(map(str, fanouts))}"
    if plan.workload.model == "rgcn":
        return "on whole neighbourhoods"
    own = " as far as the model has layers" if ":" in plan.workload.model else ""
    return f"layer by layer{own}"


def _place(plan: Plan, room: EvaluationRoom, size: int) -> str:
    """Say where layers' outputs lie."""
    if plan.num_ranks > 1 and len({device.host for device in plan.strategy.devices}) == 1:
        return "in a file that ranks share"
    if plan.num_ranks == 1 and size <= room.device_table_bytes:
        return "on the GPU"
    return "on the host" if room.table_bytes is None or size <= room.table_bytes else "in a file"
