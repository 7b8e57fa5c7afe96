"""Sum up what a rank's feature rows move over each link: payload, transactions, PCIe lines [C7].

And list the links of a machine, with the load that a plan predicts and that a run's bytes make.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.model import Link, MachineModel, Memory, Processor, prefix_of
from gnnplan.planner.machine.routes import Route, gather_bandwidth, lines, moved_bytes, routes
from gnnplan.runtime.plan.schema import Device, Plan
from gnnplan.runtime.report import RunReport


def link_of(machine: MachineModel, kind: str) -> str:
    """Return the name of the link that a kind of traffic crosses; the kind itself if unknown."""
    kinds = {m.name: m.kind for m in machine.memories}
    cpus = {p.name for p in machine.processors if p.kind == "cpu"}
    for link in machine.links:
        source = kinds.get(link.source)
        crossed = {
            "own": source == "host" and link.target in cpus,
            "cache": source == "host" and link.target in cpus,
            "host": source == "host" and link.target in cpus,
            "disk": source == "disk",
            "peer": source == "host" and link.target == link.source,
            "all_reduce": source == "host" and link.target == link.source,
        }
        if crossed.get(kind, False):
            return link.name
    return kind


@dataclass(slots=True)
class LinkUse:
    """Traffic of one link."""

    rows: float = 0.0
    """Rows that crossed the link; a fraction where memory is spread over NUMA nodes."""
    bytes: float = 0.0
    """Payload bytes of those rows."""
    moved_bytes: float = 0.0
    """Bytes with whole transactions counted."""
    pcie_lines: float = 0.0
    """Number of PCIe transactions; 0 on other links."""
    seconds: float = 0.0
    """Seconds of the moved bytes at the link's bandwidth for random reads."""
    provenance: str = ""

    def add(self, link: Link, rows: float, row_bytes: float, *, pcie: bool) -> None:
        """Add rows of one width."""
        unit, moved = link.transaction_bytes, moved_bytes(link, max(1, round(row_bytes)))
        self.rows += rows
        self.bytes += rows * row_bytes
        self.moved_bytes += rows * moved
        if pcie and unit:
            self.pcie_lines += rows * lines(max(1, round(row_bytes)), unit)
        self.seconds += rows * moved / gather_bandwidth(link)
        self.provenance = link.provenance


class PlanRoutes:
    """Routes of a plan's ranks through a machine."""

    def __init__(self, machine: MachineModel, plan: Plan) -> None:
        """Assign a processor of the machine to each rank."""
        self.machine = machine
        self._devices = plan.strategy.devices
        self._processors = [self._processor(device) for device in self._devices]
        switches = {s.name for s in machine.switches if s.kind == "pcie"}
        outside = {m.name for m in machine.memories if m.kind == "host"}
        outside |= {s.name for s in machine.switches if s.kind == "numa"}
        devices = {m.name for m in machine.memories if m.kind == "device"}
        self._pcie = {
            link.name
            for link in machine.links
            if {link.source, link.target} & switches
            or ({link.source, link.target} & outside and {link.source, link.target} & devices)
        }
        self._found: dict[tuple[str, str], list[Route]] = {}

    @property
    def processors(self) -> list[str]:
        """Return the names of the ranks' processors."""
        return [processor.name for processor in self._processors]

    def _processor(self, device: Device) -> Processor:
        """Return the GPU of the device's index on its host; cores where the machine has no GPU.

        An index is CUDA's number, which counts GPUs of other kinds too, or else a place in order.
        """
        machine = self.machine
        if not machine.gpus:
            cpus = [p for p in machine.processors if p.kind == "cpu"]
            mine = [p for p in cpus if p.host == device.host]
            return (mine or cpus)[0]
        mine = [p for p in machine.gpus if p.host == device.host]
        numbers = [place if p.number < 0 else p.number for place, p in enumerate(mine)]
        asked = {each.index for each in self._devices if each.host == device.host}
        place = numbers.index(device.index) if asked <= set(numbers) else device.index
        if place >= len(mine):
            raise SettingsError(
                f"machine {machine.name}: expected a GPU for each of the plan's "
                f"{len(self._devices)} ranks, found {len(machine.gpus)}; plan for this machine, or "
                "name a larger one"
            )
        return mine[place]

    def _memory(self, kind: str, host: int) -> Memory | None:
        """Return a host's first memory of a kind; another host's where it has none."""
        alike = [m for m in self.machine.memories if m.kind == kind]
        mine = [m for m in alike if m.name.startswith(prefix_of(host) + kind)]
        return next(iter(mine or alike), None)

    def _routes(self, memory: str, processor: str) -> list[Route]:
        key = (memory, processor)
        if key not in self._found:
            self._found[key] = routes(self.machine, memory, processor)
        return self._found[key]

    def routes_of(self, rank: int, kind: str, server: int = -1) -> list[Route]:
        """Return the routes of a rank's rows from a kind of source.

        `server` is the rank that serves the rows, for sources peer and remote.
        """
        processor = self._processors[rank]
        if kind in ("own", "cache"):
            return self._routes(processor.memory, processor.name)
        if kind in ("peer", "remote"):
            other = self._processors[server]
            if other.memory == processor.memory:
                return self._named(kind)
            return self._routes(other.memory, processor.name)
        memory = self._memory("disk" if kind == "disk" else "host", processor.host)
        return self._named(kind) if memory is None else self._routes(memory.name, processor.name)

    def _named(self, kind: str) -> list[Route]:
        """Return the link of collectives, over which ranks of one memory exchange rows."""
        name = link_of(self.machine, "peer" if kind == "remote" else kind)
        found = tuple(link for link in self.machine.links if link.name == name)
        return [Route(links=found)]

    def add(
        self,
        use: dict[str, LinkUse],
        rank: int,
        rows: Mapping[tuple[str, int], int | float],
        row_bytes: Mapping[str, float],
    ) -> None:
        """Add a rank's rows, by (kind, server), to the links that they cross."""
        for (kind, server), count in rows.items():
            for route in self.routes_of(rank, kind, server):
                for link in route.links:
                    pcie = link.name in self._pcie
                    each = use.setdefault(link.name, LinkUse())
                    each.add(link, count * route.share, row_bytes[kind], pcie=pcie)


LEVELS = (0.05, 0.25, 0.6, 0.9)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRow:
    """One link, its rate and its load."""

    name: str
    source: str
    target: str
    bytes_per_second: float
    provenance: str
    origin: str
    step_bytes: float
    """Predicted bytes per step; 0 without a plan."""
    load: float
    """Share of a step's seconds for which the link is busy."""

    @property
    def level(self) -> int:
        """Return the colour of the load."""
        return load_level(self.load)


def load_level(load: float) -> int:
    """Return the colour of a load: 0 for none, 1 for light, 5 for full.

    >>> load_level(0.0), load_level(0.01), load_level(0.3), load_level(2.0)
    (0, 1, 3, 5)
    """
    return 0 if load <= 0 else 1 + sum(load >= level for level in LEVELS)


def link_rows(machine: MachineModel, plan: Plan | None) -> list[LinkRow]:
    """Return a row per link in the machine's order, then rows of traffic on unknown links."""
    traffic = dict(plan.prediction.traffic_bytes) if plan else {}
    step = plan.prediction.step_seconds.value if plan else 0.0
    rows = [_row(machine, link, traffic.pop(link.name, 0.0), step) for link in machine.links]
    return rows + [
        LinkRow(
            name=name,
            source="",
            target="",
            bytes_per_second=0.0,
            provenance="",
            origin="",
            step_bytes=size,
            load=0.0,
        )
        for name, size in sorted(traffic.items())
        if size > 0
    ]


def _row(machine: MachineModel, link: Link, step_bytes: float, step: float) -> LinkRow:
    rate = link.bandwidth_bytes_per_second
    return LinkRow(
        name=link.name,
        source=link.source,
        target=link.target,
        bytes_per_second=rate,
        provenance=link.provenance,
        origin=machine.sources.get(link.name, ""),
        step_bytes=step_bytes,
        load=step_bytes / rate / step if rate > 0 and step > 0 else 0.0,
    )


def busiest(rows: list[LinkRow]) -> LinkRow | None:
    """Return the link with the highest load; None where nothing is carried."""
    loaded = [row for row in rows if row.load > 0]
    return max(loaded, key=lambda row: row.load) if loaded else None


COUNTED = ("own", "cache", "host", "disk")
"""Sources whose route follows from the rank alone; reports do not say which peer served rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkLoad:
    """The predicted and the measured load of one link."""

    name: str
    predicted: float
    measured: float | None
    """Share of a run's seconds, from counted bytes; None where none were counted."""


def measured_links(plan: Plan, machine: MachineModel, report: RunReport | None) -> list[LinkLoad]:
    """Return links that the plan or the run loads, the plan's busiest first.

    A run's load is its counted bytes over the machine's rate and the seconds of its epochs.
    """
    counted = {} if report is None else _counted(plan, machine, report)
    seconds = 0.0 if report is None else sum(epoch.seconds for epoch in report.epochs)
    found: list[LinkLoad] = []
    for row in link_rows(machine, plan):
        use = counted.get(row.name)
        rate = row.bytes_per_second
        known = use is not None and seconds > 0 and rate > 0
        load = use.bytes / rate / seconds if use is not None and known else None
        if row.load > 0 or load:
            found.append(LinkLoad(name=row.name, predicted=row.load, measured=load))
    return sorted(found, key=lambda each: (-each.predicted, each.name))


def _counted(plan: Plan, machine: MachineModel, report: RunReport) -> dict[str, LinkUse]:
    ways, use = PlanRoutes(machine, plan), dict[str, LinkUse]()
    for rank in report.ranks:
        rows = {(k, -1): n for k, n in rank.rows_by_source.items() if k in COUNTED and n > 0}
        widths = {k: rank.bytes_by_source.get(k, 0) / n for (k, _), n in rows.items()}
        ways.add(use, rank.rank, rows, widths)
    return use
