"""Fit frameworks' overheads to published seconds, each paper left out in turn, and say how far off.

A framework has one overhead (`planner.cost.systems.SystemOverhead`). For a paper it is fitted to
the rows of the same version in all other papers, else of any version, by the least mean |log2
ratio| and a charge for each doubling of a parameter away from what such software is assumed to
take. Where no other paper has rows of it, each parameter is the median over its class's frameworks,
those of other papers and the assumption. A second scoring scales a framework's seconds in a paper
by the ratio of its first row there, which is then not scored.

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
"""What software of a class is assumed to take, where each search begins."""
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
CHARGE = 0.1
"""Of a doubling of a parameter away from the assumed, beside mean |log2 ratio|."""
LEAST_ROWS = 1
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
        """Its framework, under its own name."""
        return self.priced.case.framework

    @property
    def version(self) -> str:
        """Its framework with its version."""
        return f"{self.system} {self.priced.case.version}"

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
    """Whose overhead: that of the version, of the system in any version, or of its class."""


def weighted_loss(rows: Sequence[Timed], overhead: SystemOverhead) -> float:
    """Mean |log2 ratio|, in which a paper weighs as the root of its rows."""
    by_paper: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_paper[row.paper].append(abs(row.off(overhead)))
    weights = [math.sqrt(len(each)) for each in by_paper.values()]
    return statistics.fmean(map(statistics.fmean, by_paper.values()), weights)


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
    """Overheads of frameworks and classes, from any choice of papers."""

    def __init__(self, rows: Sequence[Timed]) -> None:
        self.rows = list(rows)
        self.fitted = functools.cache(self._fitted)

    def _fitted(self, names: str, name: str, kind: str, without: str) -> SystemOverhead | None:
        """An overhead from other papers' rows; None where there are too few."""
        rows = [
            row
            for row in self.rows
            if row.paper != without and getattr(row, names) == name and row.kind == kind
        ]
        if len(rows) < LEAST_ROWS:
            return None
        return descend(rows, STARTS[kind], CHARGE)

    def class_overhead(self, kind: str, without: str) -> SystemOverhead:
        """The median of each parameter over a class's frameworks and the assumption."""
        systems = sorted({row.system for row in self.rows if row.kind == kind})
        known = [self._of("system", name, kind, without) for name in systems]
        every = [STARTS[kind], *(each for each in known if each is not None)]
        return SystemOverhead(
            **{name: statistics.median(getattr(each, name) for each in every) for name in BOUNDS}
        )

    def overhead(self, row: Timed) -> tuple[SystemOverhead, str]:
        """What a row is predicted with, and whose it is."""
        for names in ("version", "system"):
            own = self._of(names, getattr(row, names), row.kind, row.paper)
            if own is not None:
                return own, names
        return self.class_overhead(row.kind, row.paper), "class"

    def _of(self, names: str, name: str, kind: str, without: str) -> SystemOverhead | None:
        """The fit without a paper; one that has no such rows leaves the same fit as none."""
        left = any(r.paper == without and getattr(r, names) == name for r in self.rows)
        return self.fitted(names, name, kind, without if left else "")

    def left_out(self, row: Timed) -> Fitted:
        """Predict a row from other papers alone."""
        overhead, origin = self.overhead(row)
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
