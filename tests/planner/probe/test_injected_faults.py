"""Faults put into every recorded machine: `doctor` names them, a plan for the file is refused."""

from collections.abc import Callable

import pytest

from gnnplan.planner.errors import MachineError
from gnnplan.planner.probe.doctor import topology_findings
from gnnplan.planner.probe.gpu.nvml import bus_key
from gnnplan.planner.probe.topology import refuse_changed
from tests.support.nvml_recording import call_key
from tests.support.recordings import NAMES, Recording, look, machine_of, recorded


def links_up(found: Recording) -> list[tuple[int, int]]:
    """(GPU, link) of every NVLink that the driver says is up."""
    return [(g.index, x.index) for g in look(found).gpus for x in g.nvlinks or [] if x.up]


def take_down(found: Recording, gpu: int, link: int) -> None:
    """The link's state as both generations of drivers answer it."""
    state = call_key("nvmlDeviceGetNvLinkState", [f"device:{gpu}", link])
    field = call_key("nvmlDeviceGetFieldValues", [f"device:{gpu}", [(165, link)]])
    assert (state in found["calls"]) != (field in found["calls"])
    if state in found["calls"]:
        found["calls"][state] = 0
    else:
        found["calls"][field][0]["uiVal"] = 0


def missing_nvlink(found: Recording) -> None:
    """The first link that is up is gone; where it ends at a GPU, seen from there too."""
    gpus = look(found).gpus
    gpu, link = links_up(found)[0]
    remote = next(x for x in gpus[gpu].nvlinks or [] if x.index == link).remote_bus_id
    take_down(found, gpu, link)
    for other in gpus:
        if other.bus_id == remote:
            back = next(x for x in other.nvlinks or [] if x.remote_bus_id == gpus[gpu].bus_id)
            take_down(found, other.index, back.index)


def halved_width(found: Recording) -> None:
    """The slot of the last GPU that is shown runs on half of its lanes."""
    device = f"device:{look(found).gpus[-1].index}"
    full = found["calls"][call_key("nvmlDeviceGetMaxPcieLinkWidth", [device])]
    found["calls"][call_key("nvmlDeviceGetCurrPcieLinkWidth", [device])] = full // 2


def swapped_numa(found: Recording) -> None:
    """The first GPU and the first of another node change places; alone, it moves to the other."""
    gpus = look(found).gpus
    first = gpus[0]
    other = next((g for g in gpus if g.numa_node != first.numa_node), None)
    assert first.numa_node is not None
    put_on(found, first.index, 1 - first.numa_node)
    if other is not None:
        put_on(found, other.index, first.numa_node)


def put_on(found: Recording, gpu: int, node: int) -> None:
    """The GPU's node in NVML's view and, where it was recorded, in the system's."""
    address = bus_key(found["calls"][call_key("nvmlDeviceGetPciInfo", [f"device:{gpu}"])]["busId"])
    if address in found["pci"]:
        found["pci"][address]["numa_node"] = node
    for key, mask in found["calls"].items():
        if key.startswith(f"nvmlDeviceGetMemoryAffinity(device:{gpu},"):
            mask[0] = 1 << node


FAULTS: dict[str, tuple[Callable[[Recording], None], str]] = {
    "missing NVLink": (missing_nvlink, "nvlink"),
    "halved PCIe width": (halved_width, "pcie"),
    "swapped NUMA": (swapped_numa, "numa"),
}
WITHOUT_NVLINKS = {"h200-virtual-machine", "mig", "pcie-only", "two-numa-nodes"}
"""MIG hides links; the two others have none."""


def test_the_machines_without_nvlinks_are_those_that_say_so() -> None:
    assert {name for name in NAMES if not links_up(recorded(name))} == WITHOUT_NVLINKS


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        (name, fault)
        for name in NAMES
        for fault in FAULTS
        if fault != "missing NVLink" or name not in WITHOUT_NVLINKS
    ],
)
def test_a_fault_is_named_by_doctor_and_refused_by_a_plan(name: str, fault: str) -> None:
    change, check = FAULTS[fault]
    found = recorded(name)
    before = topology_findings(look(found), machine := machine_of(look(found)))
    refuse_changed(machine, look(found))  # as it was probed
    change(found)
    now = look(found)
    new = [f for f in topology_findings(now, machine) if f not in before]
    assert any(f.level == "problem" and f.check == f"gpu {check}" and f.advice for f in new)
    with pytest.raises(MachineError, match="expected it as it was probed") as caught:
        refuse_changed(machine, now)
    assert "\n" not in str(caught.value)
