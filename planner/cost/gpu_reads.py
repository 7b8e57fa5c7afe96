"""Seconds per row by rank and place, while all GPUs of a candidate read over the links they share.

    own   gpu<g>.memory -> gpu<g>
    peer  the other GPUs of the clique in equal shares, over NVLink or its switch
    host  this host's memory, over DRAM channels, NUMA bridges, PCIe switches and slots
    disk  the host's disk, then as host

Source: docs/formulas.md 6.2 (a link's time is the bytes of all who cross it), lines per row [C7].
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.candidate import Candidate
from planner.errors import MachineError
from planner.machine import Link, MachineModel, Memory, Processor, Switch
from planner.machine_routes import Reader, Route, byte_seconds, moved_bytes, routes, row_seconds

PLACES = ("own", "peer", "host", "disk")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ground:
    """What reads depend on; hashable, so that repeated questions are answered once."""

    links: tuple[Link, ...]
    memories: tuple[Memory, ...]
    processors: tuple[Processor, ...]
    switches: tuple[Switch, ...]
    name: str
    gpus: tuple[str, ...]
    cliques: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ways:
    """Routes of every rank to every place; none where there is no such place."""

    own: tuple[Reader, ...]
    peer: tuple[Reader, ...]
    host: tuple[Reader, ...]
    disk: tuple[Reader, ...]

    def readers(self, place: str) -> tuple[Reader, ...]:
        """By the place's name."""
        return getattr(self, place)


def ways(machine: MachineModel, candidate: Candidate) -> Ways:
    """The candidate's routes over the machine.

    Raises:
        MachineError: a GPU has no way to host memory, or to its own.
    """
    return _ways(_ground(machine, candidate))


def read_seconds(
    machine: MachineModel, candidate: Candidate, row_bytes: int
) -> dict[str, list[float]]:
    """Seconds per row of each rank by place; infinite where a rank lacks it.

    A place that no rank has is left out.

    Raises:
        MachineError: as `ways`.
    """
    return {k: list(v) for k, v in _read_seconds(_ground(machine, candidate), row_bytes).items()}


def link_bytes(
    machine: MachineModel, candidate: Candidate, place: str, rank: int, rows: float, row_bytes: int
) -> dict[str, float]:
    """Bytes that a rank's rows from one place move over each link, transactions counted whole."""
    found: dict[str, float] = {}
    for route in ways(machine, candidate).readers(place)[rank].routes:
        for link in route.links:
            moved = rows * route.share * moved_bytes(link, row_bytes)
            found[link.name] = found.get(link.name, 0.0) + moved
    return found


def copy_seconds_per_byte(machine: MachineModel, candidate: Candidate) -> list[float]:
    """Of copies from the host to all ranks at once, by rank."""
    found = byte_seconds(ways(machine, candidate).host)
    return [found[name] for name in candidate.gpus]


def memory_seconds_per_byte(machine: MachineModel, candidate: Candidate) -> float:
    """Of copies within a GPU's memory; the slowest GPU's."""
    found = byte_seconds(ways(machine, candidate).own)
    return max(found[name] for name in candidate.gpus)


def _ground(machine: MachineModel, candidate: Candidate) -> _Ground:
    return _Ground(
        links=tuple(machine.links),
        memories=tuple(machine.memories),
        processors=tuple(machine.processors),
        switches=tuple(machine.switches),
        name=machine.name,
        gpus=candidate.gpus,
        cliques=candidate.cliques or (tuple(range(candidate.num_ranks)),),
    )


@functools.lru_cache(maxsize=256)
def _read_seconds(ground: _Ground, row_bytes: int) -> dict[str, tuple[float, ...]]:
    found = _ways(ground)
    seconds: dict[str, tuple[float, ...]] = {}
    for place in PLACES:
        readers = found.readers(place)
        if any(reader.routes for reader in readers):
            each = row_seconds(readers, row_bytes)
            # A GPU alone in its clique has no peer to read.
            seconds[place] = tuple(each[r.name] if r.routes else math.inf for r in readers)
    return seconds


@functools.lru_cache(maxsize=64)
def _ways(ground: _Ground) -> Ways:
    machine = MachineModel(
        name=ground.name,
        fingerprint="",
        provenance="derived",
        processors=list(ground.processors),
        memories=list(ground.memories),
        links=list(ground.links),
        switches=list(ground.switches),
    )
    gpus = {p.name: p for p in machine.gpus}
    unknown = [name for name in ground.gpus if name not in gpus]
    if unknown:
        raise MachineError(f"machine {machine.name}: expected a GPU {unknown[0]}, found none")
    mates = {rank: clique for clique in ground.cliques for rank in clique}
    chosen = [gpus[name] for name in ground.gpus]
    return Ways(
        own=tuple(Reader(name=g.name, routes=routes(machine, g.memory, g.name)) for g in chosen),
        peer=tuple(_peers(machine, chosen, rank, mates[rank]) for rank in range(len(chosen))),
        host=tuple(_host(machine, g, "host") for g in chosen),
        disk=tuple(_host(machine, g, "disk") for g in chosen),
    )


def _peers(
    machine: MachineModel, gpus: Sequence[Processor], rank: int, clique: Sequence[int]
) -> Reader:
    others = [gpus[r] for r in clique if r != rank]
    found: list[Route] = []
    for other in others:
        for route in routes(machine, other.memory, gpus[rank].name):
            found.append(replace(route, share=route.share / len(others)))
    return Reader(name=gpus[rank].name, routes=found)


def host_memory_of(machine: MachineModel, host: int, kind: str = "host") -> Memory | None:
    """The memory (or disk) of a host; the disk may be missing.

    Raises:
        MachineError: the machine has no such host memory.
    """
    prefix = f"h{host}." if host else ""
    for memory in machine.memories:
        if memory.kind == kind and memory.name == f"{prefix}{kind}0":
            return memory
    if kind == "disk":
        return None
    raise MachineError(f"machine {machine.name}: expected a memory {prefix}host0, found none")


def _host(machine: MachineModel, gpu: Processor, kind: str) -> Reader:
    memory = host_memory_of(machine, gpu.host, kind)
    # A disk that could not be measured has no link, and plans keep nothing on it.
    linked = memory is not None and any(link.source == memory.name for link in machine.links)
    if memory is None or (kind == "disk" and not linked):
        return Reader(name=gpu.name, routes=[])
    return Reader(name=gpu.name, routes=routes(machine, memory.name, gpu.name))
