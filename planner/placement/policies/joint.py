"""`joint`: features and topology placed for the least step over shared links (formulas 6).

    buckets -> linear programme (a child process; one sort where that is proved exact)
            -> whole items within every budget -> small exchanges -> score, bound, prices

A published placement that scores better is taken instead. Many items blur in buckets: there what
scores best, also the densest items dealt over each clique, is where exchanges start, which go on
until the score is near its bound.

Where cliques draw from laws of their own, buckets would have to tell apart who asks for an item as
well as how often, and become coarse: there mixtures of whole fills take the buckets' place. The one
evaluator scores the result; the bound comes from the programme's prices by weak duality, so neither
depends on what the solver claims.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.placement.costs import (
    DISK,
    HOST,
    OWN,
    PEER,
    Goal,
    ObjectiveRows,
    drop_dominated,
    objective_rows,
)
from gnnplan.planner.placement.evaluate import PlacementScore, evaluate_rows, read_bytes, score
from gnnplan.planner.placement.lp.formulate import Buckets, Groups, find_groups, make_buckets
from gnnplan.planner.placement.lp.improve import exchange, exchange_queues, worth_exchanging
from gnnplan.planner.placement.lp.mixture import can_fill, mix_fills, round_mixture
from gnnplan.planner.placement.lp.relax import (
    SECONDS,
    Prices,
    Relaxation,
    lagrangian_bound,
    relax,
)
from gnnplan.planner.placement.lp.round_solution import (
    WantedCopies,
    fill_devices,
    read_seconds,
    round_shares,
)
from gnnplan.planner.placement.placement import Placement, fill_host, find_places
from gnnplan.planner.placement.policies.policy import (
    FAR,
    Copies,
    Knowledge,
    complete_copies,
    place_by,
)
from gnnplan.planner.placement.policies.registry import PLACEMENT_POLICIES
from gnnplan.planner.placement.policies.song_jiang import sort_key
from gnnplan.planner.placement.problem import Ids, PlacementProblem
from gnnplan.runtime.process import side_by_side

JOINT = "joint"
UNKNOWNS = 2400
"""Buckets times groups that are aimed at: a programme of this size takes well under a second."""
BOUND_BUCKETS = 128
"""Buckets per kind for a bound alone."""
ENOUGH, BLURRED = 2e-3, 1e-2
"""Gaps at which exchanges of many items end, and from which on prices are scaled."""
DEALS = 6
"""Rounds in which a short host and the cliques settle who keeps what."""
SCALES = 12
"""Scales of the prices of bytes that are tried."""


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
    others: Sequence[Placement] | None = None,
) -> JointPlacement:
    """Place by the linear programme under an objective, and go on from the best of the `others`.

    Past `seconds` of the solver the density order places. The buckets per kind follow from the
    number of groups where no `limit` is given; solver is highs, cbc, sort or density, over buckets,
    or empty: mixtures of fills where they serve, sort where it is exact, else what is installed.
    `others` are published placements; they are made if left out.
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
    bound = lagrangian_bound(problem, rows, relaxed.prices)
    if not worth_exchanging(problem):
        most = float(rows.values(read_bytes(problem, placement)).max())
        if most > bound * (1 + BLURRED):
            bound = max(bound, bound_at_best_scale(problem, rows, relaxed.prices))
    placement = _start_from_best(problem, rows, placement, relaxed, others, bound)
    return JointPlacement(
        placement=placement, score=score(problem, placement, goal), bound=bound, relaxed=relaxed
    )


def _start_from_best(
    problem: PlacementProblem,
    rows: ObjectiveRows,
    own: Placement,
    relaxed: Relaxation,
    others: Sequence[Placement] | None,
    bound: float,
) -> Placement:
    """Take another placement that leads; of many items, exchange on from it towards the bound."""

    def value(found: Placement) -> float:
        return float(rows.values(read_bytes(problem, found)).max())

    def lead(best: Placement, starts: Sequence[Placement]) -> Placement:
        same = (each for each in starts if each.cliques == problem.cliques)
        return min((best, *(name_places(problem, each) for each in same)), key=value)

    known = place_published(problem, Knowledge()) if others is None else others
    best, enough = lead(own, known), bound * (1 + ENOUGH)
    if worth_exchanging(problem) or value(best) <= enough:
        return best
    seconds = read_seconds(problem, rows, relaxed.prices)
    best = lead(best, deal_densest(problem, seconds))
    return min((best, exchange_queues(problem, rows, best, enough)), key=value)


def bound_at_best_scale(problem: PlacementProblem, rows: ObjectiveRows, prices: Prices) -> float:
    """Bound at the prices of bytes times the factor, of 0 to 2, that bounds best.

    Buckets that blur who asks for what make bytes look dearer than they are. The bound is concave
    in the factor, so that a golden section finds it (DEC-165).
    """

    def at(factor: float) -> float:
        scaled = replace(prices, device=prices.device * factor, host=prices.host * factor)
        return lagrangian_bound(problem, rows, scaled)

    low, high, share = 0.0, 2.0, (5**0.5 - 1) / 2
    left, right = high - share * (high - low), low + share * (high - low)
    of_left, of_right = at(left), at(right)
    for _ in range(SCALES - 2):
        if of_left >= of_right:
            high, right, of_right = right, left, of_left
            left = high - share * (high - low)
            of_left = at(left)
        else:
            low, left, of_left = left, right, of_right
            right = low + share * (high - low)
            of_right = at(right)
    return max(of_left, of_right)


def name_places(problem: PlacementProblem, found: Placement) -> Placement:
    """Write down where cliques read each item of a placement."""
    items = tuple(
        replace(held, fallback_places=[row.copy() for row in find_places(problem, found, t)])
        for t, held in enumerate(found.items)
    )
    return replace(found, items=items, policy=JOINT)


def deal_densest(problem: PlacementProblem, seconds: NDArray[np.float64]) -> list[Placement]:
    """Deal to each clique the items that save it most, at seconds per byte of shape [T, G, 5].

    Where the host is short, it is left what most cliques want, and they deal again without that:
    round by round, each of which is a placement (DEC-164).
    """
    limited = problem.host_bytes is not None
    size = np.concatenate([np.broadcast_to(k.size_array(), k.num_items) for k in problem.kinds])
    size = np.maximum(size, 1)
    far = [saved_rates(problem, c, seconds, DISK if limited else HOST) for c in problem.cliques]
    near = [saved_rates(problem, c, seconds, HOST) for c in problem.cliques]
    kept, found = np.zeros(len(size), np.bool_), list[Placement]()
    for _ in range(DEALS if limited else 1):
        rates = [np.where(kept, n, f) / size for n, f in zip(near, far, strict=True)]
        taken = [take_densest(problem, c, r) for c, r in zip(problem.cliques, rates, strict=True)]
        found.append(place_dealt(problem, taken))
        if limited:
            least = [float(r[t[-1]]) if len(t) else 0.0 for r, t in zip(rates, taken, strict=True)]
            wanted = sum(cap_rate(f / size, x) for f, x in zip(far, least, strict=True))
            order = np.argsort(-np.asarray(wanted), kind="stable")
            kept = np.concatenate(fill_host(problem, order))
    return found


def saved_rates(
    problem: PlacementProblem, clique: Sequence[int], seconds: NDArray[np.float64], far: int
) -> NDArray[np.float64]:
    """Return the seconds that a clique saves by each item that it reads from a peer, not `far`."""
    peer = seconds[:, :, PEER]
    near = np.where(np.isfinite(peer), peer, seconds[:, :, OWN])
    gain = np.clip(seconds[:, :, far] - near, 0.0, FAR)
    return np.concatenate(
        [
            np.sum([kind.read_bytes * gain[t, g] * kind.heat[kind.laws[g]] for g in clique], axis=0)
            for t, kind in enumerate(problem.kinds)
        ]
    )


def cap_rate(rate: NDArray[np.float64], least: float) -> NDArray[np.float64]:
    """Cap the seconds that an item saves per byte at the least of the items that are dealt.

    An item that saves more is dealt anyway. Of these the hotter are worth less to the host.
    """
    above = np.maximum(rate, least)
    share = np.divide(least, above, out=np.ones_like(above), where=above > 0)
    return np.where(rate > least, least * (0.99 + 0.01 * share), rate)


def take_densest(
    problem: PlacementProblem, clique: Sequence[int], rate: NDArray[np.float64]
) -> Ids:
    """List the items that save a clique most per byte, as many as its devices have room for."""
    order = np.argsort(-rate, kind="stable")
    size = np.concatenate([np.broadcast_to(k.size_array(), k.num_items) for k in problem.kinds])
    room = sum(problem.device_bytes[g] for g in clique)
    return order[: np.searchsorted(np.cumsum(size[order]), room, side="right")]


def place_dealt(problem: PlacementProblem, taken: Sequence[Ids]) -> Placement:
    """Place on each clique the items that it took, and on the host those that then save most."""
    ends = np.cumsum([0, *(kind.num_items for kind in problem.kinds)])
    none = np.zeros(0, np.int64)
    chosen = [
        WantedCopies(
            replicated=[none] * len(taken),
            dealt=[ids[(ids >= start) & (ids < end)] - start for ids in taken],
            single=[none] * problem.num_devices,
        )
        for start, end in itertools.pairwise(ends.tolist())
    ]
    own = dict(enumerate(fill_devices(problem, chosen, evenly=True)))
    return complete_copies(problem, JOINT, Copies(own=own, variant="dealt"))


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
    others = place_published(problem, know)
    found = place_joint(problem, "serial", others=others)
    items = tuple(replace(items, fallback_places=None) for items in found.placement.items)
    own = replace(found.placement, items=items, variant=found.relaxed.solver)
    return replace(min((own, *others), key=lambda each: _rank(problem, each)), policy=JOINT)


def place_published(problem: PlacementProblem, know: Knowledge) -> list[Placement]:
    """Place by the published policies that joint is held against, as far as they can.

    They place rows of one size: none where the first kind has several.
    """
    if not isinstance(problem.kinds[0].size, int):
        return []
    made = (place_by(each, problem, know) for each in PLACEMENT_POLICIES if each.checks_joint)
    return [each for each in made if isinstance(each, Placement)]


def _rank(problem: PlacementProblem, found: Placement) -> tuple[float, ...]:
    """Return a key that ranks placements, least first.

    Unlike devices are compared on the network: those that share a link wait longer.
    """
    if problem.compares_links:
        return (score(problem, found, "serial", check=False).seconds,)
    return sort_key(evaluate_rows(problem, found))
