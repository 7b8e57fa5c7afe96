"""Step seconds below which no placement brings a candidate, within the cost model.

For every shape of candidate (ranks, threads, depth) the feature reads of a batch are bounded by
weak duality (`planner.solver.lagrange`) at the measured seconds per row and the rows that fit. The
bound takes each half of the profile by itself, as a plan's hit rates do [A9]. A priced candidate's
step is then predicted again with its reads scaled down to the bound.
"""

from dataclasses import replace

import numpy as np

from planner.candidate import PlacedRows
from planner.placement.costs import RowCosts
from planner.placement.policies import rows_instance
from planner.solver.joint import bound_of
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
        hotness: of the batch size, in halves.
        costs: seconds per row.
        own_rows: rows each rank may hold.
        host_rows: rows the host may hold; None: all.
        cliques: ranks that read each other.
    """
    num = sum(map(len, cliques))
    shares: list[float] = []
    for half in (hotness.first_half, hotness.second_half):
        total = float(half.sum(dtype=np.float64))
        instance = rows_instance(half, costs, [own_rows] * num, cliques, host_rows)
        shares.append(bound_of(instance, "serial") / total if total > 0 else 0.0)
    return float(hotness.features.sum(dtype=np.float64)) * sum(shares) / len(shares)


def scaled_to(placed: PlacedRows, costs: RowCosts, floor_seconds: float) -> PlacedRows:
    """The same reads, as many as take `floor_seconds` on the rank that reads longest."""
    prices = {"own": costs.local, "peer": costs.peer, "host": costs.host, "disk": costs.disk}
    now = max(
        (sum(count * prices[kind] for kind, count in r.rows.items()) for r in placed.ranks),
        default=0.0,
    )
    ratio = min(1.0, floor_seconds / now) if now > 0 else 1.0
    ranks = [
        replace(r, rows={kind: count * ratio for kind, count in r.rows.items()})
        for r in placed.ranks
    ]
    return replace(placed, ranks=ranks)
