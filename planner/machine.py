"""The machine model: memories, processors and links, and what was measured on them.

A machine is a directed graph of memories and processors joined by links. Every cost the planner
computes is bytes over links or work on processors; every number says where it came from. Rates that
depend on several things (row size, working set, concurrent readers) are `Table`s.
"""

import itertools
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import networkx as nx
import numpy as np

from planner.errors import MachineError
from runtime import codec

SCHEMA_VERSION = 1

Provenance = Literal["measured", "preset", "derived"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """A place bytes can live in."""

    name: str
    kind: Literal["host", "device", "disk"]
    capacity_bytes: int
    numa_node: int = -1
    """-1 where unknown or there is one."""
    provenance: Provenance = "measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class Processor:
    """Something that computes: a host's cores together, or one GPU."""

    name: str
    kind: Literal["cpu", "cuda"]
    memory: str
    """Name of the memory next to it."""
    cores: int = 1
    uuid: str = ""
    model: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A directed way for bytes, shared by all who cross it."""

    name: str
    source: str
    target: str
    latency_seconds: float
    bandwidth_bytes_per_second: float
    provenance: Provenance = "measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A measured quantity on a grid; between points it is interpolated in log-log space.

    Outside the grid the nearest edge holds: nothing is extrapolated.
    """

    unit: str
    """Unit of the values, e.g. seconds_per_row."""
    axes: list[str]
    """Names of the coordinates, e.g. row_bytes."""
    points: list[list[float]]
    """Grid points of each axis, rising and positive."""
    values: list[float]
    """Positive values, row-major over the axes."""
    spread: float
    """Relative half-width of the repeats (robust), the residual of a fit included."""
    provenance: Provenance = "measured"
    uncertain: bool = False
    """True where the repeats stayed noisier than the probe accepts."""

    def __post_init__(self) -> None:
        size = 1
        if not self.axes or len(self.points) != len(self.axes):
            raise ValueError(f"expected one list of points for each of {len(self.axes)} axes")
        for axis in self.points:
            size *= len(axis)
            if not axis or any(b <= a for a, b in itertools.pairwise(axis)):
                raise ValueError("axis points must rise")
        if size != len(self.values):
            raise ValueError(f"expected {size} values, found {len(self.values)}")
        if min(map(min, self.points)) <= 0 or not min(self.values) > 0:
            raise ValueError("expected positive axis points and values")

    def at(self, **coordinates: float | int) -> float:
        """The value at the named coordinates.

        Raises:
            KeyError: the names given are not those of the axes, each once.
        """
        if set(coordinates) != set(self.axes):
            raise KeyError(f"expected coordinates {self.axes}, found {sorted(coordinates)}")
        grid = np.log(np.asarray(self.values, dtype=np.float64)).reshape(
            [len(p) for p in self.points]
        )
        for name, axis in zip(self.axes, self.points, strict=True):
            x, p = np.log(max(float(coordinates[name]), 1e-300)), np.log(np.asarray(axis))
            x = float(np.clip(x, p[0], p[-1]))
            hi = int(np.clip(np.searchsorted(p, x), 1, max(len(p) - 1, 1))) if len(p) > 1 else 0
            if hi == 0:
                grid = grid[0]
                continue
            weight = (x - p[hi - 1]) / (p[hi] - p[hi - 1])
            grid = grid[hi - 1] * (1 - weight) + grid[hi] * weight
        return float(np.exp(grid))


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineModel:
    """Everything the planner knows of a machine; `machine.json` on disk."""

    schema_version: int = SCHEMA_VERSION
    name: str
    fingerprint: str
    """Hash of what the machine is; equals runtime.device.machine_fingerprint() where measured."""
    provenance: Provenance
    processors: list[Processor]
    memories: list[Memory]
    links: list[Link]
    cliques: list[list[str]] = field(default_factory=list[list[str]])
    """Processors joined by fast peer links."""
    tables: dict[str, Table] = field(default_factory=dict[str, Table])
    """Measured curves; names and axes are listed in planner/probe/README.md."""
    noise: float = 0.05
    """Coefficient of variation of a fixed kernel: the least half-width of any interval."""
    extent: str = ""
    """quick | full: how much was measured; empty for presets."""
    versions: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])
    """What was noticed while probing (noisy points, missing permissions)."""

    @property
    def calibration(self) -> str:
        """Hash of every measured or preset number."""
        return codec.content_hash([self.tables, self.links, self.noise])[:32]

    @property
    def num_cores(self) -> int:
        """CPU cores of the host."""
        return sum(p.cores for p in self.processors if p.kind == "cpu")

    def memory(self, name: str) -> Memory:
        """The memory of that name.

        Raises:
            MachineError: there is none.
        """
        for memory in self.memories:
            if memory.name == name:
                return memory
        raise MachineError(f"machine {self.name}: no memory named {name!r}")

    def table(self, name: str) -> Table:
        """The measured table of that name.

        Raises:
            MachineError: this machine has no such measurement; nothing is invented.
        """
        if name not in self.tables:
            raise MachineError(
                f"machine {self.name}: no measurement {name!r}; run `gnnplan probe` on it again"
            )
        return self.tables[name]

    def graph(self) -> "nx.DiGraph[str]":
        """The machine as a directed graph: nodes are processors and memories, edges are links."""
        out: nx.DiGraph[str] = nx.DiGraph()
        for p in self.processors:
            out.add_node(p.name, kind=p.kind)
        for m in self.memories:
            out.add_node(m.name, kind=m.kind, capacity_bytes=m.capacity_bytes)
        for link in self.links:
            out.add_edge(
                link.source,
                link.target,
                name=link.name,
                latency_seconds=link.latency_seconds,
                bandwidth_bytes_per_second=link.bandwidth_bytes_per_second,
            )
        return out

    def with_tables(self, tables: dict[str, Table]) -> "MachineModel":
        """The same machine with some tables replaced or added."""
        return replace(self, tables={**self.tables, **tables})


def save_machine(machine: MachineModel, path: Path) -> None:
    """Write machine.json atomically."""
    codec.write_text_atomically(Path(path), codec.dumps(machine))


def load_machine(path: Path) -> MachineModel:
    """Read and check a machine file.

    Raises:
        MachineError: missing, damaged or of another schema version.
    """
    path = Path(path)
    if not path.is_file():
        raise MachineError(f"{path}: expected a machine file, found none; run `gnnplan probe -o`")
    try:
        machine = codec.decode(MachineModel, json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise MachineError(f"{path}: not a machine file ({error}); probe again") from None
    if machine.schema_version != SCHEMA_VERSION:
        raise MachineError(
            f"{path}: expected schema_version {SCHEMA_VERSION}, found {machine.schema_version}"
        )
    return machine
