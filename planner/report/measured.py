"""A run beside its plan: seconds by stage, bytes by source, predicted and measured."""

from dataclasses import dataclass

from markupsafe import Markup

from planner.queries.compare import Comparison, StageComparison, compare
from planner.report.svg import element, figure, percent
from planner.report.words import SOURCE_ORDER, share_text, time_text
from runtime.errors import InputError
from runtime.plan.schema import Plan
from runtime.report import RunReport

ROW = 48
BAR = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShare:
    """Share of all feature rows from one source."""

    source: str
    predicted: float
    measured: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A run held against its plan."""

    comparison: Comparison | None
    """None where the run cannot be compared; `refusal` says why."""
    refusal: str
    stages: list[tuple[str, StageComparison]]
    """The step first, then the stages of at least 2% of it, then the rest."""
    sources: list[SourceShare]
    report: RunReport


def measured(plan: Plan, report: RunReport) -> Measured:
    """Hold a run against its plan."""
    try:
        found = compare(plan, report)
    except InputError as error:
        return Measured(comparison=None, refusal=str(error), stages=[], sources=[], report=report)
    step = found.step_seconds
    whole = StageComparison(predicted=step.predicted, measured=step.measured, ape=step.ape)
    rows = [("step", whole), *found.stages.items(), *found.minor_stages.items()]
    return Measured(
        comparison=found,
        refusal="",
        stages=rows,
        sources=_sources(plan, report),
        report=report,
    )


def _sources(plan: Plan, report: RunReport) -> list[SourceShare]:
    """Rows by source over all ranks, as shares; a prediction weighs its ranks alike."""
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


def draw_measured(found: Measured, *, name: str = "measured") -> Markup:
    """Two bars per stage: predicted above, measured below."""
    whole = max((max(s.predicted, s.measured) for _, s in found.stages), default=0.0) or 1.0
    rows = [_row(stage, row, whole, i * ROW) for i, (stage, row) in enumerate(found.stages)]
    words = "; ".join(
        f"{stage}: predicted {time_text(row.predicted)}, measured {time_text(row.measured)}"
        for stage, row in found.stages
    )
    return figure(
        name,
        "Seconds per step, predicted and measured",
        f"{words}.",
        *rows,
        height=max(1, ROW * len(found.stages)),
    )


def _row(stage: str, row: StageComparison, whole: float, top: int) -> Markup:
    value = f"{time_text(row.predicted)} / {time_text(row.measured)}, off by {share_text(row.ape)}"
    bars = [
        element(
            "rect",
            class_=kind,
            x=0,
            y=top + y,
            width=percent(seconds / whole),
            height=BAR,
            rx=2,
        )
        for kind, seconds, y in (
            ("bar predicted", row.predicted, 20),
            ("bar measured", row.measured, 20 + BAR + 2),
        )
    ]
    return element(
        "g",
        element("title", f"{stage}: predicted / measured {value}"),
        element("text", stage, class_="name", x=0, y=top + 14),
        element("text", value, class_="value", x="100%", y=top + 14, text_anchor="end"),
        *bars,
    )
