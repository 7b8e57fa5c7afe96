"""What is to be placed: items and how hot they are, memories, and what reading an item costs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.placement.costs import ReadNetwork, RowCosts, network_of_costs

Ids = NDArray[np.int64]
Heat = NDArray[np.float32] | NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ItemKind:
    """Items of one kind, one per node."""

    name: str
    """Kind, features or topology."""
    heat: Heat
    """Expected reads of an item per step, by law: shape [D, N]; may be memory-mapped."""
    laws: tuple[int, ...]
    """Row of `heat` each device draws from: all 0 where they share one law."""
    size: int | NDArray[Any]
    """Bytes of every item, or of each: shape [N]."""
    read_bytes: float
    """Bytes that cross links per read."""

    @property
    def num_items(self) -> int:
        """Number of items, N."""
        return int(self.heat.shape[1])

    def sizes(self, ids: Ids) -> NDArray[np.int64]:
        """List the bytes of some items."""
        if isinstance(self.size, np.ndarray):
            return self.size[ids].astype(np.int64)
        return np.full(len(ids), self.size, np.int64)

    def size_array(self, ids: Ids | None = None) -> NDArray[np.int64]:
        """List the bytes of all items or of some: shape [n], or [1] where all are equal."""
        if not isinstance(self.size, np.ndarray):
            return np.array([self.size], np.int64)
        return (self.size if ids is None else self.size[ids]).astype(np.int64, copy=False)

    def bytes_of(self, ids: Ids) -> int:
        """Add up the bytes of some items."""
        if isinstance(self.size, np.ndarray):
            return int(self.size[ids].sum(dtype=np.int64))
        return self.size * len(ids)

    def total_bytes(self) -> int:
        """Add up the bytes of all items."""
        if isinstance(self.size, np.ndarray):
            return int(self.size.sum(dtype=np.int64))
        return self.size * self.num_items

    def heat_by_device(self) -> Heat:
        """Select each device's heat, shape [G, N]; or the one law of all, shape [N]."""
        return self.heat[0] if len(set(self.laws)) == 1 else self.heat[list(self.laws)]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlacementProblem:
    """Who may keep which items, what reading them costs, and how hot they are."""

    kinds: tuple[ItemKind, ...]
    """Feature rows first; neighbour lists, where they are placed too."""
    cliques: tuple[tuple[int, ...], ...]
    """Devices that can read each other as peers; each of 0..G-1 in one."""
    device_bytes: tuple[int, ...]
    """Bytes each device has for items, after all else it holds."""
    host_bytes: int | None
    """Bytes the host has for items; None: room for all."""
    network: ReadNetwork
    compares_links: bool = False
    """Whether policies are compared by seconds on the network's links; else by `row_costs`."""

    @property
    def num_devices(self) -> int:
        """Number of devices, G."""
        return len(self.device_bytes)

    @property
    def capacity_rows(self) -> list[int]:
        """Feature rows that fit each device."""
        return [m // int(self.kinds[0].size) for m in self.device_bytes]

    @property
    def row_costs(self) -> RowCosts:
        """Seconds per feature row from each place."""
        return self.read_costs(0)

    def read_costs(self, kind: int) -> RowCosts:
        """Find the seconds per read from each place, of the device that waits longest for it."""
        alone = self.network.alone[kind]
        slowest = np.where(np.isfinite(alone), alone, -np.inf).max(axis=0)
        seconds = np.where(np.isfinite(slowest), slowest, np.inf) * self.kinds[kind].read_bytes
        own, peer, _, host, disk = seconds.tolist()
        return RowCosts(local=own, peer=peer, host=host, disk=disk)

    def clique_of(self) -> NDArray[np.int64]:
        """Find the index of each device's clique, shape [G]."""
        out = np.zeros(self.num_devices, np.int64)
        for c, clique in enumerate(self.cliques):
            out[list(clique)] = c
        return out

    def with_hotness(self, hotness: Heat) -> "PlacementProblem":
        """Replace the heat of the feature rows: p(v), shape [N] or [G, N], or by law as it was."""
        known = self.kinds[0]
        if hotness.ndim == 2 and len(hotness) == len(known.heat):
            return replace(self, kinds=(replace(known, heat=hotness), *self.kinds[1:]))
        heat, laws = as_laws(hotness, self.num_devices)
        return replace(self, kinds=(replace(self.kinds[0], heat=heat, laws=laws), *self.kinds[1:]))


def as_laws(heat: Heat, num_devices: int) -> tuple[Heat, tuple[int, ...]]:
    """Turn p(v), of shape [N] for all devices or [G, N] for each, into `heat` and `laws`."""
    if heat.ndim == 1:
        return heat.reshape(1, -1), (0,) * num_devices
    if len(heat) != num_devices:
        raise ValueError(f"expected hotness of {num_devices} GPUs, found {len(heat)}")
    return heat, tuple(range(num_devices))


def rows_problem(
    hotness: Heat,
    costs: RowCosts | ReadNetwork,
    capacity_rows: Sequence[int],
    cliques: Sequence[Sequence[int]] | None = None,
    host_rows: int | None = None,
) -> PlacementProblem:
    """Make the problem of feature rows alone: sizes, budgets and reads count rows.

    Args:
        hotness: p(v), shape [N] when all devices draw from the same law, else [G, N].
        costs: gross seconds per row of every device, or a network where devices differ in them.
        capacity_rows: rows each of the G devices may hold.
        cliques: devices that read each other; None: all of them.
        host_rows: rows the host may hold, the rest stays on disk; None: all.
    """
    num_devices, num_nodes = len(capacity_rows), int(hotness.shape[-1])
    heat, laws = as_laws(hotness, num_devices)
    rows = ItemKind(name="features", heat=heat, laws=laws, size=1, read_bytes=1.0)
    groups = [range(num_devices)] if cliques is None else cliques
    return PlacementProblem(
        kinds=(rows,),
        cliques=tuple(tuple(clique) for clique in groups),
        device_bytes=tuple(int(rows) for rows in capacity_rows),
        host_bytes=None if host_rows is None or host_rows >= num_nodes else host_rows,
        network=network_of_costs(costs, num_devices) if isinstance(costs, RowCosts) else costs,
        compares_links=isinstance(costs, ReadNetwork),
    )
