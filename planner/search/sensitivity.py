"""Give a machine a little more of one resource, for shadow prices."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from gnnplan.planner.cost.memory import Budgets
from gnnplan.planner.cost.request import Request
from gnnplan.planner.machine.model import Link, MachineModel, Table

GIB = 2**30
FASTER = 1.1
"""Factor on a link's bandwidth."""
LINK_TABLES = {
    "memory": ("gather", "mapped_gather"),
    "disk": ("disk_read",),
    "exchange": ("all_reduce", "all_reduce_stepped", "all_to_all", "all_to_all_stepped"),
}
"""Tables of seconds that a faster link shortens."""


def faster(machine: MachineModel, tables: Sequence[str]) -> MachineModel:
    """Return the machine with the seconds of some tables 10% shorter."""
    found: dict[str, Table] = {}
    for name in tables:
        if name in machine.tables:
            table = machine.tables[name]
            found[name] = replace(table, values=[v / FASTER for v in table.values])
    return machine.with_tables(found)


LINKS: dict[str, Callable[[Link], bool]] = {
    "GPU memory bandwidth": lambda x: x.name.endswith(".hbm"),
    "NVLink": lambda x: "nvlink." in x.name,
    "PCIe": lambda x: x.name.endswith((".h2d", ".d2h")),
    "host memory and bridges": lambda x: "dram" in x.name or "bridge." in x.name,
    "disk": lambda x: "disk" in x.name,
}
"""Links of one sort, made faster together."""


def relaxed_gpus(request: Request) -> dict[str, Request]:
    """Return the request with 1 GiB more on GPUs or hosts, or one sort of link 10% faster."""
    budgets, machine = request.budgets, request.machine
    found = {
        "GPU memory +1 GiB": replace(
            request,
            machine=_larger(machine, "device"),
            budgets=Budgets(
                device_bytes=None if budgets.device_bytes is None else budgets.device_bytes + GIB,
                host_bytes=budgets.host_bytes,
            ),
        ),
        "host memory +1 GiB": replace(
            request,
            machine=_larger(machine, "host"),
            budgets=Budgets(
                device_bytes=budgets.device_bytes,
                host_bytes=None if budgets.host_bytes is None else budgets.host_bytes + GIB,
            ),
        ),
    }
    for name, is_such in LINKS.items():
        if any(is_such(x) for x in machine.links):
            found[f"{name} +10%"] = replace(request, machine=_faster(machine, is_such))
    return found


def _larger(machine: MachineModel, kind: str) -> MachineModel:
    memories = [
        replace(m, capacity_bytes=m.capacity_bytes + GIB) if m.kind == kind else m
        for m in machine.memories
    ]
    return replace(machine, memories=memories)


def _faster(machine: MachineModel, is_such: Callable[[Link], bool]) -> MachineModel:
    links = [
        replace(
            x,
            bandwidth_bytes_per_second=x.bandwidth_bytes_per_second * FASTER,
            gather_bytes_per_second=x.gather_bytes_per_second * FASTER,
        )
        if is_such(x)
        else x
        for x in machine.links
    ]
    return replace(machine, links=links)
