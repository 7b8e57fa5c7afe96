"""Constructs the NVML recordings of this folder; none is from a real machine (README.md).

    python -m tests.golden.machines.make

Run again only when a recording is to change: tests read the files.
"""

import json
from collections.abc import Callable
from pathlib import Path

from gnnplan.planner.probe.gpu.nvml import PciFacts, inventory
from gnnplan.runtime import codec
from tests.planner.probe.fake_nvml import GPU, SWITCH, UNKNOWN, Device, FakeNvml, Link
from tests.support.nvml_recording import RecordedDevices, Recorder

FOLDER = Path(__file__).parent
CUBE_MESH = [
    (0, 1, 1), (0, 2, 1), (0, 3, 2), (0, 4, 2), (1, 2, 2), (1, 3, 1), (1, 5, 2), (2, 3, 2),
    (2, 6, 1), (3, 7, 1), (4, 5, 1), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 2),
]  # fmt: skip
"""NVIDIA DGX-1 (V100) system guide."""
HIDDEN = "FFFFFFFF:FF:FF.0"
GIB = 2**30
Built = tuple[FakeNvml, dict[str, PciFacts], str]


def bus(index: int) -> str:
    """As NVML writes addresses."""
    return f"00000000:{0x10 + 8 * index:02X}:00.0"


def key(index: int) -> str:
    """As sysfs writes them."""
    return f"0000:{0x10 + 8 * index:02x}:00.0"


def gpus(
    count: int,
    *,
    name: bytes,
    capability: tuple[int, int],
    memory_gib: int,
    generation: int,
    numa: list[int],
) -> list[Device]:
    """GPUs without links."""
    return [
        Device(
            uuid=f"GPU-00000000-0000-0000-0000-{i:012d}",
            bus_id=bus(i),
            name=name,
            capability=capability,
            memory_bytes=memory_gib * GIB,
            numa_mask=1 << numa[i],
            pcie_generation=generation,
        )
        for i in range(count)
    ]


def join(devices: list[Device], pairs: list[tuple[int, int, int]], mb_per_second: int) -> None:
    """Direct links, so many for each pair."""
    for a, b, count in pairs:
        for x, y in ((a, b), (b, a)):
            devices[x].links += [
                Link(remote=bus(y), kind=GPU, mb_per_second=mb_per_second) for _ in range(count)
            ]


def tree(groups: list[list[int]], numa: list[int]) -> dict[str, PciFacts]:
    """A PCIe switch per group, behind a root port of its own."""
    return {
        key(g): PciFacts(
            numa_node=numa[g],
            bridges=[f"0000:0{s}:01.0", f"0000:0{s + 1}:00.0", f"0000:0{s + 2}:{g:02x}.0"],
        )
        for s, group in enumerate(groups)
        for g in group
    }


def ancestors(groups: list[list[int]], numa: list[int]) -> dict[tuple[int, int], int]:
    """NVML's meeting points: one switch, else the NUMA node, else beyond."""
    switch = {g: s for s, group in enumerate(groups) for g in group}
    return {
        (a, b): 10 if switch[a] == switch[b] else 40 if numa[a] == numa[b] else 50
        for a in switch
        for b in switch
        if a != b
    }


PAIRS_OF_8 = [[0, 1], [2, 3], [4, 5], [6, 7]]
HALVES_OF_8 = [0, 0, 0, 0, 1, 1, 1, 1]


def pcie_only() -> Built:
    devices = gpus(
        4,
        name=b"NVIDIA GeForce RTX 4090",
        capability=(8, 9),
        memory_gib=24,
        generation=4,
        numa=[0] * 4,
    )
    groups = [[0], [1], [2], [3]]
    return (
        FakeNvml(devices, ancestors=ancestors(groups, [0] * 4)),
        tree(groups, [0] * 4),
        "GeForce RTX 4090 specification: no NVLink",
    )


def two_numa_nodes() -> Built:
    numa, groups = [0, 0, 1, 1], [[0, 1], [2, 3]]
    devices = gpus(
        4, name=b"NVIDIA A100-PCIE-40GB", capability=(8, 0), memory_gib=40, generation=4, numa=numa
    )
    return (
        FakeNvml(devices, ancestors=ancestors(groups, numa)),
        tree(groups, numa),
        "NVIDIA A100 data sheet: PCIe cards, two per switch and processor",
    )


def bridged_pairs() -> Built:
    numa, groups = [0, 0, 1, 1], [[0, 1], [2, 3]]
    devices = gpus(
        4, name=b"Tesla V100-SXM2-32GB", capability=(7, 0), memory_gib=32, generation=3, numa=numa
    )
    join(devices, [(0, 1, 2), (2, 3, 2)], 25781)
    return (
        FakeNvml(devices, ancestors=ancestors(groups, numa)),
        tree(groups, numa),
        "Song and Jiang, ICS'22: NVLink bridges, 2+2",
    )


def dgx_v100() -> Built:
    devices = gpus(
        8,
        name=b"Tesla V100-SXM2-16GB",
        capability=(7, 0),
        memory_gib=16,
        generation=3,
        numa=HALVES_OF_8,
    )
    join(devices, CUBE_MESH, 25781)
    return (
        FakeNvml(devices, ancestors=ancestors(PAIRS_OF_8, HALVES_OF_8)),
        tree(PAIRS_OF_8, HALVES_OF_8),
        "NVIDIA DGX-1 (V100) system guide: hybrid cube mesh",
    )


def siton() -> Built:
    devices = gpus(
        8,
        name=b"NVIDIA A100-PCIE-40GB",
        capability=(8, 0),
        memory_gib=40,
        generation=4,
        numa=HALVES_OF_8,
    )
    join(devices, [(0, 1, 12), (2, 3, 12), (4, 5, 12), (6, 7, 12)], 26562)
    return (
        FakeNvml(devices, ancestors=ancestors(PAIRS_OF_8, HALVES_OF_8)),
        tree(PAIRS_OF_8, HALVES_OF_8),
        "Legion, ATC'23: 4 cliques of 2",
    )


def nvswitch() -> Built:
    devices = gpus(
        8,
        name=b"NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        memory_gib=80,
        generation=5,
        numa=HALVES_OF_8,
    )
    for device in devices:
        device.links = [Link(remote="00000000:C4:00.0", kind=SWITCH, mb_per_second=26562)] * 18
    peers = {(a, b): 0 for a in range(8) for b in range(8)}
    return (
        FakeNvml(devices, nvlink_peer=peers, ancestors=ancestors(PAIRS_OF_8, HALVES_OF_8)),
        tree(PAIRS_OF_8, HALVES_OF_8),
        "NVIDIA HGX H100 data sheet: 18 links per GPU into NVSwitches",
    )


def nvswitch_hidden() -> Built:
    devices = gpus(
        4, name=b"NVIDIA H200", capability=(9, 0), memory_gib=141, generation=5, numa=[0] * 4
    )
    for device in devices:
        device.links = [Link(remote=HIDDEN, kind=UNKNOWN, mb_per_second=26562)] * 18
    peers = {(a, b): 0 for a in range(4) for b in range(4)}
    return (
        FakeNvml(devices, nvlink_peer=peers, ancestor=50),
        {},
        "a virtual machine whose links' far ends and device tree are hidden",
    )


def mig() -> Built:
    numa, groups = [0, 0], [[0, 1]]
    devices = gpus(
        2, name=b"NVIDIA A100-SXM4-80GB", capability=(8, 0), memory_gib=80, generation=4, numa=numa
    )
    join(devices, [(0, 1, 12)], 26562)
    for device in devices:
        device.mig, device.links_forbidden = 1, True
        device.refused = {"nvmlDeviceGetP2PStatus", "nvmlDeviceGetCurrPcieLinkWidth"}
    return (
        FakeNvml(devices, ancestors=ancestors(groups, numa)),
        tree(groups, numa),
        "NVIDIA MIG user guide: peer access and link state are not offered",
    )


def broken_nvlink() -> Built:
    nvml, devices, _ = dgx_v100()
    for a, b in ((0, 4), (4, 0)):
        broken = [x for x in nvml.devices[a].links if x.remote == bus(b)]
        for each in broken:
            each.up = 0
    return nvml, devices, "dgx-v100 with both links between GPUs 0 and 4 down"


MACHINES: dict[str, Callable[[], Built]] = {
    "pcie-only": pcie_only,
    "two-numa-nodes": two_numa_nodes,
    "bridged-pairs": bridged_pairs,
    "dgx-v100": dgx_v100,
    "siton": siton,
    "nvswitch-8": nvswitch,
    "nvswitch-hidden": nvswitch_hidden,
    "mig": mig,
    "broken-nvlink": broken_nvlink,
}


def main() -> None:
    """Write every recording."""
    for name, build in MACHINES.items():
        nvml, facts, source = build()
        devices = RecordedDevices(codec.to_plain(facts))
        recorder = Recorder(nvml, devices)
        inventory(recorder, devices=devices)
        text = f"constructed, not recorded on a machine; from: {source}"
        recording = recorder.recording(name=name, real=False, source=text)
        (FOLDER / f"{name}.json").write_text(json.dumps(recording, indent=0) + "\n")


if __name__ == "__main__":
    main()
