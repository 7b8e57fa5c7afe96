"""`joint`: features and topology placed together, for the least step over shared links.

    buckets -> linear programme (a child process; one sort where that is proved exact)
            -> whole items within every budget -> small exchanges -> score, bound, prices

Where cliques draw from laws of their own, buckets would have to tell apart who asks for an item as
well as how often, and become coarse: there mixtures of whole fills take the buckets' place. The one
evaluator scores the result; the bound comes from the programme's prices by weak duality, so neither
depends on what the solver claims (formulas 6).
"""

from dataclasses import dataclass

from planner.parallel import side_by_side
from planner.placement.evaluate import Score, score
from planner.placement.layout import Instance, Layout
from planner.placement.lp.bound import lagrangian_bound
from planner.placement.lp.buckets import Buckets, find_groups, make_buckets
from planner.placement.lp.exchange import exchange
from planner.placement.lp.mixture import can_fill, mix_fills, round_mixture
from planner.placement.lp.relaxation import SECONDS, Relaxed, relax
from planner.placement.lp.rounding import read_seconds, realise
from planner.placement.network import Goal, Rows, objective_rows, undominated

UNKNOWNS = 2400
"""Buckets times groups that are aimed at: a programme of this size takes well under a second."""


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
        solver: highs | cbc | sort | density, over buckets; empty: mixtures of fills where they
            serve, sort where it is exact, else what is installed.
    """
    rows = undominated(objective_rows(instance.network, goal))
    groups = find_groups(instance, rows)
    if not solver and can_fill(instance, groups):
        mixed = _mix(instance, rows)
        if mixed is not None:
            layout, relaxed = mixed
            bound = lagrangian_bound(instance, rows, relaxed.prices)
            found = score(instance, layout, goal)
            return Joint(layout=layout, score=found, bound=bound, relaxed=relaxed)
    if limit is None:
        limit = max(48, min(256, UNKNOWNS // (len(groups.groups) * len(instance.kinds))))
    largest = max(instance.device_bytes)
    buckets = all_buckets(instance, limit, largest)
    relaxed = relax(instance, rows, groups, buckets, goal=goal, seconds=seconds, solver=solver)
    layout = realise(instance, rows, groups, buckets, relaxed)
    bound = lagrangian_bound(instance, rows, relaxed.prices)
    return Joint(layout=layout, score=score(instance, layout, goal), bound=bound, relaxed=relaxed)


def all_buckets(instance: Instance, limit: int, largest: int) -> list[Buckets]:
    """Each kind's items in buckets (`make_buckets`)."""
    return side_by_side(
        lambda kind: make_buckets(kind, limit, largest=largest),
        instance.kinds,
        items=max(kind.num_items for kind in instance.kinds),
    )


def _mix(instance: Instance, rows: Rows) -> tuple[Layout, Relaxed] | None:
    """Cliques filled item by item at the weights that bound best; None without a solver."""
    mixture = mix_fills(instance, rows)
    if mixture is None:
        return None
    seconds = read_seconds(instance, rows, mixture.prices)
    layout = exchange(instance, rows, round_mixture(instance, mixture), seconds)
    relaxed = Relaxed(
        seconds=mixture.value,
        shares=[],
        reads=mixture.reads,
        prices=mixture.prices,
        row_names=rows.names,
        solver="columns",
        status="optimal" if mixture.met else f"stopped {mixture.value / mixture.bound - 1:.1e} off",
    )
    return layout, relaxed


def bound_of(instance: Instance, goal: Goal, *, limit: int = 128) -> float:
    """A lower bound of the objective over all placements, without making one."""
    rows = undominated(objective_rows(instance.network, goal))
    groups = find_groups(instance, rows)
    if can_fill(instance, groups):
        mixture = mix_fills(instance, rows)
        if mixture is not None:
            return lagrangian_bound(instance, rows, mixture.prices)
    largest = max(instance.device_bytes)
    buckets = all_buckets(instance, limit, largest)
    relaxed = relax(instance, rows, groups, buckets, goal=goal)
    return lagrangian_bound(instance, rows, relaxed.prices)
