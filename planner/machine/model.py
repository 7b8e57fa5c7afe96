"""The machine model: memories, processors and links, and the rates measured on them.

A machine is a directed graph of memories and processors joined by links. Every cost the planner
computes is bytes over links or work on processors; every number says where it came from. Rates that
depend on several things (row size, working set, concurrent readers) are `Table`s.

Of several hosts, host 0's parts keep their plain names; those of host h begin with `h<h>.`. What
lies between hosts (cards and the network, tables `hosts_*` and `message.*`) belongs to none.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.table import Provenance, Table, check_tables, make_table as make_table
from gnnplan.runtime import codec
from gnnplan.runtime.plan.schema import HostSize, MachineRef

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
    """NUMA node; -1 where unknown or there is one."""
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
    """UUID of a GPU, by which NVML's view and torch's are joined, never by the index."""
    model: str = ""
    host: int = 0
    """Number of its host."""
    numa_node: int = -1
    """NUMA node; -1 where unknown."""
    bus_id: str = ""
    """PCI address of a GPU, as in sysfs; empty where unknown."""
    near_cores: list[int] = field(default_factory=list[int], hash=False, metadata=codec.UNLESS_SET)
    """Numbers of the cores next to a GPU; empty where unknown."""
    number: int = field(default=-1, metadata=codec.UNLESS_SET)
    """Number of a GPU among those that CUDA shows; -1: its place among the machine's."""
    emulated: bool = field(default=False, metadata=codec.UNLESS_SET)
    """Whether a GPU is emulated on cores, for tests; its rates are made up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """A node that bytes pass and do not live in; all who cross its links share them."""

    name: str
    kind: Literal["pcie", "nvlink", "numa", "card", "network"]
    """A card joins one host's memory to the network; the network joins cards."""
    provenance: Provenance = "measured"
    generation: int = field(default=0, metadata=codec.UNLESS_SET)
    """Generation of a switch of NVLinks, of which the third adds; 0 where unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A directed way for bytes, shared by all who cross it."""

    name: str
    source: str
    target: str
    latency_seconds: float
    bandwidth_bytes_per_second: float
    """Bandwidth of large copies, over all who cross it at once."""
    provenance: Provenance = "measured"
    transaction_bytes: int = 0
    """Granularity of random reads, which move whole lines; 0: any size."""
    gather_bytes_per_second: float = 0.0
    """Bandwidth of random reads, lines counted whole; 0: that of copies."""
    lanes: int = 0
    """PCIe lanes, or NVLinks taken together; 0 where unknown or there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveBackend:
    """How GPUs' ranks exchange where the library, and not the links between them, sets the pace."""

    name: Literal["nccl", "gloo"]
    bytes_per_second: float
    """Rate at which a rank sends and, at once, receives."""
    call_seconds: float
    """Seconds of a call before bytes move."""
    source: str
    provenance: Provenance = "preset"

    def exchange_seconds(self, num_bytes: float, messages: float = 1) -> float:
        """Return the seconds of calls in which a rank sends so many bytes."""
        return messages * self.call_seconds + num_bytes / self.bytes_per_second

    def all_reduce_seconds(self, num_bytes: float, ranks: int) -> float:
        """Return the seconds of a ring: 2 (P - 1) / P of the bytes leave each rank (8.3 [A3])."""
        return self.exchange_seconds(2 * (ranks - 1) / ranks * num_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineModel:
    """Everything the planner knows of a machine; `machine.json` on disk."""

    schema_version: int = SCHEMA_VERSION
    name: str
    fingerprint: str
    """Hash of the machine's parts; `runtime.device.machine_fingerprint()` where measured."""
    provenance: Provenance
    processors: list[Processor]
    memories: list[Memory]
    links: list[Link]
    switches: list[Switch] = field(default_factory=list[Switch])
    cliques: list[list[str]] = field(default_factory=list[list[str]])
    """Groups of processors joined by fast peer links."""
    other_covers: list[list[list[str]]] = field(default_factory=list[list[list[str]]])
    """Other covers of the same processors by as few cliques, next best first."""
    tables: dict[str, Table] = field(default_factory=dict[str, Table])
    """Measured curves; names and axes are listed in planner/probe/README.md."""
    noise: float = 0.05
    """Coefficient of variation of a fixed kernel: the least half-width of any interval."""
    extent: str = ""
    """Extent of probing, quick or full; empty for presets."""
    versions: dict[str, str] = field(default_factory=dict[str, str])
    sources: dict[str, str] = field(default_factory=dict[str, str])
    """Sources of the numbers of a preset's links, memories and tables, by name."""
    notes: list[str] = field(default_factory=list[str])
    backend: CollectiveBackend | None = field(default=None, metadata=codec.UNLESS_SET)
    """Library of the collectives of GPUs' ranks where it sets their pace; None: links do."""

    @property
    def calibration(self) -> str:
        """Hash of every measured or preset number."""
        more = [] if self.backend is None else [self.backend]
        return codec.content_hash([self.tables, self.links, self.noise, *more])[:32]

    @property
    def num_cores(self) -> int:
        """CPU cores of all hosts."""
        return sum(p.cores for p in self.processors if p.kind == "cpu")

    @property
    def gpus(self) -> list[Processor]:
        """GPUs, in order."""
        return [p for p in self.processors if p.kind == "cuda"]

    def reference(self) -> MachineRef:
        """Return what a plan says of the machine it was made for."""
        return MachineRef(
            name=self.name,
            fingerprint=self.fingerprint,
            calibration=self.calibration,
            provenance=self.provenance,
            hosts=[] if self.provenance == "preset" else _sizes(self),
        )

    def memory(self, name: str) -> Memory:
        """Return the memory of that name, or raise MachineError."""
        for memory in self.memories:
            if memory.name == name:
                return memory
        raise MachineError(f"machine {self.name}: no memory named {name!r}")

    def table(self, name: str) -> Table:
        """Return the table of that name; MachineError where it was not measured."""
        if name not in self.tables:
            raise MachineError(
                f"machine {self.name}: no measurement {name!r}; run `gnnplan probe` on it again"
            )
        return self.tables[name]

    def graph(self) -> Topology:
        """Return the directed graph of processors, memories and switches joined by links."""
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
        """Return the machine with some tables replaced or added."""
        return replace(self, tables={**self.tables, **tables})


BETWEEN = ("card", "network")
"""Kinds of switches that lie between hosts."""


def prefix_of(host: int) -> str:
    """Return the prefix of the names of a host's parts."""
    return f"h{host}." if host else ""


def num_hosts(machine: MachineModel) -> int:
    """Count the hosts of a machine."""
    return 1 + max((p.host for p in machine.processors), default=0)


def _sizes(machine: MachineModel) -> list[HostSize]:
    """Return the cores, memory and model of GPUs of each host."""
    found: list[HostSize] = []
    for host in range(num_hosts(machine)):
        here = [p for p in machine.processors if p.host == host]
        cpus = [p for p in here if p.kind == "cpu"]
        num_bytes = sum(machine.memory(p.memory).capacity_bytes for p in cpus)
        gpus = [p.model for p in here if p.kind == "cuda"]
        found.append(
            HostSize(
                cores=sum(p.cores for p in cpus),
                memory_gib=round(num_bytes / 2**30),
                gpu=gpus[0] if gpus else "",
            )
        )
    return found


def joins_hosts(machine: MachineModel) -> bool:
    """Tell whether ranks on several hosts can be priced: their collectives were measured."""
    return num_hosts(machine) > 1 and "hosts_all_reduce" in machine.tables


def select_parts(
    machine: MachineModel,
    keep: Callable[[str], bool],
    rename: Callable[[str], str],
    *,
    host: int | None = None,
) -> MachineModel:
    """Keep the parts with some names, under other names; links stay where both their ends do.

    Args:
        machine: a machine; its tables stay as they are.
        keep: tells by its name whether a part stays.
        rename: returns the name of a part that stays.
        host: number of the host that all processors are in from now on; None: as they are.
    """
    return replace(
        machine,
        processors=[
            replace(
                p,
                name=rename(p.name),
                memory=rename(p.memory),
                host=p.host if host is None else host,
            )
            for p in machine.processors
            if keep(p.name)
        ],
        memories=[replace(m, name=rename(m.name)) for m in machine.memories if keep(m.name)],
        links=[
            replace(x, name=rename(x.name), source=rename(x.source), target=rename(x.target))
            for x in machine.links
            if keep(x.source) and keep(x.target)
        ],
        switches=[replace(s, name=rename(s.name)) for s in machine.switches if keep(s.name)],
        cliques=[[rename(n) for n in c] for c in machine.cliques if all(map(keep, c))],
    )


GPUS_LOST = "GPUs: "
"""Beginning of a note on GPUs that the driver has and that no plan can use."""


def without_gpus(machine: MachineModel) -> MachineModel:
    """Return the machine as cores alone see it."""
    return _drop(machine, machine.gpus)


def _drop(machine: MachineModel, gpus: Sequence[Processor]) -> MachineModel:
    gone = {gpu.name for gpu in gpus} | {gpu.memory for gpu in gpus}
    covers = [
        [left for clique in cover if (left := [name for name in clique if name not in gone])]
        for cover in (machine.cliques, *machine.other_covers)
    ]
    kept = select_parts(machine, lambda name: name not in gone, lambda name: name)
    return replace(kept, cliques=covers[0], other_covers=covers[1:]) if gone else machine


def planned_kind(machine: MachineModel) -> str:
    """Return the model of the GPUs that plans use: those of the first host that read most at once.

    A GPU counts with the measured bandwidth of its memory.
    """
    rates = {link.name: link.bandwidth_bytes_per_second for link in machine.links}
    total: dict[str, float] = {}
    for gpu in machine.gpus:
        if gpu.host == machine.gpus[0].host:
            total[gpu.model] = total.get(gpu.model, 0.0) + rates.get(f"{gpu.name}.hbm", 0.0)
    return max(total, key=lambda model: total[model], default="")


def with_one_kind(machine: MachineModel) -> MachineModel:
    """Return the machine with GPUs of one model alone, whose rates its tables hold.

    A GPU whose memory was not measured is left out where another's was.
    """
    kind, rates = planned_kind(machine), {link.name for link in machine.links}
    alike = [gpu for gpu in machine.gpus if gpu.model == kind]
    known = [gpu for gpu in alike if f"{gpu.name}.hbm" in rates] or alike
    others = [gpu for gpu in machine.gpus if gpu not in known]
    if not others:
        return machine
    numbers: dict[str, int] = {}
    for host in {gpu.host for gpu in machine.gpus}:
        names = [gpu.name for gpu in machine.gpus if gpu.host == host]
        numbers |= {name: place for place, name in enumerate(names)}
    placed = [replace(p, number=numbers.get(p.name, p.number)) for p in machine.processors]
    return _drop(replace(machine, processors=placed), others)


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
    part = select_parts(machine, names.__contains__, named, host=0)
    own_tables = {named(k): t for k, t in machine.tables.items() if own(k)}
    return replace(part, tables=own_tables | between)


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

    kept = select_parts(machine, within, lambda name: name)
    return replace(kept, tables={k: t for k, t in machine.tables.items() if within(k)})


def _of_other(name: str) -> bool:
    head, dot, _ = name.partition(".")
    return bool(dot) and head[:1] == "h" and head[1:].isdecimal()


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

    try:
        check_machine(machine)
    except MachineError as error:
        raise MachineError(f"{path}: {error}") from None
    return machine


MOST_PARTS = 4096
"""Most processors, memories and switches together; a thousand GPUs are fewer."""
MOST_LINKS = 1 << 16


def check_machine(machine: MachineModel) -> None:
    """Refuse a machine whose parts do not fit together, naming the first that does not."""
    parts = [x.name for x in (*machine.processors, *machine.memories, *machine.switches)]
    if not machine.processors or not machine.memories:
        _refuse("expected at least one processor and one memory, found none")
    if len(parts) > MOST_PARTS or len(machine.links) > MOST_LINKS:
        _refuse(
            f"expected at most {MOST_PARTS} parts and {MOST_LINKS} links, found {len(parts)} and "
            f"{len(machine.links)}"
        )
    _once("part", parts)
    _once("link", (link.name for link in machine.links))
    known, memories = set(parts), {memory.name for memory in machine.memories}
    for processor in machine.processors:
        _among(f"processor {processor.name!r:.80}", processor.memory, memories, "memories")
        if not 1 <= processor.cores < 1 << 20:
            _refuse(f"processor {processor.name!r:.80}: expected cores from 1, found others")
        if not 0 <= processor.host < MOST_PARTS:
            _refuse(f"processor {processor.name!r:.80}: expected the number of a host")
    for memory in machine.memories:
        if not 0 < memory.capacity_bytes < 1 << 63:
            _refuse(f"memory {memory.name!r:.80}: expected a capacity above 0 bytes")
    for link in machine.links:
        _check_link(link, known)
    for switch in machine.switches:
        if switch.kind == "card":
            _check_card(machine, switch.name, memories)
    processors = {processor.name for processor in machine.processors}
    for cover in (machine.cliques, *machine.other_covers):
        names = [name for clique in cover for name in clique]
        _once("member of a clique", names)
        for name in names:
            _among("a clique", name, processors, "processors")
    check_tables(machine.tables)
    if not 0 <= machine.noise < 10:
        _refuse(f"expected noise from 0 to 10, found {machine.noise}")


def _check_link(link: Link, known: set[str]) -> None:
    for end in (link.source, link.target):
        _among(f"link {link.name!r:.80}", end, known, "parts")
    if not (
        0 < link.bandwidth_bytes_per_second <= Table.MOST
        and 0 <= link.latency_seconds <= Table.MOST
    ):
        _refuse(f"link {link.name!r:.80}: expected a bandwidth above 0 and a latency from 0")
    others = (link.gather_bytes_per_second, link.transaction_bytes, link.lanes)
    if min(others) < 0 or max(others) > Table.MOST:
        _refuse(f"link {link.name!r:.80}: expected rates, sizes and lanes from 0")


def _check_card(machine: MachineModel, card: str, memories: set[str]) -> None:
    """Refuse a card that is not joined, both ways, to one host's memory."""
    joined = {x.source for x in machine.links if x.target == card} & memories
    back = {x.target for x in machine.links if x.source == card} & memories
    if len(joined) != 1 or joined != back:
        found = ", ".join(sorted(joined | back)) or "none"
        _refuse(f"card {card!r:.80}: expected links to and from one memory, found {found:.80}")


def _once(what: str, names: Iterable[str]) -> None:
    name, count = next(iter(Counter(names).most_common(1)), ("", 1))
    if count > 1:
        _refuse(f"expected each {what} once, found {name!r:.80} {count} times")


def _among(whose: str, name: str, known: set[str], what: str) -> None:
    if name not in known:
        _refuse(f"{whose}: expected one of the machine's {what}, found {name!r:.80}")


def _refuse(text: str) -> None:
    raise MachineError(f"{text}; correct the file or probe again")
