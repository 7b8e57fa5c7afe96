"""Machines and requests with chosen numbers, for tests of single cost terms."""

from dataclasses import replace

from gnnplan.planner.cost.request import Request
from gnnplan.planner.machine.model import MachineModel, Table
from tests.support.machines import machine


def per_byte(seconds: float, *, ranks: int = 2) -> Table:
    """A collective that takes so long per byte, from 16 B to 16 MB."""
    sizes = [16.0, 1.6e7]
    return Table(
        unit="seconds",
        axes=["bytes", "ranks"],
        points=[sizes, [float(ranks)]],
        values=[size * seconds for size in sizes],
        spread=0.0,
    )


def with_tables(**tables: Table) -> MachineModel:
    return machine().with_tables(tables)


def timed(asked: Request, **changes: object) -> Request:
    """The request, with changes to what its profile timed."""
    timing = {k: replace(t, **changes) for k, t in asked.profile.timing.items()}
    return replace(asked, profile=replace(asked.profile, timing=timing))
