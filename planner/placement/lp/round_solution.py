"""From shares of buckets to whole items, within every device's bytes (formulas 6.4).

Inside a bucket the hottest items are replicated, the next dealt, the rest left; a bucket that is
not split needs no order. Devices that share no law take consecutive arcs of the bucket, so that
their copies overlap only where all of it is held. Dealt rows go round in serpentine order, dealt
lists to the device with most free bytes; where there are too many items for exchanges to even loads
out afterwards, each goes to the device with room whose dealt items are read least. Whatever passes
a device's bytes is dropped.
"""

import typing
from collections import Counter
from dataclasses import dataclass, replace

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.placement.costs import CROSS, DISK, HOST, OWN, PEER, ObjectiveRows
from gnnplan.planner.placement.evaluate import read_bytes
from gnnplan.planner.placement.lp.formulate import (
    Buckets,
    CliqueClass,
    Groups,
    densities,
    density_order,
)
from gnnplan.planner.placement.lp.improve import exchange, worth_exchanging
from gnnplan.planner.placement.lp.relax import Prices, Relaxation, density_shares
from gnnplan.planner.placement.placement import (
    ItemPlacement,
    Placement,
    deal_items,
    fill_host,
    held_by_others,
    mark_holders,
    split_by_device,
)
from gnnplan.planner.placement.problem import ItemKind, PlacementProblem
from gnnplan.runtime.process import side_by_side

SHARE = 1e-9
"""Largest share of a bucket that counts as none."""
SORTED_ITEMS = 4_000_000
"""Most items that are dealt in order of density; more are dealt in order of bucket."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WantedCopies:
    """Items that devices should hold whatever their budgets, hottest first."""

    replicated: list[NDArray[np.int64]]
    """Ids that every device of the clique holds, by clique."""
    dealt: list[NDArray[np.int64]]
    """Ids of which some device of the clique holds one copy, by clique."""
    single: list[NDArray[np.int64]]
    """Ids by device, where devices of a clique differ."""


def round_kind(
    problem: PlacementProblem,
    t: int,
    groups: Groups,
    buckets: Buckets,
    shares: NDArray[np.float64],
    *,
    mean: bool = False,
) -> WantedCopies:
    """Round shares [groups, K, 5] of one kind's buckets to whole items.

    With `mean` the devices of every clique are taken for alike, at the mean of their shares.
    """
    none = np.zeros(0, np.int64)
    replicated = [none] * len(problem.cliques)
    dealt = [none] * len(problem.cliques)
    single = [none] * problem.num_devices
    members = _Members(problem, t, buckets)
    for each in groups.classes:
        if len(each.groups) == 1:
            _alike(each, shares[each.groups[0]], members, replicated, dealt)
        elif mean:
            _alike(each, shares[list(each.groups)].mean(axis=0), members, replicated, dealt)
        else:
            _unlike(problem, groups, each, shares, members, single)
    return WantedCopies(replicated=replicated, dealt=dealt, single=single)


def _joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Join the parts; one that is all is not copied, so that equal lists stay one."""
    some = [part for part in parts if part.size] or parts[:1]
    return some[0] if len(some) == 1 else np.concatenate(some)


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _in_order(of: np.ndarray, chosen: np.ndarray, starts: np.ndarray, total: int) -> np.ndarray:
    """List the chosen buckets' items, bucket after bucket."""
    ids = np.empty(total, np.int64)
    for v in range(of.size):
        b = of[v]
        if chosen[b]:
            ids[starts[b]] = v
            starts[b] += 1
    return ids


class _Members:
    """Items of buckets, hottest first."""

    def __init__(self, problem: PlacementProblem, t: int, buckets: Buckets) -> None:
        self.kind, self.buckets = problem.kinds[t], buckets
        few = self.kind.num_items <= SORTED_ITEMS
        self.order = density_order(self.kind) if few else None
        self.density = densities(self.kind) if few and self.order is None else None

    def whole(self, chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
        """List all items of the chosen buckets."""
        if self.order is not None:
            return self.order[chosen[self.buckets.of[self.order]]]
        counts = np.where(chosen, self.buckets.count, 0)
        starts = np.cumsum(counts) - counts
        ids = np.asarray(_in_order(self.buckets.of, chosen, starts, int(counts.sum())))
        if self.density is not None:
            return ids[np.argsort(-self.density[ids], kind="stable")]
        return ids

    def split(self, b: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """List one bucket, hottest first, and the share of its bytes before each item's middle."""
        ids = np.flatnonzero(self.buckets.of == b)
        sizes = np.maximum(self.kind.sizes(ids), 1).astype(np.float64)
        if self.density is not None:
            density = self.density[ids]
        else:
            density = self.kind.heat[:, ids].sum(axis=0, dtype=np.float64) / sizes
        order = np.argsort(-density, kind="stable")
        ends = np.cumsum(sizes[order])
        return ids[order], (ends - sizes[order] / 2) / ends[-1]


def _alike(
    each: CliqueClass,
    shares: NDArray[np.float64],
    members: _Members,
    replicated: list[NDArray[np.int64]],
    dealt: list[NDArray[np.int64]],
) -> None:
    """Round cliques whose devices share everything: u = R + P / n, q = P (n - 1) / n."""
    n = each.size
    u, q = shares[:, OWN], shares[:, PEER]
    copies = np.zeros_like(u) if n == 1 else np.minimum(q / (n - 1), u)
    whole, part = u - copies, copies * n
    crossed = shares[:, CROSS] > SHARE
    pure_whole = (whole > 1 - SHARE) & ~crossed
    pure_part = (part > 1 - SHARE) & ~crossed
    mixed = np.flatnonzero((whole + part > SHARE) & ~pure_whole & ~pure_part)
    base_whole, base_part = members.whole(pure_whole), members.whole(pure_part)
    found = [members.split(int(b)) for b in mixed]
    for index, c in enumerate(each.cliques):
        more: tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]] = ([], [])
        for b, (ids, middle) in zip(mixed.tolist(), found, strict=True):
            # cliques that read each other hold arcs one after the other
            start = index * (whole[b] + part[b]) if crossed[b] else 0.0
            at = (middle - start) % 1.0
            more[0].append(ids[at < whole[b]])
            more[1].append(ids[(at >= whole[b]) & (at < whole[b] + part[b])])
        replicated[c] = _joined([base_whole, *more[0]])
        dealt[c] = _joined([base_part, *more[1]])


def _unlike(
    problem: PlacementProblem,
    groups: Groups,
    each: CliqueClass,
    shares: NDArray[np.float64],
    members: _Members,
    single: list[NDArray[np.int64]],
) -> None:
    """Round a clique whose devices differ: each takes the next arc of every bucket."""
    group_of = {g: name for name in each.groups for g in groups.groups[name].devices}
    clique = problem.cliques[each.cliques[0]]
    own = np.stack([shares[group_of[g], :, OWN] for g in clique])
    pure = (own > 1 - SHARE) | (own < SHARE)
    mixed = np.flatnonzero(~pure.all(axis=0))
    split = np.zeros(own.shape[1], np.bool_)
    split[mixed] = True
    parts: list[list[NDArray[np.int64]]] = [
        [members.whole((own[i] > 1 - SHARE) & ~split)] for i in range(len(clique))
    ]
    for b in mixed.tolist():
        ids, middle = members.split(b)
        start = 0.0
        for i in range(len(clique)):
            at = (middle - start) % 1.0
            parts[i].append(ids[at < own[i, b] - SHARE])
            start += float(own[i, b])
    for i, g in enumerate(clique):
        single[g] = _joined(parts[i])


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _that_fit(sizes: np.ndarray, free: int) -> np.ndarray:
    """Take items first come first served; one that does not fit is passed over."""
    taken = np.zeros(sizes.size, np.bool_)
    for i in range(sizes.size):
        if sizes[i] <= free:
            free -= sizes[i]
            taken[i] = True
    return taken


def _first_that_fit(kind: ItemKind, ids: NDArray[np.int64], free: int) -> NDArray[np.int64]:
    """Select of items that together pass so many bytes those that fit, first come first served."""
    if not isinstance(kind.size, np.ndarray):
        return ids[: free // kind.size]
    return ids[np.asarray(_that_fit(kind.sizes(ids), free))]


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _deal_evenly(
    sizes: np.ndarray, reads: np.ndarray, free: np.ndarray, busy: np.ndarray
) -> np.ndarray:
    """Choose the device of each item, or -1; free [n] is reduced, busy [n], its reads, grows."""
    device = np.full(reads.size, -1, np.int16)
    for i in range(reads.size):
        best, size = -1, sizes[i if sizes.size > 1 else 0]
        for g in range(free.size):
            fits = free[g] >= size
            if fits and (best < 0 or (busy[g], -free[g]) < (busy[best], -free[best])):
                best = g
        if best >= 0:
            free[best] -= size
            busy[best] += reads[i]
            device[i] = best
    return device


def fill_devices(
    problem: PlacementProblem,
    chosen: list[WantedCopies],
    *,
    rows_first: bool = False,
    evenly: bool = False,
) -> list[list[NDArray[np.int64]]]:
    """Give devices what was chosen, each within its bytes; own ids by kind and device.

    Replicated items of all kinds first, then lists, then rows, which fit any gap; or rows first.
    With `evenly`, dealt items go where least is read of what was dealt so far.
    """
    free = np.array(problem.device_bytes, np.int64)
    parts: list[list[list[NDArray[np.int64]]]] = [
        [[] for _ in range(problem.num_devices)] for _ in problem.kinds
    ]

    order = sorted(
        range(len(problem.kinds)),
        key=lambda t: isinstance(problem.kinds[t].size, np.ndarray) == rows_first,
    )
    for t in order:
        kind = problem.kinds[t]
        for c, clique in enumerate(problem.cliques):
            for ids, devices in (
                (chosen[t].replicated[c], clique),
                *((chosen[t].single[g], (g,)) for g in clique),
            ):
                needed = kind.bytes_of(ids)
                for g in devices:
                    fits = needed <= free[g]
                    kept = ids if fits else _first_that_fit(kind, ids, int(free[g]))
                    free[g] -= needed if fits else kind.bytes_of(kept)
                    parts[t][g].append(kept)
    busy = np.zeros(problem.num_devices)
    for t in order:
        kind = problem.kinds[t]
        for c, clique in enumerate(problem.cliques):
            ids, mine = chosen[t].dealt[c], list(clique)
            sizes, room, read = kind.size_array(ids), free[mine], busy[mine]
            if evenly:
                reads = np.zeros(len(ids), np.float32)
                for law, count in Counter(kind.laws[g] for g in mine).items():
                    factor = kind.heat.dtype.type(count * kind.read_bytes)
                    reads += factor * kind.heat[law][ids]
                dealt = np.asarray(_deal_evenly(sizes, reads, room, read))
            else:
                equal = not isinstance(kind.size, np.ndarray)
                dealt = deal_items(len(ids), sizes, room, serpentine=equal)
            free[mine], busy[mine] = room, read
            for g, part in zip(clique, split_by_device(ids, dealt, len(mine)), strict=True):
                parts[t][g].append(part)
    return [[_joined(mine) for mine in of_kind] for of_kind in parts]


HOST_ROUNDS = 4
"""Times that devices' and the host's items are chosen in turn."""


def round_shares(
    problem: PlacementProblem,
    rows: ObjectiveRows,
    groups: Groups,
    buckets: list[Buckets],
    relaxed: Relaxation,
) -> Placement:
    """Round to whole items, choose what the host keeps, and find who reads what where.

    Where an item matters, several ways to round are tried.
    """
    seconds = read_seconds(problem, rows, relaxed.prices)
    unlike = any(len(each.groups) > 1 for each in groups.classes)
    few = worth_exchanging(problem)
    ways = [(relaxed.shares, False, False)]
    if few:
        ways += [(relaxed.shares, True, False)] if len(problem.kinds) > 1 else []
        ways += [(relaxed.shares, False, True)] if unlike else []
        if relaxed.solver not in ("sort", "density"):
            by_density, _ = density_shares(problem, rows, groups, buckets)
            ways.append((by_density, False, unlike))
    best: tuple[float, Placement] | None = None
    for shares, rows_first, mean in ways:
        chosen = [
            round_kind(problem, t, groups, b, shares[t], mean=mean) for t, b in enumerate(buckets)
        ]
        own = fill_devices(problem, chosen, rows_first=rows_first, evenly=not few)
        placement = find_sources(problem, groups, buckets, relaxed, own, seconds)
        placement = exchange(problem, rows, placement, seconds)
        if not few:
            return placement
        value = float(rows.values(read_bytes(problem, placement)).max())
        for _ in range(HOST_ROUNDS if problem.host_bytes is not None else 0):
            again = exchange(problem, rows, choose_host_again(problem, placement, seconds), seconds)
            found = float(rows.values(read_bytes(problem, again)).max())
            if found >= value * (1 - 1e-9):
                break
            value, placement = found, again
        if best is None or value < best[0]:
            best = (value, placement)
    assert best is not None
    return best[1]


def read_seconds(
    problem: PlacementProblem, rows: ObjectiveRows, prices: Prices
) -> NDArray[np.float64]:
    """Price a byte by kind, device and place; ties are broken by what it takes alone."""
    priced = np.einsum("k,ktgs->tgs", prices.rows, rows.weights)
    alone = np.where(np.isfinite(problem.network.alone), problem.network.alone, 0.0)
    tie = 1e-6 * max(float(priced.max()), 1e-300) / max(float(alone.max()), 1e-300)
    found = priced + tie * alone
    found[~np.isfinite(problem.network.alone)] = np.inf
    return found


def find_sources(
    problem: PlacementProblem,
    groups: Groups,
    buckets: list[Buckets],
    relaxed: Relaxation,
    own: list[list[NDArray[np.int64]]],
    seconds: NDArray[np.float64],
) -> Placement:
    """Find where cliques read what devices do not hold, and what the host keeps for them."""

    def places(t: int) -> list[NDArray[np.uint8]]:
        kind = problem.kinds[t]
        marks = [mark_holders([own[t][g] for g in c], kind.num_items) for c in problem.cliques]
        codes: list[NDArray[np.uint8]] = [np.zeros(0, np.uint8)] * len(problem.cliques)
        for each in groups.classes:
            peers = _peers_pay(groups, each.groups, relaxed.shares[t], buckets[t], kind.laws)
            crossed = relaxed.shares[t][list(each.groups), :, CROSS].max(axis=0) > SHARE
            for c in each.cliques:
                place = np.full(kind.num_items, HOST, np.uint8)
                if crossed.any():
                    place[held_by_others(marks, c) & crossed[buckets[t].of]] = CROSS
                if peers.any():
                    place[(marks[c] >= 0) & peers[buckets[t].of]] = PEER
                codes[c] = place
        return codes

    items = max(kind.num_items for kind in problem.kinds)
    fallback_places = side_by_side(places, range(len(problem.kinds)), items=items)
    return Placement(
        policy="joint",
        cliques=problem.cliques,
        items=_with_host(problem, own, fallback_places, seconds),
        variant=relaxed.solver,
    )


def _peers_pay(
    groups: Groups,
    names: tuple[int, ...],
    shares: NDArray[np.float64],
    buckets: Buckets,
    laws: tuple[int, ...],
) -> NDArray[np.bool_]:
    """Whether most reads of a bucket's held items come from peers, shape [K]."""
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
    # What every device holds is read from a peer as soon as one device drops its copy.
    return (from_peers > share) | (possible <= SHARE * total)


def choose_host_again(
    problem: PlacementProblem, placement: Placement, seconds: NDArray[np.float64]
) -> Placement:
    """Choose the host's items again for what a placement's devices lack now."""
    own = [held.own for held in placement.items]
    codes = [[row.copy() for row in held.fallback_places or ()] for held in placement.items]
    return replace(placement, items=_with_host(problem, own, codes, seconds))


def _with_host(
    problem: PlacementProblem,
    own: list[list[NDArray[np.int64]]],
    fallback_places: list[list[NDArray[np.uint8]]],
    seconds: NDArray[np.float64],
) -> tuple[ItemPlacement, ...]:
    """Choose what the host keeps; what it lacks is read from disk, where it was to be read."""
    held: list[ItemPlacement] = []
    for t, mask in enumerate(host_items(problem, own, fallback_places, seconds)):
        if mask is not None:
            for row in fallback_places[t]:
                far = row >= HOST
                row[far] = np.where(mask, HOST, DISK)[far]
        held.append(ItemPlacement(own=own[t], fallback_places=fallback_places[t], on_host=mask))
    return tuple(held)


def host_items(
    problem: PlacementProblem,
    own: list[list[NDArray[np.int64]]],
    fallback_places: list[list[NDArray[np.uint8]]],
    seconds: NDArray[np.float64],
) -> list[NDArray[np.bool_] | None]:
    """Choose what the host keeps: the items whose reads from there save most seconds per byte."""
    if problem.host_bytes is None:
        return [None] * len(problem.kinds)
    rates: list[NDArray[np.float64]] = []
    for t, kind in enumerate(problem.kinds):
        saved = np.zeros(kind.num_items)
        for c, clique in enumerate(problem.cliques):
            far = fallback_places[t][c] >= HOST
            for g in clique:
                gain = seconds[t, g, DISK] - seconds[t, g, HOST]
                gain = min(gain, 1e30) * kind.read_bytes
                mine = np.where(far, kind.heat[kind.laws[g]], 0.0) * gain
                mine[own[t][g]] = 0.0
                saved += mine
        rates.append(saved / np.maximum(kind.size_array(), 1))
    return [*fill_host(problem, np.argsort(-np.concatenate(rates), kind="stable"))]
