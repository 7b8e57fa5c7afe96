"""Predict every figure of a file of published ones, a line each, and say how near they come.

Each line has the prediction, its 90% interval, the published figure, their ratio, and what the row
was read as; or why it cannot be predicted. Summaries follow: counts, times with each paper left out
whole, times with one row of a paper for a framework's overhead, intervals, and order in groups.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.common import record
from tests.benchmarks.published_cases import Case, cases_of
from tests.benchmarks.published_counts import count_value
from tests.benchmarks.published_fit import (
    Fit,
    Timed,
    from_first_rows,
    half_widths,
    off_by,
)
from tests.benchmarks.published_predict import priced
from tests.benchmarks.published_rows import read_rows
from tests.benchmarks.published_score import (
    RATES,
    Scored,
    groups,
    in_order,
    median_off,
    share,
)

Emit = Callable[..., Any]


def fitted_rows() -> frozenset[str]:
    """Rows that the graph laws were fitted to, which are not scored."""
    from tests.benchmarks.fit_graph_laws import ROWS

    return frozenset(ROWS)


@dataclass(slots=True)
class Found:
    """All rows with what was made of them."""

    scored: list[Scored] = field(default_factory=list[Scored])
    timed: list[Timed] = field(default_factory=list[Timed])
    origins: dict[str, str] = field(default_factory=dict[str, str])
    """Whose overhead a time was predicted with, by row."""
    one_row: dict[str, float | None] = field(default_factory=dict[str, float | None])
    reasons: dict[str, str] = field(default_factory=dict[str, str])


def predict(cases: Sequence[Case]) -> Found:
    """Predict all rows; what fails has a reason instead."""
    found, counted = Found(), list[tuple[Case, float]]()
    for case in cases:
        if case.reason:
            found.reasons[case.row.id] = case.reason
            continue
        try:
            if case.asked.kind in ("time", "rate"):
                found.timed.append(_timed(case))
            else:
                counted.append((case, count_value(case)))
        except Exception as error:  # a row must not end the others
            found.reasons[case.row.id] = f"not predicted: {type(error).__name__}: {error}"
    found.scored += _counts(counted) + _times(found)
    return found


def _timed(case: Case) -> Timed:
    if case.row.value <= 0:
        raise ValueError(f"expected a time above 0, found {case.row.value:g}")
    return Timed(priced=priced(case), value=case.row.value)


def _counts(counted: Sequence[tuple[Case, float]]) -> list[Scored]:
    """Counts with intervals: points of shares, factors of numbers, each as others were off."""
    made: list[Scored] = []
    for of_shares in (True, False):
        mine = [(c, v) for c, v in counted if (c.asked.kind in RATES) == of_shares]
        papers = [c.paper for c, _ in mine]
        if of_shares:
            off = [(v - c.row.value) * c.asked.scale for c, v in mine]
        else:
            off = [off_by(v, c.row.value) if c.row.value > 0 else 0.0 for c, v in mine]
        widths = half_widths(papers, off)
        for case, value in mine:
            width = widths[case.paper]
            if of_shares:
                points = min(1.0, width) / case.asked.scale
                low, high = value - points, value + points
            else:
                low, high = value * 2**-width, value * 2**width
            made.append(Scored(case=case, value=value, low=low, high=high))
    return made


def _times(found: Found) -> list[Scored]:
    """Times, each with its paper left out."""
    fit, made = Fit(found.timed), list[Scored]()
    left = [fit.left_out(row) for row in found.timed]
    off = [off_by(each.value, row.value) for each, row in zip(left, found.timed, strict=True)]
    widths = half_widths([row.paper for row in found.timed], off)
    scaled = from_first_rows(found.timed, [each.value for each in left])
    for row, each, other in zip(found.timed, left, scaled, strict=True):
        case, width = row.priced.case, widths[row.paper]
        found.origins[case.row.id] = each.origin
        found.one_row[case.row.id] = other
        low, high = each.value * 2**-width, each.value * 2**width
        made.append(Scored(case=case, value=each.value, low=low, high=high))
    return made


def report(cases: Sequence[Case], found: Found, emit: Emit, fitted: frozenset[str]) -> None:
    """Emit a line per row, in the file's order, and then the summaries."""
    by_id = {each.case.row.id: each for each in found.scored}
    for case in cases:
        row, each = case.row, by_id.get(case.row.id)
        words: dict[str, Any] = {"paper": case.paper, "mapped": case.mapped()}
        if each is None:
            emit(row.id, None, row.unit, baseline=row.value, why=found.reasons[row.id], **words)
            continue
        if row.id in found.origins:
            words |= {"overhead": found.origins[row.id], "with_one_row": found.one_row[row.id]}
        words |= {"near": each.near} if each.is_count else {}
        words |= {"fitted": True} if row.id in fitted else {}
        emit(
            row.id,
            each.value,
            row.unit,
            baseline=row.value,
            ratio=each.value / row.value if row.value else None,
            interval=[each.low, each.high],
            covered=each.covered,
            quantity=row.quantity,
            **words,
        )
    summarise(found, emit, fitted, len(cases))


def summarise(found: Found, emit: Emit, fitted: frozenset[str], total: int) -> None:
    """Emit how near the predictions come."""
    emit(
        "csv_rows", len(found.scored), "rows", baseline=total, ratio=len(found.scored) / total,
        reasons=dict(Counter(found.reasons.values())),
    )  # fmt: skip
    counts = [x for x in found.scored if x.is_count and x.case.row.id not in fitted]
    _emit_share(emit, "csv_counts_near", [x.near for x in counts], by=_by_kind(counts))
    every_count = [x for x in found.scored if x.is_count]
    _emit_order(emit, "csv_counts_order", every_count)
    times = [x for x in found.scored if x.case.row.id in found.origins.keys() - fitted]
    if times:
        _emit_times(found, times, emit)
    _emit_share(emit, "csv_intervals_hold", [x.covered for x in times + counts])


def _emit_times(found: Found, times: list[Scored], emit: Emit) -> None:
    whole, parts = median_off([x.value for x in times], [x.published for x in times]), {}
    for name, key in (("by_system", _system), ("by_paper", _paper), ("by_stages", _stages)):
        split: dict[str, list[Scored]] = defaultdict(list)
        for each in times:
            split[key(each)].append(each)
        parts[name] = {
            k: [round(median_off([x.value for x in v], [x.published for x in v]), 2), len(v)]
            for k, v in sorted(split.items())
        }
    emit("csv_times_left_out", whole, "median |log2|", baseline=0.4, rows=len(times), **parts)
    again = [(x, v) for x in times if (v := found.one_row[x.case.row.id]) is not None]
    if again:
        off = median_off([v for _, v in again], [x.published for x, _ in again])
        emit("csv_times_one_row", off, "median |log2|", baseline=0.3, rows=len(again))
    _emit_order(emit, "csv_times_order", times)
    _emit_share(emit, "csv_times_covered", [x.covered for x in times])


def _system(each: Scored) -> str:
    return each.case.system


def _paper(each: Scored) -> str:
    return each.case.paper


def _stages(each: Scored) -> str:
    return "+".join(each.case.asked.stages)


def _by_kind(counts: Sequence[Scored]) -> dict[str, list[int]]:
    split: dict[str, list[bool]] = defaultdict(list)
    for each in counts:
        split[each.case.asked.kind].append(each.near)
    return {kind: list(share(near)) for kind, near in sorted(split.items())}


def _emit_share(emit: Emit, name: str, right: Sequence[bool], **words: Any) -> None:
    if right:
        good, total = share(right)
        emit(name, good, "rows", baseline=total, ratio=good / total, **words)


def _emit_order(emit: Emit, name: str, scored: Sequence[Scored]) -> None:
    asked = groups(scored)
    wrong = [[x.case.row.id for x in g] for g in asked if not in_order(g)]
    if asked:
        right = len(asked) - len(wrong)
        ids = [f"{g[0]} .. {g[-1]} ({len(g)})" for g in wrong]
        emit(name, right, "groups", baseline=len(asked), ratio=right / len(asked), wrong=ids)


def run(path: Path, emit: Emit = record) -> tuple[list[Case], Found]:
    """Predict a file and emit all lines."""
    cases = cases_of(read_rows(path))
    found = predict(cases)
    report(cases, found, emit, fitted_rows())
    return cases, found


def log_ratio(each: Scored) -> float:
    """log2 of predicted over published; 0 where nothing was published."""
    return math.log2(each.value / each.published) if each.published > 0 < each.value else 0.0
