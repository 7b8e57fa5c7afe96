"""Score predictions of published figures: shares that are near, order in groups, intervals.

A group holds rows of one source that ask for the same figure and differ in one setting alone. Its
order is right where each pair that is printed further apart than equal machines differ is predicted
in the printed order; pairs that are printed closer than that say nothing.
"""

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.published_cases import Case

NEAR_SHARE, NEAR_POINTS = 0.05, 0.03
NOISE = 0.05
"""Two figures closer than this share are printed alike: equal boxes differ by 2 to 7%."""
TIE = 0.001
"""Predictions closer than this share have no order."""
RATES = ("hit", "miss", "touched")
TOGETHER = ({"model", "fanouts"}, {"machine", "cache"}, {"machine", "size"}, {"system", "cache"})
"""Settings that change together, as one choice of the source: a model with its fan-outs, a machine
with where rows fit in it, GPUs with a preset that has as many, a system with its cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A row with its prediction."""

    case: Case
    value: float
    low: float
    high: float

    @property
    def published(self) -> float:
        """The printed figure."""
        return self.case.row.value

    @property
    def is_count(self) -> bool:
        """Whether no time enters the figure."""
        return self.case.asked.kind not in ("time", "rate", "memory")

    @property
    def near(self) -> bool:
        """Whether a count is within 3 points or 5%."""
        ours, printed = self.value, self.published
        if self.case.asked.kind in RATES:
            points = abs(ours - printed) * self.case.asked.scale
            return points <= NEAR_POINTS or abs(ours - printed) <= NEAR_SHARE * printed
        return abs(ours - printed) <= NEAR_SHARE * printed

    @property
    def covered(self) -> bool:
        """Whether the interval holds the printed figure."""
        return self.low <= self.published <= self.high


def _settings(case: Case) -> dict[str, Any]:
    """What a source sets, mostly as its columns say; notes tell workers, sampler and kappa."""
    row = case.row
    return {
        "system": row.system,
        "machine": case.machine.partition(":")[0],
        "size": (row.gpus, row.hosts),
        "graph": row.dataset,
        "model": (row.model, row.layers, row.hidden),
        "fanouts": row.fanouts,
        "batch": case.batch,
        "cache": row.cache,
        "sampler": (case.sampler, case.cache.kappa),
        "workers": case.workers,
        "epoch": case.epoch,
    }


def _asked(case: Case, alone: bool) -> tuple[Any, ...]:
    asked, source = case.asked, case.paper if alone else case.row.source
    return (source, asked.kind, asked.stages, asked.per, asked.cache, case.row.unit)


def groups(scored: Sequence[Scored]) -> list[list[Scored]]:
    """Rows of one source that differ in one setting alone, each largest such set once."""
    by_asked: dict[tuple[Any, ...], list[Scored]] = defaultdict(list)
    sources = Counter(each.case.row.source for each in scored)
    for each in scored:  # a source of one row is a part of its paper
        by_asked[_asked(each.case, sources[each.case.row.source] == 1)].append(each)
    found: dict[frozenset[str], list[Scored]] = {}
    for rows in by_asked.values():
        settings = {id(each): _settings(each.case) for each in rows}
        for varied in [*({name} for name in _settings(rows[0].case)), *TOGETHER]:
            alike: dict[str, list[Scored]] = defaultdict(list)
            for each in rows:
                rest = {k: v for k, v in settings[id(each)].items() if k not in varied}
                alike[repr(sorted(rest.items(), key=lambda x: x[0]))].append(each)
            for group in alike.values():
                names = frozenset(each.case.row.id for each in group)
                if len(names) > 1 and _differs(group):
                    found.setdefault(names, group)
    return [g for names, g in found.items() if not any(names < other for other in found)]


def _differs(group: Sequence[Scored]) -> bool:
    """Whether any two are printed apart."""
    values = [each.published for each in group]
    return max(values) - min(values) > NOISE * max(map(abs, values))


def in_order(group: Sequence[Scored]) -> bool:
    """Whether every pair that is printed apart is predicted in that order."""
    for a, b in itertools.combinations(group, 2):
        if abs(a.published - b.published) <= NOISE * max(abs(a.published), abs(b.published)):
            continue
        if _settings(a.case) == _settings(b.case):
            continue  # equal boxes
        if abs(a.value - b.value) <= TIE * max(abs(a.value), abs(b.value)):
            return False
        if (a.value > b.value) != (a.published > b.published):
            return False
    return True


def share(right: Sequence[bool]) -> tuple[int, int]:
    """How many of how many."""
    return sum(right), len(right)


def median_off(values: Sequence[float], published: Sequence[float]) -> float:
    """Median |log2 ratio|."""
    return statistics.median(
        abs(math.log2(max(1e-12, a) / b)) for a, b in zip(values, published, strict=True)
    )
