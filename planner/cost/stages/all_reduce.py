"""Price stage `all_reduce`: the elapsed seconds of summing one flat gradient over ranks.

The probe's curve, measured while all ranks compute, is used where there is one. Between GPUs it is
a ring over the machine's links, or rings inside hosts and between them. A ring visits cliques one
after the other, and is as fast as its slowest link with all who cross it.

In parts, the gradient is sent while the backward pass runs. Two thirds of forward_backward are the
backward pass (two of a layer's three products). Parts are taken to be ready evenly over it, and
have at least 1 MiB (runtime.stages).
"""

import functools
from collections.abc import Callable, Sequence

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.rates import MachineTable, Rate
from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import Link, MachineModel, Memory, Table
from gnnplan.planner.machine.routes import Reader, byte_seconds, shortest
from gnnplan.runtime.stages import most_parts

GRADIENT_ITEM_BYTES = 4


def gradient_bytes(num_parameters: int) -> int:
    """Return the bytes of the flat gradient, in float32."""
    return num_parameters * GRADIENT_ITEM_BYTES


def all_reduce_seconds(table: Table, message_bytes: float, ranks: int) -> float:
    """Return the measured seconds of an all-reduce while all ranks compute; 0 for one rank.

    Source: docs/modelling.md 4 and 6: the loaded curve at the gradient's own size.
    """
    return 0.0 if ranks <= 1 else table.at(bytes=message_bytes, ranks=float(ranks))


def ring_seconds(
    message_bytes: float, ranks: int, latency_seconds: float, bytes_per_second: float
) -> float:
    """Return the seconds of a ring all-reduce: 2 (P - 1) messages of n / P bytes each.

    T = 2 (P - 1) (a + n / (P B)), with a seconds per message and B bytes per second and direction
    of a link.

    Source: docs/formulas.md 8.3 [A3].

    >>> round(ring_seconds(4e6, 8, 10e-6, 100e9) * 1e6)
    210
    """
    if ranks <= 1:
        return 0.0
    return 2 * (ranks - 1) * (latency_seconds + message_bytes / (ranks * bytes_per_second))


def hierarchical_seconds(
    message_bytes: float,
    *,
    devices: int,
    hosts: int,
    device_latency_seconds: float,
    device_bytes_per_second: float,
    host_latency_seconds: float,
    nic_bytes_per_second: float,
) -> float:
    """Return the seconds of an all-reduce inside hosts, then between them.

    T = 2 (g - 1) (a1 + n / (g B1)) + 2 (H - 1) (a2 + n / (g H) / (NIC / g)), with g devices on each
    of H hosts sharing a network card.

    Source: docs/formulas.md 8.3 [A3].

    >>> t = hierarchical_seconds(4e6, devices=4, hosts=2, device_latency_seconds=10e-6,
    ...     device_bytes_per_second=100e9, host_latency_seconds=30e-6, nic_bytes_per_second=25e9)
    >>> round(t * 1e6)
    340
    """
    inside = 2 * (devices - 1)
    inside_seconds = inside * (
        device_latency_seconds + message_bytes / (devices * device_bytes_per_second)
    )
    share = message_bytes / (devices * hosts) / (nic_bytes_per_second / devices)
    return inside_seconds + 2 * (hosts - 1) * (host_latency_seconds + share)


def exposed_bucket_seconds(
    ready_seconds: Sequence[float], bucket_seconds: Sequence[float]
) -> float:
    """Return the seconds of communication after the last gradient is ready.

    f_k = max(f_{k-1}, r_k) + T_k;  exposed = max(0, f_K - r_K). Bucket k, in backward order, is
    ready at r_k, and its all-reduce takes T_k.

    Source: docs/formulas.md 8.3 [A3].

    >>> t = [ring_seconds(n, 4, 10e-6, 10e9) for n in (25e6, 5e6)]
    >>> round(exposed_bucket_seconds([5e-3, 10e-3], t) * 1e3, 2)
    0.81
    """
    finished = 0.0
    for ready, seconds in zip(ready_seconds, bucket_seconds, strict=True):
        finished = max(finished, ready) + seconds
    return max(0.0, finished - ready_seconds[-1])


def exposed_seconds(comm_seconds: float, hidden_seconds: float, eta: float) -> float:
    """Return the seconds of communication that computation beside it does not hide.

    exposed = max(0, T_comm - eta T_hidden); eta = 0 where it was not measured.

    Source: docs/modelling.md 5.

    >>> exposed_seconds(6.0, 10.0, 0.5), exposed_seconds(6.0, 0.0, 0.5)
    (1.0, 6.0)
    """
    return max(0.0, comm_seconds - eta * hidden_seconds)


def gpu_all_reduce(machine: MachineModel, candidate: Candidate, message_bytes: float) -> Rate:
    """Price the all-reduce of a gradient over the candidate's GPUs.

    Source: docs/formulas.md 8.3 [A3], with tables `gpu_message` and (several hosts) `host_message`.
    """
    if candidate.num_ranks == 1:
        return Rate(seconds=0.0, spread=0.0, provenance="derived: one rank has nothing to sum")
    message = machine.table(MachineTable.GPU_MESSAGE)
    latency = message.at(ranks=float(candidate.num_ranks))
    hosts = {p.name: p.host for p in machine.gpus}
    by_host: dict[int, list[str]] = {}
    for name in candidate.gpus:
        by_host.setdefault(hosts[name], []).append(name)
    inside = min(ring_bandwidth(machine, gpus) for gpus in by_host.values())
    if len(by_host) == 1:
        seconds = ring_seconds(message_bytes, candidate.num_ranks, latency, inside)
        words = "derived: ring over the links between the GPUs + expected straggler"
        return Rate(seconds=seconds, spread=message.spread, provenance=words)
    seconds = hierarchical_seconds(
        message_bytes,
        devices=max(len(gpus) for gpus in by_host.values()),
        hosts=len(by_host),
        device_latency_seconds=latency,
        device_bytes_per_second=inside,
        host_latency_seconds=machine.table(MachineTable.HOST_MESSAGE).at(ranks=1.0),
        nic_bytes_per_second=min(
            x.bandwidth_bytes_per_second
            for x in machine.links
            if x.name.startswith("nic") and x.name.endswith((".out", ".in"))
        ),
    )
    words = "derived: rings inside hosts and over their cards + expected straggler"
    return Rate(seconds=seconds, spread=message.spread, provenance=words)


def ring_bandwidth(machine: MachineModel, gpus: list[str]) -> float:
    """Return the bytes per second of each hop of a ring in use; infinite for one GPU."""
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
    """Compute `ring_bandwidth` over the GPUs' memories, from hashable arguments."""
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


BACKWARD = 2 / 3
"""Share of forward_backward in which gradients become ready."""
LOSS_BYTES = 4.0
"""Bytes of the loss, which is sent last, by itself."""


def exposed_in_parts(
    all_reduce: Callable[[float], float],
    message_bytes: float,
    forward_backward: float,
    eta: float,
) -> float:
    """Return the seconds of an all-reduce in parts that the training thread waits for.

    sum_k T_k - eta (sum_k T_k - exposed) + T(loss), with exposed as for buckets [A3]. `all_reduce`
    gives the seconds of a message's bytes; eta is the hidden share of what compute could hide.

    Source: docs/formulas.md 8.3 [A3]; docs/modelling.md 5.

    >>> def ring(n):
    ...     return 1e-4 + n / 1e9
    >>> round(1e3 * exposed_in_parts(ring, 8 * 2**20, 0.1, 1.0), 2)  # the last part, and the loss
    1.25
    >>> exposed_in_parts(ring, 8 * 2**20, 0.1, 0.0) > ring(8 * 2**20)  # nothing hidden
    True
    """
    parts = most_parts(message_bytes)
    each = all_reduce(message_bytes / parts)
    ready = [forward_backward * (1 - BACKWARD * (1 - (k + 1) / parts)) for k in range(parts)]
    hidden = parts * each - exposed_bucket_seconds(ready, [each] * parts)
    return parts * each - eta * hidden + all_reduce(LOSS_BYTES)
