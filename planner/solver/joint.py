"""`joint`: features and topology placed together, for the least step over shared links.

    buckets -> linear programme (a child process; one sort where that is proved exact)
            -> whole items within every budget -> small exchanges -> score, bound, prices

The one evaluator scores the result; the bound comes from the programme's prices by weak duality,
so neither depends on what the solver claims (formulas 6).
"""

from dataclasses import dataclass

import numpy as np

from planner.placement.layout import Instance, Layout
from planner.placement.network import Goal, Rows, objective_rows, undominated
from planner.placement.score import Score, read_bytes, score
from planner.solver.buckets import make_buckets
from planner.solver.exchange import exchange
from planner.solver.groups import find_groups
from planner.solver.lagrange import lagrangian_bound
from planner.solver.priced import binding, can_fill, fill_priced
from planner.solver.program import Prices
from planner.solver.realise import read_seconds, realise
from planner.solver.relaxation import SECONDS, Relaxed, relax

UNKNOWNS = 2400
"""Buckets times groups that are aimed at: a programme of this size takes well under a second."""
REFILLS = 3
"""Weights of rows at which cliques are filled item by item."""
ENOUGH = 1e-4
"""A gap below which no other weights are tried."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Joint:
    """A placement with what is known of it."""

    layout: Layout
    score: Score
    bound: float
    """No placement scores less."""
    relaxed: Relaxed

    @property
    def gap(self) -> float:
        """(score - bound) / bound; 0 where both are 0."""
        excess = self.score.seconds - self.bound
        if excess <= 1e-12 * abs(self.score.seconds):
            return 0.0
        return excess / self.bound if self.bound > 0 else float("inf")


def place_joint(
    instance: Instance,
    goal: Goal = "pipelined",
    *,
    limit: int | None = None,
    seconds: float = SECONDS,
    solver: str = "",
) -> Joint:
    """Place by the unified model.

    Args:
        instance: the problem.
        goal: objective.
        limit: buckets per kind; None: by the number of groups.
        seconds: limit of the solver; past it the density order places.
        solver: highs | cbc | sort | density; empty: sort where it is exact, else what is installed.
    """
    rows = undominated(objective_rows(instance.network, goal))
    groups = find_groups(instance, rows)
    if limit is None:
        limit = max(48, min(256, UNKNOWNS // (len(groups.groups) * len(instance.kinds))))
    largest = max(instance.device_bytes)
    buckets = [make_buckets(kind, limit, largest=largest) for kind in instance.kinds]
    relaxed = relax(instance, rows, groups, buckets, goal=goal, seconds=seconds, solver=solver)
    layout = realise(instance, rows, groups, buckets, relaxed)
    bound = lagrangian_bound(instance, rows, relaxed.prices)
    if can_fill(instance, groups):
        layout, bound = _refill(instance, rows, relaxed, layout, bound)
    return Joint(layout=layout, score=score(instance, layout, goal), bound=bound, relaxed=relaxed)


def _refill(
    instance: Instance, rows: Rows, relaxed: Relaxed, layout: Layout, bound: float
) -> tuple[Layout, float]:
    """The better of the layout and of cliques filled item by item, and the better bound.

    First at the programme's weights, then at those of the slowest row alone, which the other
    cliques cannot help.
    """
    reads = read_bytes(instance, layout)
    value = float(rows.values(reads).max())
    weights = relaxed.prices.rows
    for _ in range(REFILLS):
        priced = Prices(rows=weights, device=relaxed.prices.device, host=0.0)
        seconds = read_seconds(instance, rows, priced)
        filled = fill_priced(instance, weights, seconds)
        bound = max(bound, lagrangian_bound(instance, rows, filled.prices))
        other = exchange(instance, rows, filled.layout, seconds)
        found = read_bytes(instance, other)
        if float(rows.values(found).max()) < value:
            reads, value, layout = found, float(rows.values(found).max()), other
        slowest = binding(rows, reads)
        if value <= bound * (1 + ENOUGH) or np.array_equal(slowest, weights):
            break
        weights = slowest
    return layout, bound


def bound_of(instance: Instance, goal: Goal, *, limit: int = 128) -> float:
    """A lower bound of the objective over all placements, without making one."""
    rows = undominated(objective_rows(instance.network, goal))
    groups = find_groups(instance, rows)
    largest = max(instance.device_bytes)
    buckets = [make_buckets(kind, limit, largest=largest) for kind in instance.kinds]
    relaxed = relax(instance, rows, groups, buckets, goal=goal)
    return lagrangian_bound(instance, rows, relaxed.prices)
