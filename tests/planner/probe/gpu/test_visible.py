"""Machines of divided, hidden, unequal and busy GPUs: planned as what they are, and said so."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gnnplan.planner.candidate import list_gpus
from gnnplan.planner.cli.main import main
from gnnplan.planner.cli.planning import print_machine_notes
from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import (
    MachineModel,
    check_machine,
    save_machine,
    with_one_kind,
)
from gnnplan.planner.probe.doctor import topology_findings
from gnnplan.planner.probe.gpu.inventory import gpu_notes
from gnnplan.planner.probe.gpu.machine import with_gpus
from gnnplan.planner.probe.gpu.measure import GpuFindings
from gnnplan.planner.probe.gpu.nvml import Inventory
from gnnplan.planner.probe.presets import choose_machine
from gnnplan.planner.probe.timing import summarize
from gnnplan.planner.probe.topology import (
    faults,
    refuse_changed,
    with_free_memory,
    with_gpus_of_here,
)
from gnnplan.runtime.device import VARIABLE
from tests.support.recordings import divide, look, machine_of, recorded, rename, slice_uuid

GIB = 2**30


def sizes(machine: MachineModel) -> dict[str, float]:
    return {m.name: m.capacity_bytes / GIB for m in machine.memories if m.kind == "device"}


def found_by_torch(gpu: int, uuid: str, flops_per_second: float = 1e12) -> GpuFindings:
    """What the probe of GPUs measured: torch's number, UUID, and one rate."""
    found = GpuFindings(gpu=gpu, uuid=uuid, processors=100)
    found.flops = {(): summarize([1 / flops_per_second])}
    found.launch = {(): summarize([1e18 / flops_per_second**2])}
    found.copy = {(GIB,): summarize([0.001 * (1 + gpu)])}
    return found


def checked(found: Inventory) -> MachineModel:
    machine = machine_of(found)
    check_machine(machine)
    return machine


# Divided GPUs.


def test_a_slice_is_planned_with_its_own_memory() -> None:
    found = look(divide(divide(recorded("mig"), 0, [40, 10]), 1, [20]), {})
    machine = checked(found)
    assert sizes(machine) == {"gpu0.memory": 40}
    assert [gpu.uuid for gpu in machine.gpus] == [slice_uuid(0, 0)]
    (note,) = [n for n in found.notes if "MIG" in n]
    assert "40.0 GiB of 80.0 GiB" in note
    assert "1 other GPUs and 1 slice are left out" in note
    assert not [fault for fault in faults(found) if fault.check == "mig"]


def test_a_slice_is_chosen_by_the_variable() -> None:
    recording = divide(divide(recorded("mig"), 0, [40, 10]), 1, [20, 5])
    for gpu, number, size in ((0, 1, 10), (1, 0, 20), (1, 1, 5)):
        found = look(recording, {VARIABLE: slice_uuid(gpu, number)})
        assert sizes(checked(found)) == {f"gpu{gpu}.memory": size}
        assert f"gpu{gpu}: MIG is on" in " ".join(found.notes)


def test_with_mig_on_one_gpu_alone_its_slice_hides_the_whole_ones_unless_they_are_named() -> None:
    recording = divide(recorded("nvswitch-8"), 5, [10])
    found = look(recording, {})
    assert sizes(checked(found)) == {"gpu5.memory": 10}
    assert "7 other GPUs" in " ".join(found.notes)
    whole = look(recording, {VARIABLE: "0,1"})
    assert sizes(checked(whole)) == {"gpu0.memory": 80, "gpu1.memory": 80}


@pytest.mark.parametrize(("shown", "gpu"), [(None, 0), ("0,1", 0), ("1,0", 1), ("1", 1)])
def test_of_divided_gpus_whose_slices_are_unknown_one_gets_the_least_slice(
    shown: str | None, gpu: int
) -> None:
    found = look(recorded("mig"), {} if shown is None else {VARIABLE: shown})
    assert sizes(checked(found)) == {f"gpu{gpu}.memory": 10}
    (note,) = [n for n in found.notes if "an eighth of its memory" in n]
    assert note.startswith(f"gpu{gpu}: MIG is on")
    assert "CUDA shows a process one slice" in note
    assert "1 other GPU and its other slices are left out" in note
    assert [fault.check for fault in faults(found)] == ["mig"]
    levels = [(f.check, f.level) for f in topology_findings(found)]
    assert levels.count(("gpu mig", "problem")) == 1


def test_a_divided_gpu_without_slices_is_left_out_with_a_note() -> None:
    found = look(divide(recorded("mig"), 0, []), {VARIABLE: "0"})
    assert found.gpus == []
    assert "it has no slice" in " ".join(found.notes)


def test_what_torch_measured_of_a_slice_is_the_slices() -> None:
    machine = checked(look(divide(recorded("mig"), 1, [20]), {}))
    # torch knows the slice's UUID, and calls it a GPU.
    torchs = "GPU-" + slice_uuid(1, 0).removeprefix("MIG-")
    measured = with_gpus(machine, [found_by_torch(0, torchs, 5e12)])
    assert measured.table("gpu_flops").values == pytest.approx([5e12])
    assert [link.source for link in measured.links if link.name.endswith("hbm")] == ["gpu1.memory"]
    unnamed = checked(look(recorded("mig"), {VARIABLE: "0"}))
    measured = with_gpus(unnamed, [found_by_torch(0, "GPU-of-a-slice", 5e12)])
    assert measured.table("gpu_flops").values == pytest.approx([5e12])


# Hidden GPUs.


def test_the_machine_has_the_visible_gpus_alone_in_cudas_order() -> None:
    found = look(recorded("nvswitch-8"), {VARIABLE: "6,1"})
    machine = checked(found)
    assert [gpu.name for gpu in machine.gpus] == ["gpu6", "gpu1"]
    assert set(machine.cliques[0]) == {"gpu1", "gpu6"}
    ends = " ".join(f"{link.source} {link.target}" for link in machine.links)
    assert "gpu0" not in ends
    assert f"{VARIABLE}=6,1: 2 of 8 GPUs are visible" in found.notes[0]
    # Rank r runs on torch's GPU `index`.
    devices = list_gpus(machine, ("gpu6", "gpu1"), [(0, 1)])
    assert [(each.memory, each.index) for each in devices] == [
        ("gpu6.memory", 0),
        ("gpu1.memory", 1),
    ]


@pytest.mark.parametrize("text", ["", "-1", "GPU-nobody"])
def test_where_no_gpu_is_visible_the_machine_has_none_and_says_so(text: str) -> None:
    found = look(recorded("nvswitch-8"), {VARIABLE: text})
    machine = machine_of(found)
    assert machine.gpus == machine.links == machine.switches == machine.cliques == []
    assert f"{VARIABLE}={text}: 0 of 8 GPUs are visible" in found.notes[0]
    (finding,) = [f for f in topology_findings(found) if "visible" in f.found]
    assert finding.level == "note"


@pytest.mark.parametrize("text", [None, "0,1,2,3", "0,1,2,3,7"])
def test_nothing_is_said_where_all_are_visible_in_order(text: str | None) -> None:
    found = look(recorded("pcie-only"), {} if text is None else {VARIABLE: text})
    assert len(found.gpus) == 4
    assert not gpu_notes(found.notes)


def test_gpus_by_number_among_unequal_ones_name_the_order_that_numbers_them() -> None:
    recording = rename(recorded("pcie-only"), 0, "Tesla K80", 12)
    by_speed = look(recording, {VARIABLE: "0"})
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in by_speed.notes[0]
    by_address = look(recording, {VARIABLE: "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert "CUDA_DEVICE_ORDER" not in by_address.notes[0]


def test_gpus_stand_in_torchs_order_and_those_it_does_not_show_are_left_out() -> None:
    machine = checked(look(recorded("pcie-only"), {}))
    uuids = {gpu.name: gpu.uuid for gpu in machine.gpus}
    found = [found_by_torch(0, uuids["gpu2"]), found_by_torch(1, uuids["gpu0"])]
    measured = with_gpus(machine, [*found, found_by_torch(2, "GPU-unknown")])
    check_machine(measured)
    assert [gpu.name for gpu in measured.gpus] == ["gpu2", "gpu0"]
    text = " ".join(measured.notes)
    assert "gpu1: torch does not show it" in text
    assert "gpu3: torch does not show it" in text
    assert "torch shows GPU GPU-unknown" in text
    rates = {x.name: x.bandwidth_bytes_per_second for x in measured.links}
    assert rates["gpu2.hbm"] == pytest.approx(2 * rates["gpu0.hbm"])


# GPUs that differ.


@pytest.mark.parametrize(
    ("others", "planned"), [([3], [0, 1, 2]), ([0], [1, 2, 3]), ([0, 1, 2], [0, 1, 2])]
)
def test_of_gpus_that_differ_those_of_one_model_are_planned_by_their_own_rates(
    others: list[int], planned: list[int]
) -> None:
    recording = recorded("pcie-only")
    for gpu in others:
        rename(recording, gpu, "Tesla K80", 12)
    found = look(recording, {})
    (note,) = [n for n in found.notes if "differ" in n]
    names = ", ".join(f"gpu{g}" for g in others)
    assert f"{names} Tesla K80 of 12.0 GiB" in note
    assert "NVIDIA GeForce RTX 4090 of 24.0 GiB" in note
    machine = checked(found)
    assert sizes(machine) == {f"gpu{g}.memory": 12 if g in others else 24 for g in range(4)}
    speeds = {g: 10e12 if g in others else 20e12 for g in range(4)}
    findings = [found_by_torch(g, machine.gpus[g].uuid, speeds[g]) for g in range(4)]
    measured = with_gpus(machine, findings)
    speed = 10e12 if planned == others else 20e12
    assert measured.table("gpu_flops").values == pytest.approx([speed])
    one = with_one_kind(measured)
    check_machine(one)
    assert [gpu.name for gpu in one.gpus] == [f"gpu{g}" for g in planned]
    # A rank's number stays torch's, among all that are shown.
    ranks = list_gpus(one, [gpu.name for gpu in one.gpus], [range(len(planned))])
    assert [device.index for device in ranks] == planned
    assert [name for clique in one.cliques for name in clique] == [f"gpu{g}" for g in planned]
    assert with_one_kind(one) == one


def busy(amount: dict[str, Any], processes: list[dict[str, int]]) -> Inventory:
    recording = recorded("pcie-only")
    calls = recording["calls"]
    calls["nvmlDeviceGetMemoryInfo(device:1)"] = {"total": 24 * GIB, **amount}
    calls["nvmlDeviceGetComputeRunningProcesses(device:1)"] = processes
    return look(recording, {})


@pytest.mark.parametrize(
    ("amount", "processes"),
    [
        ({"used": 20 * GIB}, [{}]),
        ({"free": 4 * GIB}, [{}]),
        ({"free": 4 * GIB, "used": 20 * GIB}, []),  # of another container: nobody is listed
        ({}, [{"usedGpuMemory": 12 * GIB}, {"usedGpuMemory": 8 * GIB}]),
    ],
)
def test_of_a_busy_gpu_what_is_free_is_planned(
    amount: dict[str, Any], processes: list[dict[str, int]]
) -> None:
    found = busy(amount, processes)
    assert sizes(checked(found))["gpu1.memory"] == 4
    (note,) = gpu_notes(found.notes)
    assert "hold 20.0 GiB: planned with the 4.0 GiB free" in note


def test_what_a_driver_keeps_of_an_idle_gpu_is_nobodys() -> None:
    found = busy({"used": GIB // 2, "free": 24 * GIB - GIB // 2}, [])
    assert sizes(checked(found))["gpu1.memory"] == 24
    assert not gpu_notes(found.notes)


def test_a_gpu_whose_memory_others_hold_all_of_is_left_out() -> None:
    machine = checked(busy({"used": 24 * GIB}, [{}]))
    assert "gpu1.memory" not in sizes(machine)


def test_other_processes_whose_memory_is_unknown_are_noted() -> None:
    (note,) = gpu_notes(busy({}, [{}, {}]).notes)
    assert "2 other processes use it, how much of its memory is unknown" in note


def test_a_machine_that_was_probed_idle_is_planned_with_what_is_free_now() -> None:
    machine = checked(look(recorded("pcie-only"), {}))
    now = with_free_memory(machine, busy({"used": 20 * GIB}, [{}]))
    assert sizes(now)["gpu1.memory"] == 4
    assert "planned with the 4.0 GiB free" in now.notes[-1]
    assert with_free_memory(machine, look(recorded("pcie-only"), {})) == machine
    assert with_free_memory(machine, None) == machine


def test_plan_and_machine_show_say_what_there_is_of_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    probed = look(recorded("pcie-only"), {VARIABLE: "0,1"})
    machine = replace(machine_of(probed), notes=["load: high", *probed.notes])
    now = busy({"used": 20 * GIB}, [{}])
    monkeypatch.setattr(
        "gnnplan.planner.probe.gpu.nvml.inventory", lambda: replace(now, gpus=now.gpus[:2])
    )
    save_machine(machine, tmp_path / "m.json")
    planned = choose_machine(str(tmp_path / "m.json"))
    print_machine_notes(planned)
    assert sizes(planned) == {"gpu0.memory": 24, "gpu1.memory": 4}
    said = capsys.readouterr().err
    assert f"note: {VARIABLE}=0,1: 2 of 4 GPUs are visible" in said
    assert "note: gpu1: 1 other processes use it and hold 20.0 GiB" in said
    assert "load: high" not in said
    assert main(["machine", "show", str(tmp_path / "m.json")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"note: {VARIABLE}=0,1: 2 of 4 GPUs are visible" in shown


def test_an_equal_hosts_gpus_take_the_place_of_those_that_were_probed() -> None:
    found = look(recorded("nvswitch-8"), {})
    machine = replace(machine_of(found), fingerprint="equal")
    other = replace(found, gpus=[replace(gpu, uuid=f"GPU-other-{gpu.index}") for gpu in found.gpus])
    taken = with_gpus_of_here(machine, other, "equal")
    assert [gpu.uuid for gpu in taken.gpus] == [f"GPU-other-{g}" for g in range(8)]
    (note,) = gpu_notes(taken.notes)
    assert note.startswith("GPUs of this machine are others than those that were probed")
    refuse_changed(taken, other)
    assert with_gpus_of_here(machine, found, "equal") == machine
    assert with_gpus_of_here(machine, other, "another") == machine
    fewer = replace(other, gpus=other.gpus[:7])
    assert with_gpus_of_here(machine, fewer, "equal") == machine
    # One of eight replaced by an equal one is a change.
    swapped = replace(found, gpus=[*found.gpus[:7], other.gpus[7]])
    with pytest.raises(MachineError, match="is gone"):
        refuse_changed(with_gpus_of_here(machine, swapped, "equal"), swapped)
