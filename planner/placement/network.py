"""Links a placement loads, and the objectives made of them (formulas 6.2).

A byte that device g reads of kind t from place s spends `loads[t, l, g, s]` seconds on link l; a
link that several devices cross adds them up. `alone[t, g, s]` is what the byte takes a device that
reads by itself: the slowest of the links on its way, or a measured rate.

    pipelined     z >= seconds of every link
    serial        z >= sum over places of bytes * alone, of every device, and every shared link
    transactions  z  = bytes from host and disk over all devices / bytes of a transaction
    stages        z >= sampling (topology), z >= features, each as `serial`, and shared links

The network of a placement on a machine's GPUs: every link their reads cross, shared or not.

    seconds per byte on link l = share of the route * moved_l(access) / (bandwidth_l * read_bytes)

summed over a place's routes: half of a host's pages come over each NUMA node, peers serve equal
shares. Links that several GPUs cross (PCIe switch, bridge between NUMA nodes, NVSwitch port, DRAM)
are one link here, so that their reads add up on it.

Source: docs/formulas.md 6.2 (t_sw, t_dram, t_nv) with lines per access [C7].
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.candidate import Candidate
from planner.cost.stages.gather_gpu import read_seconds, ways
from planner.machine.model import MachineModel
from planner.machine.routes import Reader, Route, gather_bandwidth, moved_bytes, routes
from planner.placement.costs import RowCosts
from planner.placement.reads import DISK, HOST, PLACES

Goal = Literal["pipelined", "serial", "transactions", "stages"]
LINE_BYTES = 64
"""CLS: bytes of one PCIe transaction."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Network:
    """Seconds per byte by kind of item, link, device and place."""

    links: tuple[str, ...]
    loads: NDArray[np.float64]
    """Shape [T, L, G, 5]; 0 where the way does not cross the link."""
    alone: NDArray[np.float64]
    """Shape [T, G, 5]; infinite where there is no such place."""
    compute_seconds: float = 0.0
    """What a step takes besides; a floor of the pipelined objectives."""

    @property
    def num_devices(self) -> int:
        """G."""
        return int(self.alone.shape[1])

    def shared(self) -> NDArray[np.bool_]:
        """Links that more than one device crosses, shape [L]."""
        return (self.loads > 0).any(axis=(0, 3)).sum(axis=1) > 1

    def faster(self, link: str, factor: float) -> "Network":
        """The same with one link's bandwidth times `factor`.

        Ways that the link does not limit take as long alone as before.
        """
        at = self.links.index(link)
        loads = self.loads.copy()
        limits = (loads[:, at] > 0) & (loads[:, at] >= loads.max(axis=1))
        loads[:, at] /= factor
        quicker = np.maximum(loads.max(axis=1), self.alone / factor)
        return replace(self, loads=loads, alone=np.where(limits, quicker, self.alone))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """What the objective is the maximum of: constants [K] + weights [K, T, G, 5] . bytes."""

    names: tuple[str, ...]
    weights: NDArray[np.float64]
    constants: NDArray[np.float64]

    def values(self, read_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of every row, given bytes [T, G, 5]; shape [K]."""
        return self.constants + np.einsum("ktgs,tgs->k", self.weights, read_bytes)


def undominated(rows: Rows) -> Rows:
    """Without the rows that another one is never below, whatever is read; the maximum stays.

    A GPU's own slot behind a switch of the same width is such a row: it carries a part of what the
    switch does. GPUs that differ in these rows alone are alike then. Of equal rows the first stays.
    """
    flat = np.column_stack([rows.weights.reshape(len(rows.names), -1), rows.constants])
    kept: list[int] = []
    for k in np.argsort(-flat.sum(axis=1), kind="stable").tolist():
        if not (flat[kept] >= flat[k]).all(axis=1).any():
            kept.append(k)
    kept.sort()
    return Rows(
        names=tuple(rows.names[k] for k in kept),
        weights=rows.weights[kept],
        constants=rows.constants[kept],
    )


def objective_rows(network: Network, goal: Goal) -> Rows:
    """The rows of an objective.

    Raises:
        ValueError: it is unknown.
    """
    num_kinds, num_devices, _ = network.alone.shape
    alone = np.where(np.isfinite(network.alone), network.alone, 0.0)
    per_link = network.loads.transpose(1, 0, 2, 3)
    shared = network.shared()
    names: list[str] = []
    weights: list[NDArray[np.float64]] = []
    if goal == "transactions":
        total = np.zeros_like(alone)
        total[:, :, [HOST, DISK]] = 1.0 / LINE_BYTES
        return Rows(names=("transactions",), weights=total[None], constants=np.zeros(1))
    if goal in ("serial", "stages"):
        stages = [range(num_kinds)] if goal == "serial" else [[t] for t in range(num_kinds)]
        for stage in stages:
            for g in range(num_devices):
                row = np.zeros_like(alone)
                row[list(stage), g] = alone[list(stage), g]
                names.append(f"device {g}" if goal == "serial" else f"kind {stage[0]} device {g}")
                weights.append(row)
        kept = np.flatnonzero(shared)
    elif goal == "pipelined":
        kept = np.arange(len(network.links))
    else:
        raise ValueError(f"expected pipelined, serial, transactions or stages, found {goal!r}")
    for at in kept.tolist():
        names.append(network.links[at])
        weights.append(per_link[at])
    constants = np.zeros(len(names))
    if network.compute_seconds > 0:
        names.append("compute")
        weights.append(np.zeros_like(alone))
        constants = np.append(constants, network.compute_seconds)
    return Rows(names=tuple(names), weights=np.stack(weights), constants=constants)


def network_of_costs(costs: RowCosts, row_bytes: int, num_devices: int) -> Network:
    """Devices that share no link, at measured seconds per row: ranks on a CPU's cores.

    Rates of ranks that read at once are measured that way, so sharing is in them already.
    """
    prices = [costs.local, costs.peer, np.inf, costs.host, costs.disk]
    alone = np.tile(np.array(prices) / row_bytes, (1, num_devices, 1))
    links = tuple(f"rank{g} reads" for g in range(num_devices))
    loads = np.zeros((1, num_devices, num_devices, len(PLACES)))
    for g in range(num_devices):
        loads[0, g, g] = np.where(np.isfinite(alone[0, g]), alone[0, g], 0.0)
    return Network(links=links, loads=loads, alone=alone)


def network_of_paths(
    paths: Sequence[Sequence[Sequence[str] | None]],
    seconds_per_byte: dict[str, float],
    *,
    num_kinds: int = 1,
    compute_seconds: float = 0.0,
) -> Network:
    """A network from the links on each device's way to each place.

    Args:
        paths: For each of the G devices, for each of `PLACES`: names of the links a byte crosses;
            None where there is no such place.
        seconds_per_byte: Of each link, under the load of all who cross it.
        num_kinds: T, kinds of items at these rates.
        compute_seconds: What a step takes besides.
    """
    links = tuple(seconds_per_byte)
    index = {name: i for i, name in enumerate(links)}
    loads = np.zeros((len(links), len(paths), len(PLACES)))
    alone = np.full((len(paths), len(PLACES)), np.inf)
    for g, of_group in enumerate(paths):
        for s, way in enumerate(of_group):
            if way is None:
                continue
            for name in way:
                loads[index[name], g, s] = seconds_per_byte[name]
            alone[g, s] = max((seconds_per_byte[name] for name in way), default=0.0)
    return Network(
        links=links,
        loads=np.repeat(loads[None], num_kinds, axis=0),
        alone=np.repeat(alone[None], num_kinds, axis=0),
        compute_seconds=compute_seconds,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """How one kind of item is read."""

    bytes: int
    """Asked for at a random place: a feature row, or one neighbour's id."""
    counted: float
    """`read_bytes` of the kind: what a read counts as; seconds are per such byte."""


def gpu_network(
    machine: MachineModel,
    candidate: Candidate,
    accesses: Sequence[Access],
    *,
    across: bool = False,
    compute_seconds: float = 0.0,
) -> Network:
    """The links of a candidate's GPUs, one access per kind of item.

    Args:
        machine: its links.
        candidate: GPUs and cliques.
        accesses: of each kind.
        across: whether GPUs read those of other cliques on their host, in equal shares.
        compute_seconds: what a step takes besides.

    Raises:
        MachineError: a GPU has no way to host memory, or to its own.
    """
    found = ways(machine, candidate)
    readers = {place: found.readers(place) for place in ("own", "peer", "host", "disk")}
    if across:
        readers["cross"] = _across(machine, candidate)
    crossed = [
        (g, s, route)
        for s, place in enumerate(PLACES)
        for g, reader in enumerate(readers.get(place, ()))
        for route in reader.routes
    ]
    links = {link.name: link for _, _, route in crossed for link in route.links}
    index = {name: at for at, name in enumerate(sorted(links))}
    num = candidate.num_ranks
    loads = np.zeros((len(accesses), len(index), num, len(PLACES)))
    alone = np.full((len(accesses), num, len(PLACES)), np.inf)
    for t, access in enumerate(accesses):
        for g, s, route in crossed:
            for link in route.links:
                seconds = moved_bytes(link, access.bytes) / gather_bandwidth(link)
                loads[t, index[link.name], g, s] += route.share * seconds / access.counted
        for g, s, _ in crossed:
            alone[t, g, s] = loads[t, :, g, s].max()
    return Network(links=tuple(index), loads=loads, alone=alone, compute_seconds=compute_seconds)


def contended_network(machine: MachineModel, candidate: Candidate, row_bytes: int) -> Network:
    """Feature rows alone, each GPU at its seconds per row while all read: as plans are priced.

    Sharing is in those seconds, so no link is shared besides. Sizes and reads count rows.

    Raises:
        MachineError: as `gpu_network`.
    """
    found = read_seconds(machine, candidate, row_bytes)
    num = candidate.num_ranks
    alone = np.full((1, num, len(PLACES)), np.inf)
    for s, place in enumerate(PLACES):
        if place in found:
            alone[0, :, s] = found[place]
    loads = np.zeros((1, num, num, len(PLACES)))
    for g in range(num):
        loads[0, g, g] = np.where(np.isfinite(alone[0, g]), alone[0, g], 0.0)
    return Network(
        links=tuple(f"{name} reads" for name in candidate.gpus), loads=loads, alone=alone
    )


def _across(machine: MachineModel, candidate: Candidate) -> tuple[Reader, ...]:
    """Ways to the GPUs of other cliques on the same host, over NVLink or from slot to slot."""
    gpus = {p.name: p for p in machine.gpus}
    clique_of = {rank: c for c, clique in enumerate(candidate.cliques) for rank in clique}
    found: list[Reader] = []
    for rank, name in enumerate(candidate.gpus):
        others = [
            gpus[other]
            for r, other in enumerate(candidate.gpus)
            if clique_of[r] != clique_of[rank] and gpus[other].host == gpus[name].host
        ]
        ways_there: list[Route] = []
        for other in others:
            for route in routes(machine, other.memory, name):
                ways_there.append(replace(route, share=route.share / len(others)))
        found.append(Reader(name=name, routes=ways_there))
    return tuple(found)
