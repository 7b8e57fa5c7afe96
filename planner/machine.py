"""The machine model: memories, processors and links, and what was measured on them.

A machine is a directed graph of memories and processors joined by links. Every cost the planner
computes is bytes over links or work on processors; every number says where it came from. Rates that
depend on several things (row size, working set, concurrent readers) are `Table`s.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from planner.errors import MachineError
from planner.machine_table import Provenance, Table
from runtime import codec
from runtime.plan import MachineRef

__all__ = [
    "SCHEMA_VERSION",
    "Link",
    "MachineModel",
    "Memory",
    "Processor",
    "Provenance",
    "Switch",
    "Table",
    "load_machine",
    "save_machine",
]

if TYPE_CHECKING:
    import networkx as nx

    Topology = nx.DiGraph[str]
else:
    Topology = Any  # networkx is imported where a machine's graph is asked for

SCHEMA_VERSION = 1


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
    """Of a GPU: what joins NVML's view with torch's, never the index."""
    model: str = ""
    host: int = 0
    """Which of several hosts it is in."""
    numa_node: int = -1
    """-1 where unknown."""
    bus_id: str = ""
    """PCI address of a GPU, as in sysfs; empty where unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """A node that bytes pass and do not live in: all who cross its links share them."""

    name: str
    kind: Literal["pcie", "nvlink", "numa", "card", "network"]
    """A card joins one host's memory to the network; the network joins cards."""
    provenance: Provenance = "measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A directed way for bytes, shared by all who cross it."""

    name: str
    source: str
    target: str
    latency_seconds: float
    bandwidth_bytes_per_second: float
    """Of large copies, over all who cross it at once."""
    provenance: Provenance = "measured"
    transaction_bytes: int = 0
    """Granularity of reads at random, which move whole lines; 0: any size."""
    gather_bytes_per_second: float = 0.0
    """Bandwidth of random reads, lines counted whole; 0: that of copies."""
    lanes: int = 0
    """PCIe lanes, or NVLinks taken together; 0 where unknown or there are none."""


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
    switches: list[Switch] = field(default_factory=list[Switch])
    cliques: list[list[str]] = field(default_factory=list[list[str]])
    """Processors joined by fast peer links."""
    other_covers: list[list[list[str]]] = field(default_factory=list[list[list[str]]])
    """Other ways to cover the same processors by as few cliques, next best first."""
    tables: dict[str, Table] = field(default_factory=dict[str, Table])
    """Measured curves; names and axes are listed in planner/probe/README.md."""
    noise: float = 0.05
    """Coefficient of variation of a fixed kernel: the least half-width of any interval."""
    extent: str = ""
    """quick | full: how much was measured; empty for presets."""
    versions: dict[str, str] = field(default_factory=dict[str, str])
    sources: dict[str, str] = field(default_factory=dict[str, str])
    """Where the numbers of a preset's links, memories and tables are from, by name."""
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

    @property
    def gpus(self) -> list[Processor]:
        """The GPUs, in order."""
        return [p for p in self.processors if p.kind == "cuda"]

    def reference(self) -> MachineRef:
        """What a plan says of the machine it was made for."""
        return MachineRef(
            name=self.name,
            fingerprint=self.fingerprint,
            calibration=self.calibration,
            provenance=self.provenance,
        )

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

    def graph(self) -> Topology:
        """The machine as a directed graph: processors, memories and switches joined by links."""
        import networkx as nx

        out: Topology = nx.DiGraph()
        for s in self.switches:
            out.add_node(s.name, kind=s.kind)
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
        MachineError: missing, damaged, of another schema version, or its parts do not fit together.
    """
    path = Path(path)
    if not path.is_file():
        raise MachineError(f"{path}: expected a machine file, found none; run `gnnplan probe -o`")
    try:
        machine = codec.decode(MachineModel, codec.parse(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise MachineError(f"{path}: not a machine file ({error}); probe again") from None
    if machine.schema_version != SCHEMA_VERSION:
        raise MachineError(
            f"{path}: expected schema_version {SCHEMA_VERSION}, found {machine.schema_version}"
        )
    from planner.machine_check import check_machine  # on use: it imports this module

    try:
        check_machine(machine)
    except MachineError as error:
        raise MachineError(f"{path}: {error}; probe again") from None
    return machine
