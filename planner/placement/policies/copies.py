"""From the copies that a policy chooses to a layout of the whole instance.

A policy names the items of each kind that every device holds, and no more: what the host keeps and
from where everything else is read follows from the network, by one rule for all policies.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.errors import SettingsError
from planner.placement.costs import RowCosts
from planner.placement.layout import Held, Instance, Kind, Layout, Reason, as_laws, read_nearest
from planner.placement.network import network_of_costs
from planner.placement.order import hotness_order
from planner.placement.policies.registry import find_policy, load_function
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Copies:
    """What every device holds by a policy."""

    own: dict[int, list[Ids]]
    """Ids that each device holds, by index of the instance's kind; the others lie on the host."""
    variant: str = ""
    """What the policy settled on; empty: there was nothing to settle."""


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


def place_named(name: str, instance: Instance, know: Knowledge) -> Layout | Reason:
    """Place an instance by a named policy, or say why it has no placement here.

    Args:
        name: of a policy that chooses copies (`PlacementPolicy.copies`).
        instance: the problem; its first kind are the feature rows.
        know: what some policies look at besides.

    Raises:
        SettingsError: there is no such policy, or it places feature rows alone.
    """
    policy = find_policy(name)
    if not policy.copies:
        raise SettingsError(f"expected a policy that chooses copies, found {name!r}")
    if "out_degree" in policy.needs and know.out_degree is None:
        return Reason(policy=name, why="the out-degrees of the graph are not known")
    found: Copies | Reason = load_function(policy.copies)(instance, know)
    if isinstance(found, Reason):
        return found
    return complete_layout(instance, name, found, peers=policy.reads_peers)


def complete_layout(instance: Instance, name: str, copies: Copies, *, peers: bool) -> Layout:
    """Complete what devices hold to a layout; kinds that are not named lie on the host."""
    own = copies.own
    on_host = hottest_on_host(instance, own, peers=peers)
    held: list[Held] = []
    for t in range(len(instance.kinds)):
        mine = own.get(t) or [np.zeros(0, np.int64) for _ in range(instance.num_devices)]
        held.append(read_nearest(instance, t, mine, on_host[t], peers=peers))
    return Layout(policy=name, held=tuple(held), variant=copies.variant or name)


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


def heat_of_clique(kind: Kind, clique: Sequence[int]) -> Heat:
    """Rank vertices by their heat over a clique's devices: shape [N]; one law is its own rank."""
    laws = [kind.laws[g] for g in clique]
    if len(set(laws)) == 1:
        return kind.heat[laws[0]]
    return np.asarray(sum(kind.heat[law] for law in laws), np.float64)
