"""How a GPU gathers: how wide its grid is, and by which way rows of its peers come."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from planner.candidate import Candidate, PlacedRows
from planner.cost.gpu_reads import (
    copy_seconds_per_byte,
    memory_seconds_per_byte,
    read_seconds,
    ways,
)
from planner.machine import MachineModel
from planner.machine_routes import Route, gather_bandwidth

PROGRAM_BYTES = 8192
"""Bytes that one program of the gather has under way: a tile of 2048 words of 4 bytes."""
MEMORY_LATENCY_SECONDS = 7e-7
"""Least latency of any read: a GPU's own memory, whose links carry none."""
MOST_PROGRAMS = 4096
SLACK = 0.05
"""How much longer a gather may take for leaving multiprocessors to compute."""
UVA_PROGRAMS = "gpu_uva_programs"
ID_BYTES = 8
EXCHANGES = 3
"""Collectives of one exchange of rows: counts, slots, rows."""
EXCHANGE_KERNELS = 6
"""Sort, count, pick, serve, place, and their like."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """Reads of one place."""

    seconds: float
    """Of the bytes at the links' full rate."""
    under_way_bytes: float
    """What must be under way for that rate: bandwidth x latency (Little's law)."""


def gather_seconds_with(flows: Mapping[str, Flow], programs: int) -> float:
    """Seconds of a gather whose grid is capped.

    T(P) = sum over places of  t_place max(1, B_place L_place / (8192 P))

    Args:
        flows: reads by place.
        programs: P, at least 1.

    >>> flows = {"host": Flow(seconds=1e-3, under_way_bytes=81920.0)}
    >>> [round(1e3 * gather_seconds_with(flows, p), 1) for p in (1, 5, 10, 99)]
    [10.0, 2.0, 1.0, 1.0]
    """
    room = PROGRAM_BYTES * programs
    return sum(f.seconds * max(1.0, f.under_way_bytes / room) for f in flows.values())


def fewest_programs(flows: Mapping[str, Flow]) -> int:
    """The narrowest grid that takes at most 5% longer than the widest; 0 where nothing is read.

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
    """Cap of the gather's grid: the widest that one of the ranks needs.

    What must be under way to the host is what the probe's least grid near the best rate had under
    way (table `gpu_uva_programs`), where it measured one; else bandwidth x latency.

    Args:
        machine: its links, and that table.
        candidate: which GPUs.
        placed: rows that each rank reads of each place.
        row_bytes: of a stored row.

    Raises:
        MachineError: a GPU has no way to a memory.
    """
    found, stored = ways(machine, candidate), read_seconds(machine, candidate, row_bytes)
    most = 0
    for rank, rows in enumerate(placed.ranks):
        flows: dict[str, Flow] = {}
        for place, count in rows.rows.items():
            if place not in stored or count <= 0 or not math.isfinite(stored[place][rank]):
                continue
            routes = found.readers(place)[rank].routes
            under_way = sum(route.share * _under_way(route) for route in routes)
            if place == "host" and UVA_PROGRAMS in machine.tables:
                under_way = PROGRAM_BYTES * machine.table(UVA_PROGRAMS).at(ranks=1.0)
            seconds = count * stored[place][rank]
            flows[place] = Flow(seconds=seconds, under_way_bytes=under_way)
        most = max(most, fewest_programs(flows))
    return most


def _under_way(route: Route) -> float:
    latency = max(route.latency_seconds, MEMORY_LATENCY_SECONDS)
    return latency * min(gather_bandwidth(link) for link in route.links)


def peer_way(
    machine: MachineModel, candidate: Candidate, placed: PlacedRows, row_bytes: int
) -> str:
    """How peers' rows come: `mapped`, read in place, or by `exchange`; what is less for all.

    mapped    r c_peer + t_k
    exchange  r (c_own + b_mem (s + s) + b_peer (s + 8)) + 3 (n - 1) t_m + 6 t_k

    with r rows of s bytes read of peers, c seconds per row read at random, b seconds per byte,
    t_k of a launch, t_m of a message between n GPUs. In place, a row crosses the link in lines and
    starts at once; exchanged, it is packed, sent whole, and put in place by its reader.
    """
    stored = read_seconds(machine, candidate, row_bytes)
    read = [ranks.rows.get("peer", 0.0) for ranks in placed.ranks]
    if "peer" not in stored or max(read, default=0.0) <= 0:
        return "mapped"
    ranks = float(candidate.num_ranks)
    launch = machine.table("gpu_kernel").at(ranks=ranks)
    message = machine.table("gpu_message").at(ranks=ranks)
    in_memory = memory_seconds_per_byte(machine, candidate)
    mapped = exchanged = 0.0
    for rank, count in enumerate(read):
        near = stored["peer"][rank]
        if math.isinf(near):  # no link between them: only by way of the host
            near = stored["host"][rank]
        sent = _peer_byte_seconds(machine, candidate, rank)
        packed = stored["own"][rank] + 2 * row_bytes * in_memory
        per_row = packed + sent * (row_bytes + ID_BYTES)
        fixed = EXCHANGES * (candidate.num_ranks - 1) * message + EXCHANGE_KERNELS * launch
        mapped = max(mapped, count * near + launch)
        exchanged = max(exchanged, count * per_row + fixed)
    return "mapped" if mapped <= exchanged else "exchange"


def _peer_byte_seconds(machine: MachineModel, candidate: Candidate, rank: int) -> float:
    """Of large copies from the peers; over the host where no link joins them."""
    routes = ways(machine, candidate).peer[rank].routes
    if not routes:
        return copy_seconds_per_byte(machine, candidate)[rank]
    return sum(route.share / route.bandwidth_bytes_per_second for route in routes)
