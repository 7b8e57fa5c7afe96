"""Routes through a machine, from a memory to a processor, and how concurrent readers share them.

A link's bandwidth is one capacity for all whose routes cross it: a PCIe switch's upstream port, the
bridge between two NUMA nodes, a GPU's port to an NVSwitch, a network card, a disk, DRAM channels.
"""

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import Link, MachineModel, Memory, Processor, Switch

PROBE_BYTES = 1 << 20
"""Default bytes of a copy for which the shortest route is chosen."""


def lines(row_bytes: int, line_bytes: int = 64) -> float:
    """Return the cache lines that a row touches, on average over random multiple-of-row offsets.

    (L - gcd(L, C)) / C + 1

    >>> lines(400), lines(64), lines(100)
    (7.0, 1.0, 2.5)

    Source: docs/formulas.md 2.4 [C7].
    """
    return (row_bytes - math.gcd(row_bytes, line_bytes)) / line_bytes + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Links in the order in which bytes cross them, and the share of the bytes that do."""

    links: tuple[Link, ...]
    share: float = 1.0
    """Share of the bytes; below 1 where memory is spread over NUMA nodes."""

    @property
    def latency_seconds(self) -> float:
        """Sum of the links' latencies."""
        return sum(link.latency_seconds for link in self.links)

    @property
    def bandwidth_bytes_per_second(self) -> float:
        """Bandwidth of the narrowest link; infinite where none is crossed."""
        return min((x.bandwidth_bytes_per_second for x in self.links), default=math.inf)


def moved_bytes(link: Link, row_bytes: int) -> float:
    """Return the bytes that a link carries for one random row: whole transactions [C7].

    >>> base = {"name": "x", "source": "a", "target": "b", "latency_seconds": 0.0}
    >>> moved_bytes(Link(**base, bandwidth_bytes_per_second=1.0, transaction_bytes=128), 100)
    224.0
    """
    unit = link.transaction_bytes
    return float(row_bytes) if unit == 0 else lines(row_bytes, unit) * unit


def gather_bandwidth(link: Link) -> float:
    """Return the bytes per second of random reads over a link."""
    return link.gather_bytes_per_second or link.bandwidth_bytes_per_second


@dataclass(frozen=True, kw_only=True, slots=True)
class Wiring:
    """Parts of a machine that routes depend on, as a cache's key."""

    name: str
    links: tuple[Link, ...]
    memories: tuple[Memory, ...]
    processors: tuple[Processor, ...]
    switches: tuple[Switch, ...]

    @staticmethod
    def of(machine: MachineModel) -> "Wiring":
        """Return a machine's wiring."""
        return Wiring(
            name=machine.name,
            links=tuple(machine.links),
            memories=tuple(machine.memories),
            processors=tuple(machine.processors),
            switches=tuple(machine.switches),
        )

    def __hash__(self) -> int:
        return hash(self.name)  # not of every link, at every look-up


def shortest(
    machine: MachineModel | Wiring,
    source: str,
    target: str,
    size_bytes: float | int = PROBE_BYTES,
) -> Route | None:
    """Return the route that carries that many bytes soonest; None where there is none.

    Bytes stream through all links at once, so a route takes its latencies plus n / least bandwidth:
    for each bandwidth that occurs, the least latency over links at least as wide is found. GPUs do
    not forward: another device's memory is never passed through.
    """
    wiring = machine if isinstance(machine, Wiring) else Wiring.of(machine)
    return _shortest(wiring, source, target, size_bytes)


@functools.lru_cache(maxsize=4096)
def _shortest(machine: Wiring, source: str, target: str, size_bytes: float | int) -> Route | None:
    ends = {source, target} | {p.memory for p in machine.processors if p.name in (source, target)}
    avoid = {m.name for m in machine.memories if m.kind == "device"} - ends
    usable = [x for x in machine.links if x.source not in avoid and x.target not in avoid]
    if source == target:
        return Route(links=())
    best: Route | None = None
    best_seconds, least = math.inf, 0.0
    for width in sorted({link.bandwidth_bytes_per_second for link in usable}):
        if width <= least:
            continue  # the last one found is wide enough, and of the least latency still
        found = _least_latency(usable, source, target, width)
        if found is None:
            break
        least = found.bandwidth_bytes_per_second
        seconds = found.latency_seconds + size_bytes / least
        if seconds < best_seconds:
            best, best_seconds = found, seconds
    return best


HOP_SECONDS = 1e-12
"""Seconds that a link costs beside its latency: of equal latencies the way of fewer links."""


def _least_latency(
    links: Sequence[Link], source: str, target: str, least_bandwidth: float | int
) -> Route | None:
    """Find the way of least latency over links that are wide enough, by Dijkstra's algorithm."""
    ways: dict[str, dict[str, Link]] = {}
    for link in links:
        if link.bandwidth_bytes_per_second >= least_bandwidth:
            known = ways.setdefault(link.source, {})
            if _hop(link) < (_hop(known[link.target]) if link.target in known else math.inf):
                known[link.target] = link
    came, least, done = dict[str, Link](), {source: 0.0}, set[str]()
    fringe, turns = [(0.0, 0, source)], itertools.count(1)
    while fringe:
        seconds, _, place = heapq.heappop(fringe)
        if place == target:
            return Route(links=_trace(came, source, target))
        if place in done:
            continue
        done.add(place)
        for other, link in ways.get(place, {}).items():
            later = seconds + _hop(link)
            if later < least.get(other, math.inf):
                came[other], least[other] = link, later
                heapq.heappush(fringe, (later, next(turns), other))
    return None


def _hop(link: Link) -> float:
    return link.latency_seconds + HOP_SECONDS


def _trace(came: Mapping[str, Link], source: str, target: str) -> tuple[Link, ...]:
    """Follow the links back from the target."""
    found, place = list[Link](), target
    while place != source:
        found.append(came[place])
        place = came[place].source
    return tuple(reversed(found))


def routes(machine: MachineModel | Wiring, memory: str, processor: str) -> list[Route]:
    """Return how a processor reads a memory: one route, or one per node of an interleaved memory.

    A memory with links to several `numa` switches has its pages spread evenly over them, so each of
    those links carries an equal share of every read.

    Raises:
        MachineError: there is no way.
    """
    nodes = {s.name for s in machine.switches if s.kind == "numa"}
    exits = [x for x in machine.links if x.source == memory and x.target in nodes]
    found: list[Route] = []
    if len(exits) > 1:
        for link in exits:
            rest = shortest(machine, link.target, processor)
            if rest is not None:
                found.append(Route(links=(link, *rest.links), share=1 / len(exits)))
        if len(found) == len(exits):
            return found
    one = shortest(machine, memory, processor)
    if one is None:
        raise MachineError(
            f"machine {machine.name}: expected a way from {memory} to {processor}, found no links "
            "that make one; probe it again, or name another machine"
        )
    return [one]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """One of several concurrent readers: its routes, whose shares add up to its own bytes."""

    name: str
    routes: list[Route] = field(default_factory=list[Route])


def row_seconds(readers: Iterable[Reader], row_bytes: int) -> dict[str, float]:
    """Return seconds per row of each reader while all read at random at the same rate.

    c_g = max over links l of g of  sum over readers h of share_{h,l} * moved_l / bandwidth_l

    Source: docs/formulas.md 6.2 (t_sw, t_pcie) with [C7].
    """
    return _shared_seconds(
        readers, lambda link: moved_bytes(link, row_bytes) / gather_bandwidth(link)
    )


def byte_seconds(readers: Iterable[Reader]) -> dict[str, float]:
    """Return seconds per byte of each reader while all copy at the same rate."""
    return _shared_seconds(readers, lambda link: 1 / link.bandwidth_bytes_per_second)


def _shared_seconds(
    readers: Iterable[Reader], seconds_of: Callable[[Link], float]
) -> dict[str, float]:
    """Return seconds per unit of each reader: those of the most loaded link on its routes."""
    everyone = list(readers)
    total: dict[str, float] = {}
    for route in (route for reader in everyone for route in reader.routes):
        for link in route.links:
            total[link.name] = total.get(link.name, 0.0) + route.share * seconds_of(link)
    return {
        reader.name: max((total[x.name] for r in reader.routes for x in r.links), default=0.0)
        for reader in everyone
    }
