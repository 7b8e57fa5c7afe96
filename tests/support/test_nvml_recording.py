"""Recorded machines: record and replay agree, and the recipe reads each shape as it is."""

import ctypes
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gnnplan.planner.errors import MachineError
from gnnplan.planner.machine.model import save_machine
from gnnplan.planner.probe.doctor import topology_findings
from gnnplan.planner.probe.gpu import nvml as nvml_module
from gnnplan.planner.probe.gpu.nvml import SysfsDevices, inventory
from gnnplan.planner.probe.links import (
    gpu_links,
    gpu_switches,
    nvlink_cliques,
    nvlink_covers,
    pcie_groups,
)
from gnnplan.planner.probe.topology import changes, faults, refuse_changed
from tests.support.nvml_recording import (
    FORMAT,
    NVMLError,
    RecordedDevices,
    Recorder,
    Replay,
    call_key,
    load_replay,
)
from tests.support.recordings import FOLDER, NAMES, Recording, look, machine_of, recorded

REAL = {"h200-virtual-machine"}
"""Those that a driver answered."""
CLIQUES = {
    "h200-virtual-machine": [["gpu0"]],
    # formulas 2.1 [L1] and 2.6; Song and Jiang's pairs (1.7); the others follow from their links.
    "pcie-only": [["gpu0"], ["gpu1"], ["gpu2"], ["gpu3"]],
    "two-numa-nodes": [["gpu0"], ["gpu1"], ["gpu2"], ["gpu3"]],
    "bridged-pairs": [["gpu0", "gpu1"], ["gpu2", "gpu3"]],
    "dgx-v100": [["gpu0", "gpu1", "gpu2", "gpu3"], ["gpu4", "gpu5", "gpu6", "gpu7"]],
    "siton": [["gpu0", "gpu1"], ["gpu2", "gpu3"], ["gpu4", "gpu5"], ["gpu6", "gpu7"]],
    "nvswitch-8": [[f"gpu{g}" for g in range(8)]],
    "nvswitch-hidden": [[f"gpu{g}" for g in range(4)]],
    "mig": [["gpu0"]],  # of which CUDA shows a slice
    "broken-nvlink": [["gpu0", "gpu1", "gpu2", "gpu3"], ["gpu4", "gpu5", "gpu6", "gpu7"]],
}
Change = Callable[[Recording], None]


def test_every_recording_says_whether_it_is_real_and_where_from():
    assert len(NAMES) >= 8
    assert set(NAMES) == set(CLIQUES)
    for name in NAMES:
        found = recorded(name)
        assert (found["format"], found["name"]) == (FORMAT, name)
        assert found["real"] == (name in REAL)
        assert ("recorded on" if found["real"] else "constructed") in found["source"]


@pytest.mark.parametrize("name", NAMES)
def test_cliques_of_a_recorded_machine(name: str):
    assert nvlink_cliques(look(recorded(name))) == CLIQUES[name]


@pytest.mark.parametrize("name", NAMES)
def test_recording_a_replay_gives_the_same_recording(name: str):
    replay = load_replay(FOLDER / f"{name}.json")
    recorder = Recorder(replay, replay.devices)
    assert inventory(recorder, devices=replay.devices) is not None
    found = recorded(name)
    again = recorder.recording(name=name, real=name in REAL, source=found["source"])
    assert {k: v for k, v in again["calls"].items() if v != {"error": 13}} == {
        k: v for k, v in found["calls"].items() if v != {"error": 13}
    }
    assert again["pci"] == found["pci"]


def test_masks_are_recorded_whatever_holds_them(monkeypatch: pytest.MonkeyPatch):
    # pynvml answers with an array of ctypes: it has a length, and no __iter__.
    replay = load_replay(FOLDER / "h200-virtual-machine.json")
    answer = (ctypes.c_ulong * 2)(3, 0)
    monkeypatch.setattr(
        replay, "nvmlDeviceGetCpuAffinity", lambda handle, words: answer, raising=False
    )
    recorder = Recorder(replay, replay.devices)
    assert recorder.nvmlDeviceGetCpuAffinity("device:0", 2) is answer
    found = recorder.recording(name="", real=False, source="")["calls"]
    assert found == {"nvmlDeviceGetCpuAffinity(device:0, 2)": [3, 0]}


def test_what_was_not_recorded_is_refused():
    replay = load_replay(FOLDER / "siton.json")
    with pytest.raises(NVMLError) as caught:
        replay.nvmlDeviceGetUUID("device:99")
    assert caught.value.value == 13
    with pytest.raises(AttributeError):
        _ = replay.something_else


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other", "calls": {}}', "{"])
def test_a_damaged_recording_is_one_line(tmp_path: Path, text: str):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(MachineError) as caught:
        load_replay(path)
    assert "\n" not in str(caught.value)


def test_gpus_of_one_bridge_share_a_switch_and_its_port():
    found = look(recorded("siton"))
    assert pcie_groups(found) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    links = {x.name: x for x in gpu_links(found)}
    assert (links["plx1.h2d"].source, links["plx1.h2d"].target) == ("host0", "plx1")
    assert (links["pcie2.h2d"].source, links["pcie2.h2d"].target) == ("plx1", "gpu2.memory")
    assert links["pcie2.h2d"].lanes == 16
    assert [s.name for s in gpu_switches(found)] == ["plx0", "plx1", "plx2", "plx3"]


def test_a_hidden_device_tree_falls_back_to_where_gpus_meet():
    found = recorded("siton")
    del found["pci"]
    assert pcie_groups(look(found)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert pcie_groups(look(recorded("nvswitch-hidden"))) == []


def test_a_switch_whose_far_end_is_hidden_is_still_one_node():
    found = look(recorded("nvswitch-hidden"))
    assert {p.num_nvlinks for p in found.pairs} == {18}
    assert [s.kind for s in gpu_switches(found)] == ["nvlink"]
    assert sum("nvswitch0" in x.name for x in gpu_links(found)) == 8


def test_under_mig_links_are_unknown_and_not_zero():
    found = look(recorded("mig"))
    assert [g.mig for g in found.gpus] == [True]
    assert found.gpus[0].nvlinks is None
    assert any("nvmlDeviceGetCurrPcieLinkWidth refused" in note for note in found.notes)
    assert [fault.check for fault in faults(found)] == ["mig"]  # else nothing is known


def test_a_machine_with_two_best_covers_offers_both():
    # A ring of four: two covers by two pairs.
    found = recorded("bridged-pairs")
    calls = found["calls"]
    address = {g: calls[f"nvmlDeviceGetPciInfo(device:{g})"]["busId"] for g in range(4)}
    for g in range(4):
        for link, peer in enumerate(((g + 1) % 4, (g - 1) % 4)):
            key = call_key("nvmlDeviceGetNvLinkRemotePciInfo", [f"device:{g}", link])
            calls[key] = {"busId": address[peer]}
    assert nvlink_covers(look(found)) == [
        [["gpu0", "gpu1"], ["gpu2", "gpu3"]],
        [["gpu0", "gpu3"], ["gpu1", "gpu2"]],
    ]


# Faults put into recordings: doctor names them, and a plan for the old machine file is refused.


def missing_nvlink(found: Recording) -> None:
    """One of the two links between GPUs 0 and 1 is gone, seen from both ends."""
    for gpu in (0, 1):
        key = call_key("nvmlDeviceGetNvLinkState", [f"device:{gpu}", 0])
        assert found["calls"][key] == 1
        found["calls"][key] = 0


def halved_width(found: Recording) -> None:
    key = call_key("nvmlDeviceGetCurrPcieLinkWidth", ["device:2"])
    assert found["calls"][key] == 16
    found["calls"][key] = 8


def swapped_numa(found: Recording) -> None:
    """GPUs 1 and 2 exchange their nodes, in NVML's view and the system's alike."""
    addresses = sorted(found["pci"])
    for gpu, node in ((1, 1), (2, 0)):
        found["pci"][addresses[gpu]]["numa_node"] = node
        for key in found["calls"]:
            if key.startswith(f"nvmlDeviceGetMemoryAffinity(device:{gpu},"):
                found["calls"][key][0] = 1 << node


def contradicting_numa(found: Recording) -> None:
    """The system's table alone is wrong."""
    found["pci"][sorted(found["pci"])[1]]["numa_node"] = 1


FAULTS: dict[str, tuple[Change, str, str]] = {
    "missing NVLink": (missing_nvlink, "nvlink", "gpu0"),
    "halved PCIe width": (halved_width, "pcie", "gpu2: 8 of 16 PCIe lanes"),
    "swapped NUMA": (swapped_numa, "numa", "several NUMA nodes: gpu0 on 0, gpu1 on 1"),
    "contradicting NUMA": (contradicting_numa, "numa", "gpu1: NVML says NUMA node 0, the system 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_doctor_names_an_injected_fault(fault: str):
    change, check, words = FAULTS[fault]
    found = recorded("bridged-pairs")
    assert [f.level for f in topology_findings(look(found))] == ["ok"]
    change(found)
    findings = topology_findings(look(found))
    assert {f.level for f in findings} == {"problem"}
    assert any(f.check == f"gpu {check}" and words in f.found and f.advice for f in findings)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_plan_for_the_machine_as_it_was_is_refused(fault: str):
    change, check, _ = FAULTS[fault]
    found = recorded("bridged-pairs")
    machine = machine_of(look(found))
    refuse_changed(machine, look(found))  # as it was probed
    change(found)
    now = look(found)
    assert check in {f.check for f in changes(machine, now)}
    with pytest.raises(MachineError, match="expected it as it was probed") as caught:
        refuse_changed(machine, now)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name in NAMES if len(look(recorded(name)).gpus) > 1])
def test_an_unchanged_machine_is_let_through_also_with_its_gpus_in_another_order(name: str):
    found = recorded(name)
    machine = machine_of(look(found))
    assert changes(machine, look(found)) == []
    turned = json.loads(json.dumps(found).replace("device:0", "device:x"))
    turned = json.loads(json.dumps(turned).replace("device:1", "device:0"))
    turned = json.loads(json.dumps(turned).replace("device:x", "device:1"))
    for index in (0, 1):
        key = f"nvmlDeviceGetHandleByIndex({index})"
        turned["calls"][key] = f"device:{index}"
    for key in list(turned["calls"]):  # a pair is asked for from its lower index alone
        turned["calls"][key.replace("device:1, device:0", "device:0, device:1")] = turned["calls"][
            key
        ]
    assert changes(machine, look(turned)) == []


def test_the_broken_link_of_the_recorded_machine_is_noticed():
    found = look(recorded("broken-nvlink"))
    assert {f.found.split(":")[0] for f in faults(found)} == {"gpu0", "gpu4"}
    whole = machine_of(look(recorded("dgx-v100")))
    assert any("nvlink.gpu0.gpu4" in f.found for f in changes(whole, found))


def test_a_lost_gpu_is_named_and_other_machines_are_let_through():
    whole = machine_of(look(recorded("dgx-v100")))
    found = recorded("dgx-v100")
    found["calls"]["nvmlDeviceGetCount()"] = 7
    lost = changes(whole, look(found))
    assert [f.check for f in lost] == ["gpu"]
    assert "gpu7" in lost[0].found
    elsewhere = json.loads(json.dumps(found).replace("GPU-0000", "GPU-9999"))
    refuse_changed(whole, look(elsewhere))
    refuse_changed(whole, None)
    findings = topology_findings(None, whole)
    assert "none is here" in findings[0].found


def test_the_command_refuses_a_machine_file_that_no_longer_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from gnnplan.planner.cli.main import main
    from gnnplan.planner.probe.presets import choose_machine

    found = recorded("bridged-pairs")
    path = tmp_path / "machine.json"
    save_machine(machine_of(look(found)), path)
    halved_width(found)
    monkeypatch.setattr(nvml_module, "inventory", lambda *a, **k: look(found))
    with pytest.raises(MachineError, match="as it was probed"):
        choose_machine(str(path))
    monkeypatch.setattr("gnnplan.planner.probe.doctor.inventory", lambda: look(found))
    assert main(["doctor", "--machine", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert any("8 of 16" in f["found"] for f in document["findings"])
    assert any("16 lanes or links before, 8 now" in f["found"] for f in document["findings"])


def test_the_systems_device_tree_is_read(tmp_path: Path):
    real = tmp_path / "devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:07:00.0"
    real.mkdir(parents=True)
    (real / "numa_node").write_text("1\n")
    folder = tmp_path / "bus/pci/devices"
    folder.mkdir(parents=True)
    (folder / "0000:07:00.0").symlink_to(real)
    facts = SysfsDevices(tmp_path).facts("0000:07:00.0")
    assert facts is not None
    assert (facts.numa_node, facts.bridges) == (1, ["0000:00:01.0", "0000:01:00.0"])
    assert SysfsDevices(tmp_path).facts("0000:08:00.0") is None
    (real / "numa_node").write_text("-1\n")
    unknown = SysfsDevices(tmp_path).facts("0000:07:00.0")
    assert unknown is not None
    assert unknown.numa_node is None
    with pytest.raises(MachineError, match="expected PCI devices"):
        RecordedDevices({"x": {"numa_node": "one"}})


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("nvmlDeviceGetCount()", 10**9),
        ("nvmlDeviceGetCount()", [8]),
        ("nvmlDeviceGetMemoryInfo(device:0)", {"total": None}),
        ("nvmlDeviceGetPciInfo(device:0)", 3),
        ("nvmlDeviceGetCudaComputeCapability(device:0)", [8]),
        ("nvmlDeviceGetCpuAffinity(device:0, 16)", ["x"]),
        ("nvmlDeviceGetNvLinkState(device:0, 0)", {"error": "soon"}),
        ("nvmlDeviceGetFieldValues(device:0, [[165, 0]])", []),
    ],
)
def test_an_answer_that_no_driver_gives_is_refused(call: str, answer: object):
    with pytest.raises(MachineError, match="answer of a driver"):
        Replay({"format": FORMAT, "calls": {call: answer}})
