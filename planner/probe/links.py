"""Parts and links of the machine graph, from facts, the measured tables and the NVML inventory.

A link holds one latency and one bandwidth for pictures, bounds and what-if questions; the cost
model reads the tables they were derived from. GPU links carry what the driver states, until they
are measured: their provenance is `derived` and never `measured`.
"""

import itertools
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gnnplan.planner.machine.model import Link, MachineModel, Memory, Processor, Switch, Table
from gnnplan.planner.partition.cliques import clique_covers
from gnnplan.planner.probe.gpu.nvml import Gpu, Inventory
from gnnplan.planner.probe.grid import fit_alpha_beta
from gnnplan.planner.probe.presets import Part, find_gpu, gpu_tables, load_effects

DISK = "disk0.read"
"""Name of the link from a host's disk to its memory."""
PCIE_BYTES_PER_SECOND_PER_LANE = {
    1: 0.25e9,
    2: 0.5e9,
    3: 0.985e9,
    4: 1.969e9,
    5: 3.938e9,
    6: 7.563e9,
}
"""PCIe rates by generation, one direction, line code included; PCI Express base specifications 1.0
to 6.0."""


def host_processor(facts: dict[str, Any]) -> Processor:
    """Return all usable cores together."""
    return Processor(
        name="cpu0", kind="cpu", memory="host0", cores=facts["cores"], model=facts["cpu_model"]
    )


def host_memories(facts: dict[str, Any], scratch: Path) -> list[Memory]:
    """Return the host's RAM, and the disk that holds `scratch` (its free bytes)."""
    numa_node = 0 if facts["numa_nodes"] == 1 else -1
    return [
        Memory(name="host0", kind="host", capacity_bytes=facts["ram_bytes"], numa_node=numa_node),
        Memory(name="disk0", kind="disk", capacity_bytes=shutil.disk_usage(scratch).free),
    ]


def numa_notes(facts: dict[str, Any]) -> list[str]:
    """Say where several memories were measured as one."""
    if facts["numa_nodes"] == 1:
        return []
    return [
        f"host0: {facts['numa_nodes']} NUMA nodes measured as one memory; "
        "rates between nodes are not told apart"
    ]


def host_links(tables: dict[str, Table]) -> tuple[list[Link], list[str]]:
    """Return memory to cores, disk to memory, and rank to rank links, and notes on their fits."""
    links = _memory_links(tables)
    notes: list[str] = []
    if "disk_read" in tables:
        links.append(disk_link(tables["disk_read"]))
    if "all_to_all_idle" in tables:
        link, note = _exchange_link(tables["all_to_all_idle"])
        links.append(link)
        notes.append(note)
    return links, notes


def _derived_link(
    name: str, source: str, target: str, bandwidth: float, latency: float = 0.0, lanes: int = 0
) -> Link:
    return Link(
        name=name,
        source=source,
        target=target,
        latency_seconds=latency,
        bandwidth_bytes_per_second=bandwidth,
        provenance="derived",
        lanes=lanes,
    )


def _memory_links(tables: dict[str, Table]) -> list[Link]:
    """Return all readers' copy bandwidth, with the latency of a short random row."""
    copy, gather = tables["copy"], tables["gather"]
    readers = copy.points[0]
    bandwidth = max(n * rate for n, rate in zip(readers, copy.values, strict=True))
    grid = dict(zip(gather.axes, gather.points, strict=True))
    latency = gather.at(**{name: axis[-1] for name, axis in grid.items()} | {
        "row_bytes": grid["row_bytes"][0], "readers": 1.0,
    })  # fmt: skip
    return [
        _derived_link("memory0.read", "host0", "cpu0", bandwidth, latency),
        _derived_link("memory0.write", "cpu0", "host0", bandwidth, latency),
    ]


def disk_link(table: Table) -> Link:
    """Return the disk's link: a lone read's latency, and the best rate that was measured."""
    sizes, depths, readers = table.points
    one = [table.at(read_bytes=size, queue_depth=depths[0], readers=1.0) for size in sizes]
    best = max(
        size * count / table.at(read_bytes=size, queue_depth=depth, readers=count)
        for size, depth, count in itertools.product(sizes, depths, readers)
    )
    return _derived_link(DISK, "disk0", "host0", best, fit_alpha_beta(sizes, one).latency_seconds)


def _exchange_link(table: Table) -> tuple[Link, str]:
    """Return the gloo link of two ranks of a host; half of an all-to-all leaves a rank."""
    sizes, ranks = table.points
    seconds = [table.at(bytes=size, ranks=ranks[0]) for size in sizes]
    share = 1 - 1 / ranks[0]
    fit = fit_alpha_beta([size * share for size in sizes], seconds)
    link = _derived_link(
        "gloo0", "host0", "host0", fit.bandwidth_bytes_per_second, fit.latency_seconds
    )
    return link, f"gloo0: latency + bytes / bandwidth fitted with {fit.residual:.0%} residual"


def gpu_parts(inventory: Inventory) -> tuple[list[Processor], list[Memory], list[str]]:
    """Return a processor and its free memory per GPU, and notes on those that are left out."""
    processors: list[Processor] = []
    memories: list[Memory] = []
    notes = list(inventory.notes)
    for gpu in inventory.gpus:
        name = f"gpu{gpu.index}"
        if not gpu.capacity_bytes:
            why = "memory size unknown" if gpu.memory_bytes is None else "no memory is free"
            notes.append(f"{name}: {why}; left out of the machine")
            continue
        processors.append(
            Processor(
                name=name,
                kind="cuda",
                memory=f"{name}.memory",
                uuid=gpu.uuid,
                model=gpu.name,
                numa_node=-1 if gpu.numa_node is None else gpu.numa_node,
                bus_id=gpu.bus_id,
                near_cores=gpu.cpus or [],
            )
        )
        memories.append(
            Memory(
                name=f"{name}.memory",
                kind="device",
                capacity_bytes=gpu.capacity_bytes,
                numa_node=-1 if gpu.numa_node is None else gpu.numa_node,
            )
        )
    return processors, memories, notes


def gpu_links(inventory: Inventory) -> list[Link]:
    """Return PCIe to the host, direct NVLinks, and one switch node with each GPU's port."""
    present = {gpu.index: gpu for gpu in inventory.gpus if gpu.capacity_bytes}
    groups = pcie_groups(inventory)
    above = {g: f"plx{s}" for s, group in enumerate(groups) for g in group}
    links: list[Link] = []
    for s, group in enumerate(groups):
        # The port above is taken to be as wide as the widest slot below it.
        widest = max((present[g] for g in group), key=_pcie_rate)
        links += _pcie_links(widest, f"plx{s}", "host0", f"plx{s}")
    for gpu in present.values():
        port = above.get(gpu.index, "host0")
        links += _pcie_links(gpu, f"pcie{gpu.index}", port, f"gpu{gpu.index}.memory")
    switched: dict[int, int] = {}
    for pair in inventory.pairs:
        if pair.first not in present or pair.second not in present or not pair.num_nvlinks:
            continue
        if pair.via_switch:
            for index in (pair.first, pair.second):
                switched[index] = max(switched.get(index, 0), pair.num_nvlinks)
            continue
        for a, b in ((pair.first, pair.second), (pair.second, pair.first)):
            links += _nvlink(present[a], f"gpu{a}.memory", f"gpu{b}.memory", pair.num_nvlinks)
    for index, count in sorted(switched.items()):
        port = f"gpu{index}.memory"
        links += _nvlink(present[index], port, "nvswitch0", count)
        links += _nvlink(present[index], "nvswitch0", port, count)
    return links


def pcie_groups(inventory: Inventory) -> list[list[int]]:
    """Group GPUs that share an upstream port: those under one bridge, by the device tree.

    Where the tree is hidden, those whose way to each other does not pass the host bridge.
    """
    present = {gpu.index for gpu in inventory.gpus if gpu.capacity_bytes}
    bridges = {g.index: g.pci_bridges for g in inventory.gpus if g.pci_bridges is not None}
    if present <= set(bridges):
        return shared_bridges({index: bridges[index] for index in sorted(present)})
    import networkx as nx

    near: nx.Graph[int] = nx.Graph()
    near.add_edges_from(
        (pair.first, pair.second)
        for pair in inventory.pairs
        if pair.common_ancestor in ("internal", "single", "multiple")
        and {pair.first, pair.second} <= present
    )
    return sorted(sorted(group) for group in nx.connected_components(near))


BEFORE_SWITCHES = 6
"""Major compute capability before the first NVSwitch, since when each has had its own."""


def shared_bridges(bridges: Mapping[int, list[str]]) -> list[list[int]]:
    """Group devices by the lowest bridge that two or more of them share.

    Args:
        bridges: addresses above each device, root first.

    Returns:
        Groups of at least two devices, each device in at most one.

    >>> shared_bridges({0: ["00", "a", "b"], 1: ["00", "a", "c"], 2: ["00", "d"]})
    [[0, 1]]
    >>> shared_bridges({0: ["a", "b"], 1: ["a", "b"], 2: ["a", "c"], 3: ["a", "c"]})
    [[0, 1], [2, 3]]
    """
    left, groups = dict(bridges), list[list[int]]()
    deepest = max((len(path) for path in bridges.values()), default=0)
    for depth in range(deepest - 1, -1, -1):
        under: dict[str, list[int]] = {}
        for device, path in left.items():
            if len(path) > depth:
                under.setdefault(path[depth], []).append(device)
        for devices in under.values():
            if len(devices) > 1:
                groups.append(sorted(devices))
                for device in devices:
                    del left[device]
    return sorted(groups)


def gpu_switches(inventory: Inventory) -> list[Switch]:
    """Return PCIe switches that GPUs share, and the NVSwitch fabric taken as one node."""
    found = [Switch(name=f"plx{s}", kind="pcie") for s in range(len(pcie_groups(inventory)))]
    if any(pair.via_switch and pair.num_nvlinks for pair in inventory.pairs):
        found.append(
            Switch(name="nvswitch0", kind="nvlink", generation=switch_generation(inventory))
        )
    return found


def switch_generation(inventory: Inventory) -> int:
    """Return the generation of the NVSwitches that came with the GPUs; 0 where unknown."""
    known = [gpu.compute_capability for gpu in inventory.gpus]
    majors = [each[0] for each in known if each is not None]
    return max(0, min(majors) - BEFORE_SWITCHES) if len(majors) == len(known) and majors else 0


def pcie_width(gpu: Gpu) -> int:
    """Return the lanes in use, at most those of the slot; 0 where unknown."""
    known = [width for width in (gpu.pcie_width, gpu.pcie_max_width) if width]
    return min(known) if gpu.pcie_max_width else 0


def _pcie_rate(gpu: Gpu) -> float:
    lane = PCIE_BYTES_PER_SECOND_PER_LANE.get(gpu.pcie_max_generation or 0, 0.0)
    return lane * pcie_width(gpu)


def _pcie_links(gpu: Gpu, name: str, above: str, below: str) -> list[Link]:
    if not _pcie_rate(gpu):
        return []
    return [
        _derived_link(f"{name}.{way}", source, target, _pcie_rate(gpu), lanes=pcie_width(gpu))
        for way, source, target in (("h2d", above, below), ("d2h", below, above))
    ]


def _nvlink(gpu: Gpu, source: str, target: str, count: int) -> list[Link]:
    speeds = [link.bytes_per_second for link in gpu.nvlinks or [] if link.bytes_per_second]
    if not speeds:
        return []
    name = f"nvlink.{source.split('.')[0]}.{target.split('.')[0]}"
    return [_derived_link(name, source, target, float(np.median(speeds)) * count, lanes=count)]


def nvlink_covers(inventory: Inventory) -> list[list[list[str]]]:
    """Cover GPUs by the fewest groups joined all to all by NVLink; best covers first."""
    present = [gpu.index for gpu in inventory.gpus if gpu.capacity_bytes]
    place = {index: position for position, index in enumerate(present)}
    joined = np.zeros((len(place), len(place)), np.int64)
    for pair in inventory.pairs:
        if pair.num_nvlinks and {pair.first, pair.second} <= set(place):
            a, b = place[pair.first], place[pair.second]
            joined[a, b] = joined[b, a] = pair.num_nvlinks
    names = [f"gpu{index}" for index in present]
    return [
        [[names[g] for g in clique] for clique in cover.cliques] for cover in clique_covers(joined)
    ]


def nvlink_cliques(inventory: Inventory) -> list[list[str]]:
    """Return the best of `nvlink_covers`; link counts break ties."""
    return nvlink_covers(inventory)[0]


def with_rates_of_parts(machine: MachineModel, inventory: Inventory) -> MachineModel:
    """Add the GPUs that the driver names to a host, at the rates of the first one's part.

    Slots and NVLinks have the rates that the driver states, less what packets take.
    """
    processors, memories, notes = gpu_parts(inventory)
    if not processors:
        return replace(machine, notes=[*machine.notes, *notes])
    part, gpu, known = find_gpu(processors[0].model, memories[0].capacity_bytes)
    effects = load_effects()
    notes.append(f"GPUs: rates of {part}" if known else f"GPUs: assumed to be like {part}")
    tables, sources = gpu_tables(gpu, effects, {})
    covers = nvlink_covers(inventory)
    hbm = gpu["memory_bytes_per_second"]
    own = [
        Link(
            name=f"{each.name}.hbm",
            source=each.memory,
            target=each.name,
            latency_seconds=0.0,
            bandwidth_bytes_per_second=hbm.times(effects["memory_copy_share"]).value,
            provenance="derived",
            transaction_bytes=int(effects["memory_transaction_bytes"].value),
            gather_bytes_per_second=hbm.times(effects["memory_gather_share"]).value,
        )
        for each in processors
    ]
    return replace(
        machine,
        processors=[*machine.processors, *processors],
        memories=[*machine.memories, *memories],
        links=[*machine.links, *own, *(_less(x, effects) for x in gpu_links(inventory))],
        switches=gpu_switches(inventory),
        cliques=covers[0],
        other_covers=covers[1:],
        tables=machine.tables | tables,
        noise=max(machine.noise, effects["noise"].value),
        sources=machine.sources | sources,
        notes=[*machine.notes, *notes],
    )


def _less(link: Link, effects: Part) -> Link:
    """Return a link at the rates that are left of those the driver states."""
    kind, raw = "nvlink" if "nvlink" in link.name else "pcie", link.bandwidth_bytes_per_second
    return replace(
        link,
        latency_seconds=effects[f"{kind}_latency_seconds"].value,
        bandwidth_bytes_per_second=raw * effects[f"{kind}_copy_share"].value,
        gather_bytes_per_second=raw * effects[f"{kind}_gather_share"].value,
        transaction_bytes=int(effects[f"{kind}_transaction_bytes"].value),
    )
