"""Price feature reads of GPUs: seconds per row by rank and place, over links that all share.

A cache that fills itself works in the stream of its gather, so its seconds are added to that stage.

    own   gpu<g>.memory -> gpu<g>
    peer  the other GPUs of the clique in equal shares, over NVLink or its switch
    host  this host's memory, over DRAM channels, NUMA bridges, PCIe switches and slots
    disk  the host's disk, then as host

Source: docs/formulas.md 6.2 (a link's time is the bytes of all who cross it), lines per row [C7].
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gnnplan.planner.candidate import Candidate, PlacedRows
from gnnplan.planner.cost.memory import host_memory_of
from gnnplan.planner.cost.rank_times import RankTimes, RankWork, StageTime
from gnnplan.planner.cost.rates import MachineTable
from gnnplan.planner.cost.stages.host import CACHE_STARTS, start_seconds
from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import MachineModel, Processor
from gnnplan.planner.machine.routes import (
    Reader,
    Route,
    Wiring,
    byte_seconds,
    gather_bandwidth,
    moved_bytes,
    routes,
    row_seconds,
)
from gnnplan.runtime.plan.schema import DynamicPolicy
from gnnplan.runtime.stages import Stage

PLACES = ("own", "peer", "host", "disk")


def place_of(kind: str) -> str:
    """Return the place that rows of a kind of source are read from: a cache's are the GPU's own.

    >>> place_of("cache"), place_of("host")
    ('own', 'host')
    """
    return "own" if kind == "cache" else kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """What the reads of a candidate's GPUs depend on, as a cache's key."""

    wiring: Wiring
    gpus: tuple[str, ...]
    cliques: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRoutes:
    """Routes of every rank to every place; no routes where there is no such place."""

    own: tuple[Reader, ...]
    peer: tuple[Reader, ...]
    host: tuple[Reader, ...]
    disk: tuple[Reader, ...]

    def readers(self, place: str) -> tuple[Reader, ...]:
        """Return the readers of a place, by its name."""
        return getattr(self, place)


def find_routes(machine: MachineModel, candidate: Candidate) -> RankRoutes:
    """Find the candidate's routes over the machine.

    Raises:
        MachineError: a GPU has no route to host memory or to its own.
    """
    return routes_over(ground_of(machine, candidate))


def read_seconds(
    machine: MachineModel, candidate: Candidate, row_bytes: int
) -> dict[str, list[float]]:
    """Return the seconds per row of each rank, by place.

    Infinite where a rank lacks the place; a place that all lack is absent.

    Raises:
        MachineError: as `find_routes`.
    """
    return {k: list(v) for k, v in _read_seconds(ground_of(machine, candidate), row_bytes).items()}


def link_bytes(
    machine: MachineModel, candidate: Candidate, place: str, rank: int, rows: float, row_bytes: int
) -> dict[str, float]:
    """Return the bytes that a rank's rows from a place move over each link, in transactions."""
    found: dict[str, float] = {}
    for route in find_routes(machine, candidate).readers(place_of(place))[rank].routes:
        for link in route.links:
            moved = rows * route.share * moved_bytes(link, row_bytes)
            found[link.name] = found.get(link.name, 0.0) + moved
    return found


def copy_seconds_per_byte(machine: MachineModel, candidate: Candidate) -> list[float]:
    """Return the seconds per byte of copies from the host to all ranks at once, by rank."""
    return list(_byte_seconds(ground_of(machine, candidate), "host"))


def memory_seconds_per_byte(machine: MachineModel, candidate: Candidate) -> float:
    """Return the seconds per byte of copies within the slowest GPU's memory."""
    return max(_byte_seconds(ground_of(machine, candidate), "own"))


def ground_of(machine: MachineModel, candidate: Candidate) -> Ground:
    """Return what the reads of a candidate's GPUs depend on."""
    return Ground(wiring=Wiring.of(machine), gpus=candidate.gpus, cliques=candidate.cliques)


@functools.lru_cache(maxsize=256)
def _byte_seconds(ground: Ground, place: str) -> tuple[float, ...]:
    """Return the seconds per byte of copies from a place to all ranks at once, by rank."""
    found = byte_seconds(routes_over(ground).readers(place))
    return tuple(found[name] for name in ground.gpus)


@functools.lru_cache(maxsize=256)
def _read_seconds(ground: Ground, row_bytes: int) -> dict[str, tuple[float, ...]]:
    found = routes_over(ground)
    seconds: dict[str, tuple[float, ...]] = {}
    for place in PLACES:
        readers = found.readers(place)
        if any(reader.routes for reader in readers):
            each = row_seconds(readers, row_bytes)
            # A GPU alone in its clique has no peer to read.
            seconds[place] = tuple(each[r.name] if r.routes else math.inf for r in readers)
    return seconds


@functools.lru_cache(maxsize=64)
def routes_over(ground: Ground) -> RankRoutes:
    """Find the routes of `find_routes`, once for the same ground."""
    machine = ground.wiring
    gpus = {p.name: p for p in machine.processors if p.kind == "cuda"}
    unknown = [name for name in ground.gpus if name not in gpus]
    if unknown:
        raise MachineError(f"machine {machine.name}: expected a GPU {unknown[0]}, found none")
    mates = {rank: clique for clique in ground.cliques for rank in clique}
    chosen = [gpus[name] for name in ground.gpus]
    return RankRoutes(
        own=tuple(Reader(name=g.name, routes=routes(machine, g.memory, g.name)) for g in chosen),
        peer=tuple(_peers(machine, chosen, rank, mates[rank]) for rank in range(len(chosen))),
        host=tuple(_host(machine, g, "host") for g in chosen),
        disk=tuple(_host(machine, g, "disk") for g in chosen),
    )


def _peers(machine: Wiring, gpus: Sequence[Processor], rank: int, clique: Sequence[int]) -> Reader:
    others = [gpus[r] for r in clique if r != rank]
    found: list[Route] = []
    for other in others:
        for route in routes(machine, other.memory, gpus[rank].name):
            found.append(replace(route, share=route.share / len(others)))
    return Reader(name=gpus[rank].name, routes=found)


def _host(machine: Wiring, gpu: Processor, kind: str) -> Reader:
    memory = host_memory_of(machine, gpu.host, kind)
    # A disk that could not be measured has no link, and plans keep nothing on it.
    linked = memory is not None and any(link.source == memory.name for link in machine.links)
    if memory is None or (kind == "disk" and not linked):
        return Reader(name=gpu.name, routes=[])
    return Reader(name=gpu.name, routes=routes(machine, memory.name, gpu.name))


PROGRAM_BYTES = 8192
"""Bytes that one program of the gather has in flight: a tile of 2048 words of 4 bytes."""
MEMORY_LATENCY_SECONDS = 7e-7
"""Least latency of any read; links of a GPU's own memory carry none."""
MOST_PROGRAMS = 4096
SLACK = 0.05
"""Share by which a gather may be slower to leave multiprocessors to compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """Reads of one place by one gather."""

    seconds: float
    """Seconds of the bytes at the links' full rate."""
    under_way_bytes: float
    """Bytes in flight that the full rate needs: bandwidth x latency (Little's law)."""


def gather_seconds_with(flows: Mapping[str, Flow], programs: int) -> float:
    """Return the seconds of a gather whose grid has at most P programs.

    T(P) = sum over places of  t_place max(1, B_place L_place / (8192 P))

    >>> flows = {"host": Flow(seconds=1e-3, under_way_bytes=81920.0)}
    >>> [round(1e3 * gather_seconds_with(flows, p), 1) for p in (1, 5, 10, 99)]
    [10.0, 2.0, 1.0, 1.0]
    """
    room = PROGRAM_BYTES * programs
    return sum(f.seconds * max(1.0, f.under_way_bytes / room) for f in flows.values())


def fewest_programs(flows: Mapping[str, Flow]) -> int:
    """Return the smallest grid that is at most 5% slower than the widest; 0 if nothing is read.

    >>> near = Flow(seconds=1e-4, under_way_bytes=3.4e6)
    >>> far = Flow(seconds=1e-3, under_way_bytes=8e4)
    >>> fewest_programs({"host": far}), fewest_programs({"own": near}), fewest_programs({})
    (10, 396, 0)
    >>> fewest_programs({"own": near, "host": far})  # the near rows may wait for the far ones
    268
    """
    widest = gather_seconds_with(flows, MOST_PROGRAMS)
    if widest <= 0:
        return 0
    low, high = 1, MOST_PROGRAMS
    while low < high:
        middle = (low + high) // 2
        if gather_seconds_with(flows, middle) <= (1 + SLACK) * widest:
            high = middle
        else:
            low = middle + 1
    return low


def gather_programs(
    machine: MachineModel, candidate: Candidate, placed: PlacedRows, row_bytes: int
) -> int:
    """Return the cap of the gather's grid: the largest that one of the ranks needs.

    Bytes in flight to the host are those of the probe's smallest grid near the best rate (table
    `gpu_uva_programs`), else bandwidth x latency.

    Raises:
        MachineError: a GPU has no route to a memory.
    """
    found, stored = find_routes(machine, candidate), read_seconds(machine, candidate, row_bytes)
    most = 0
    for rank, rows in enumerate(placed.ranks):
        flows: dict[str, Flow] = {}
        for kind, count in rows.rows.items():
            place = place_of(kind)
            if place not in stored or count <= 0 or not math.isfinite(stored[place][rank]):
                continue
            routes = found.readers(place)[rank].routes
            under_way = sum(route.share * _under_way(route) for route in routes)
            if place == "host" and MachineTable.GPU_UVA_PROGRAMS in machine.tables:
                under_way = PROGRAM_BYTES * machine.table(MachineTable.GPU_UVA_PROGRAMS).at(
                    ranks=1.0
                )
            seconds = count * stored[place][rank]
            flows[kind] = Flow(seconds=seconds, under_way_bytes=under_way)
        most = max(most, fewest_programs(flows))
    return most


def _under_way(route: Route) -> float:
    latency = max(route.latency_seconds, MEMORY_LATENCY_SECONDS)
    return latency * min(gather_bandwidth(link) for link in route.links)


WORD_BYTES = 8
"""Bytes of an entry of the directory."""
ACCESSES = 13
"""Accesses of the directory per row: first places, codes, touches, slots and nodes."""
STREAMED_BYTES = 900
"""Bytes per row of a batch that pass through the GPU's memory while slots are found."""
SELECTED_BYTES = 72
"""Bytes per slot of finding the smallest keys of 64 bits: eight passes, a sort of the chosen."""
SWEPT_BYTES: dict[DynamicPolicy, int] = {"lru": SELECTED_BYTES, "clock": 190 + SELECTED_BYTES}
"""Bytes per slot that are read and written to choose the slots that are given away, by policy."""


def gpu_cache_seconds(
    rows: float,
    slots: float,
    slot_bytes: int,
    *,
    row_bytes: int,
    access_seconds: float,
    byte_seconds: float,
) -> float:
    """Return the seconds in which a GPU's memory serves its cache for one batch.

    T = V (13 c + (900 + 2 s) b) + C S b: V rows of s bytes, c seconds of a random access of 8
    bytes, b seconds per byte of copies within the memory, C slots of which S bytes are swept.

    Source: derived from the operations of `runtime.features.device_store`.

    >>> round(1e6 * gpu_cache_seconds(1e5, 1e6, SWEPT_BYTES["lru"], row_bytes=400,
    ...     access_seconds=1e-11, byte_seconds=1e-12), 1)
    255.0
    """
    per_row = ACCESSES * access_seconds + (STREAMED_BYTES + 2 * row_bytes) * byte_seconds
    return rows * per_row + slots * slot_bytes * byte_seconds


def gpu_look_up_seconds(machine: MachineModel, candidate: Candidate) -> float:
    """Return the seconds that each row of a batch costs in a GPU's cache, whatever its size."""
    near = max(read_seconds(machine, candidate, WORD_BYTES)["own"])
    return ACCESSES * near + STREAMED_BYTES * memory_seconds_per_byte(machine, candidate)


def add_gpu_cache(work: RankWork, times: RankTimes) -> RankTimes:
    """Add the work of a GPU's cache to its gather."""
    machine, candidate = work.machine, work.candidate
    if candidate.cache is None or not candidate.gpus:
        return times
    kernels = CACHE_STARTS[candidate.cache]
    started = kernels * start_seconds(machine)
    served = gpu_cache_seconds(
        sum(work.rows.rows.values()),
        work.rows.cache_rows,
        SWEPT_BYTES[candidate.cache],
        row_bytes=work.row_bytes,
        access_seconds=read_seconds(machine, candidate, WORD_BYTES)["own"][work.rank],
        byte_seconds=memory_seconds_per_byte(machine, candidate),
    )
    gather, device = times.stages[Stage.GATHER], times.device
    words = f"{gather.provenance}; derived: {kernels} kernels of the cache and its directory"
    changed = StageTime(
        seconds=gather.seconds + started + served, spread=gather.spread, provenance=words
    )
    busy = replace(device, memory=device.memory + served, host=device.host + started)
    return replace(times.with_stages({Stage.GATHER: changed}), device=busy)
