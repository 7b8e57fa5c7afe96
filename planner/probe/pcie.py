"""Where PCI devices hang: bridges above them and their NUMA node, as the system tells it.

Two devices under one bridge share its upstream port. NVML says how far up two GPUs meet but not
which bridge that is; the system's device tree does.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from planner.errors import MachineError
from runtime import codec

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True, kw_only=True, slots=True)
class PciFacts:
    """What the system knows of one device."""

    numa_node: int | None = None
    """None where the system does not know (it says -1)."""
    bridges: list[str] | None = None
    """PCI addresses above the device, the one next to the root first; None where unknown."""


@runtime_checkable
class PciDevices(Protocol):
    """Looks devices up by address."""

    def facts(self, bus_id: str) -> PciFacts | None:
        """What is known; None where there is no such device."""
        ...


class SysfsDevices:
    """Devices of this machine, from /sys.

    Args:
        sysfs: root of the tree, another one in tests.
    """

    def __init__(self, sysfs: Path = Path("/sys")) -> None:
        self._folder = sysfs / "bus/pci/devices"

    def facts(self, bus_id: str) -> PciFacts | None:
        """NUMA node and bridges of a device."""
        place = self._folder / bus_id
        if not bus_id or not place.exists():
            return None
        try:
            node = int((place / "numa_node").read_text())
        except (OSError, ValueError):
            node = -1
        above = [part for part in place.resolve().parts[:-1] if _ADDRESS.fullmatch(part)]
        return PciFacts(numa_node=node if node >= 0 else None, bridges=above or None)


class RecordedDevices:
    """Devices of a recording.

    Raises:
        MachineError: the facts are not of that form.
    """

    def __init__(self, plain: Mapping[str, Any]) -> None:
        try:
            self._facts = {bus: codec.decode(PciFacts, each) for bus, each in plain.items()}
        except ValueError as error:
            raise MachineError(f"expected PCI devices in a recording, found {error}") from None

    def facts(self, bus_id: str) -> PciFacts | None:
        """What was recorded of a device."""
        return self._facts.get(bus_id)


def shared_bridges(bridges: Mapping[int, list[str]]) -> list[list[int]]:
    """Devices that share a bridge: the lowest one that two or more of them are under.

    Args:
        bridges: by device, addresses above it, root first.

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
