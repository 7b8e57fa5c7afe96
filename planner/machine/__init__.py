"""The machine model: memories, processors and links, known machines, and files of other tools."""

from gnnplan.planner.machine.model import (
    MOST_LINKS,
    MOST_PARTS,
    SCHEMA_VERSION,
    Link,
    MachineModel,
    Memory,
    Processor,
    Provenance,
    Switch,
    Table,
    check_machine,
    load_machine,
    save_machine,
)

__all__ = [
    "MOST_LINKS",
    "MOST_PARTS",
    "SCHEMA_VERSION",
    "Link",
    "MachineModel",
    "Memory",
    "Processor",
    "Provenance",
    "Switch",
    "Table",
    "check_machine",
    "load_machine",
    "save_machine",
]
