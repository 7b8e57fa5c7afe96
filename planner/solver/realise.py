"""A relaxation's shares as whole items: rounding, what the host keeps, who reads where."""

import numpy as np
from numpy.typing import NDArray

from planner.placement.layout import Held, Instance, Layout
from planner.placement.network import Rows
from planner.placement.reads import CROSS, DISK, HOST, PEER, mark_holders
from planner.placement.score import read_bytes
from planner.side_by_side import side_by_side
from planner.solver.buckets import Buckets
from planner.solver.density import density_shares
from planner.solver.exchange import exchange, worth_exchanging
from planner.solver.groups import Groups
from planner.solver.program import Prices
from planner.solver.relaxation import Relaxed
from planner.solver.rounding import SHARE, fill, round_kind

HOST_ROUNDS = 4
"""Times that devices' and the host's items are chosen in turn."""


def realise(
    instance: Instance, rows: Rows, groups: Groups, buckets: list[Buckets], relaxed: Relaxed
) -> Layout:
    """Whole items: rounding, then what the host keeps, then who reads what where.

    Where an item matters, several ways to round are tried.
    """
    seconds = read_seconds(instance, rows, relaxed.prices)
    unlike = any(len(each.groups) > 1 for each in groups.classes)
    few = worth_exchanging(instance)
    ways = [(relaxed.shares, False, False)]
    if few:
        ways += [(relaxed.shares, True, False)] if len(instance.kinds) > 1 else []
        ways += [(relaxed.shares, False, True)] if unlike else []
        if relaxed.solver not in ("sort", "density"):
            by_density, _ = density_shares(instance, rows, groups, buckets)
            ways.append((by_density, False, unlike))
    best: tuple[float, Layout] | None = None
    for shares, rows_first, mean in ways:
        chosen = [
            round_kind(instance, t, groups, b, shares[t], mean=mean) for t, b in enumerate(buckets)
        ]
        own = fill(instance, chosen, rows_first=rows_first, evenly=not few)
        layout = complete(instance, groups, buckets, relaxed, own, seconds)
        layout = exchange(instance, rows, layout, seconds)
        if not few:
            return layout
        value = float(rows.values(read_bytes(instance, layout)).max())
        for _ in range(HOST_ROUNDS if instance.host_bytes is not None else 0):
            again = exchange(instance, rows, rehosted(instance, layout, seconds), seconds)
            found = float(rows.values(read_bytes(instance, again)).max())
            if found >= value * (1 - 1e-9):
                break
            value, layout = found, again
        if best is None or value < best[0]:
            best = (value, layout)
    assert best is not None
    return best[1]


def read_seconds(instance: Instance, rows: Rows, prices: Prices) -> NDArray[np.float64]:
    """Priced seconds per byte by kind, device and place; ties are broken by what it takes alone."""
    priced = np.einsum("k,ktgs->tgs", prices.rows, rows.weights)
    alone = np.where(np.isfinite(instance.network.alone), instance.network.alone, 0.0)
    tie = 1e-6 * max(float(priced.max()), 1e-300) / max(float(alone.max()), 1e-300)
    found = priced + tie * alone
    found[~np.isfinite(instance.network.alone)] = np.inf
    return found


def complete(
    instance: Instance,
    groups: Groups,
    buckets: list[Buckets],
    relaxed: Relaxed,
    own: list[list[NDArray[np.int64]]],
    seconds: NDArray[np.float64],
) -> Layout:
    """Where cliques read what devices do not hold, and what the host keeps for them."""

    def places(t: int) -> list[NDArray[np.uint8]]:
        kind = instance.kinds[t]
        marks = [mark_holders([own[t][g] for g in c], kind.num_items) for c in instance.cliques]
        codes: list[NDArray[np.uint8]] = [np.zeros(0, np.uint8)] * len(instance.cliques)
        for each in groups.classes:
            peers = _peers_pay(groups, each.groups, relaxed.shares[t], buckets[t], kind.laws)
            crossed = relaxed.shares[t][list(each.groups), :, CROSS].max(axis=0) > SHARE
            for c in each.cliques:
                place = np.full(kind.num_items, HOST, np.uint8)
                if crossed.any():
                    across = np.zeros(kind.num_items, np.bool_)
                    for d, holders in enumerate(marks):
                        if d != c:
                            across |= holders >= 0
                    place[across & crossed[buckets[t].of]] = CROSS
                if peers.any():
                    place[(marks[c] >= 0) & peers[buckets[t].of]] = PEER
                codes[c] = place
        return codes

    items = max(kind.num_items for kind in instance.kinds)
    elsewhere = side_by_side(places, range(len(instance.kinds)), items=items)
    on_host = host_items(instance, own, elsewhere, seconds)
    held: list[Held] = []
    for t in range(len(instance.kinds)):
        mask = on_host[t]
        if mask is not None:
            for row in elsewhere[t]:
                row[(row == HOST) & ~mask] = DISK
        held.append(Held(own=own[t], elsewhere=elsewhere[t], on_host=mask))
    return Layout(policy="joint", held=tuple(held), variant=relaxed.solver)


def _peers_pay(
    groups: Groups,
    names: tuple[int, ...],
    shares: NDArray[np.float64],
    buckets: Buckets,
    laws: tuple[int, ...],
) -> NDArray[np.bool_]:
    """Whether a bucket's held items are read from peers: whether most such reads are so, [K]."""
    covered = np.minimum(
        1.0, sum((groups.groups[g].per_clique * shares[g, :, 0] for g in names), np.zeros(1))
    )
    from_peers = np.zeros(shares.shape[1])
    possible = np.zeros(shares.shape[1])
    for g in names:
        heat = buckets.heat[:, laws[groups.groups[g].devices[0]]] * groups.groups[g].per_clique
        from_peers += heat * shares[g, :, PEER]
        possible += heat * np.maximum(0.0, covered - shares[g, :, 0])
    total = buckets.heat.sum(axis=1)
    share = SHARE * total if len(names) == 1 else 0.5 * possible
    # what every device holds is read from a peer as soon as one drops it
    return (from_peers > share) | (possible <= SHARE * total)


def rehosted(instance: Instance, layout: Layout, seconds: NDArray[np.float64]) -> Layout:
    """The layout with the host's items chosen again for what its devices lack now."""
    own = [held.own for held in layout.held]
    codes = [[row.copy() for row in held.elsewhere] for held in layout.held]
    masks = host_items(instance, own, codes, seconds)
    held: list[Held] = []
    for t, mask in enumerate(masks):
        for row in codes[t]:
            if mask is not None:
                row[row >= HOST] = np.where(mask, HOST, DISK)[row >= HOST]
        held.append(Held(own=own[t], elsewhere=codes[t], on_host=mask))
    return Layout(policy=layout.policy, held=tuple(held), variant=layout.variant)


def host_items(
    instance: Instance,
    own: list[list[NDArray[np.int64]]],
    elsewhere: list[list[NDArray[np.uint8]]],
    seconds: NDArray[np.float64],
) -> list[NDArray[np.bool_] | None]:
    """What the host keeps: the items whose reads from there save most seconds per byte."""
    if instance.host_bytes is None:
        return [None] * len(instance.kinds)
    values: list[NDArray[np.float64]] = []
    for t, kind in enumerate(instance.kinds):
        saved = np.zeros(kind.num_items)
        for c, clique in enumerate(instance.cliques):
            far = elsewhere[t][c] >= HOST
            for g in clique:
                gain = seconds[t, g, DISK] - seconds[t, g, HOST]
                gain = min(gain, 1e30) * kind.read_bytes
                mine = np.where(far, kind.heat[kind.laws[g]], 0.0) * gain
                mine[own[t][g]] = 0.0
                saved += mine
        values.append(saved)
    size = [kind.sizes(np.arange(kind.num_items)) for kind in instance.kinds]
    rate = np.concatenate([v / s for v, s in zip(values, size, strict=True)])
    order = np.argsort(-rate, kind="stable")
    ends = np.cumsum(np.concatenate(size)[order])
    kept = np.zeros(len(rate), np.bool_)
    kept[order[: int(np.searchsorted(ends, instance.host_bytes, side="right"))]] = True
    parts = np.split(kept, np.cumsum([len(s) for s in size])[:-1])
    return list(parts)
