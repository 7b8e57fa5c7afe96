"""What is shown beside a plan: its run, or the differences of another plan."""

import re
from dataclasses import dataclass
from typing import Any, cast

from markupsafe import Markup

from gnnplan.planner.queries.compare import Comparison, StageComparison, compare
from gnnplan.planner.queries.diff import NumberPair, diff
from gnnplan.planner.report.svg import element, figure, labelled_row, percent
from gnnplan.planner.report.words import SOURCE_ORDER, share_text, time_text
from gnnplan.planner.units import counted
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.report import RunReport

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


def _row(stage: str, row: StageComparison, whole: float, top: int) -> Markup:
    value = f"{time_text(row.predicted)} / {time_text(row.measured)}, off by {share_text(row.ape)}"
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
