"""Fit frameworks' overheads to published seconds, each paper left out in turn, and say how far off.

A framework has one overhead (`planner.cost.systems.SystemOverhead`). For a paper it is fitted to
the rows of all others: first one of its class, each paper weighing alike, by the least mean |log2 ratio|;
from there one of the framework, where other papers have rows of it, with a charge for each doubling
of a parameter. Where none has, the class's stands. A second scoring scales a framework's seconds in
a paper by the ratio of its first row there, which is then not scored.

Half-widths of intervals are the 90th percentile of what the other papers, each left out, were off.
"""

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gnnplan.planner.cost.systems import SystemOverhead
from tests.benchmarks.published_predict import Priced

STARTS = {
    "cpu_loader": SystemOverhead(
        batch_seconds=5e-3, edge_seconds=3e-7, row_share=0.5, compute_factor=2.0, epoch_seconds=0.5
    ),
    "uva": SystemOverhead(batch_seconds=4e-3, edge_seconds=1e-9, row_share=0.5, compute_factor=2.0),
    "gpu_cache": SystemOverhead(
        batch_seconds=2e-3, edge_seconds=1e-9, row_share=0.6, compute_factor=2.0
    ),
    "full_graph": SystemOverhead(batch_seconds=5e-2, row_share=0.5, compute_factor=2.0),
    "disk": SystemOverhead(
        batch_seconds=5e-3, edge_seconds=1e-8, row_share=0.3, compute_factor=2.0
    ),
}
"""Where a class's search begins."""
BOUNDS = {
    "batch_seconds": (1e-5, 1.0),
    "edge_seconds": (1e-12, 1e-5),
    "row_share": (0.01, 1.0),
    "compute_factor": (0.5, 16.0),
    "epoch_seconds": (1e-3, 30.0),
}
STEPS = (8.0, 3.0, 1.6, 1.25, 1.1)
"""Factors by which a parameter is tried up and down, coarse first."""
SWEEPS = 3
CHARGE = 0.05
"""Of a doubling of a framework's parameter away from its class's, beside mean |log2 ratio|."""
LEAST_ROWS = 2
COVER = 0.9
LEAST_WIDTH, USUAL_WIDTH = 0.1, 1.5
"""Half-width of an interval in log2 at least, and where no other paper has been priced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A published time and what it is predicted from."""

    priced: Priced
    value: float

    @property
    def paper(self) -> str:
        """Its publication."""
        return self.priced.case.paper

    @property
    def system(self) -> str:
        """Its framework."""
        return self.priced.case.system

    @property
    def kind(self) -> str:
        """Its framework's class."""
        return self.priced.system.kind

    def off(self, overhead: SystemOverhead) -> float:
        """log2 of predicted over published."""
        return math.log2(max(1e-12, self.priced.value(overhead)) / self.value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """A time's prediction with its paper left out."""

    value: float
    origin: str
    """Whose overhead: the system's or its class's."""


def weighted_loss(rows: Sequence[Timed], overhead: SystemOverhead) -> float:
    """Mean |log2 ratio| in which every paper weighs alike."""
    by_paper: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_paper[row.paper].append(abs(row.off(overhead)))
    return statistics.fmean(statistics.fmean(each) for each in by_paper.values())


def _doublings(a: SystemOverhead, b: SystemOverhead) -> float:
    return sum(
        abs(math.log2(max(getattr(a, name), low) / max(getattr(b, name), low)))
        for name, (low, _) in BOUNDS.items()
    )


def descend(rows: Sequence[Timed], start: SystemOverhead, charge: float) -> SystemOverhead:
    """Search one parameter after another, with steps that shrink."""

    def loss(overhead: SystemOverhead) -> float:
        return weighted_loss(rows, overhead) + charge * _doublings(overhead, start)

    best, least = start, loss(start)
    for factor in STEPS:
        for _ in range(SWEEPS):
            before = least
            for name, (low, high) in BOUNDS.items():
                for step in (factor, 1 / factor):
                    value = max(low, getattr(best, name)) * step
                    trial = replace(best, **{name: min(high, max(low, value))})
                    found = loss(trial)
                    if found < least - 1e-9:
                        best, least = trial, found
            if before - least < 1e-6:
                break
    return best


class Fit:
    """Overheads of classes and frameworks, from any choice of papers."""

    def __init__(self, rows: Sequence[Timed]) -> None:
        self.rows = list(rows)
        self.class_overhead = functools.cache(self._class_overhead)
        self.overhead = functools.cache(self._overhead)

    def _rows(self, without: str, **same: str) -> list[Timed]:
        return [
            row
            for row in self.rows
            if row.paper != without and all(getattr(row, k) == v for k, v in same.items())
        ]

    def _class_overhead(self, kind: str, without: str) -> SystemOverhead:
        rows = self._rows(without, kind=kind)
        return descend(rows, STARTS[kind], 0.0) if rows else STARTS[kind]

    def _overhead(self, system: str, kind: str, without: str) -> tuple[SystemOverhead, str]:
        """The framework's, from its rows in other papers; else its class's."""
        usual = self.class_overhead(kind, self._key(kind, without))
        rows = self._rows(without, system=system, kind=kind)
        if len(rows) < LEAST_ROWS:
            return usual, "class"
        return descend(rows, usual, CHARGE), "system"

    def _key(self, kind: str, without: str) -> str:
        """The paper left out where the class has rows of it; else none: the same fit."""
        return without if any(r.paper == without and r.kind == kind for r in self.rows) else ""

    def left_out(self, row: Timed) -> Fitted:
        """Predict a row from other papers alone."""
        overhead, origin = self.overhead(row.system, row.kind, row.paper)
        return Fitted(value=row.priced.value(overhead), origin=origin)


def off_by(value: float, published: float) -> float:
    """log2 of predicted over published, of positive figures."""
    return math.log2(max(1e-12, value) / published)


def half_widths(papers: Sequence[str], off: Sequence[float]) -> dict[str, float]:
    """Half-width of each paper's intervals in log2, from what other papers were off.

    Each of the others weighs alike: the width is the weighted 90th percentile of |log2 ratio|.
    """
    found: dict[str, float] = {}
    for paper in set(papers):
        others: dict[str, list[float]] = defaultdict(list)
        for name, each in zip(papers, off, strict=True):
            if name != paper:
                others[name].append(abs(each))
        found[paper] = max(LEAST_WIDTH, _percentile(others)) if others else USUAL_WIDTH
    return found


def _percentile(by_paper: Mapping[str, Sequence[float]]) -> float:
    weighed = sorted((x, 1 / len(each)) for each in by_paper.values() for x in each)
    total, sum_ = sum(weight for _, weight in weighed), 0.0
    for value, weight in weighed:
        sum_ += weight
        if sum_ >= COVER * total:
            return value
    return weighed[-1][0]


def from_first_rows(rows: Sequence[Timed], values: Sequence[float]) -> list[float | None]:
    """Values scaled by the ratio of a framework's first row in a paper; None for those rows."""
    factors: dict[tuple[str, str], float] = {}
    found: list[float | None] = []
    for row, value in zip(rows, values, strict=True):
        key = (row.paper, row.system)
        if key not in factors:
            factors[key] = row.value / max(1e-12, value)
            found.append(None)
        else:
            found.append(value * factors[key])
    return found
