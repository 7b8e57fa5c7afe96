"""A box of GPUs as a preset describes it: which parts, and how they are joined."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.errors import MachineError
from planner.machine import Provenance
from planner.probe.parts import Number, read_number
from runtime import codec


@dataclass(frozen=True, kw_only=True, slots=True)
class NvLinks:
    """How GPUs are joined by NVLink: in pairs, or all through a switch."""

    source: str
    provenance: Provenance
    pairs: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """First GPU, second GPU, number of links."""
    switch: int = 0
    """Links of each GPU into the switch; 0: there is none."""


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
    """Cards of one host, all alike, and what a message between hosts costs."""

    cards: int
    bytes_per_second: Number
    """Of one card, one direction."""
    share: Number
    """What messages get of it."""
    latency_seconds: Number


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
    most_hosts: int = 1
    """The preset can be asked for with up to so many hosts (NAME:N)."""
    notes: list[str] = field(default_factory=list[str])

    def links(self) -> NDArray[np.int64]:
        """NVLinks between each two GPUs, shape (num_gpus, num_gpus)."""
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
    """A box from its YAML form.

    Raises:
        MachineError: a field is missing, unknown or of the wrong kind.
    """
    network = plain.get("network")
    try:
        box = codec.decode(Box, {key: value for key, value in plain.items() if key != "network"})
        if network is None:
            return box
        joined = Network(
            cards=int(network["cards"]),
            **{
                key: read_number(network[key], f"{name}: network: {key}")
                for key in ("bytes_per_second", "share", "latency_seconds")
            },
        )
    except (ValueError, KeyError, TypeError) as error:
        raise MachineError(f"preset {name}: not a box of GPUs ({error})") from None
    return codec.decode(Box, {**codec.to_plain(box), "network": codec.to_plain(joined)})
