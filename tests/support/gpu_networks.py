"""Every link that a candidate's GPUs read over, shared or not, and networks given by their paths.

    seconds per byte on link l = share of the route * moved_l(access) / (bandwidth_l * read_bytes)

summed over a place's routes: half of a host's pages come over each NUMA node, peers serve equal
shares. Links that several GPUs cross (PCIe switch, bridge between NUMA nodes, NVSwitch port, DRAM)
are one link here, so that their reads add up on it (docs/formulas.md 6.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.stages.gather_gpu import find_routes
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.machine.routes import Reader, Route, gather_bandwidth, moved_bytes, routes
from gnnplan.planner.placement.costs import PLACES, ReadNetwork


def network_of_paths(
    paths: Sequence[Sequence[Sequence[str] | None]],
    seconds_per_byte: dict[str, float],
    *,
    num_kinds: int = 1,
    compute_seconds: float = 0.0,
) -> ReadNetwork:
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
    return ReadNetwork(
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
) -> ReadNetwork:
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
    found = find_routes(machine, candidate)
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
    return ReadNetwork(
        links=tuple(index), loads=loads, alone=alone, compute_seconds=compute_seconds
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
