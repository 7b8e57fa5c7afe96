"""Parts of a machine of several hosts by host, and the same machine with fewer hosts.

Host 0's parts keep their plain names; those of host h begin with `h<h>.`. What lies between hosts
(cards and the network, tables `hosts_*` and `message.*`) belongs to none of them.
"""

from dataclasses import replace

from gnnplan.planner.machine.model import MachineModel

BETWEEN = ("card", "network")
"""Kinds of switches that lie between hosts."""


def prefix_of(host: int) -> str:
    """Return the prefix of the names of a host's parts."""
    return f"h{host}." if host else ""


def num_hosts(machine: MachineModel) -> int:
    """Count the hosts of a machine."""
    return 1 + max((p.host for p in machine.processors), default=0)


def joins_hosts(machine: MachineModel) -> bool:
    """Tell whether ranks on several hosts can be priced: their collectives were measured."""
    return num_hosts(machine) > 1 and "hosts_all_reduce" in machine.tables


def one_host(machine: MachineModel, host: int) -> MachineModel:
    """Return one host's own part, under the names that a machine of one host has.

    Tables between hosts stay; those of other hosts are dropped.
    """
    if num_hosts(machine) == 1:
        return machine
    prefix = prefix_of(host)

    def own(name: str) -> bool:
        return name.startswith(prefix) if prefix else not _of_other(name)

    def named(name: str) -> str:
        return name.removeprefix(prefix)

    names = {m.name for m in machine.memories if own(m.name)}
    names |= {p.name for p in machine.processors if p.host == host}
    names |= {s.name for s in machine.switches if own(s.name) and s.kind not in BETWEEN}
    between = {k: t for k, t in machine.tables.items() if k.startswith(("hosts_", "message."))}
    return replace(
        machine,
        processors=[
            replace(p, name=named(p.name), memory=named(p.memory), host=0)
            for p in machine.processors
            if p.host == host
        ],
        memories=[replace(m, name=named(m.name)) for m in machine.memories if m.name in names],
        links=[
            replace(x, name=named(x.name), source=named(x.source), target=named(x.target))
            for x in machine.links
            if x.source in names and x.target in names
        ],
        switches=[replace(s, name=named(s.name)) for s in machine.switches if s.name in names],
        cliques=[[named(n) for n in c] for c in machine.cliques if all(n in names for n in c)],
        tables={named(k): t for k, t in machine.tables.items() if own(k)} | between,
    )


def first_hosts(machine: MachineModel, hosts: int) -> MachineModel:
    """Return a machine of its first `hosts` hosts alone."""
    if num_hosts(machine) <= hosts:
        return machine
    if hosts == 1:
        return one_host(machine, 0)
    beyond = tuple(prefix_of(h) for h in range(hosts, num_hosts(machine)))
    # A card goes with the host whose memory it is joined to.
    cards = {s.name for s in machine.switches if s.kind == "card"}
    gone = {x.target for x in machine.links if x.source.startswith(beyond) and x.target in cards}

    def within(name: str) -> bool:
        return not name.startswith(beyond) and name not in gone

    return replace(
        machine,
        processors=[p for p in machine.processors if p.host < hosts],
        memories=[m for m in machine.memories if within(m.name)],
        links=[x for x in machine.links if within(x.source) and within(x.target)],
        switches=[s for s in machine.switches if within(s.name)],
        cliques=[c for c in machine.cliques if all(within(n) for n in c)],
        tables={k: t for k, t in machine.tables.items() if within(k)},
    )


def _of_other(name: str) -> bool:
    head, dot, _ = name.partition(".")
    return bool(dot) and head[:1] == "h" and head[1:].isdecimal()
