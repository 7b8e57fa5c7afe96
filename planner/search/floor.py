"""Step seconds below which no placement brings a candidate, within the cost model.

For every shape of candidate (ranks, threads, depth) the feature reads of a batch are bounded by
weak duality (`placement.lp.bound`) at the measured seconds per row and the rows that fit, on
the whole profile. How far a placement is above the least is judged on that same profile; a plan's
reads are those of one half of it under the placement of the other [A9], and a bound from a half
would count its accidents as gains: no placement can know them. So the reads a plan is priced with
are scaled by (least seconds) / (seconds of the shape's best placement), both on the whole profile.
"""

from dataclasses import replace

from planner.candidate import PlacedRows
from planner.placement.costs import RowCosts
from planner.placement.lp.joint import bound_of
from planner.placement.policies.copies import rows_instance
from planner.workload import Hotness


def reads_floor(
    hotness: Hotness,
    costs: RowCosts,
    own_rows: int,
    host_rows: int | None,
    cliques: list[list[int]],
) -> float:
    """Least seconds of the rank that reads longest, per batch.

    Args:
        hotness: of the batch size.
        costs: seconds per row.
        own_rows: rows each rank may hold.
        host_rows: rows the host may hold; None: all.
        cliques: ranks that read each other.
    """
    num = sum(map(len, cliques))
    instance = rows_instance(hotness.features, costs, [own_rows] * num, cliques, host_rows)
    return bound_of(instance, "serial")


def least_share(floor_seconds: float, placed_seconds: float) -> float:
    """What is left of a placement's reads at the least, both of the rank that reads longest.

    >>> least_share(0.5, 2.0), least_share(0.0, 0.0)
    (0.25, 1.0)
    """
    return min(1.0, max(0.0, floor_seconds) / placed_seconds) if placed_seconds > 0 else 1.0


def scaled(placed: PlacedRows, share: float) -> PlacedRows:
    """A share of the same reads."""
    ranks = [
        replace(r, rows={kind: count * share for kind, count in r.rows.items()})
        for r in placed.ranks
    ]
    return replace(placed, ranks=ranks)
