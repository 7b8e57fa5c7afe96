"""What one more GiB of a memory, or a tenth more bandwidth of a link, would save.

To first order, from the programme's multipliers: a memory's price times the bytes; for a link, the
priced rows at the programme's own reads, with the link's seconds shortened. At a kink the slopes to
both sides differ and the price lies between them.
"""

import numpy as np

from gnnplan.planner.placement.costs import Goal, objective_rows
from gnnplan.planner.placement.lp.relax import Relaxation
from gnnplan.planner.placement.problem import PlacementProblem

GIB = 2**30
FASTER = 1.1


def shadow_prices(
    instance: PlacementProblem, goal: Goal, relaxed: Relaxation, *, factor: float = FASTER
) -> dict[str, float]:
    """Seconds saved per step by each relaxation; those that save nothing are 0.

    Args:
        instance: the problem.
        goal: its objective.
        relaxed: its solved programme.
        factor: of a link's bandwidth.
    """
    found: dict[str, float] = {}
    for g, price in enumerate(relaxed.prices.device):
        found[f"device {g} +1 GiB"] = float(price) * GIB
    if instance.host_bytes is not None:
        found["host +1 GiB"] = relaxed.prices.host * GIB
    rows = objective_rows(instance.network, goal)
    weighed = [rows.names.index(name) for name in relaxed.row_names]
    before = rows.values(relaxed.reads)[weighed]
    for link in instance.network.links:
        rows = objective_rows(instance.network.faster(link, factor), goal)
        saved = float(relaxed.prices.rows @ (before - rows.values(relaxed.reads)[weighed]))
        found[f"{link} {factor - 1:+.0%}"] = max(0.0, saved) if np.isfinite(saved) else 0.0
    return found
