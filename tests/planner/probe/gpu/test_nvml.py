"""Tests for planner/probe/gpu/nvml.py and nvlinks.py on recorded drivers (no GPU needed)."""

from dataclasses import replace
from pathlib import Path

import pytest

from gnnplan.planner.machine.model import GPUS_LOST
from gnnplan.planner.probe.gpu.nvml import bus_key, inventory
from tests.planner.probe.fake_nvml import (
    SWITCH,
    UNKNOWN,
    Device,
    FakeNvml,
    Link,
    NVMLError_LibraryNotFound,
    NVMLError_NoPermission,
)

BUS = ["00000000:07:00.0", "00000000:0B:00.0", "00000000:48:00.0"]
HIDDEN = "FFFFFFFF:FF:FF.0"


def peers(count: int, links_each: int) -> list[Device]:
    """GPUs joined all to all by direct links, as on a board with bridges."""
    return [
        Device(
            uuid=f"GPU-{i}",
            bus_id=BUS[i],
            links=[Link(remote=BUS[j]) for j in range(count) if j != i for _ in range(links_each)],
        )
        for i in range(count)
    ]


def switched(kind: int, remote: str, count: int = 18) -> list[Device]:
    """Two Hopper GPUs whose links end at a switch."""
    return [
        Device(
            uuid=f"GPU-{i}",
            bus_id=BUS[i],
            name=b"NVIDIA H100 80GB HBM3",
            capability=(9, 0),
            links=[Link(remote=remote, kind=kind) for _ in range(count - i)],
        )
        for i in range(2)
    ]


def look(nvml: FakeNvml, sysfs: Path = Path("/nonexistent")):
    found = inventory(nvml, sysfs)
    assert found is not None
    assert nvml.shut_down
    return found


def test_no_driver_means_no_inventory():
    assert inventory(FakeNvml([], init_error=NVMLError_LibraryNotFound("none"))) is None


@pytest.mark.parametrize(
    "nvml",
    [
        FakeNvml(peers(2, 1), init_error=NVMLError_NoPermission("Insufficient Permissions")),
        FakeNvml([replace(each, refused={"nvmlDeviceGetHandleByIndex"}) for each in peers(2, 1)]),
    ],
)
def test_a_driver_that_tells_nothing_is_said_and_no_gpu_is_guessed(nvml: FakeNvml):
    found = inventory(nvml)
    assert found is not None
    assert found.gpus == []
    (note,) = found.notes
    assert note.startswith(GPUS_LOST)
    assert "Insufficient Permissions" in note or "none of 2 could be opened" in note


def test_no_gpu_means_no_inventory():
    assert inventory(FakeNvml([])) is None


def test_facts_of_a_gpu_are_read():
    gpu = look(FakeNvml(peers(2, 1))).gpus[0]
    assert (gpu.uuid, gpu.name, gpu.bus_id) == ("GPU-0", "NVIDIA A100-SXM4-80GB", "0000:07:00.0")
    assert (gpu.compute_capability, gpu.memory_bytes, gpu.mig) == ((8, 0), 80 * 2**30, False)
    assert gpu.cpus == [2, 3, 15 * 64]
    assert (gpu.pcie_generation, gpu.pcie_max_generation, gpu.pcie_max_width) == (1, 4, 16)


def test_direct_links_are_counted_by_the_peers_address():
    found = look(FakeNvml(peers(3, 4)))
    assert {(p.first, p.second): p.num_nvlinks for p in found.pairs} == {
        (0, 1): 4,
        (0, 2): 4,
        (1, 2): 4,
    }
    assert all(pair.via_switch is False for pair in found.pairs)


def test_links_that_are_down_do_not_count():
    devices = peers(2, 4)
    for device in devices:
        device.links[0].up = device.links[1].up = 0
    assert look(FakeNvml(devices)).pairs[0].num_nvlinks == 2


@pytest.mark.parametrize(
    ("kind", "remote"),
    [(SWITCH, "00000000:C4:00.0"), (UNKNOWN, HIDDEN), (UNKNOWN, ""), (SWITCH, HIDDEN)],
    ids=["switch", "hidden", "empty", "switch-hidden"],
)
def test_links_to_a_switch_count_as_the_lesser_of_both_ports(kind: int, remote: str):
    nvml = FakeNvml(switched(kind, remote), nvlink_peer={(0, 1): 0})
    pair = look(nvml).pairs[0]
    assert (pair.num_nvlinks, pair.via_switch) == (17, True)


def test_switch_links_without_peer_access_are_no_way_between_gpus():
    pair = look(FakeNvml(switched(SWITCH, HIDDEN))).pairs[0]
    assert (pair.num_nvlinks, pair.via_switch) == (0, None)


def test_switch_links_with_unknown_peer_access_stay_unknown():
    devices = switched(SWITCH, HIDDEN)
    devices[0].refused = {"nvmlDeviceGetP2PStatus"}
    pair = look(FakeNvml(devices)).pairs[0]
    assert (pair.num_nvlinks, pair.via_switch) == (None, None)
    assert set(pair.p2p.values()) == {None}


def test_links_of_older_gpus_are_read_by_the_older_call():
    devices = peers(2, 2)
    for device in devices:
        device.refused = {"nvmlDeviceGetFieldValues"}
    found = look(FakeNvml(devices))
    assert found.pairs[0].num_nvlinks == 2
    assert found.gpus[0].nvlinks is not None
    assert found.gpus[0].nvlinks[0].bytes_per_second is None


def test_a_gpu_without_nvlink_has_none_and_its_pair_has_zero():
    found = look(FakeNvml(peers(2, 0)))
    assert found.gpus[0].nvlinks == []
    assert found.pairs[0].num_nvlinks == 0
    assert found.pairs[0].common_ancestor == "node"


def test_links_that_may_not_be_asked_for_are_unknown_also_under_mig():
    devices = peers(2, 2)

    class SilentNvml(FakeNvml):
        def nvmlDeviceGetNvLinkCapability(self, device: Device, index: int, _: int) -> int:  # noqa: N802
            raise self.NVMLError_NoPermission("MIG")

    found = look(SilentNvml(devices))
    assert found.gpus[0].nvlinks is None
    assert found.pairs[0].num_nvlinks is None
    devices[0].mig = devices[1].mig = 1
    found = look(SilentNvml(devices))
    assert [gpu.mig for gpu in found.gpus] == [True]  # CUDA shows one slice
    assert found.gpus[0].nvlinks is None


def test_every_refusal_leaves_its_fact_unknown_and_is_noted():
    names = [
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetCpuAffinity",
        "nvmlDeviceGetMemoryAffinity",
        "nvmlDeviceGetMaxPcieLinkWidth",
        "nvmlDeviceGetCudaComputeCapability",
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetTopologyCommonAncestor",
        "nvmlDeviceGetPciInfo",
    ]
    device = Device(uuid="GPU-0", bus_id=BUS[0], refused=set(names))
    found = look(FakeNvml([device, Device(uuid="GPU-1", bus_id=BUS[1])]))
    gpu = found.gpus[0]
    assert (gpu.mig, gpu.memory_bytes, gpu.cpus, gpu.numa_node) == (None, None, None, None)
    assert (gpu.pcie_max_width, gpu.compute_capability, gpu.bus_id) == (None, None, "")
    assert gpu.compute_processes is None
    assert found.pairs[0].common_ancestor is None
    assert [n for n in names if not any(n in note for note in found.notes)] == []


def test_a_gpu_that_cannot_be_opened_is_noted():
    devices = peers(2, 1)
    devices[1].refused = {"nvmlDeviceGetHandleByIndex"}
    found = look(FakeNvml(devices))
    assert len(found.gpus) == 1
    assert any("1 of 2" in note for note in found.notes)


def test_other_processes_on_a_gpu_are_noted():
    found = look(FakeNvml([Device(uuid="GPU-0", bus_id=BUS[0], processes=2)]))
    assert any("2 other processes" in note for note in found.notes)


@pytest.mark.parametrize(
    ("mask", "told", "expected"),
    [(0b10, "1", 1), (0b10, "-1", 1), (0b11, "0", 0), (0b11, "-1", None), (0b10, "0", None)],
    ids=["agree", "system-unknown", "mask-wide", "both-unknown", "disagree"],
)
def test_numa_node_is_never_guessed(tmp_path: Path, mask: int, told: str, expected: int | None):
    folder = tmp_path / "bus/pci/devices/0000:07:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(told)
    device = Device(uuid="GPU-0", bus_id=BUS[0], numa_mask=mask)
    assert look(FakeNvml([device]), tmp_path).gpus[0].numa_node == expected


def test_an_unknown_function_of_an_old_module_is_a_refusal():
    class OldNvml(FakeNvml):
        def __getattribute__(self, name: str):
            if name == "nvmlDeviceGetTopologyCommonAncestor":
                raise AttributeError(name)
            return super().__getattribute__(name)

    assert look(OldNvml(peers(2, 1))).pairs[0].common_ancestor is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("00000000:C1:00.0", "0000:c1:00.0"),
        (b"0000:C1:00.0", "0000:c1:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        (HIDDEN, ""),
        ("", ""),
        (b"\0\0", ""),
    ],
)
def test_addresses_are_made_comparable(given: str | bytes, expected: str):
    assert bus_key(given) == expected
