"""Tests for planner/probe/links.py."""

from pathlib import Path

import pytest

from gnnplan.planner.machine.model import Link, Table
from gnnplan.planner.probe.gpu.nvml import Inventory, inventory
from gnnplan.planner.probe.links import gpu_links, gpu_parts, host_links, nvlink_cliques
from tests.planner.probe.fake_nvml import SWITCH, Device, FakeNvml, Link as FakeLink

BUS = [f"00000000:{i:02X}:00.0" for i in range(1, 5)]


def table(axes: dict[str, list[float]], values: list[float]) -> Table:
    return Table(unit="s", axes=list(axes), points=list(axes.values()), values=values, spread=0.1)


TABLES = {
    "copy": table({"readers": [1.0, 2.0]}, [10e9, 8e9]),
    "gather": table(
        {"row_bytes": [64.0, 512.0], "working_set_bytes": [1e6, 1e9], "readers": [1.0]},
        [1e-9, 5e-8, 1e-8, 1e-7],
    ),
    "disk_read": table(
        {"read_bytes": [4096.0, 65536.0], "queue_depth": [1.0, 16.0], "readers": [1.0, 2.0]},
        # One read: 100 us + bytes / 1 GB/s; 16 in flight: 1.5 GB/s; of two readers 2 GB/s together.
        [
            *(100e-6 + 4096e-9, 100e-6 + 4096e-9, 4096 / 1.5e9, 4096 / 1e9),
            *(100e-6 + 65536e-9, 100e-6 + 65536e-9, 65536 / 1.5e9, 65536 / 1e9),
        ],
    ),
    "all_to_all_idle": table(
        {"bytes": [1e3, 1e6, 1e8], "ranks": [2.0]},
        # Half of the bytes leave a rank: 200 us + bytes / 2 / 1 GB/s.
        [200e-6 + b / 2 / 1e9 for b in (1e3, 1e6, 1e8)],
    ),
}


def by_name(links: list[Link]) -> dict[str, Link]:
    assert len({link.name for link in links}) == len(links)
    return {link.name: link for link in links}


def test_host_links_follow_from_their_tables_by_hand():
    links = by_name(host_links(TABLES)[0])
    assert links["memory0.read"].bandwidth_bytes_per_second == pytest.approx(16e9)  # 2 x 8
    assert links["memory0.read"].latency_seconds == pytest.approx(5e-8)
    assert links["disk0.read"].latency_seconds == pytest.approx(100e-6)
    assert links["disk0.read"].bandwidth_bytes_per_second == pytest.approx(2e9)
    assert links["gloo0"].latency_seconds == pytest.approx(200e-6)
    assert links["gloo0"].bandwidth_bytes_per_second == pytest.approx(1e9)
    assert {link.provenance for link in links.values()} == {"derived"}


def test_a_link_whose_table_is_missing_is_left_out():
    tables = {name: TABLES[name] for name in ("copy", "gather")}
    assert set(by_name(host_links(tables)[0])) == {"memory0.read", "memory0.write"}


def look(devices: list[Device], peers: dict[tuple[int, int], int] | None = None) -> Inventory:
    found = inventory(FakeNvml(devices, nvlink_peer=peers), Path("/nonexistent"))
    assert found is not None
    return found


def test_two_pairs_joined_by_bridges_are_two_cliques():
    devices = [
        Device(uuid=str(i), bus_id=BUS[i], links=[FakeLink(remote=BUS[i ^ 1])] * 4)
        for i in range(4)
    ]
    found = look(devices)
    assert nvlink_cliques(found) == [["gpu0", "gpu1"], ["gpu2", "gpu3"]]
    links = by_name(gpu_links(found))
    # 4 links of 26,562 MB/s each.
    assert links["nvlink.gpu0.gpu1"].bandwidth_bytes_per_second == pytest.approx(106.248e9)
    assert "nvlink.gpu0.gpu2" not in links


def test_a_switch_is_one_node_with_the_capacity_of_each_port():
    devices = [
        Device(
            uuid=str(i),
            bus_id=BUS[i],
            capability=(9, 0),
            links=[FakeLink(remote="FFFFFFFF:FF:FF.0", kind=SWITCH)] * 18,
        )
        for i in range(4)
    ]
    peers = {(i, j): 0 for i in range(4) for j in range(4)}
    found = look(devices, peers)
    links = by_name(gpu_links(found))
    nvlinks = {name for name in links if name.startswith("nvlink")}
    assert len(nvlinks) == 8  # to and from the switch, not 12 ways between GPUs
    assert links["nvlink.gpu2.nvswitch0"].target == "nvswitch0"
    assert nvlink_cliques(found) == [["gpu0", "gpu1", "gpu2", "gpu3"]]


def test_pcie_links_carry_the_slots_highest_rate_as_derived():
    links = by_name(gpu_links(look([Device(uuid="0", bus_id=BUS[0])])))
    assert links["pcie0.h2d"].bandwidth_bytes_per_second == pytest.approx(31.5e9, rel=1e-3)
    assert links["pcie0.h2d"].provenance == "derived"


def test_unknown_width_makes_no_link_and_unknown_memory_no_gpu():
    devices = [
        Device(uuid="0", bus_id=BUS[0], refused={"nvmlDeviceGetMaxPcieLinkWidth"}),
        Device(uuid="1", bus_id=BUS[1], refused={"nvmlDeviceGetMemoryInfo"}),
    ]
    found = look(devices)
    processors, memories, notes = gpu_parts(found)
    assert gpu_links(found) == []
    assert [p.name for p in processors] == ["gpu0"]
    assert [m.capacity_bytes for m in memories] == [80 * 2**30]
    assert any("gpu1: memory size unknown" in note for note in notes)
