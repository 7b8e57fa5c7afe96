"""`joint`: features and topology placed for the least step over shared links (formulas 6).

    buckets -> linear programme (a child process; one sort where that is proved exact)
            -> whole items within every budget -> small exchanges -> score, bound, prices

Where cliques draw from laws of their own, buckets would have to tell apart who asks for an item as
well as how often, and become coarse: there mixtures of whole fills take the buckets' place. The one
evaluator scores the result; the bound comes from the programme's prices by weak duality, so neither
depends on what the solver claims. A published policy that scores better is taken instead.
"""

from dataclasses import dataclass, replace

from gnnplan.planner.placement.costs import Goal, ObjectiveRows, drop_dominated, objective_rows
from gnnplan.planner.placement.evaluate import PlacementScore, evaluate_rows, score
from gnnplan.planner.placement.lp.formulate import Buckets, Groups, find_groups, make_buckets
from gnnplan.planner.placement.lp.improve import exchange
from gnnplan.planner.placement.lp.mixture import can_fill, mix_fills, round_mixture
from gnnplan.planner.placement.lp.relax import SECONDS, Relaxation, lagrangian_bound, relax
from gnnplan.planner.placement.lp.round_solution import read_seconds, round_shares
from gnnplan.planner.placement.placement import Placement
from gnnplan.planner.placement.policies.policy import Knowledge, place_by
from gnnplan.planner.placement.policies.registry import PLACEMENT_POLICIES
from gnnplan.planner.placement.policies.song_jiang import sort_key
from gnnplan.planner.placement.problem import PlacementProblem
from gnnplan.runtime.process import side_by_side

JOINT = "joint"
UNKNOWNS = 2400
"""Buckets times groups that are aimed at: a programme of this size takes well under a second."""
BOUND_BUCKETS = 128
"""Buckets per kind for a bound alone."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class JointPlacement:
    """A placement by the programme, its score, and what bounds it."""

    placement: Placement
    score: PlacementScore
    bound: float
    """Score below which no placement comes."""
    relaxed: Relaxation

    @property
    def gap(self) -> float:
        """(score - bound) / bound; 0 where both are 0."""
        excess = self.score.seconds - self.bound
        if excess <= 1e-12 * abs(self.score.seconds):
            return 0.0
        return excess / self.bound if self.bound > 0 else float("inf")


def place_joint(
    problem: PlacementProblem,
    goal: Goal = "pipelined",
    *,
    limit: int | None = None,
    seconds: float = SECONDS,
    solver: str = "",
) -> JointPlacement:
    """Place by the linear programme under an objective.

    Past `seconds` of the solver the density order places. The buckets per kind follow from the
    number of groups where no `limit` is given; solver is highs, cbc, sort or density, over buckets,
    or empty: mixtures of fills where they serve, sort where it is exact, else what is installed.
    """
    rows = drop_dominated(objective_rows(problem.network, goal))
    groups = find_groups(problem, rows)
    mixed = None if solver else _mix(problem, rows, groups)
    if mixed is not None:
        placement, relaxed = mixed
    else:
        if limit is None:
            limit = max(48, min(256, UNKNOWNS // (len(groups.groups) * len(problem.kinds))))
        buckets = make_all_buckets(problem, limit)
        relaxed = relax(problem, rows, groups, buckets, goal=goal, seconds=seconds, solver=solver)
        placement = round_shares(problem, rows, groups, buckets, relaxed)
    return JointPlacement(
        placement=placement,
        score=score(problem, placement, goal),
        bound=lagrangian_bound(problem, rows, relaxed.prices),
        relaxed=relaxed,
    )


def make_all_buckets(problem: PlacementProblem, limit: int) -> list[Buckets]:
    """Sort each kind's items into buckets (`make_buckets`)."""
    largest = max(problem.device_bytes)
    return side_by_side(
        lambda kind: make_buckets(kind, limit, largest=largest),
        problem.kinds,
        items=max(kind.num_items for kind in problem.kinds),
    )


def _mix(
    problem: PlacementProblem, rows: ObjectiveRows, groups: Groups
) -> tuple[Placement, Relaxation] | None:
    """Fill cliques item by item at the weights that bound best; None where that does not serve."""
    mixture = mix_fills(problem, rows) if can_fill(problem, groups) else None
    if mixture is None:
        return None
    seconds = read_seconds(problem, rows, mixture.prices)
    placement = exchange(problem, rows, round_mixture(problem, mixture), seconds)
    relaxed = Relaxation(
        seconds=mixture.value,
        shares=[],
        reads=mixture.reads,
        prices=mixture.prices,
        row_names=rows.names,
        solver="columns",
        status="optimal" if mixture.met else f"stopped {mixture.value / mixture.bound - 1:.1e} off",
    )
    return placement, relaxed


def bound_placements(problem: PlacementProblem, goal: Goal) -> float:
    """Bound the objective of all placements from below, without making one."""
    rows = drop_dominated(objective_rows(problem.network, goal))
    groups = find_groups(problem, rows)
    mixture = mix_fills(problem, rows) if can_fill(problem, groups) else None
    if mixture is not None:
        return lagrangian_bound(problem, rows, mixture.prices)
    buckets = make_all_buckets(problem, BOUND_BUCKETS)
    return lagrangian_bound(problem, rows, relax(problem, rows, groups, buckets, goal=goal).prices)


def place_jointly(problem: PlacementProblem, know: Knowledge) -> Placement:
    """Place feature rows by the programme, or by a policy held against it that scores better."""
    found = place_joint(problem, "serial")
    items = tuple(replace(items, elsewhere=None) for items in found.placement.items)
    own = replace(found.placement, items=items, variant=found.relaxed.solver)
    others = [place_by(each, problem, know) for each in PLACEMENT_POLICIES if each.checks_joint]
    tried = [own, *(each for each in others if isinstance(each, Placement))]
    return replace(min(tried, key=lambda each: _rank(problem, each)), policy=JOINT)


def _rank(problem: PlacementProblem, found: Placement) -> tuple[float, ...]:
    """Return a key that ranks placements, least first.

    Unlike devices are compared on the network: those that share a link wait longer.
    """
    if problem.compares_links:
        return (score(problem, found, "serial", check=False).seconds,)
    return sort_key(evaluate_rows(problem, found))
