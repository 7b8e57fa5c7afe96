"""A machine with a little more of one thing, for shadow prices: what GPUs and cores share."""

from collections.abc import Sequence
from dataclasses import replace

from planner.machine import MachineModel, Table

GIB = 2**30
FASTER = 1.1
"""A link's bandwidth times this, for its shadow price."""
LINK_TABLES = {
    "memory": ("gather", "mapped_gather"),
    "disk": ("disk_read",),
    "exchange": ("all_reduce", "all_reduce_stepped", "all_to_all", "all_to_all_stepped"),
}
"""Tables of seconds that a faster link would shorten."""


def faster(machine: MachineModel, tables: Sequence[str]) -> MachineModel:
    """The machine with some links 10% faster: their seconds shrink by that."""
    found: dict[str, Table] = {}
    for name in tables:
        if name in machine.tables:
            table = machine.tables[name]
            found[name] = replace(table, values=[v / FASTER for v in table.values])
    return machine.with_tables(found)
