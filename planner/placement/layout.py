"""One description of every placement: what is placed, where it may lie, where it lies.

An `Instance` is the question: kinds of items (feature rows, adjacency lists) with their sizes and
heat, devices in cliques, the bytes of every memory, and the network. A `Layout` is an answer,
node by node: what each device holds, what the host holds, and from where each clique reads the
rest. `planner.placement.evaluate` scores any layout of any instance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.placement.network import Network
from planner.placement.reads import CROSS, Heat, first_misread, mark_holders, nearest_places


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kind:
    """Items of one kind, one per node."""

    name: str
    """features | topology."""
    heat: Heat
    """Expected reads of an item per step, by law: shape [D, N]; may be memory-mapped."""
    laws: tuple[int, ...]
    """Row of `heat` each device draws from: all 0 where they share one law."""
    size: int | NDArray[Any]
    """Bytes of an item, or of each: shape [N]."""
    read_bytes: float
    """Bytes that cross links per read."""

    @property
    def num_items(self) -> int:
        """N."""
        return int(self.heat.shape[1])

    def sizes(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of some items."""
        if isinstance(self.size, np.ndarray):
            return self.size[ids].astype(np.int64)
        return np.full(len(ids), self.size, np.int64)

    def size_array(self, ids: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Bytes of all items or of some: shape [n], or [1] where all are equal."""
        if not isinstance(self.size, np.ndarray):
            return np.array([self.size], np.int64)
        return (self.size if ids is None else self.size[ids]).astype(np.int64, copy=False)

    def bytes_of(self, ids: NDArray[np.int64]) -> int:
        """Of some items together."""
        if isinstance(self.size, np.ndarray):
            return int(self.size[ids].sum(dtype=np.int64))
        return self.size * len(ids)

    def total_bytes(self) -> int:
        """Of all items."""
        if isinstance(self.size, np.ndarray):
            return int(self.size.sum(dtype=np.int64))
        return self.size * self.num_items


def shared_law(heat: Heat, num_devices: int) -> tuple[Heat, tuple[int, ...]]:
    """`heat` and `laws` of a kind whose devices all draw from one law [N]."""
    return heat.reshape(1, -1), (0,) * num_devices


def as_laws(heat: Heat, num_devices: int) -> tuple[Heat, tuple[int, ...]]:
    """`heat` and `laws` from p(v): shape [N] for all devices, or [G, N] for each.

    Raises:
        ValueError: there are neither one law nor one for each device.
    """
    if heat.ndim == 1:
        return shared_law(heat, num_devices)
    if len(heat) != num_devices:
        raise ValueError(f"expected heat of {num_devices} devices, found {len(heat)}")
    return heat, tuple(range(num_devices))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Instance:
    """A placement problem."""

    kinds: tuple[Kind, ...]
    cliques: tuple[tuple[int, ...], ...]
    """Devices that can read each other as peers; each of 0..G-1 in one."""
    device_bytes: tuple[int, ...]
    """What each device has for items, after all else it holds."""
    host_bytes: int | None
    """What the host has for items; None: room for all."""
    network: Network

    @property
    def num_devices(self) -> int:
        """G."""
        return len(self.device_bytes)

    def clique_of(self) -> NDArray[np.int64]:
        """Index of each device's clique, shape [G]."""
        out = np.zeros(self.num_devices, np.int64)
        for c, clique in enumerate(self.cliques):
            out[list(clique)] = c
        return out


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Held:
    """Where the items of one kind lie and are read."""

    own: list[NDArray[np.int64]]
    """Ids each device holds."""
    elsewhere: list[NDArray[np.uint8]]
    """For each clique, the place its devices read what they do not hold, by id [N]."""
    on_host: NDArray[np.bool_] | None
    """Whether the host has the item, shape [N]; None: it has all."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layout:
    """A placement: one `Held` per kind of the instance."""

    policy: str
    held: tuple[Held, ...]
    variant: str = ""
    """What the policy settled on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Why a policy has no placement here."""

    policy: str
    why: str


def read_nearest(
    instance: Instance,
    kind: int,
    own: list[NDArray[np.int64]],
    on_host: NDArray[np.bool_] | None,
    *,
    peers: bool = True,
    across: bool = False,
) -> Held:
    """Complete a placement: every clique reads each item from the cheapest place that has it.

    Args:
        instance: the problem.
        kind: index of the kind.
        own: ids each device holds.
        on_host: what the host has; None: all.
        peers: whether devices of a clique read each other.
        across: whether cliques read each other.
    """
    alone, num = instance.network.alone[kind], instance.kinds[kind].num_items
    holders = [mark_holders([own[g] for g in c], num) for c in instance.cliques]
    elsewhere: list[NDArray[np.uint8]] = []
    for c, clique in enumerate(instance.cliques):
        seconds = alone[list(clique)].mean(axis=0)
        others: NDArray[np.bool_] | None = None
        if across and np.isfinite(seconds[CROSS]):
            others = np.zeros(num, np.bool_)
            for d, held in enumerate(holders):
                if d != c:
                    others |= held >= 0
        held = holders[c] if peers else np.full(num, -1, np.int16)
        elsewhere.append(nearest_places(held, seconds, held_across=others, on_host=on_host))
    return Held(own=own, elsewhere=elsewhere, on_host=on_host)


def used_bytes(instance: Instance, layout: Layout) -> tuple[list[int], int]:
    """Bytes of items on each device, and on the host."""
    devices = [0] * instance.num_devices
    host = 0
    for kind, held in zip(instance.kinds, layout.held, strict=True):
        for g, ids in enumerate(held.own):
            devices[g] += kind.bytes_of(ids)
        host += (
            kind.total_bytes()
            if held.on_host is None
            else kind.bytes_of(np.flatnonzero(held.on_host))
        )
    return devices, host


def check_layout(instance: Instance, layout: Layout) -> None:
    """Check that every memory holds what is put there and every read finds its item.

    Raises:
        ValueError: names the memory or the item.
    """
    devices, host = used_bytes(instance, layout)
    for g, (used, limit) in enumerate(zip(devices, instance.device_bytes, strict=True)):
        if used > limit:
            raise ValueError(f"device {g}: expected at most {limit} bytes of items, found {used}")
    if instance.host_bytes is not None and host > instance.host_bytes:
        raise ValueError(f"host: expected at most {instance.host_bytes} bytes, found {host}")
    for t, (kind, held) in enumerate(zip(instance.kinds, layout.held, strict=True)):
        marks = [mark_holders([held.own[g] for g in c], kind.num_items) for c in instance.cliques]
        for c, codes in enumerate(held.elsewhere):
            across = _others(marks, c) if len(marks) > 1 else None
            wrong = first_misread(codes, marks[c], held_across=across, on_host=held.on_host)
            if wrong >= 0:
                raise ValueError(
                    f"kind {t}, clique {c}: item {wrong} is read where it does not lie"
                )


def _others(marks: Sequence[NDArray[np.int16]], clique: int) -> NDArray[np.bool_]:
    found = np.zeros(marks[0].size, np.bool_)
    for d, held in enumerate(marks):
        if d != clique:
            found |= held >= 0
    return found
