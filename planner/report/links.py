"""A machine's links and what the plan's rows make of them."""

from dataclasses import dataclass

from planner.machine.model import Link, MachineModel
from runtime.plan.schema import Plan

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
