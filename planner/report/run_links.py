"""Load of a machine's links: as the plan predicts it, and as a run's counted bytes make it."""

from dataclasses import dataclass

from planner.cost.link_use import LinkUse, Ways
from planner.machine.model import MachineModel
from planner.report.links import link_rows
from runtime.plan.schema import Plan
from runtime.report import RunReport

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
    ways, use = Ways(machine, plan), dict[str, LinkUse]()
    for rank in report.ranks:
        rows = {(k, -1): n for k, n in rank.rows_by_source.items() if k in COUNTED and n > 0}
        widths = {k: rank.bytes_by_source.get(k, 0) / n for (k, _), n in rows.items()}
        ways.add(use, rank.rank, rows, widths)
    return use
