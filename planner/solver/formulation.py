"""The placement problem of one clique, item by item, as a fractional knapsack.

    minimise   sum_i cR_i x_i^R + cP_i x_i^P + cH_i x_i^H         mean cost per GPU
    subject to x_i^R + x_i^P + x_i^H = 1,  x >= 0                 every item has a place
               sum_i s_i (x_i^R + x_i^P / n) <= M                 bytes (or rows) of one GPU

R is replicated on all n GPUs, P one copy dealt over them, H left on the host (or disk). Each item
moves from H to P and from P to R, and each move has a value and a size; where the first move is
worth less per byte than the second, P is off the lower hull and the item moves from H to R at once.
With one capacity and an additive objective the moves sorted by value per byte solve the linear
programme, up to one fractional move (formulas 6.3 [C22]).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.placement.costs import RowCosts
from planner.placement.order import Probabilities


@dataclass(frozen=True, kw_only=True, slots=True)
class Items:
    """What is to be placed: sizes, and mean cost per GPU in each state; arrays of shape [N]."""

    size: NDArray[np.float64]
    replicated: NDArray[np.float64]
    """cR."""
    dealt: NDArray[np.float64]
    """cP."""
    host: NDArray[np.float64]
    """cH."""
    num_devices: int
    """n."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moves:
    """Moves of items to a better state: seconds saved, and bytes it takes of each GPU."""

    value: NDArray[np.float64]
    size: NDArray[np.float64]
    item: NDArray[np.int64]
    """Which item moves."""
    to_dealt: NDArray[np.bool_]
    """Whether to P; else to R, from P where the item has both moves."""

    def fill(self, capacity: float) -> tuple[NDArray[np.float64], float]:
        """Take moves by value per unit of size until the capacity is full.

        Returns:
            The share taken of each move, and what one more unit of capacity would save.
        """
        order = np.argsort(-self.value / self.size, kind="stable")
        filled = np.cumsum(self.size[order])
        whole = int(np.searchsorted(filled, capacity * (1 + 1e-12), side="right"))
        taken, price = np.zeros(len(order)), 0.0
        taken[order[:whole]] = 1.0
        if whole < len(order):
            used = float(filled[whole - 1]) if whole else 0.0
            last = order[whole]
            taken[last] = max(0.0, capacity - used) / self.size[last]
            price = float(self.value[last] / self.size[last])
        return taken, price


def feature_items(hotness: Probabilities, costs: RowCosts, num_devices: int) -> Items:
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
    return Items(
        size=np.ones(p.size),
        replicated=p * costs.local,
        dealt=p * ((n - 1) / n * elsewhere + costs.local / n),
        host=p * costs.host,
        num_devices=n,
    )


def moves(items: Items) -> Moves:
    """Two moves per item, or one where P is off the lower hull.

        H -> P: cH - cP on s/n bytes,   P -> R: cP - cR on s*(n-1)/n bytes

    Returns:
        Moves of both kinds, and of H -> R, in no particular order; those without value are left
        out.
    """
    n, every = items.num_devices, np.arange(items.size.size)
    if n == 1:
        alone = np.zeros(every.size, np.bool_)
        return _worthwhile(items.host - items.replicated, items.size, every, alone)
    first = items.host - items.dealt
    second = items.dealt - items.replicated
    on_hull = first * (n - 1) >= second  # value per byte; the common factor s/n cancels
    hull, off = np.flatnonzero(on_hull), np.flatnonzero(~on_hull)
    value = np.concatenate([first[hull], second[hull], (first + second)[off]])
    size = items.size
    taken = np.concatenate([size[hull] / n, size[hull] * ((n - 1) / n), size[off]])
    dealt = np.zeros(value.size, np.bool_)
    dealt[: hull.size] = True
    return _worthwhile(value, taken, np.concatenate([hull, hull, off]), dealt)


def _worthwhile(
    value: NDArray[np.float64],
    size: NDArray[np.float64],
    item: NDArray[np.int64],
    to_dealt: NDArray[np.bool_],
) -> Moves:
    keep = (value > 0) & (size > 0)
    return Moves(value=value[keep], size=size[keep], item=item[keep], to_dealt=to_dealt[keep])
