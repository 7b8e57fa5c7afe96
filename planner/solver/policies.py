"""Every placement that can be asked for by name: the published ones, and `joint`.

`joint` is the programme's own placement, or a published one where that scores better: whole items
and small budgets can favour a rule of thumb, and none of them is thrown away.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.placement import policy as published
from planner.placement.costs import RowCosts
from planner.placement.evaluate import evaluate
from planner.placement.layout import Instance, Layout, Reason, read_nearest
from planner.placement.network import Goal, Network
from planner.placement.order import Probabilities
from planner.placement.policies import NAMED, Knowledge, place_named, rows_instance
from planner.placement.policy import Parts, Placement
from planner.placement.score import Score, score
from planner.placement.song_jiang import Objective, as_variant, sort_key
from planner.solver.joint import Joint, place_joint

JOINT = "joint"
NEEDS_DEGREE = ("degree", "quiver", "pagraph")
NEEDS_PARTS = ("metis", "pagraph", "pagraph-plus")
WARM = ("song-jiang", "legion")
"""Published placements that joint is held against; they need nothing but hotness."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Compared:
    """All policies on one instance, by the one evaluator."""

    scores: dict[str, Score]
    reasons: dict[str, str]
    """Why a policy has no placement."""
    joint: Joint
    """The programme's own placement, before it is held against the others."""
    best: Layout


def compare_policies(
    instance: Instance, know: Knowledge, goal: Goal = "pipelined", *, names: Sequence[str] = ()
) -> Compared:
    """Score every named policy and joint.

    Args:
        instance: the problem.
        know: what some policies look at besides.
        goal: objective.
        names: policies; none: all.
    """
    joint = place_joint(instance, goal)
    scores, reasons = {JOINT: joint.score}, dict[str, str]()
    best = joint.layout
    for name in names or NAMED:
        found = place_named(name, instance, know)
        if isinstance(found, Reason):
            reasons[name] = found.why
            continue
        scores[name] = score(instance, found, goal)
        if scores[name].seconds < scores[JOINT].seconds:
            best = replace(found, policy=JOINT, variant=f"{found.policy}: {found.variant}")
            scores[JOINT] = scores[name]
    return Compared(scores=scores, reasons=reasons, joint=joint, best=best)


def place(
    policy: str,
    hotness: Probabilities,
    costs: RowCosts,
    capacity_rows: Sequence[int],
    *,
    cliques: Sequence[Sequence[int]] | None = None,
    host_rows: int | None = None,
    out_degree: NDArray[np.int64] | None = None,
    parts: Parts | None = None,
    row_bytes: int = 0,
    seed: int = 0,
    objective: Objective = "max",
    network: Network | None = None,
) -> Placement:
    """Place feature rows by name; as `planner.placement.policy.place`, and `joint`.

    With a `network`, seconds per row of each device, joint is placed and held against the others
    on it: devices that share a link with more readers wait longer. None: `costs` hold for all.

    Raises:
        SettingsError: the policy is unknown or lacks its input.
        InputError: hotness holds negative or non-finite values.
    """
    again = functools.partial(
        published.place,
        hotness=hotness,
        costs=costs,
        capacity_rows=capacity_rows,
        cliques=cliques,
        host_rows=host_rows,
        out_degree=out_degree,
        parts=parts,
        row_bytes=row_bytes,
        seed=seed,
        objective=objective,
    )
    if policy != JOINT:
        return again(policy)
    published.check_hotness(hotness)
    groups = [list(c) for c in ([range(len(capacity_rows))] if cliques is None else cliques)]
    limit = None if host_rows is None or host_rows >= hotness.shape[-1] else host_rows
    instance = rows_instance(hotness, costs, capacity_rows, groups, limit)
    if network is not None:
        instance = replace(instance, network=network)
    found = place_joint(instance, "serial")
    held = found.layout.held[0]
    result = evaluate(
        hotness, held.own, costs, cliques=groups, on_host=held.on_host, row_bytes=row_bytes
    )
    own = Placement(
        policy=JOINT,
        variant=found.relaxed.solver,
        own=held.own,
        cliques=groups,
        on_host=held.on_host,
        evaluation=result,
        variants=(as_variant(found.relaxed.solver, result),),
    )
    tried = [own, *(again(name) for name in WARM)]
    best = min(tried, key=lambda each: _worth(instance, network, each, objective))
    variants = tuple(as_variant(p.variant, p.evaluation) for p in tried)
    return replace(best, policy=JOINT, variants=variants)


def _worth(
    instance: Instance, network: Network | None, found: Placement, objective: Objective
) -> tuple[float, ...]:
    """What placements are ranked by, least first."""
    if network is None:
        return tuple(sort_key(found.evaluation, objective))
    held = read_nearest(instance, 0, found.own, found.on_host)
    return (score(instance, Layout(policy="", held=(held,)), "serial", check=False).seconds,)
