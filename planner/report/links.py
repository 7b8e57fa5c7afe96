"""The links of a machine, with the load that a plan predicts and that a run's bytes make."""

from dataclasses import dataclass

from gnnplan.planner.cost.link_use import LinkUse, Ways
from gnnplan.planner.machine.model import Link, MachineModel
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.report import RunReport

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
    ways, use = Ways(machine, plan), dict[str, LinkUse]()
    for rank in report.ranks:
        rows = {(k, -1): n for k, n in rank.rows_by_source.items() if k in COUNTED and n > 0}
        widths = {k: rank.bytes_by_source.get(k, 0) / n for (k, _), n in rows.items()}
        ways.add(use, rank.rank, rows, widths)
    return use
