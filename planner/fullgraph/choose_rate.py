"""Which p, and why: the rule of docs/formulas.md 3.6, one p for all candidates that are compared.

    p_mem   largest p that fits every rank and the host
    p_bw    largest p whose exchange the work beside it hides; 0 without overlap
    p_var   smallest p whose added variance is tolerated, for the planned partition
    p     = min(min(1, p_mem), max(p_var, min(1, p_bw)))

Epochs of different p are not comparable by their seconds, so candidates are compared at one p, the
largest p_var over the planned cuts; the chosen one is then raised to its own p_bw, which costs it
nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.fullgraph.bytes import columns_per_row
from planner.fullgraph.candidate import PLANNED, FullCandidate
from planner.fullgraph.memory import memory_use, rank_parts
from planner.fullgraph.price import (
    ITEM_BYTES,
    FullRequest,
    busiest_rows,
    exchange_table,
    exchanged_widths,
    overlap_share,
    rank_seconds,
    table_seconds,
)
from planner.fullgraph.profile import CutProfile
from planner.fullgraph.sampling_rate import choose_keep, p_bandwidth, p_memory
from runtime.plan.schema import MemoryUse

LARGEST_SAMPLED = 0.999
"""In the place of p = 1 where a slope is taken: sampled epochs hold more lists than whole ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """A candidate's bounds on p, and what the rule makes of them."""

    value: float | None
    """None: no p fits."""
    p_mem: float
    p_bw: float
    p_var: float
    accurate: bool

    @property
    def words(self) -> str:
        """Why this p, in one sentence."""
        if self.value is None:
            return f"no p fits: memory allows {self.p_mem:.3g}"
        bounds = f"p_var {self.p_var:.3g}, p_mem {self.p_mem:.3g}, p_bw {self.p_bw:.3g}"
        if not self.accurate:
            return (
                f"p = {self.value:.3g}, all that memory allows ({bounds}): accuracy budget not met"
            )
        if self.value >= 1:
            return f"p = 1: the whole exchange hides behind compute ({bounds})"
        if self.p_bw > self.p_var:
            return f"p = {self.value:.3g}, the largest whose exchange is hidden ({bounds})"
        return f"p = {self.value:.3g}, the least that the accuracy budget allows ({bounds})"


def least_keep(profiles: Sequence[CutProfile]) -> float:
    """p_var that all candidates are compared at: the largest over the planned cuts."""
    found = [p.variance.least_keep for p in profiles if p.cut.partitioner == PLANNED]
    return max(found, default=0.0)


def keep_of(
    request: FullRequest, profile: CutProfile, candidate: FullCandidate, p_var: float
) -> Keep:
    """The rule for one candidate.

    Args:
        request: budgets and machine.
        profile: of its cut.
        candidate: draws, overlap, first layer; its own p does not matter.
        p_var: from `least_keep`.
    """
    p_mem = memory_keep(request, profile, candidate)
    p_bw = bandwidth_keep(request, profile, candidate)
    chosen = choose_keep(p_var, p_mem, p_bw)
    value = None if chosen.keep is None else float(chosen.keep)
    return Keep(value=value, p_mem=p_mem, p_bw=p_bw, p_var=p_var, accurate=chosen.accurate)


def memory_keep(request: FullRequest, profile: CutProfile, candidate: FullCandidate) -> float:
    """p_mem: the largest p that fits; negative where even p = 0 does not.

    Bytes are convex in p, so the chord that the rule takes is on the safe side.
    """
    none, most = (
        _use(request, profile, candidate.with_keep(keep)) for keep in (0.0, LARGEST_SAMPLED)
    )
    bounds: list[float] = []
    for name, use in none.items():
        slope = (most[name].total - use.total) / LARGEST_SAMPLED
        bounds.append(float(p_memory(use.capacity, use.total, use.total + slope)))
    return min(bounds)


def _use(
    request: FullRequest, profile: CutProfile, candidate: FullCandidate
) -> dict[str, MemoryUse]:
    parts = rank_parts(profile, candidate, request.workload)
    launcher = profile.process.launcher_bytes
    return memory_use(parts, request.graph, request.machine, request.budgets, launcher)


def bandwidth_keep(request: FullRequest, profile: CutProfile, candidate: FullCandidate) -> float:
    """p_bw by [C13], with the work beside an epoch that keeps nothing (which is safe)."""
    machine, cut, sizes = request.machine, candidate.cut, profile.sizes
    eta = overlap_share(machine, cut.ranks, cut.threads, overlap=candidate.overlap)
    known = candidate.settings.precompute_first_layer
    row = ITEM_BYTES * columns_per_row(profile.widths, precomputed=known)
    if cut.ranks == 1 or row == 0 or busiest_rows(sizes, 1.0) == 0:
        return 1.0
    idle = rank_seconds(profile, candidate.with_keep(0.0).settings)
    speed = _bytes_per_second(request, profile, candidate)
    found = [
        p_bandwidth(part, eta * sum(mine.windows), speed, row)
        for part, mine in zip(sizes, idle, strict=True)
    ]
    return min((float(p) for p in found if p is not None), default=1.0)


def _bytes_per_second(request: FullRequest, profile: CutProfile, candidate: FullCandidate) -> float:
    """Of the all-to-all at the mean size of an epoch's exchanges."""
    ranks = candidate.cut.ranks
    known = candidate.settings.precompute_first_layer
    columns = exchanged_widths(profile.widths, precomputed=known)
    table = request.machine.table(exchange_table(request.machine, overlap=candidate.overlap))
    size = busiest_rows(profile.sizes, 1.0) * ITEM_BYTES * sum(columns) / len(columns)
    return size / table_seconds(table, size * ranks / (ranks - 1), ranks)
