"""NVML inventory: which GPUs there are and how they are joined. Facts, no measured rate.

Every call may be refused (old driver, MIG, container, virtual machine); what is refused is None and
stays unknown, it is never guessed. Names follow nvidia-ml-py, module `pynvml`, which is imported
here only when the inventory is asked for; tests hand in a fake or a recorded module instead.
"""

import importlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.probe.gpu.inventory import (
    Asker,
    Gpu,
    GpuPair,
    Inventory,
    busy_text,
    differences,
    slices_of,
    used_bytes,
    visible_gpus,
)
from planner.probe.gpu.nvlinks import bus_key, pair_links, read_links
from planner.probe.host import PciDevices, SysfsDevices

__all__ = ["Asker", "Gpu", "GpuPair", "Inventory", "inventory", "set_bits"]

COMMON_ANCESTORS = {
    0: "internal",
    10: "single",
    20: "multiple",
    30: "hostbridge",
    40: "node",
    50: "system",
}
"""Meeting point of two GPUs on PCIe: one bridge, several, the host bridge, a NUMA node, beyond."""
P2P_INDEX = {"read": 0, "write": 1, "nvlink": 2, "atomics": 3, "pci": 4}
"""Plain integers: the module's constant for `read` is a tuple by mistake."""
P2P_OK = 0
MASK_WORDS = 16
"""64-bit words of a CPU or NUMA node mask: 1024 bits."""


def inventory(
    nvml: Any = None,
    sysfs: Path = Path("/sys"),
    *,
    devices: PciDevices | None = None,
    environment: Mapping[str, str] | None = None,
) -> Inventory | None:
    """Ask NVML for the GPUs that CUDA shows, and their links.

    Args:
        nvml: a module like pynvml; None imports it.
        sysfs: where PCI devices say their NUMA node and the bridges above them.
        devices: looks PCI devices up instead of `sysfs`.
        environment: variables that say which GPUs CUDA shows; None: those of this process.

    Returns:
        None where there is no NVML, no driver or no GPU; an inventory without GPUs, and notes,
        where there are some and CUDA shows none.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        return _read_inventory(Asker(nvml), devices or SysfsDevices(sysfs), environment)
    finally:
        nvml.nvmlShutdown()


def _read_inventory(
    asker: Asker, devices: PciDevices, environment: Mapping[str, str] | None
) -> Inventory | None:
    count = asker.number("nvmlDeviceGetCount") or 0
    handles = [(i, asker.ask("nvmlDeviceGetHandleByIndex", i)) for i in range(count)]
    usable = [(i, handle) for i, handle in handles if handle is not None]
    if not usable:
        return None
    listed = [_read_gpu(asker, i, handle, devices) for i, handle in usable]
    slices = [
        slices_of(asker, handle) if gpu.mig else None
        for gpu, (_, handle) in zip(listed, usable, strict=True)
    ]
    visible = visible_gpus(listed, slices, environment)
    gpus = visible.gpus
    by_place = sorted(zip(visible.places, gpus, strict=True), key=lambda each: each[0])
    pairs = [
        _read_pair(asker, one, other, usable[a][1], usable[b][1])
        for (a, one), (b, other) in itertools.combinations(by_place, 2)
    ]
    notes = visible.notes + differences(gpus)
    notes += [f"nvml: {name} refused, left unknown" for name in sorted(asker.refused)]
    notes += [note for gpu in gpus if (note := busy_text(gpu))]
    if len(usable) < count:
        notes.append(f"nvml: {count - len(usable)} of {count} GPUs could not be opened")
    return Inventory(
        driver_version=asker.text("nvmlSystemGetDriverVersion"),
        cuda_driver_version=asker.number("nvmlSystemGetCudaDriverVersion_v2"),
        gpus=gpus,
        pairs=pairs,
        notes=notes,
    )


def _read_gpu(asker: Asker, index: int, handle: Any, devices: PciDevices) -> Gpu:
    pci = asker.ask("nvmlDeviceGetPciInfo", handle)
    bus_id = bus_key(pci.busId) if pci is not None else ""
    capability: Any = asker.ask("nvmlDeviceGetCudaComputeCapability", handle)
    memory = asker.ask("nvmlDeviceGetMemoryInfo", handle)
    mig = asker.ask("nvmlDeviceGetMigMode", handle)
    processes = asker.ask("nvmlDeviceGetComputeRunningProcesses", handle)
    facts = devices.facts(bus_id)
    node, conflict = _numa_node(asker, handle, None if facts is None else facts.numa_node)
    compute = None if capability is None else (int(capability[0]), int(capability[1]))
    return Gpu(
        index=index,
        uuid=asker.text("nvmlDeviceGetUUID", handle),
        name=asker.text("nvmlDeviceGetName", handle),
        bus_id=bus_id,
        compute_capability=compute,
        memory_bytes=None if memory is None else int(memory.total),
        mig=None if mig is None else int(mig[0]) == 1,
        numa_node=node,
        numa_conflict=conflict,
        pci_bridges=None if facts is None else facts.bridges,
        cpus=set_bits(asker.ask("nvmlDeviceGetCpuAffinity", handle, MASK_WORDS)),
        pcie_generation=asker.number("nvmlDeviceGetCurrPcieLinkGeneration", handle),
        pcie_width=asker.number("nvmlDeviceGetCurrPcieLinkWidth", handle),
        pcie_max_generation=asker.number("nvmlDeviceGetMaxPcieLinkGeneration", handle),
        pcie_max_width=asker.number("nvmlDeviceGetMaxPcieLinkWidth", handle),
        nvlinks=read_links(asker.ask, asker.nvml, handle, compute[0] if compute else None),
        compute_processes=None if processes is None else len(processes),
        used_bytes=_taken(memory, processes),
    )


def _taken(memory: Any, processes: Any) -> int | None:
    """Bytes in use: as the device says, or as its processes do where those are more."""
    running: list[Any] = list(processes or [])
    held = sum(getattr(each, "usedGpuMemory", None) or 0 for each in running)
    told = None if memory is None else used_bytes(memory)
    return (held or None) if told is None else max(told, held)


def set_bits(mask: Any) -> list[int] | None:
    """Positions of the set bits of an array of 64-bit words."""
    if mask is None:
        return None
    words = [int(word) for word in mask]
    return [64 * w + b for w, word in enumerate(words) for b in range(64) if word >> b & 1]


def _numa_node(
    asker: Asker, handle: Any, told: int | None
) -> tuple[int | None, tuple[int, int] | None]:
    """The one NUMA node next to the GPU, unknown where the two sources disagree; and what they say.

    Args:
        asker: asks NVML.
        handle: the device.
        told: what the system says; None: it does not know.
    """
    nodes = set_bits(asker.ask("nvmlDeviceGetMemoryAffinity", handle, MASK_WORDS, 0))
    asked = nodes[0] if nodes is not None and len(nodes) == 1 else None
    if told is None or asked is None:
        return (asked if told is None else told), None
    return (told, None) if asked == told else (None, (asked, told))


def _read_pair(asker: Asker, a: Gpu, b: Gpu, handle_a: Any, handle_b: Any) -> GpuPair:
    p2p: dict[str, bool | None] = {}
    for name, index in P2P_INDEX.items():
        status = asker.number("nvmlDeviceGetP2PStatus", handle_a, handle_b, index)
        p2p[name] = None if status is None else status == P2P_OK
    level = asker.number("nvmlDeviceGetTopologyCommonAncestor", handle_a, handle_b)
    links, via_switch = pair_links(
        a.nvlinks, a.bus_id, b.nvlinks, b.bus_id, nvlink_peer=p2p["nvlink"]
    )
    return GpuPair(
        first=a.index,
        second=b.index,
        common_ancestor=None if level is None else COMMON_ANCESTORS.get(level),
        p2p=p2p,
        num_nvlinks=links,
        via_switch=via_switch,
    )
