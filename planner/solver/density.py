"""Placement by one sort of value per byte: exact where [C22] says so, else what a time-out gets.

Each bucket has up to two moves, host to dealt and dealt to replicated; all of them, of all kinds,
sorted by seconds saved per byte, fill a device's memory. With one clique of alike devices, an
additive objective and one capacity that is the optimum of the linear programme, up to one bucket.
Host memory, where it is short, is then filled by density too, which is exact nowhere.
"""

import numpy as np
from numpy.typing import NDArray

from planner.placement.layout import Instance
from planner.placement.network import Goal, Rows
from planner.placement.reads import CROSS, DISK, HOST, OWN, PEER
from planner.solver.buckets import Buckets
from planner.solver.formulation import Items, moves
from planner.solver.groups import Groups
from planner.solver.program import Prices


def sort_is_exact(instance: Instance, goal: Goal, groups: Groups) -> bool:
    """Whether one sort is the programme's optimum (formulas 6.3 [C22]).

    One clique of alike devices, an objective that adds places up, memory of devices the only
    capacity, and no link that several devices share.
    """
    additive = goal == "transactions" or (
        goal == "serial"
        and instance.network.compute_seconds == 0
        and not instance.network.shared().any()
    )
    return (
        additive
        and len(groups.groups) == 1
        and len(instance.cliques) == 1
        and instance.host_bytes is None
        and bool(np.isfinite(instance.network.alone[:, :, HOST]).all())
    )


def density_shares(
    instance: Instance, rows: Rows, groups: Groups, buckets: list[Buckets]
) -> tuple[list[NDArray[np.float64]], Prices]:
    """Shares of buckets by group and place, and prices.

    Returns:
        By kind, shape [groups, K, 5]; and the prices of the last moves taken.
    """
    sizes = np.concatenate([b.bytes for b in buckets])
    kind_of = np.repeat(np.arange(len(buckets)), [len(b.bytes) for b in buckets])
    shares = np.zeros((len(groups.groups), len(sizes), 5))
    device = np.zeros(instance.num_devices)
    missing = np.zeros(len(sizes))
    for each in groups.classes:
        for name in each.groups:
            group = groups.groups[name]
            g, n = group.devices[0], each.size
            heat = np.concatenate(
                [
                    kind.read_bytes * b.heat[:, kind.laws[g]]
                    for kind, b in zip(instance.kinds, buckets, strict=True)
                ]
            )
            cost = _seconds(instance, rows, g)[kind_of]
            host = np.minimum(cost[:, HOST], cost[:, DISK])
            peer = np.minimum(cost[:, PEER], host)
            # a device that has no like must not count on the others' copies
            n = n if len(each.groups) == 1 else 1
            fits = np.concatenate([b.fits for b in buckets])
            items = Items(
                size=np.where(fits, sizes, np.inf),
                replicated=heat * cost[:, OWN],
                dealt=heat * (cost[:, OWN] / n + peer * (n - 1) / n),
                host=heat * host,
                num_devices=n,
            )
            found = moves(items)
            taken, price = found.fill(float(min(instance.device_bytes[d] for d in group.devices)))
            device[list(group.devices)] = price / instance.num_devices
            dealt, whole = np.zeros(len(sizes)), np.zeros(len(sizes))
            np.add.at(dealt, found.item[found.to_dealt], taken[found.to_dealt])
            np.add.at(whole, found.item[~found.to_dealt], taken[~found.to_dealt])
            dealt = np.maximum(dealt, whole) - whole
            shares[name, :, OWN] = whole + dealt / n
            # a peer that is no faster than the host is never read (formulas 1.1)
            read = dealt * (n - 1) / n
            from_peer = cost[:, PEER] < host
            shares[name, :, PEER] = np.where(from_peer, read, 0.0)
            left = np.maximum(0.0, 1.0 - whole - dealt) + np.where(from_peer, 0.0, read)
            shares[name, :, HOST] = left
            missing += left * heat * len(group.devices)
    _leave_to_disk(instance, shares, missing, sizes)
    ends = np.cumsum([len(b.bytes) for b in buckets])[:-1]
    weights = _weights(rows, instance)
    return list(np.split(shares, ends, axis=1)), Prices(rows=weights, device=device, host=0.0)


def _seconds(instance: Instance, rows: Rows, g: int) -> NDArray[np.float64]:
    """Seconds per byte of a device by kind and place, shape [T, 5]."""
    alone = instance.network.alone[:, g].copy()
    if rows.names == ("transactions",):
        alone = np.where(np.isfinite(alone), rows.weights[0, :, g], np.inf)
    alone[:, CROSS] = np.inf
    return np.minimum(alone, 1e30)


def _weights(rows: Rows, instance: Instance) -> NDArray[np.float64]:
    """Equal weights of the rows that belong to one device each, else of all."""
    touched = np.any(rows.weights > 0, axis=(1, 3)).sum(axis=1)
    single = touched == 1 if instance.num_devices > 1 else touched > 0
    chosen = single if single.any() else np.ones(len(rows.names), np.bool_)
    return chosen / chosen.sum()


def _leave_to_disk(
    instance: Instance,
    shares: NDArray[np.float64],
    missing: NDArray[np.float64],
    sizes: NDArray[np.float64],
) -> None:
    """What host memory has no room for is read from disk, the least asked for first."""
    if instance.host_bytes is None:
        return
    order = np.argsort(-missing / np.maximum(sizes, 1e-300), kind="stable")
    before = np.cumsum(sizes[order]) - sizes[order]
    room = np.empty(len(sizes))
    room[order] = np.clip((instance.host_bytes - before) / np.maximum(sizes[order], 1e-300), 0, 1)
    kept = np.minimum(shares[:, :, HOST], room[None])
    shares[:, :, DISK] += shares[:, :, HOST] - kept
    shares[:, :, HOST] = kept
