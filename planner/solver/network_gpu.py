"""The network of a placement on a machine's GPUs: every link their reads cross, shared or not.

    seconds per byte on link l = share of the route * moved_l(access) / (bandwidth_l * read_bytes)

summed over a place's routes: half of a host's pages come over each NUMA node, peers serve equal
shares. Links that several GPUs cross (PCIe switch, bridge between NUMA nodes, NVSwitch port, DRAM)
are one link here, so that their reads add up on it.

Source: docs/formulas.md 6.2 (t_sw, t_dram, t_nv) with lines per access [C7].
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.candidate import Candidate
from planner.cost.gpu_reads import read_seconds, ways
from planner.machine import MachineModel
from planner.machine_routes import Reader, Route, gather_bandwidth, moved_bytes, routes
from planner.placement.network import Network
from planner.placement.reads import PLACES


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
    clique_of = {rank: c for c, clique in enumerate(candidate.groups) for rank in clique}
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
