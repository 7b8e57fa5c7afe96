"""NVML inventory: which GPUs there are and how they are joined. Facts, no measured rate.

Every call may be refused (old driver, MIG, container, virtual machine); what is refused is None and
stays unknown, it is never guessed. Names follow nvidia-ml-py, module `pynvml`, which is imported
here only when the inventory is asked for; tests hand in a fake or a recorded module instead.

The remote end of an NVLink may be a peer, a switch or hidden from us; in the last case links count
as a way between two GPUs only where the driver says that peer access over NVLink works. How far up
two GPUs meet on PCIe NVML says, but not under which bridge; the system's device tree does.
"""

import importlib
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from gnnplan.planner.machine.model import GPUS_LOST
from gnnplan.planner.probe.gpu.inventory import (
    Asker,
    Gpu,
    GpuPair,
    Inventory,
    NvLink,
    busy_text,
    denied_notes,
    differences,
    is_denied,
    slices_of,
    used_bytes,
    visible_gpus,
)

__all__ = ["Asker", "Gpu", "GpuPair", "Inventory", "inventory", "set_bits"]

COMMON_ANCESTORS = {
    0: "internal",
    10: "single",
    20: "multiple",
    30: "hostbridge",
    40: "node",
    50: "system",
}
"""Meeting points of two GPUs on PCIe: one bridge, several, the host bridge, a NUMA node, beyond."""
P2P_INDEX = {"read": 0, "write": 1, "nvlink": 2, "atomics": 3, "pci": 4}
"""Indices as plain integers: the module's constant for `read` is a tuple by mistake."""
P2P_OK = 0
MASK_WORDS = 16
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True, kw_only=True, slots=True)
class PciFacts:
    """What the system knows of one PCI device."""

    numa_node: int | None = None
    """NUMA node; None where the system does not know (it says -1)."""
    bridges: list[str] | None = None
    """PCI addresses above the device, the one next to the root first; None where unknown."""


@runtime_checkable
class PciDevices(Protocol):
    """Looks PCI devices up by address."""

    def facts(self, bus_id: str) -> PciFacts | None:
        """Return the facts of a device; None where there is no such device."""
        ...


class SysfsDevices:
    """Devices of this machine, from the tree `sysfs`."""

    def __init__(self, sysfs: Path = Path("/sys")) -> None:
        self._folder = sysfs / "bus/pci/devices"

    def facts(self, bus_id: str) -> PciFacts | None:
        """Return NUMA node and bridges of a device; None where there is no such device."""
        place = self._folder / bus_id
        if not bus_id or not place.exists():
            return None
        try:
            node = int((place / "numa_node").read_text())
        except (OSError, ValueError):
            node = -1
        above = [part for part in place.resolve().parts[:-1] if _ADDRESS.fullmatch(part)]
        return PciFacts(numa_node=node if node >= 0 else None, bridges=above or None)


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
        sysfs: folder where PCI devices say their NUMA node and the bridges above them.
        devices: looks PCI devices up instead of `sysfs`.
        environment: variables that say which GPUs CUDA shows; None: those of this process.

    Returns:
        None where there is no NVML, no driver or no GPU; an inventory without GPUs, and notes,
        where there are some and CUDA shows none, or the driver tells nothing of them.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return None if getattr(error, "value", None) in NO_DRIVER else _untold(f"NVML says {error}")
    try:
        return _read_inventory(Asker(nvml), devices or SysfsDevices(sysfs), environment)
    finally:
        nvml.nvmlShutdown()


NO_DRIVER = (9, 12)
"""NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND: the machine has no GPU for CUDA."""


def _untold(why: str) -> Inventory:
    """Return an inventory of GPUs of which the driver tells nothing."""
    note = (
        f"{GPUS_LOST}the driver is there and tells nothing of its GPUs ({why}): this process needs "
        "permission for /dev/nvidia*, and driver and libraries of one release"
    )
    return Inventory(driver_version="", cuda_driver_version=None, gpus=[], pairs=[], notes=[note])


def _read_inventory(
    asker: Asker, devices: PciDevices, environment: Mapping[str, str] | None
) -> Inventory | None:
    count = asker.number("nvmlDeviceGetCount") or 0
    handles = [(i, asker.ask("nvmlDeviceGetHandleByIndex", i)) for i in range(count)]
    usable = [(i, handle) for i, handle in handles if handle is not None]
    if not usable:
        return _untold(f"none of {count} could be opened") if count else None
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
    notes = visible.notes + differences(gpus) + denied_notes(gpus, pairs)
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
    """Return the bytes in use, by the device or by its processes, whichever is more."""
    running: list[Any] = list(processes or [])
    held = sum(getattr(each, "usedGpuMemory", None) or 0 for each in running)
    told = None if memory is None else used_bytes(memory)
    return (held or None) if told is None else max(told, held)


def set_bits(mask: Any) -> list[int] | None:
    """List the positions of the set bits of an array of 64-bit words."""
    if mask is None:
        return None
    words = [int(word) for word in mask]
    return [64 * w + b for w, word in enumerate(words) for b in range(64) if word >> b & 1]


def _numa_node(
    asker: Asker, handle: Any, told: int | None
) -> tuple[int | None, tuple[int, int] | None]:
    """Return the NUMA node next to the GPU, and both sources' nodes where they disagree."""
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
    if links and is_denied(p2p):  # what they join does not serve
        links, via_switch = 0, None
    return GpuPair(
        first=a.index,
        second=b.index,
        common_ancestor=None if level is None else COMMON_ANCESTORS.get(level),
        p2p=p2p,
        num_nvlinks=links,
        via_switch=via_switch,
    )


MAX_LINKS = 36
FIELD_STATE = 165
"""NVML_FI_DEV_NVLINK_GET_STATE, for compute capability 9 and later."""
FIELD_SPEED = 164
"""NVML_FI_DEV_NVLINK_GET_SPEED, MB/s per link."""
FIELD_COMMON_SPEED = 90
"""NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, MB/s per link, all alike."""
CAPABILITY_P2P = 0
REMOTE_KINDS = {0: "gpu", 1: "npu", 2: "switch"}

Ask = Callable[..., Any]
"""Calls an NVML function by name; None where it is refused."""


def bus_key(bus_id: Any) -> str:
    """Return a comparable PCI address: lower case, domain of four hex digits, as in sysfs.

    NVML writes 00000000:07:00.0 where sysfs writes 0000:07:00.0; an address of all ones or without
    a domain is no address.

    >>> bus_key(b"00000000:C1:00.0"), bus_key("soon:1")
    ('0000:c1:00.0', '')
    """
    text = bus_id.decode(errors="replace") if isinstance(bus_id, bytes) else str(bus_id)
    domain, _, rest = text.lower().strip("\0 ").partition(":")
    if not re.fullmatch(r"[0-9a-f]{1,8}:[0-9a-z:.]{1,16}", f"{domain}:{rest}", re.ASCII):
        return ""
    if set(domain) <= {"f"}:
        return ""
    return f"{int(domain, 16):04x}:{rest}"


def read_links(ask: Ask, nvml: Any, handle: Any, major: int | None) -> list[NvLink] | None:
    """Read the links of a GPU; [] where it has none, None where they could not be asked for.

    From compute capability 9 (`major`) on, the state is read by a field, as NCCL does.
    """
    links: list[NvLink] = []
    for index in range(MAX_LINKS):
        try:
            access = nvml.nvmlDeviceGetNvLinkCapability(handle, index, CAPABILITY_P2P)
        except nvml.NVMLError as error:
            if index == 0 and not _has_no_links(nvml, error):
                return None
            break
        remote = ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, index)
        kind = ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, index)
        links.append(
            NvLink(
                index=index,
                up=_state(ask, handle, index, major),
                peer_access=bool(access),
                remote_kind=REMOTE_KINDS.get(-1 if kind is None else int(kind), "unknown"),
                remote_bus_id="" if remote is None else bus_key(remote.busId),
                bytes_per_second=_speed(ask, handle, index),
            )
        )
    return links


def _has_no_links(nvml: Any, error: Exception) -> bool:
    kinds = tuple(
        kind
        for name in ("NVMLError_NotSupported", "NVMLError_InvalidArgument")
        if isinstance(kind := getattr(nvml, name, None), type)
    )
    return isinstance(error, kinds)


def _state(ask: Ask, handle: Any, index: int, major: int | None) -> bool | None:
    if major is not None and major >= 9:
        value = _field(ask, handle, FIELD_STATE, index)
    else:
        value = ask("nvmlDeviceGetNvLinkState", handle, index)
    return None if value is None else int(value) == 1


def _speed(ask: Ask, handle: Any, index: int) -> float | None:
    speed = _field(ask, handle, FIELD_SPEED, index)
    if not speed:
        speed = _field(ask, handle, FIELD_COMMON_SPEED, 0)
    return float(speed) * 1e6 if speed else None


def _field(ask: Ask, handle: Any, field: int, scope: int) -> int | None:
    answer = ask("nvmlDeviceGetFieldValues", handle, [(field, scope)])
    if not answer or int(answer[0].nvmlReturn) != 0:
        return None
    return int(answer[0].value.uiVal)


def pair_links(
    links_a: list[NvLink] | None,
    bus_a: str,
    links_b: list[NvLink] | None,
    bus_b: str,
    *,
    nvlink_peer: bool | None,
) -> tuple[int | None, bool | None]:
    """Count the NVLinks between two GPUs, and tell whether they pass a switch.

    direct = links of a whose remote end is b. Where there are none, both have links to a switch (or
    to an end they cannot see) and the driver says peer access over NVLink works: min(links_a,
    links_b) through the switch. Otherwise none.

    Returns:
        (count, via switch); (None, None) where a GPU's links are unknown, (0, None) where none.
    """
    if links_a is None or links_b is None:
        return None, None
    up_a, up_b = _active(links_a), _active(links_b)
    direct = max(
        sum(link.remote_bus_id == bus_b != "" for link in up_a),
        sum(link.remote_bus_id == bus_a != "" for link in up_b),
    )
    if direct:
        return direct, False
    switched = min(_switched(up_a), _switched(up_b))
    if switched and nvlink_peer is None:
        return None, None
    return (switched, True) if switched and nvlink_peer else (0, None)


def _active(links: list[NvLink]) -> list[NvLink]:
    return [link for link in links if link.up]


def _switched(links: list[NvLink]) -> int:
    return sum(
        link.remote_kind == "switch" or (link.remote_kind == "unknown" and not link.remote_bus_id)
        for link in links
    )
