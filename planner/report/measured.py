"""What is shown beside a plan: its run, also as a trace, or the differences of another plan."""

import re
from dataclasses import dataclass, field
from typing import Any, cast

from markupsafe import Markup

from gnnplan.planner.queries.compare import (
    Comparison,
    StageComparison,
    Total,
    check_run_of,
    compare,
)
from gnnplan.planner.queries.diff import NumberPair, diff
from gnnplan.planner.report.charts import timeline
from gnnplan.planner.report.svg import element, figure, labelled_row, percent, plain
from gnnplan.planner.report.words import SOURCE_ORDER, share_text, time_text
from gnnplan.planner.units import counted
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.report import EMULATED_NOTE, RunReport, Span
from gnnplan.runtime.stages import LOADER_STAGES

ROW = 48
BAR = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShare:
    """Predicted and measured share of one source among all feature rows."""

    source: str
    predicted: float
    measured: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A run compared with its plan."""

    comparison: Comparison | None
    """None where the run cannot be compared; `refusal` says why."""
    refusal: str
    stages: list[tuple[str, StageComparison]]
    """The step first, then its stages, those below 2% of it last."""
    sources: list[SourceShare]
    report: RunReport


def compare_run(plan: Plan, report: RunReport) -> Measured:
    """Compare a run with its plan."""
    try:
        found = compare(plan, report)
    except InputError as error:
        return Measured(comparison=None, refusal=str(error), stages=[], sources=[], report=report)
    step = found.step_seconds
    whole = StageComparison(predicted=step.predicted, measured=step.measured, ape=step.ape)
    rows = [("step", whole), *found.stages.items(), *found.minor_stages.items()]
    return Measured(
        comparison=found, refusal="", stages=rows, sources=_sources(plan, report), report=report
    )


def _sources(plan: Plan, report: RunReport) -> list[SourceShare]:
    """Return the share of each source over all ranks; predictions weigh all ranks equally."""
    counted: dict[str, int] = {}
    for rank in report.ranks:
        for source, rows in rank.rows_by_source.items():
            counted[source] = counted.get(source, 0) + rows
    total = sum(counted.values())
    rates = list(plan.prediction.hit_rates.values())
    names = {*counted, *(source for rank in rates for source in rank)}
    order = sorted(names, key=lambda s: (s not in SOURCE_ORDER, s))
    return [
        SourceShare(
            source=source,
            predicted=sum(r.get(source, 0.0) for r in rates) / len(rates) if rates else 0.0,
            measured=counted.get(source, 0) / total if total else 0.0,
        )
        for source in order
    ]


def draw_measured(found: Measured) -> Markup:
    """Draw two bars per stage: predicted above, measured below."""
    whole = max((max(s.predicted, s.measured) for _, s in found.stages), default=0.0) or 1.0
    rows = [_row(stage, row, whole, i * ROW) for i, (stage, row) in enumerate(found.stages)]
    words = "; ".join(
        f"{stage}: predicted {time_text(row.predicted)}, measured {time_text(row.measured)}"
        for stage, row in found.stages
    )
    return figure(
        "measured",
        "Seconds per step, predicted and measured",
        f"{words}.",
        *rows,
        height=max(1, ROW * len(found.stages)),
    )


def off_text(row: StageComparison | Total) -> str:
    """Say by how much a prediction is too long or too short.

    >>> off_text(StageComparison(predicted=12.0, measured=10.0, ape=0.2))
    '20.0% too long'
    """
    if row.measured == 0.0:
        return "none measured" if row.predicted else ""
    off = row.predicted / row.measured - 1.0
    if abs(off) < 0.0005:
        return "as measured"
    return f"{share_text(abs(off))} too {'long' if off > 0 else 'short'}"


def ratio_text(row: "NumberRow") -> str:
    """Say how many times the first number the second is; empty where either is none.

    >>> ratio_text(NumberRow(name="step", unit="seconds", a=8.7, b=0.1))
    '1/87'
    """
    if not row.a or not row.b:
        return ""
    ratio = row.b / row.a
    if ratio <= 0.1:
        return f"1/{row.a / row.b:,.0f}"
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.2f}"


def _row(stage: str, row: StageComparison, whole: float, top: int) -> Markup:
    value = f"{time_text(row.predicted)} / {time_text(row.measured)}"
    value += f", {off_text(row)}" if off_text(row) else ""
    bars = [
        element(
            "rect", class_=kind, x=0, y=top + y, width=percent(seconds / whole), height=BAR, rx=2
        )
        for kind, seconds, y in (
            ("bar predicted", row.predicted, 20),
            ("bar measured", row.measured, 20 + BAR + 2),
        )
    ]
    title = f"{stage}: predicted / measured {value}"
    return labelled_row(stage, value, *bars, top=top, title=title)


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceBar:
    """One stage of one step in a trace."""

    lane: str
    stage: str
    step: int
    start_seconds: float
    seconds: float
    told: str
    """Where the seconds are from."""


def chrome_trace(plan: Plan, report: RunReport | None) -> dict[str, Any]:
    """Return predicted and measured steps as Chrome trace events, which Perfetto reads.

    Every rank is a process. Its predicted steps follow each other as the plan lays them out; the
    measured ones begin where they did, from the rank's first step that is shown.

    Raises:
        SettingsError: the run was made under another plan.
    """
    if report is not None:
        check_run_of(plan, report)
    events: list[dict[str, Any]] = []
    for device in plan.strategy.devices:
        spans = [] if report is None else [x for r in report.ranks if r.rank == device.rank
                                           for x in r.spans]  # fmt: skip
        bars = [*_predicted_bars(plan, spans), *_measured_bars(plan, spans)]
        events += _trace_events(device.rank, f"rank {device.rank} at {device.memory}", bars)
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "plan_id": plan.plan_id,
            "predicted_step_seconds": plan.prediction.step_seconds.value,
            "notes": _trace_notes(plan, report),
        },
        "traceEvents": events,
    }


def _trace_notes(plan: Plan, report: RunReport | None) -> list[str]:
    notes = ["clocks of ranks are not compared: each begins at its own first step that is shown"]
    if report is None:
        notes.append("nothing was measured: all bars are predicted")
    elif not any(rank.spans for rank in report.ranks):
        notes.append("the run's report does not say when stages ran: all bars are predicted")
    if plan.strategy.emulated:
        notes.append(EMULATED_NOTE)
    return notes


def _predicted_bars(plan: Plan, spans: list[Span]) -> list[TraceBar]:
    """Return one predicted step for each measured one, or a single one, end to end."""
    laid = timeline(plan)
    bars: list[TraceBar] = []
    for place, step in enumerate(sorted({span.step for span in spans}) or [0]):
        begun = place * laid.step_seconds
        bars.append(
            TraceBar(
                lane="predicted: step",
                stage="step",
                step=step,
                start_seconds=begun,
                seconds=laid.step_seconds,
                told="predicted",
            )
        )
        bars += [
            TraceBar(
                lane=f"predicted: {laid.loaded_by if bar.lane == 'loader' else 'training thread'}",
                stage=bar.stage,
                step=step,
                start_seconds=begun + bar.start_seconds,
                seconds=bar.seconds,
                told=bar.provenance,
            )
            for bar in laid.bars
        ]
    return bars


def _measured_bars(plan: Plan, spans: list[Span]) -> list[TraceBar]:
    told = "emulated" if plan.strategy.emulated else "measured"
    return [
        TraceBar(
            lane=f"{told}: {_measured_lane(span)}",
            stage=span.stage,
            step=span.step,
            start_seconds=span.start_seconds,
            seconds=span.seconds,
            told=told,
        )
        for span in spans
    ]


def _measured_lane(span: Span) -> str:
    if span.stage == "step":
        return "step"
    if span.stage in set(LOADER_STAGES):
        return f"loader thread {span.thread}" if span.thread else "loading on the training thread"
    return "training thread"


def _trace_events(rank: int, name: str, bars: list[TraceBar]) -> list[dict[str, Any]]:
    """Write a rank's bars on lines on which none overlaps another."""
    numbers: dict[tuple[str, int], int] = {}
    events: list[dict[str, Any]] = [_named("process_name", rank, 0, plain(name))]
    ends: dict[tuple[str, int], float] = {}
    for bar in sorted(bars, key=lambda bar: (bar.lane, bar.start_seconds)):
        line = 0
        while ends.get((bar.lane, line), 0.0) > bar.start_seconds + INSTANT_SECONDS:
            line += 1
        lane = bar.lane, line
        if lane not in numbers:
            numbers[lane] = len(numbers) + 1
            title = bar.lane + (f" ({line + 1})" if line else "")
            events.append(_named("thread_name", rank, numbers[lane], title))
        ends[lane] = bar.start_seconds + bar.seconds
        events.append(
            {
                "ph": "X",
                "name": plain(bar.stage),
                "cat": bar.lane.split(":")[0],
                "pid": rank,
                "tid": numbers[lane],
                "ts": round(bar.start_seconds * 1e6, 3),
                "dur": round(bar.seconds * 1e6, 3),
                "args": {"step": bar.step, "seconds from": plain(bar.told)},
            }
        )
    return events


def _named(what: str, rank: int, number: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": number, "args": {"name": name}}


INSTANT_SECONDS = 1e-9
"""Time that is none: rounding of a trace's microseconds to thousandths."""
CLOSE = 0.005
"""Relative difference below which numbers are counted, not listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberRow:
    """A predicted number of both plans, or several that are equal in each."""

    name: str
    unit: str
    a: float
    """Number of plan A; 0 where it has none."""
    b: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionRow:
    """One field of both plans, in words."""

    field: str
    a: str
    b: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Differences:
    """What a page shows of two plans."""

    numbers: list[NumberRow]
    close: int
    """How many numbers differ by less than `CLOSE`, relatively."""
    decisions: list[DecisionRow]
    arrays: list[str]
    sentences: list[str] = field(default_factory=list[str])
    """What the second plan does otherwise, in words."""


def differences(a: Plan, b: Plan) -> Differences:
    """Return what two plans decide and predict differently."""
    found = diff(a, b)
    far = [pair for pair in found.numbers if abs(pair.a - pair.b) > CLOSE * max(pair.a, pair.b)]
    ranks = DecisionRow(field="ranks", a=ranks_text(a), b=ranks_text(b))
    told = ranks.a != ranks.b
    decisions = [ranks] if told else []
    decisions += [
        DecisionRow(field=each.field, a=value_text(each.a), b=value_text(each.b))
        for each in found.decisions
        if not (told and each.field.startswith("strategy.devices."))
    ]
    return Differences(
        numbers=_join_equal(far),
        close=len(found.numbers) - len(far),
        decisions=decisions,
        arrays=shorten_names(found.arrays),
        sentences=found.sentences,
    )


def verdict(a: Plan, b: Plan) -> str:
    """Say which of two plans is predicted to be faster by epoch, and whether that is certain."""
    if a.graph.fingerprint != b.graph.fingerprint:
        return "They are plans of different graphs: their seconds say nothing of each other."
    first, second = a.prediction.epoch_seconds, b.prediction.epoch_seconds
    times = f"{time_text(first.value)} for A, {time_text(second.value)} for B"
    slow, fast = max(first.value, second.value), min(first.value, second.value)
    if slow - fast <= CLOSE * slow:
        return f"Both are predicted to take as long for an epoch: {times}."
    name, other = ("A", "B") if first.value < second.value else ("B", "A")
    sentence = f"{name} is predicted to be {slow / fast:.2f} times as fast as {other}: an epoch "
    sentence += f"takes {times}"
    if max(first.low, second.low) <= min(first.high, second.high):
        return f"{sentence}; the intervals overlap, so that runs may show it the other way round."
    return f"{sentence}."


def ranks_text(plan: Plan) -> str:
    """Describe the ranks and their memories.

    Equal memories are named once: "4 ranks at host0", "8 ranks at gpu0.memory to gpu7.memory".
    """
    devices = plan.strategy.devices
    places = list(dict.fromkeys(device.memory for device in devices))
    return f"{counted(len(devices), 'rank')} at {', '.join(shorten_names(places))}"


def value_text(value: Any) -> str:
    """Write a plan's value in words.

    >>> value_text(None), value_text([0, 0, 0, 0]), value_text([15, 10]), value_text(True)
    ('not there', '4 times 0', '15, 10', 'yes')
    """
    if value is None:
        return "not there"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        items = [value_text(each) for each in cast("list[Any]", value)]
        if len(items) > 2 and len(set(items)) == 1:
            return f"{len(items)} times {items[0]}"
        return ", ".join(items) if items else "none"
    return str(value)


def shorten_names(names: list[str]) -> list[str]:
    """Shorten runs of names that differ in one number, which counts up.

    >>> shorten_names(["own_4", "own_5", "own_6", "gpu0.hbm", "gpu1.hbm", "gpu2.hbm", "partition"])
    ['own_4 to own_6', 'gpu0.hbm to gpu2.hbm', 'partition']
    """
    runs: list[list[str]] = []
    place: int | None = None
    for name in names:
        now = _counted_at(runs[-1][-1], name) if runs else None
        if now is not None and (len(runs[-1]) == 1 or now == place):
            runs[-1].append(name)
            place = now
        else:
            runs.append([name])
    return [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs]


def _counted_at(before: str, now: str) -> int | None:
    """Return which number of a name is one more in the next, if all else is equal."""
    parts, others = re.split(r"(\d+)", before), re.split(r"(\d+)", now)
    if len(parts) != len(others):
        return None
    differ = [i for i, (a, b) in enumerate(zip(parts, others, strict=True)) if a != b]
    if len(differ) != 1 or differ[0] % 2 == 0:  # every second part is a number
        return None
    return differ[0] if int(others[differ[0]]) == int(parts[differ[0]]) + 1 else None


def _join_equal(pairs: list[NumberPair]) -> list[NumberRow]:
    rows: dict[tuple[str, str, float, float], list[str]] = {}
    for pair in pairs:
        kind, _, name = pair.name.partition(" ")
        rows.setdefault((kind, pair.unit, pair.a, pair.b), []).append(name)
    return [
        NumberRow(name=f"{kind} {', '.join(shorten_names(names))}".strip(), unit=unit, a=a, b=b)
        for (kind, unit, a, b), names in rows.items()
    ]
