"""Several hosts as one machine: their own models side by side, joined by cards and a network.

Host 0's parts keep their names; those of host h begin with `h<h>.`. Bytes go from host memory to
the card (`nic<h>.out`, what the host sends to all at once), over the network (`network.<a>.<b>`,
what the pair carries alone) and from the card into memory (`nic<h>.in`).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import (
    Link,
    MachineModel,
    Switch,
    Table,
    make_table,
    prefix_of,
    select_parts,
)
from gnnplan.planner.partition.cliques import clique_covers
from gnnplan.planner.probe.collectives import asked_sizes
from gnnplan.planner.probe.grid import make_monotone
from gnnplan.planner.probe.hosts import ID_TABLES, HostRates
from gnnplan.planner.probe.timing import Measurement

CLEAR_MARGIN = 1.5
"""Least ratio between the slowest link within cliques of hosts and the fastest beside them."""


def host_cliques(bandwidth: NDArray[np.float64]) -> list[list[int]]:
    """Return cliques of hosts whose links beat the others by a clear margin.

    Rates of pairs (the slower direction) are sorted; the widest gap between neighbours divides fast
    links from slow ones, where it is at least `CLEAR_MARGIN`. The fast ones are covered by the
    fewest cliques. Where no gap is that wide, no host is nearer than another: each is alone.

    Args:
        bandwidth: bytes per second, shape (n, n), from row to column.
    """
    n = len(bandwidth)
    both = np.minimum(bandwidth, bandwidth.T)
    rates = np.sort(both[np.triu_indices(n, 1)])
    ratios = rates[1:] / rates[:-1]
    if len(ratios) == 0 or ratios.max() < CLEAR_MARGIN:
        return [[host] for host in range(n)]
    least = rates[1 + int(np.argmax(ratios))]
    fast = np.where(both >= least, both, 0.0)
    np.fill_diagonal(fast, 0.0)
    return sorted(list(clique) for clique in clique_covers(fast)[0].cliques)


def join_hosts(machines: list[MachineModel], rates: HostRates) -> MachineModel:
    """Join each host's own model to one machine by the rates between them.

    Tables of host 0 keep their names, other hosts' begin with their prefix. New tables:
    `message.<a>.<b>` (bytes), `hosts_all_reduce`, `hosts_all_to_all`, their `_stepped` ones and
    `hosts_all_to_all_asked`, `_early`, `_after`, `_around_ids`, `_around_rows`, `_hidden` (bytes,
    hosts); where there are GPUs, `host_message`.
    """
    if len(machines) != len(rates.sent):
        raise MachineError(f"expected {len(rates.sent)} machines, found {len(machines)}")
    parts = [_prefixed(machine, host) for host, machine in enumerate(machines)]
    near = [clique for clique in host_cliques(rates.bandwidth) if len(clique) > 1]
    cpus = [next(p.name for p in part.processors if p.kind == "cpu") for part in parts]
    first = machines[0]
    noisy = [note for part in parts for note in part.notes]
    between = _host_message(machines, rates)
    return replace(
        first,
        name="+".join(machine.name for machine in machines),
        fingerprint="+".join(machine.fingerprint for machine in machines),
        processors=[each for part in parts for each in part.processors],
        memories=[each for part in parts for each in part.memories],
        links=[each for part in parts for each in part.links] + _network(rates),
        switches=[each for part in parts for each in part.switches]
        + [Switch(name=f"nic{host}", kind="card") for host in range(len(parts))],
        cliques=[each for part in parts for each in part.cliques]
        + [[cpus[host] for host in clique] for clique in near],
        tables={k: v for part in parts for k, v in part.tables.items()} | _tables(rates) | between,
        noise=max(machine.noise for machine in machines),
        notes=[*noisy, _clique_note(near, len(machines)), *([TCP_NOTE] if between else [])],
    )


TCP_NOTE = (
    "network: messages between GPUs of two hosts are priced by the latency that TCP has between "
    "the hosts' processes; NCCL over RDMA was not measured and is faster"
)


def _host_message(machines: Sequence[MachineModel], rates: HostRates) -> dict[str, Table]:
    """Return the table of a collective's message between hosts with GPUs, by the slowest pair."""
    if not any(machine.gpus for machine in machines):
        return {}
    slowest = float(rates.latency_seconds.max())
    return {"host_message": make_table("seconds", {"ranks": [1]}, [slowest], 0.1)}


def _clique_note(near: list[list[int]], num_hosts: int) -> str:
    if not near:
        return f"network: the links between the {num_hosts} hosts are alike"
    return f"network: hosts {near} are nearer to one another than to the rest"


def _prefixed(machine: MachineModel, host: int) -> MachineModel:
    prefix = prefix_of(host)
    part = select_parts(machine, lambda _: True, lambda name: prefix + name, host=host)
    return replace(
        part,
        tables={prefix + name: table for name, table in machine.tables.items()},
        notes=[f"{prefix}{note}" for note in machine.notes],
    )


def _network(rates: HostRates) -> list[Link]:
    links: list[Link] = []
    num_hosts = len(rates.sent)
    for host in range(num_hosts):
        memory, card = f"{prefix_of(host)}host0", f"nic{host}"
        links += [
            _link(f"{card}.out", memory, card, 0.0, float(rates.sent[host])),
            _link(f"{card}.in", card, memory, 0.0, float(rates.received[host])),
        ]
    for a in range(num_hosts):
        for b in range(num_hosts):
            if a != b:
                latency, bandwidth = rates.latency_seconds[a, b], rates.bandwidth[a, b]
                name = f"network.{a}.{b}"
                links.append(_link(name, f"nic{a}", f"nic{b}", float(latency), float(bandwidth)))
    return links


def _link(name: str, source: str, target: str, latency: float, bandwidth: float) -> Link:
    return Link(
        name=name,
        source=source,
        target=target,
        latency_seconds=latency,
        bandwidth_bytes_per_second=bandwidth,
    )


def _tables(rates: HostRates) -> dict[str, Table]:
    def of_hosts(sizes: Sequence[int]) -> dict[str, Sequence[int]]:
        return {"bytes": sizes, "hosts": rates.host_counts}

    out = {
        f"message.{a}.{b}": _table({"bytes": rates.message_bytes}, points)
        for (a, b), points in rates.messages.items()
    }
    for name, points in rates.collectives.items():
        out[f"hosts_{name}"] = _table(of_hosts(rates.message_bytes), points)
    for name, points in rates.stepped.items():
        sizes = asked_sizes(rates.exchange_bytes) if name in ID_TABLES else rates.exchange_bytes
        rising = [] if name == "all_to_all_early" else [0]
        out[f"hosts_{name}"] = _table(of_hosts(sizes), points, rising)
    return out


def _table(
    axes: dict[str, Sequence[int]], points: list[Measurement], rising: Sequence[int] = (0,)
) -> Table:
    shape = [len(axis) for axis in axes.values()]
    values, moved = make_monotone(np.array([p.value for p in points]).reshape(shape), rising)
    spread = float(np.percentile([point.spread for point in points], 75))
    return make_table("seconds", axes, values.ravel(), float(np.hypot(spread, moved)))
