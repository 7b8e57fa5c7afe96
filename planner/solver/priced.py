"""Each clique filled item by item at the programme's prices: finer than buckets can be.

Where cliques draw from laws of their own, buckets must tell apart who asks for an item as well as
how often, and become coarse. At given weights of the objective's rows the cliques no longer touch
each other, and one sort of moves by priced seconds per byte fills each of them, up to one item
(formulas 6.3 [C22]). The price of the last move taken is the multiplier that bounds best at those
weights (formulas 6.4), so the same sort serves placement and bound.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.placement.layout import Held, Instance, Layout
from planner.placement.network import Rows
from planner.placement.order import hotness_order
from planner.placement.reads import CROSS, HOST, OWN, PEER, Heat, mark_holders
from planner.solver.formulation import Items, moves
from planner.solver.groups import Groups
from planner.solver.program import Prices
from planner.solver.rounding import Chosen, fill

MOST_ITEMS = 16_000_000
"""Of all kinds: a sort of more takes longer than it gains."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Filled:
    """A placement and the prices of its last bytes."""

    layout: Layout
    prices: Prices


def can_fill(instance: Instance, groups: Groups) -> bool:
    """Whether cliques differ in their laws, are alike inside, and share nothing but links."""
    return (
        any(kind.heat.shape[0] > 1 for kind in instance.kinds)
        and all(len(each.groups) == 1 for each in groups.classes)
        and instance.host_bytes is None
        and bool(np.isfinite(instance.network.alone[:, :, HOST]).all())
        and not np.isfinite(instance.network.alone[:, :, CROSS]).any()
        and sum(kind.num_items for kind in instance.kinds) <= MOST_ITEMS
    )


def fill_priced(
    instance: Instance, weights: NDArray[np.float64], seconds: NDArray[np.float64]
) -> Filled:
    """Fill every clique.

    Args:
        instance: one that `can_fill` takes.
        weights: of the objective's rows, for the prices.
        seconds: per byte by kind, device and place at those weights, shape [T, G, 5].
    """
    none = np.zeros(0, np.int64)
    chosen = [
        Chosen(
            replicated=[none] * len(instance.cliques),
            dealt=[none] * len(instance.cliques),
            single=[none] * instance.num_devices,
        )
        for _ in instance.kinds
    ]
    device = np.zeros(instance.num_devices)
    ends = np.cumsum([0, *(kind.num_items for kind in instance.kinds)])
    for c, clique in enumerate(instance.cliques):
        g, n = clique[0], len(clique)
        limit = min(instance.device_bytes[d] for d in clique)
        items = _items(instance, g, n, limit, seconds)
        found = moves(items)
        taken, price = found.fill(float(limit))
        device[list(clique)] = price
        whole = taken == 1.0
        part = np.zeros(int(ends[-1]), np.bool_)
        every = np.zeros(int(ends[-1]), np.bool_)
        part[found.item[whole & found.to_dealt]] = True
        every[found.item[whole & ~found.to_dealt]] = True
        part &= ~every
        for t, kind in enumerate(instance.kinds):
            span = slice(int(ends[t]), int(ends[t + 1]))
            heat = kind.heat[kind.laws[g]]
            chosen[t].replicated[c] = _hottest(np.flatnonzero(every[span]), heat)
            chosen[t].dealt[c] = _hottest(np.flatnonzero(part[span]), heat)
    own = fill(instance, chosen)
    held: list[Held] = []
    for t, kind in enumerate(instance.kinds):
        codes: list[NDArray[np.uint8]] = []
        for clique in instance.cliques:
            place = np.full(kind.num_items, HOST, np.uint8)
            if seconds[t, clique[0], PEER] < seconds[t, clique[0], HOST]:
                there = mark_holders([own[t][d] for d in clique], kind.num_items) >= 0
                place[there] = PEER
            codes.append(place)
        held.append(Held(own=own[t], elsewhere=codes, on_host=None))
    layout = Layout(policy="joint", held=tuple(held), variant="prices")
    return Filled(layout=layout, prices=Prices(rows=weights, device=device, host=0.0))


def _items(instance: Instance, g: int, n: int, limit: int, seconds: NDArray[np.float64]) -> Items:
    """Priced seconds of every item in each state, as one of the clique's GPUs reads it."""
    sizes: list[NDArray[np.float64]] = []
    states: list[list[NDArray[np.float64]]] = [[], [], []]
    for t, kind in enumerate(instance.kinds):
        own, host = float(seconds[t, g, OWN]), float(seconds[t, g, HOST])
        peer = min(float(seconds[t, g, PEER]), host) if n > 1 else host
        size = kind.sizes(np.arange(kind.num_items)).astype(np.float64)
        reads = kind.read_bytes * kind.heat[kind.laws[g]].astype(np.float64)
        reads[size > limit] = 0.0  # never held, so nothing is saved
        sizes.append(size)
        for state, price in zip(states, (own, own / n + peer * (n - 1) / n, host), strict=True):
            state.append(reads * price)
    replicated, dealt, far = (np.concatenate(state) for state in states)
    return Items(
        size=np.concatenate(sizes), replicated=replicated, dealt=dealt, host=far, num_devices=n
    )


def _hottest(ids: NDArray[np.int64], heat: Heat) -> NDArray[np.int64]:
    return ids[hotness_order(heat[ids])]


def binding(rows: Rows, read_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights that count the slowest row alone, shape [K]."""
    weights = np.zeros(len(rows.names))
    weights[int(np.argmax(rows.values(read_bytes)))] = 1.0
    return weights
