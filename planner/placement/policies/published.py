"""Published placements as layouts, to be scored by the one evaluator beside `joint`.

Each is one short function on the same instance; what a system keeps of the topology is part of it
(formulas 2.6). One that cannot exist here, such as GNNLab's when a device cannot hold the whole
topology, returns a `Reason` and no number.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.errors import SettingsError
from planner.placement.costs import RowCosts
from planner.placement.layout import Held, Instance, Kind, Layout, Reason, as_laws, read_nearest
from planner.placement.network import network_of_costs
from planner.placement.order import degree_order, hotness_order
from planner.placement.policies import baselines
from planner.placement.policies.legion import place_legion
from planner.placement.policies.song_jiang import best_of
from planner.placement.reads import DISK, HOST, OWN, PEER, Heat

Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Knowledge:
    """What some policies look at besides the instance."""

    out_degree: NDArray[np.int64] | None = None
    """Lists each node stands in, shape [N]."""
    in_degree: NDArray[np.int64] | None = None
    """Length of each node's list, shape [N]; for legion."""
    parts: Callable[[str], NDArray[np.int32] | None] | None = None
    """Device of each node by a partitioner's name (metis, pagraph), or None."""
    reach: Callable[[str], NDArray[np.bool_] | None] | None = None
    """Nodes that each device's batches can touch under those parts, redundant ones included, shape
    [G, N]; for pagraph and pagraph-plus. None: each device's own part."""
    seed: int = 0


def _none(instance: Instance, know: Knowledge) -> Layout | Reason:
    del know
    return _rows_only(instance, "none", [_empty() for _ in range(instance.num_devices)])


def _naive(instance: Instance, know: Knowledge) -> Layout | Reason:
    del know
    return _rows_only(instance, "naive", baselines.naive(_laws(instance), capacity(instance)))


def _random(instance: Instance, know: Knowledge) -> Layout | Reason:
    own = baselines.random(_laws(instance), capacity(instance), seed=know.seed)
    return _rows_only(instance, "random", own)


def _degree(instance: Instance, know: Knowledge) -> Layout | Reason:
    if know.out_degree is None:
        return Reason(policy="degree", why="the out-degrees of the graph are not known")
    own = baselines.degree(know.out_degree, capacity(instance))
    return _rows_only(instance, "degree", own)


def _metis(instance: Instance, know: Knowledge) -> Layout | Reason:
    return _of_parts(instance, know, "metis", "metis", _heat_of, peers=True)


def _pagraph(instance: Instance, know: Knowledge) -> Layout | Reason:
    degree = know.out_degree
    if degree is None:
        return Reason(policy="pagraph", why="the out-degrees of the graph are not known")
    return _of_parts(
        instance, know, "pagraph", "pagraph", lambda _i, _g: degree.astype(np.float64), peers=False
    )


def _pagraph_plus(instance: Instance, know: Knowledge) -> Layout | Reason:
    return _of_parts(instance, know, "pagraph-plus", "metis", _heat_of, peers=False)


def _gnnlab(instance: Instance, know: Knowledge) -> Layout | Reason:
    """Every device: the whole topology, then the same rows, hottest over all devices."""
    del know
    left = list(instance.device_bytes)
    whole: dict[int, list[Ids]] = {}
    for t, kind in enumerate(instance.kinds[1:], start=1):
        total = kind.total_bytes()
        if total > min(left):
            return Reason(
                policy="gnnlab",
                why=f"the {kind.name} of {total} bytes stands on every device, which has "
                f"{min(left)} bytes",
            )
        left = [m - total for m in left]
        whole[t] = [np.arange(kind.num_items)] * instance.num_devices
    order = hotness_order(_total_heat(instance))
    rows = instance.kinds[0].size
    own = [order[: m // int(rows)] for m in left]
    return _finish(instance, "gnnlab", {0: own, **whole}, peers=False)


def _quiver(instance: Instance, know: Knowledge) -> Layout | Reason:
    """Rows by degree, dealt inside a clique, the same in each; topology on the host."""
    if know.out_degree is None:
        return Reason(policy="quiver", why="the out-degrees of the graph are not known")
    order = degree_order(know.out_degree)
    rows = capacity(instance)
    own = [_empty() for _ in rows]
    for clique in instance.cliques:
        n = len(clique)
        for i, g in enumerate(clique):
            own[g] = order[i : n * min(rows[d] for d in clique) : n]
    return _finish(instance, "quiver", {0: own})


def _song_jiang(instance: Instance, know: Knowledge) -> Layout | Reason:
    """The best of Algorithm 1 with both thresholds and split_k, inside every clique."""
    del know
    rows, heat = capacity(instance), instance.kinds[0].heat
    own = [_empty() for _ in rows]
    names: list[str] = []
    solved: dict[tuple[object, ...], tuple[list[Ids], str]] = {}
    for clique in instance.cliques:
        laws = tuple(instance.kinds[0].laws[g] for g in clique)
        least = min(rows[g] for g in clique)
        key = (laws, least, len(clique), instance.network.alone[0, clique[0]].tobytes())
        if key not in solved:
            p = heat[laws[0]] if len(set(laws)) == 1 else heat[list(laws)]
            found = best_of(p, clique_costs(instance, clique), len(clique), least)
            solved[key] = (list(found.own), found.variants[0].name)
        for g, ids in zip(clique, solved[key][0], strict=True):
            own[g] = ids
        names.append(solved[key][1])
    return _finish(instance, "song-jiang", {0: own}, variant=names[0])


def _legion(instance: Instance, know: Knowledge) -> Layout | Reason:
    """The published split of each clique's memory between lists and rows, and its fill."""
    least = min(instance.device_bytes)
    if len(instance.kinds) == 1:
        rows = least // int(instance.kinds[0].size)
        own = [_empty() for _ in instance.device_bytes]
        for clique in instance.cliques:
            order = hotness_order(_heat_of_clique(instance.kinds[0], clique))
            for i, g in enumerate(clique):
                own[g] = order[i : len(clique) * rows : len(clique)]
        return _finish(instance, "legion", {0: own}, variant="no topology to share with")
    if know.in_degree is None:
        return Reason(policy="legion", why="the lengths of the neighbour lists are not known")
    features, topology = instance.kinds[0], instance.kinds[1]
    found = place_legion(
        features.heat[list(features.laws)],
        topology.heat[list(topology.laws)],
        know.in_degree,
        cliques=instance.cliques,
        row_bytes=int(features.size),
        device_cache_bytes=least,
    )
    shares = ", ".join(f"{split.alpha:.2f}" for split in found.splits)
    return _finish(
        instance, "legion", {0: found.own, 1: found.lists}, variant=f"share of lists {shares}"
    )


NAMED: dict[str, Callable[[Instance, Knowledge], Layout | Reason]] = {
    "none": _none,
    "naive": _naive,
    "random": _random,
    "metis": _metis,
    "degree": _degree,
    "gnnlab": _gnnlab,
    "quiver": _quiver,
    "pagraph": _pagraph,
    "pagraph-plus": _pagraph_plus,
    "song-jiang": _song_jiang,
    "legion": _legion,
}
"""Every published policy, and none. The first kind of an instance are its feature rows."""


def rows_instance(
    hotness: Heat,
    costs: RowCosts,
    capacity_rows: Sequence[int],
    cliques: Sequence[Sequence[int]],
    host_rows: int | None,
) -> Instance:
    """Feature rows alone, at seconds per row: sizes and budgets count rows.

    Args:
        hotness: p(v), shape [N] or [G, N].
        costs: seconds per row, gross.
        capacity_rows: rows each device may hold.
        cliques: devices that read each other.
        host_rows: rows the host may hold; None: all.
    """
    num_devices = len(capacity_rows)
    heat, laws = as_laws(hotness, num_devices)
    return Instance(
        kinds=(Kind(name="features", heat=heat, laws=laws, size=1, read_bytes=1.0),),
        cliques=tuple(tuple(clique) for clique in cliques),
        device_bytes=tuple(int(rows) for rows in capacity_rows),
        host_bytes=host_rows,
        network=network_of_costs(costs, 1, num_devices),
    )


WITHOUT_PEERS = ("gnnlab", "pagraph", "pagraph-plus")
"""Policies whose devices never read each other."""


def place_named(policy: str, instance: Instance, know: Knowledge) -> Layout | Reason:
    """A named policy's layout, or why it has none.

    Raises:
        SettingsError: there is no such policy.
    """
    if policy not in NAMED:
        raise SettingsError(
            f"expected a placement policy among {', '.join(NAMED)}, found {policy!r}; choose one, "
            "or add its function to NAMED (planner/placement/HOWTO_add_a_placement_policy.md)"
        )
    return NAMED[policy](instance, know)


def capacity(instance: Instance) -> list[int]:
    """Feature rows that fit each device."""
    return [m // int(instance.kinds[0].size) for m in instance.device_bytes]


def clique_costs(instance: Instance, clique: tuple[int, ...]) -> RowCosts:
    """Seconds per row of a clique's devices, the slowest of them; peers where there are any."""
    rows = instance.kinds[0]
    seconds = instance.network.alone[0, list(clique)].max(axis=0) * rows.read_bytes
    miss = HOST if np.isfinite(seconds[HOST]) and instance.host_bytes != 0 else DISK
    return RowCosts(
        local=float(seconds[OWN]),
        peer=float(seconds[PEER]) if len(clique) > 1 else float("inf"),
        host=float(seconds[miss]),
        disk=float(seconds[DISK]),
    )


def hottest_on_host(
    instance: Instance, own: dict[int, list[Ids]], *, peers: bool
) -> list[NDArray[np.bool_] | None]:
    """Items of all kinds the host keeps: those whose place there saves most seconds per byte."""
    if instance.host_bytes is None:
        return [None] * len(instance.kinds)
    rates: list[NDArray[np.float64]] = []
    sizes: list[NDArray[np.int64]] = []
    for t, kind in enumerate(instance.kinds):
        alone = np.minimum(instance.network.alone[t], 1e30)
        saved = np.zeros(kind.num_items)
        for clique in instance.cliques:
            held = np.zeros(kind.num_items, np.bool_)
            for g in clique if peers and t in own else ():
                held[own[t][g]] = True
            for g in clique:
                host, disk = alone[g, HOST], alone[g, DISK]
                gain = np.where(held, max(0.0, min(alone[g, PEER], disk) - host), disk - host)
                mine = kind.heat[kind.laws[g]] * gain * kind.read_bytes
                if t in own:
                    mine[own[t][g]] = 0.0
                saved += mine
        sizes.append(kind.sizes(np.arange(kind.num_items)))
        rates.append(saved / sizes[-1])
    return keep_densest(rates, sizes, instance.host_bytes)


def keep_densest(
    rates: list[NDArray[np.float64]], sizes: list[NDArray[np.int64]], limit: int
) -> list[NDArray[np.bool_] | None]:
    """Masks of the items of highest rate that fit a limit, over all kinds."""
    every, bytes_ = np.concatenate(rates), np.concatenate(sizes)
    order = hotness_order(np.maximum(every, 0.0))
    ends = np.cumsum(bytes_[order])
    kept = np.zeros(len(every), np.bool_)
    kept[order[: int(np.searchsorted(ends, limit, side="right"))]] = True
    return list(np.split(kept, np.cumsum([len(s) for s in sizes])[:-1]))


def _rows_only(instance: Instance, policy: str, own: list[Ids]) -> Layout:
    return _finish(instance, policy, {0: own})


def _finish(
    instance: Instance,
    policy: str,
    own: dict[int, list[Ids]],
    *,
    peers: bool = True,
    variant: str = "",
) -> Layout:
    """Complete a placement; kinds that are not named lie on the host."""
    on_host = hottest_on_host(instance, own, peers=peers)
    held: list[Held] = []
    for t in range(len(instance.kinds)):
        mine = own.get(t) or [_empty() for _ in range(instance.num_devices)]
        held.append(read_nearest(instance, t, mine, on_host[t], peers=peers))
    return Layout(policy=policy, held=tuple(held), variant=variant or policy)


def _of_parts(
    instance: Instance,
    know: Knowledge,
    policy: str,
    partitioner: str,
    score: Callable[[Instance, int], NDArray[np.float64]],
    *,
    peers: bool,
) -> Layout | Reason:
    """Each device: of its own part, the rows of highest score.

    Systems whose devices do not read each other keep a part's redundant nodes beside it.
    """
    parts = know.parts(partitioner) if know.parts is not None else None
    if parts is None:
        return Reason(policy=policy, why=f"the graph is not partitioned ({partitioner})")
    reach = know.reach(partitioner) if know.reach is not None and not peers else None
    own: list[Ids] = []
    for g, rows in enumerate(capacity(instance)):
        ids = np.flatnonzero(parts == g if reach is None else reach[g])
        own.append(ids[hotness_order(score(instance, g)[ids])[:rows]])
    return _finish(instance, policy, {0: own}, peers=peers)


def _heat_of(instance: Instance, g: int) -> NDArray[np.float64]:
    rows = instance.kinds[0]
    return rows.heat[rows.laws[g]].astype(np.float64)


def _heat_of_clique(kind: Kind, clique: Sequence[int]) -> Heat:
    """Shape [N], in the order of the sum over a clique's devices; that of one law is its own."""
    laws = [kind.laws[g] for g in clique]
    if len(set(laws)) == 1:
        return kind.heat[laws[0]]
    return np.asarray(sum(kind.heat[law] for law in laws), np.float64)


def _laws(instance: Instance) -> NDArray[np.float32] | NDArray[np.float64]:
    rows = instance.kinds[0]
    return rows.heat[0] if len(set(rows.laws)) == 1 else rows.heat[list(rows.laws)]


def _total_heat(instance: Instance) -> NDArray[np.float64]:
    rows = instance.kinds[0]
    counts = np.bincount(rows.laws, minlength=len(rows.heat)).astype(np.float64)
    return np.asarray(counts @ rows.heat, np.float64)


def _empty() -> Ids:
    return np.zeros(0, np.int64)
