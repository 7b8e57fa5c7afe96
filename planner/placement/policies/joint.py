"""Place by the linear programme, or by a published policy where that scores better.

Whole items and small budgets can favour a rule of thumb, and none of them is thrown away.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.placement.evaluate import Score, evaluate, score
from planner.placement.layout import Instance, Layout, Reason, read_nearest
from planner.placement.lp.joint import Joint, place_joint
from planner.placement.network import Goal
from planner.placement.policies.copies import Knowledge, place_named, rows_instance
from planner.placement.policies.policy import Asked, Placement, as_variant, place_by, sort_key
from planner.placement.policies.registry import PLACEMENT_POLICIES

JOINT = "joint"


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
    for name in names or [p.name for p in PLACEMENT_POLICIES if p.copies]:
        found = place_named(name, instance, know)
        if isinstance(found, Reason):
            reasons[name] = found.why
            continue
        scores[name] = score(instance, found, goal)
        if scores[name].seconds < scores[JOINT].seconds:
            best = replace(found, policy=JOINT, variant=f"{found.policy}: {found.variant}")
            scores[JOINT] = scores[name]
    return Compared(scores=scores, reasons=reasons, joint=joint, best=best)


def place_rows_jointly(asked: Asked) -> Placement:
    """Place feature rows by the programme, or by a policy held against it that scores better.

    With a network the candidates are held against each other on it: devices that share a link with
    more readers wait longer.
    """
    hotness, groups = asked.hotness, asked.groups
    every = asked.host_rows is None or asked.host_rows >= hotness.shape[-1]
    limit = None if every else asked.host_rows
    instance = rows_instance(hotness, asked.costs, asked.capacity_rows, groups, limit)
    if asked.network is not None:
        instance = replace(instance, network=asked.network)
    found = place_joint(instance, "serial")
    held = found.layout.held[0]
    result = evaluate(
        hotness,
        held.own,
        asked.costs,
        cliques=groups,
        on_host=held.on_host,
        row_bytes=asked.row_bytes,
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
    tried = [own, *(place_by(each, asked) for each in PLACEMENT_POLICIES if each.checks_joint)]
    best = min(tried, key=lambda each: _worth(instance, asked, each))
    variants = tuple(as_variant(p.variant, p.evaluation) for p in tried)
    return replace(best, policy=JOINT, variants=variants)


def _worth(instance: Instance, asked: Asked, found: Placement) -> tuple[float, ...]:
    """What placements are ranked by, least first."""
    if asked.network is None:
        return tuple(sort_key(found.evaluation, asked.objective))
    held = read_nearest(instance, 0, found.own, found.on_host)
    return (score(instance, Layout(policy="", held=(held,)), "serial", check=False).seconds,)
