"""The host: its memory, disk and load, and where PCI devices hang.

Two devices under one bridge share its upstream port. NVML says how far up two GPUs meet but not
which bridge that is; the system's device tree does.
"""

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from gnnplan.planner.machine.model import Memory, Processor

PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSample:
    """Busy, stolen and all processor ticks since boot, and the load average of the last minute."""

    busy_ticks: int
    steal_ticks: int
    all_ticks: int
    load: float


def read_load() -> LoadSample:
    """Read the load from /proc; where that is missing all ticks are zero."""
    try:
        words = (PROC / "stat").read_text().splitlines()[0].split()[1:9]
    except (OSError, IndexError):
        words = []
    ticks = [int(w) for w in words] + [0] * (8 - len(words))
    idle, steal = ticks[3] + ticks[4], ticks[7]
    return LoadSample(
        busy_ticks=sum(ticks) - idle - steal,
        steal_ticks=steal,
        all_ticks=sum(ticks),
        load=os.getloadavg()[0],
    )


def load_notes(before: LoadSample, after: LoadSample, cores: int) -> list[str]:
    """Note a load average above a quarter of the cores, or over 1% of processor time stolen."""
    notes: list[str] = []
    if before.load > max(0.25 * cores, 0.5):
        notes.append(
            f"load: {before.load:.1f} before the probe on {cores} cores: other work was running; "
            "probe an idle machine"
        )
    ticks = after.all_ticks - before.all_ticks
    stolen = (after.steal_ticks - before.steal_ticks) / ticks if ticks > 0 else 0.0
    if stolen > 0.01:
        notes.append(f"load: {stolen:.1%} of processor time was stolen by the hypervisor")
    return notes


def disturbance_notes(num_disturbed: int) -> list[str]:
    """Say how many points were measured while the machine was slower than in its good moments."""
    if not num_disturbed:
        return []
    return [
        f"disturbed: {num_disturbed} points were measured while a small training step took longer "
        "than in this machine's good moments: other work, or neighbours outside this machine that "
        "share its cores, slow it down; probe and profile in a quieter hour"
    ]


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
