"""Stage `all_reduce` between GPUs: a ring over the machine's links, or rings inside hosts and out.

The ring visits the ranks in order, cliques one after the other, so it leaves a clique as seldom as
it can; its bandwidth is that of its slowest link with all who cross it.
"""

import functools
from dataclasses import dataclass

from planner.candidate import Candidate
from planner.cost.all_reduce import hierarchical_seconds, ring_seconds
from planner.errors import MachineError
from planner.machine import Link, MachineModel, Memory
from planner.machine_routes import Reader, byte_seconds, shortest


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """Seconds of one all-reduce and where they are from."""

    seconds: float
    spread: float
    words: str


def gpu_all_reduce(machine: MachineModel, candidate: Candidate, message_bytes: float) -> Collective:
    """All-reduce of a gradient over the candidate's GPUs.

    Args:
        machine: its links, and tables `gpu_message` and (several hosts) `host_message`.
        candidate: which GPUs.
        message_bytes: n, of the gradient.

    Raises:
        MachineError: two neighbours of the ring have no way to each other.

    Source: docs/formulas.md 8.3 [A3].
    """
    if candidate.num_ranks == 1:
        return Collective(seconds=0.0, spread=0.0, words="derived: one rank has nothing to sum")
    message = machine.table("gpu_message")
    latency = message.at(ranks=float(candidate.num_ranks))
    hosts = {p.name: p.host for p in machine.gpus}
    by_host: dict[int, list[str]] = {}
    for name in candidate.gpus:
        by_host.setdefault(hosts[name], []).append(name)
    inside = min(ring_bandwidth(machine, gpus) for gpus in by_host.values())
    if len(by_host) == 1:
        seconds = ring_seconds(message_bytes, candidate.num_ranks, latency, inside)
        words = "derived: ring over the links between the GPUs + expected straggler"
        return Collective(seconds=seconds, spread=message.spread, words=words)
    seconds = hierarchical_seconds(
        message_bytes,
        devices=max(len(gpus) for gpus in by_host.values()),
        hosts=len(by_host),
        device_latency_seconds=latency,
        device_bytes_per_second=inside,
        host_latency_seconds=machine.table("host_message").at(ranks=1.0),
        nic_bytes_per_second=min(
            x.bandwidth_bytes_per_second
            for x in machine.links
            if x.name.startswith("nic") and x.name.endswith((".out", ".in"))
        ),
    )
    words = "derived: rings inside hosts and over their cards + expected straggler"
    return Collective(seconds=seconds, spread=message.spread, words=words)


def ring_bandwidth(machine: MachineModel, gpus: list[str]) -> float:
    """Bytes per second of each hop of a ring while all hops are used; infinite for one GPU.

    Raises:
        MachineError: two neighbours have no way to each other.
    """
    if len(gpus) == 1:
        return float("inf")
    memory = {p.name: p.memory for p in machine.gpus}
    return _ring(
        tuple(machine.links),
        tuple(m for m in machine.memories if m.kind == "device"),
        tuple(memory[g] for g in gpus),
        machine.name,
    )


@functools.lru_cache(maxsize=256)
def _ring(
    links: tuple[Link, ...], memories: tuple[Memory, ...], stops: tuple[str, ...], name: str
) -> float:
    """As `ring_bandwidth`, over the GPUs' memories; all that it depends on can be hashed."""
    machine = MachineModel(
        name=name,
        fingerprint="",
        provenance="derived",
        processors=[],
        memories=list(memories),
        links=list(links),
    )
    hops: list[Reader] = []
    for a, b in zip(stops, [*stops[1:], stops[0]], strict=True):
        way = shortest(machine, a, b)
        if way is None:
            raise MachineError(
                f"machine {name}: expected a way from {a} to {b}, found none; probe it again"
            )
        hops.append(Reader(name=b, routes=[way]))
    return 1 / max(byte_seconds(hops).values())
