"""How good a placement is known to be: a lower bound by one sort, and the gap above it."""

import math
from dataclasses import dataclass

import numpy as np

from gnnplan.planner.placement.costs import RowCosts
from gnnplan.planner.placement.lp.relax import KnapsackItems, list_moves
from gnnplan.planner.placement.order import Probabilities
from gnnplan.runtime.plan.schema import Certificate

SOLVER = "sort"
"""No solver is called where one sort is proved exact (formulas 6.3 [C22])."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Optimum of the relaxed problem of one clique."""

    seconds: float
    """Least mean cost per GPU."""
    seconds_per_unit: float
    """Shadow price: what the last unit of a GPU's capacity saves; 0 where some stays free."""


def relaxed_optimum(items: KnapsackItems, capacity: float) -> Bound:
    """Solve the relaxation by taking moves in order of value per unit until the capacity is full.

    Args:
        items: From `feature_items`, or of any mixture of types.
        capacity: M, in the unit of `items.size`, of each GPU.

    References:
        Formulas 6.3 [C22]: exact with one binding capacity and an additive objective.
    """
    found = list_moves(items)
    taken, price = found.fill(capacity)
    saved = float((taken * found.value).sum())
    return Bound(seconds=float(items.host.sum()) - saved, seconds_per_unit=price)


def lower_bound(
    hotness: Probabilities, costs: RowCosts, capacity_rows: int, num_devices: int
) -> float:
    """Seconds below which no placement of feature rows brings the mean cost per GPU.

    It bounds the maximum over the GPUs too, which is never below the mean. Holds for one clique
    whose GPUs share one law p and one capacity (with unequal ones: their mean capacity; with
    unequal laws it is no bound, formulas 6.4 [C23]).

    Args:
        hotness: p(v), shape [N].
        costs: Gross seconds per row; `host` is what a row costs that no GPU holds. Where host
            memory holds only some rows, its cost still gives a bound, with all of them on it.
        capacity_rows: Rows each GPU may hold.
        num_devices: n.

    Example:
        Two GPUs of one row each; both keep row 0 and read row 1 from the host, or deal them:

        >>> import numpy as np
        >>> costs = RowCosts(local=0.0, peer=0.5, host=1.0)
        >>> round(lower_bound(np.array([1.0, 0.4]), costs, 1, 2), 6)
        0.35
    """
    items = feature_items(hotness, costs, num_devices)
    return relaxed_optimum(items, float(capacity_rows)).seconds


def certificate(objective: float, bound: float) -> Certificate:
    """A placement's score against the bound; gap = (objective - bound) / bound.

    Both in seconds per batch. A bound of zero is reached (gap 0) or infinitely far.
    """
    excess = max(0.0, objective - bound)
    gap = excess / bound if bound > 0 else (0.0 if excess == 0 else math.inf)
    return Certificate(
        objective=objective,
        lower_bound=bound,
        gap=gap,
        solver=SOLVER,
        status="optimal" if gap <= 1e-9 else "feasible",
    )


def feature_items(hotness: Probabilities, costs: RowCosts, num_devices: int) -> KnapsackItems:
    """Feature rows of equal size (1 row) and one law p for all GPUs of the clique.

        cR = p*C_loc,   cP = p*((n-1)/n*C_gpu + 1/n*C_loc),   cH = p*C_cpu

    A peer that costs more than the host is not read, so a dealt row then costs C_cpu elsewhere.

    Args:
        hotness: p(v), shape [N].
        costs: Gross seconds per row.
        num_devices: n.

    References:
        Formulas 6.3; Song and Jiang's model is the case of singleton items and free local reads.
    """
    n, p = num_devices, hotness.astype(np.float64)
    elsewhere = min(costs.peer, costs.host)
    return KnapsackItems(
        size=np.ones(p.size),
        replicated=p * costs.local,
        dealt=p * ((n - 1) / n * elsewhere + costs.local / n),
        host=p * costs.host,
        num_devices=n,
    )
