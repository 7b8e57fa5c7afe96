"""A box of GPUs as a preset describes it, and the machine that it makes.

Every link, switch and memory of the machine says where its number is from.

    host0 -> numa<n> -> plx<s> -> gpu<g>.memory -> gpu<g>        reads of host memory by a GPU
    gpu<a>.memory -> gpu<b>.memory, or through nvswitch0         reads of a peer
    host0 -> nic<h> -> network0 -> nic<k>                        to another host

Host memory is spread over the NUMA nodes, so a read takes equal shares of each node's channels.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import (
    CollectiveBackend,
    Link,
    MachineModel,
    Memory,
    Processor,
    Provenance,
    Switch,
    Table,
    prefix_of,
)
from gnnplan.planner.partition.cliques import clique_covers
from gnnplan.planner.probe.links import PCIE_BYTES_PER_SECOND_PER_LANE
from gnnplan.planner.probe.presets import (
    Number,
    Part,
    gpu_tables,
    load_effects,
    load_part,
    read_number,
)
from gnnplan.runtime import codec


@dataclass(frozen=True, kw_only=True, slots=True)
class NvLinks:
    """How GPUs are joined by NVLink: in pairs, or all through a switch."""

    source: str
    provenance: Provenance
    pairs: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """First GPU, second GPU, number of links."""
    switch: int = 0
    """Links of each GPU into the switch; 0: there is none."""
    generation: int = 0
    """Generation of the switch; 0 where unknown or there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PcieSwitches:
    """GPUs that share one upstream port."""

    source: str
    provenance: Provenance
    groups: list[list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Numa:
    """The NUMA node of each GPU."""

    source: str
    provenance: Provenance
    nodes: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Cards of one host, all alike, and the cost of a message between hosts."""

    hosts: int
    """Most hosts that it joins."""
    cards: int
    bytes_per_second: Number
    """Bandwidth of one card, one direction."""
    share: Number
    """Share of it that messages get."""
    latency_seconds: Number


MOST_HOSTS = 64
"""Most hosts of a preset whose network does not say how many it joins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """One host of a preset."""

    kind: str
    gpu: str
    """Name of a part in parts/gpus.yaml."""
    host: str
    """Name of a part in parts/hosts.yaml."""
    num_gpus: int
    nvlinks: NvLinks
    pcie_switches: PcieSwitches
    numa: Numa
    network: Network | None = None
    backend: CollectiveBackend | None = None
    """Library of the collectives, where it sets their pace."""
    host_numbers: dict[str, Number] = field(default_factory=dict[str, Number])
    """Numbers that stand for those of the host's part: an instance has a share of a host."""
    notes: list[str] = field(default_factory=list[str])

    @property
    def most_hosts(self) -> int:
        """Return the most hosts that the preset can be asked for; 1 without a network."""
        return 1 if self.network is None else self.network.hosts

    def links(self) -> NDArray[np.int64]:
        """Return the NVLinks between each two GPUs, shape (num_gpus, num_gpus)."""
        n = self.num_gpus
        found = np.full((n, n), self.nvlinks.switch, np.int64)
        np.fill_diagonal(found, 0)
        for a, b, count in self.nvlinks.pairs:
            found[a, b] = found[b, a] = count
        return found

    def __post_init__(self) -> None:
        n = self.num_gpus
        held = sorted(g for group in self.pcie_switches.groups for g in group)
        if held != list(range(n)) or len(self.numa.nodes) != n:
            raise ValueError(f"expected each of {n} GPUs in one PCIe group and one NUMA node")
        if any(not 0 <= a < b < n or count < 1 for a, b, count in self.nvlinks.pairs):
            raise ValueError(f"expected pairs of GPUs below {n} with at least one link")


def read_box(plain: dict[str, Any], name: str) -> Box:
    """Read a box from its YAML form; MachineError where a field is missing, unknown or wrong."""
    apart = ("network", "backend", "host_numbers")
    try:
        box = codec.decode(Box, {key: value for key, value in plain.items() if key not in apart})
        read = {key: _READERS[key](plain[key], name) for key in apart if plain.get(key)}
    except (ValueError, KeyError, TypeError) as error:
        raise MachineError(f"preset {name}: not a box of GPUs ({error})") from None
    return replace(box, **read)


def _read_network(plain: dict[str, Any], name: str) -> Network:
    return Network(
        hosts=int(plain.get("hosts", MOST_HOSTS)),
        cards=int(plain["cards"]),
        **{
            key: read_number(plain[key], f"{name}: network: {key}")
            for key in ("bytes_per_second", "share", "latency_seconds")
        },
    )


def _read_backend(plain: dict[str, Any], name: str) -> CollectiveBackend:
    rate, call = (
        read_number(plain[key], f"{name}: backend: {key}")
        for key in ("bytes_per_second", "call_seconds")
    )
    both = rate.times(call)
    return codec.decode(
        CollectiveBackend,
        {
            "name": plain["name"],
            "bytes_per_second": rate.value,
            "call_seconds": call.value,
            "source": both.source,
            "provenance": both.provenance,
        },
    )


def _read_numbers(plain: dict[str, Any], name: str) -> Part:
    return {key: read_number(value, f"{name}: {key}") for key, value in plain.items()}


_READERS: dict[str, Callable[[dict[str, Any], str], Any]] = {
    "network": _read_network,
    "backend": _read_backend,
    "host_numbers": _read_numbers,
}


HOST_LINE_BYTES = 64


@dataclass(slots=True)
class Build:
    """The parts of a machine under construction, and what they are made from."""

    box: Box
    gpu: Part
    gpu_model: str
    host: Part
    host_model: str
    effects: Part
    links: list[Link] = field(default_factory=list[Link])
    switches: list[Switch] = field(default_factory=list[Switch])
    memories: list[Memory] = field(default_factory=list[Memory])
    processors: list[Processor] = field(default_factory=list[Processor])
    sources: dict[str, str] = field(default_factory=dict[str, str])

    def memory(
        self,
        name: str,
        kind: Literal["host", "device", "disk"],
        size: Number,
        *,
        numa_node: int = -1,
    ) -> None:
        """Add a memory with the source of its size."""
        self.memories.append(
            Memory(
                name=name,
                kind=kind,
                capacity_bytes=int(size.value),
                numa_node=numa_node,
                provenance=size.provenance,
            )
        )
        self.sources[name] = size.source

    def link(
        self,
        name: str,
        source: str,
        target: str,
        bandwidth: Number,
        *,
        gather: Number | None = None,
        latency: Number | None = None,
        transaction_bytes: int = 0,
        lanes: int = 0,
    ) -> None:
        """Add a link with the source of its bandwidth."""
        known = {number.provenance for number in (bandwidth, gather) if number is not None}
        self.links.append(
            Link(
                name=name,
                source=source,
                target=target,
                latency_seconds=0.0 if latency is None else latency.value,
                bandwidth_bytes_per_second=bandwidth.value,
                provenance="preset" if known == {"preset"} else "derived",
                transaction_bytes=transaction_bytes,
                gather_bytes_per_second=0.0 if gather is None else gather.value,
                lanes=lanes,
            )
        )
        words = [bandwidth.source, *([] if gather is None else [f"at random: {gather.source}"])]
        self.sources[name] = "; ".join(words)


def _numa_names(build: Build, host: int) -> list[str]:
    """Name the NUMA nodes; host memory stands for the only one, unless its reads are limited."""
    prefix, sockets = prefix_of(host), int(build.host["sockets"].value)
    if sockets == 1 and "gather_bytes_per_second" not in build.host:
        return [f"{prefix}host0"]
    return [f"{prefix}numa{n}" for n in range(sockets)]


def add_host(build: Build, h: int) -> None:
    """Add cores, memory, disk, and the channels and bridges between them."""
    prefix, host, effects = prefix_of(h), build.host, build.effects
    memory, cpu, disk = f"{prefix}host0", f"{prefix}cpu0", f"{prefix}disk0"
    build.processors.append(
        Processor(
            name=cpu,
            kind="cpu",
            memory=memory,
            cores=int(host["cores"].value),
            model=build.host_model,
            host=h,
        )
    )
    build.memory(memory, "host", host["memory_bytes"])
    build.memory(disk, "disk", effects["disk_bytes"])
    sockets = int(host["sockets"].value)
    dram = host["dram_bytes_per_second"]
    build.link(f"{prefix}memory0.read", memory, cpu, dram.scaled(sockets))
    build.link(f"{prefix}memory0.write", cpu, memory, dram.scaled(sockets))
    build.link(
        f"{prefix}disk0.read",
        disk,
        memory,
        effects["disk_bytes_per_second"],
        latency=effects["disk_latency_seconds"],
        transaction_bytes=int(effects["disk_page_bytes"].value),
    )
    nodes, gather = _numa_names(build, h), host.get("gather_bytes_per_second")
    if nodes == [memory]:
        return
    for n, node in enumerate(nodes):
        build.switches.append(Switch(name=node, kind="numa", provenance=host["sockets"].provenance))
        line = HOST_LINE_BYTES
        build.link(
            f"{prefix}dram{n}.read", memory, node, dram, gather=gather, transaction_bytes=line
        )
        build.link(f"{prefix}dram{n}.write", node, memory, dram, transaction_bytes=line)
        for other in range(n):
            for a, b in ((n, other), (other, n)):
                bridge = host["bridge_bytes_per_second"]
                build.link(f"{prefix}bridge.{a}.{b}", nodes[a], nodes[b], bridge)


def add_gpus(build: Build, h: int) -> None:
    """Add GPUs, their memories, and PCIe up to the NUMA node."""
    prefix, box, effects = prefix_of(h), build.box, build.effects
    nodes = _numa_names(build, h)
    size, hbm = build.gpu["memory_bytes"], build.gpu["memory_bytes_per_second"]
    for g in range(box.num_gpus):
        name, node = f"{prefix}gpu{g}", box.numa.nodes[g]
        build.processors.append(
            Processor(
                name=name,
                kind="cuda",
                memory=f"{name}.memory",
                uuid=f"preset-{name}",
                model=build.gpu_model,
                host=h,
                numa_node=node,
            )
        )
        build.memory(f"{name}.memory", "device", size, numa_node=node)
        build.link(
            f"{name}.hbm",
            f"{name}.memory",
            name,
            hbm.times(effects["memory_copy_share"]),
            gather=hbm.times(effects["memory_gather_share"]),
            transaction_bytes=int(effects["memory_transaction_bytes"].value),
        )
    for s, group in enumerate(box.pcie_switches.groups):
        above = nodes[min(box.numa.nodes[group[0]], len(nodes) - 1)]
        if len(group) > 1:
            plx = f"{prefix}plx{s}"
            build.switches.append(
                Switch(name=plx, kind="pcie", provenance=box.pcie_switches.provenance)
            )
            _add_pcie(build, plx, above, plx)
            above = plx
        for g in group:
            _add_pcie(build, f"{prefix}pcie{g}", above, f"{prefix}gpu{g}.memory")


def _add_pcie(build: Build, name: str, above: str, below: str) -> None:
    gpu, effects = build.gpu, build.effects
    lanes, generation = int(gpu["pcie_lanes"].value), int(gpu["pcie_generation"].value)
    raw = gpu.get("host_bytes_per_second") or Number(
        value=PCIE_BYTES_PER_SECOND_PER_LANE[generation] * lanes,
        provenance="preset",
        source=f"PCI Express {generation}.0 x{lanes}",
    )
    for way, source, target in (("h2d", above, below), ("d2h", below, above)):
        build.link(
            f"{name}.{way}",
            source,
            target,
            raw.times(effects["pcie_copy_share"]),
            gather=raw.times(effects["pcie_gather_share"]),
            latency=effects["pcie_latency_seconds"],
            transaction_bytes=int(effects["pcie_transaction_bytes"].value),
            lanes=0 if "host_bytes_per_second" in gpu else lanes,
        )


def add_nvlinks(build: Build, h: int) -> None:
    """Add direct pairs, or one switch with each GPU's port, where contention is."""
    prefix, box = prefix_of(h), build.box

    def join(name: str, source: str, target: str, count: int) -> None:
        one, effects = build.gpu["nvlink_bytes_per_second"], build.effects
        build.link(
            name,
            source,
            target,
            one.scaled(count).times(effects["nvlink_copy_share"]),
            gather=one.scaled(count).times(effects["nvlink_gather_share"]),
            latency=effects["nvlink_latency_seconds"],
            transaction_bytes=int(effects["nvlink_transaction_bytes"].value),
            lanes=count,
        )

    for first, second, count in box.nvlinks.pairs:
        for a, b in ((first, second), (second, first)):
            source, target = f"{prefix}gpu{a}.memory", f"{prefix}gpu{b}.memory"
            join(f"{prefix}nvlink.gpu{a}.gpu{b}", source, target, count)
    if box.nvlinks.switch:
        switch = f"{prefix}nvswitch0"
        build.switches.append(
            Switch(
                name=switch,
                kind="nvlink",
                provenance=box.nvlinks.provenance,
                generation=box.nvlinks.generation,
            )
        )
        for g in range(box.num_gpus):
            port = f"{prefix}gpu{g}.memory"
            join(f"{prefix}nvlink.gpu{g}.nvswitch0", port, switch, box.nvlinks.switch)
            join(f"{prefix}nvlink.nvswitch0.gpu{g}", switch, port, box.nvlinks.switch)


def add_card(build: Build, h: int) -> None:
    """Add the host's network cards taken together, in both directions."""
    network = build.box.network
    assert network is not None
    bandwidth = network.bytes_per_second.scaled(network.cards).times(network.share)
    memory, card = f"{prefix_of(h)}host0", f"nic{h}"
    for name, source, target in (
        (f"{card}.out", memory, card),
        (f"{card}.in", card, memory),
        (f"network.{h}.out", card, "network0"),
        (f"network.{h}.in", "network0", card),
    ):
        half = network.latency_seconds.scaled(0.5) if "network" in name else None
        build.link(name, source, target, bandwidth, latency=half)
    build.switches.append(Switch(name=card, kind="card", provenance="preset"))


def box_machine(box: Box, name: str, num_hosts: int = 1) -> MachineModel:
    """Return the machine of `num_hosts` such boxes, joined by their network cards."""
    gpu_model, gpu = load_part("gpus", box.gpu)
    host_model, host = load_part("hosts", box.host)
    build = Build(
        box=box,
        gpu=gpu,
        gpu_model=gpu_model,
        host={**host, **box.host_numbers},
        host_model=host_model,
        effects=load_effects(),
    )
    covers = clique_covers(box.links())
    for h in range(num_hosts):
        add_host(build, h)
        add_gpus(build, h)
        add_nvlinks(build, h)
        if box.network is not None and num_hosts > 1:
            add_card(build, h)
    if num_hosts > 1:
        build.switches.append(Switch(name="network0", kind="network", provenance="preset"))

    def named(cliques: tuple[tuple[int, ...], ...]) -> list[list[str]]:
        return [
            [f"{prefix_of(h)}gpu{g}" for g in clique]
            for h in range(num_hosts)
            for clique in cliques
        ]

    tables, table_sources = _tables(build)
    return MachineModel(
        name=name,
        fingerprint=f"preset:{name}",
        provenance="preset",
        processors=build.processors,
        memories=build.memories,
        switches=build.switches,
        links=build.links,
        cliques=named(covers[0].cliques),
        other_covers=[named(cover.cliques) for cover in covers[1:]],
        tables=tables,
        noise=build.effects["noise"].value,
        backend=box.backend,
        sources=build.sources | table_sources,
        notes=[
            *box.notes,
            f"NVLink: {box.nvlinks.source} ({box.nvlinks.provenance})",
            f"PCIe switches: {box.pcie_switches.source} ({box.pcie_switches.provenance})",
            f"NUMA: {box.numa.source} ({box.numa.provenance})",
            "Nothing was measured on such a machine by us; probe it for figures of its own.",
        ],
    )


def _tables(build: Build) -> tuple[dict[str, Table], dict[str, str]]:
    network = build.box.network
    more = {} if network is None else {"host_message": ("seconds", network.latency_seconds)}
    return gpu_tables(build.gpu, build.effects, more)
