"""A machine's links, with the load that a plan predicts and that a run's counted bytes make."""

from dataclasses import dataclass

from gnnplan.planner.cost.link_use import LinkUse, PlanRoutes
from gnnplan.planner.machine.model import Link, MachineModel
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.report import RunReport

LEVELS = (0.05, 0.25, 0.6, 0.9)
"""Loads at which a link's colour changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRow:
    """One link: what it can carry and what it does carry in the plan."""

    name: str
    source: str
    target: str
    bytes_per_second: float
    provenance: str
    origin: str
    """Where the rate is from, where the machine says; else empty."""
    step_bytes: float
    """Predicted bytes per step; 0 without a plan."""
    load: float
    """Share of a step for which the link is busy carrying them."""

    @property
    def level(self) -> int:
        """0 for a link without a load, then 1 to 5 by load."""
        return load_level(self.load)


def load_level(load: float) -> int:
    """Colour of a load: 0 none, 1 light, 5 full.

    >>> load_level(0.0), load_level(0.01), load_level(0.3), load_level(2.0)
    (0, 1, 3, 5)
    """
    return 0 if load <= 0 else 1 + sum(load >= level for level in LEVELS)


def link_rows(machine: MachineModel, plan: Plan | None) -> list[LinkRow]:
    """A row per link, in the machine's order, then traffic that no link of it is named for."""
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
    """The link with the highest load; None where nothing is carried."""
    loaded = [row for row in rows if row.load > 0]
    return max(loaded, key=lambda row: row.load) if loaded else None


COUNTED = ("own", "cache", "host", "disk")
"""Sources whose way follows from the rank alone; a report does not say which peer served rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkLoad:
    """One link's share of busy time."""

    name: str
    predicted: float
    measured: float | None
    """From counted rows and measured seconds; None where nothing was counted for it."""


def measured_links(plan: Plan, machine: MachineModel, report: RunReport | None) -> list[LinkLoad]:
    """Links that the plan or the run loads, the busiest of the plan first.

    A run's load is its counted bytes over the machine's rate and the seconds of its epochs.

    Raises:
        SettingsError: the machine has too few GPUs for the plan.
        MachineError: the machine has no such way.
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
