"""Tests for runtime/device.py."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gnnplan.runtime import device
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Device
from tests.support.plans import make_plan

FACTS: dict[str, Any] = {
    "cpu_model": "Example CPU",
    "architecture": "x86_64",
    "cores": 8,
    "ram_bytes": 64 * 2**30 - 5,
    "ram_gib": 64,
    "numa_nodes": 1,
    "huge_pages": "madvise",
    "gpus": [
        {"uuid": "GPU-a", "name": "A", "memory_bytes": 1},
        {"uuid": "GPU-b", "name": "B", "memory_bytes": 1},
    ],
    "box_gpus": ["A", "B"],
    "versions": {"torch": "2.9", "numpy": "2.0", "numba": "0.60", "kernel": "6.1"},
}


def test_fingerprint_is_the_same_twice_in_one_process():
    assert device.machine_fingerprint() == device.machine_fingerprint()


def test_fingerprint_is_thirty_two_hex_digits():
    text = device.machine_fingerprint(FACTS)
    assert len(text) == 32
    assert int(text, 16) >= 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cpu_model", "Other CPU"),
        ("cores", 4),
        ("ram_gib", 63),
        ("huge_pages", "never"),
        ("box_gpus", ["A"]),
        ("versions", {"torch": "2.10", "numpy": "2.0", "numba": "0.60"}),
    ],
)
def test_fingerprint_changes_with(name: str, value: Any):
    changed = copy.deepcopy(FACTS) | {name: value}
    assert device.machine_fingerprint(changed) != device.machine_fingerprint(FACTS)


def test_an_equal_host_has_the_same_fingerprint_whatever_gpus_it_shows():
    other = copy.deepcopy(FACTS)
    other["gpus"][0]["uuid"] = "GPU-c"
    assert device.machine_fingerprint(other) == device.machine_fingerprint(FACTS)
    other["gpus"] = []
    assert device.machine_fingerprint(other) == device.machine_fingerprint(FACTS)
    other["box_gpus"][0] = "C"
    assert device.machine_fingerprint(other) != device.machine_fingerprint(FACTS)


def test_fingerprint_ignores_kernel_version_exact_bytes_and_gpu_order():
    changed = copy.deepcopy(FACTS)
    changed["versions"]["kernel"] = "6.2"
    changed["ram_bytes"] += 1000
    changed["box_gpus"].reverse()
    assert device.machine_fingerprint(changed) == device.machine_fingerprint(FACTS)


def test_facts_of_this_machine_are_sane():
    facts = device.machine_facts()
    assert facts["cores"] >= 1
    assert facts["ram_bytes"] > 2**28
    assert facts["versions"]["numpy"]
    assert set(device.FINGERPRINT_FACTS) <= set(facts)


def test_module_imports_neither_torch_nor_nvml_nor_numba():
    code = (
        "import sys, runtime.device as d; d.machine_fingerprint();"
        "print([m for m in ('torch', 'numba') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_control_group_limits_lower_cores_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    group = tmp_path / "fs/cgroup"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("50000 100000\n")
    (group / "memory.max").write_text("1048576\n")
    monkeypatch.setattr(device, "SYS", tmp_path)
    assert device.usable_cores() == 1
    assert device.usable_ram_bytes() == 1048576
    assert device.available_ram_bytes() <= 1048576


def test_unlimited_control_group_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    free = device.usable_cores(), device.usable_ram_bytes()
    group = tmp_path / "fs/cgroup"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("max 100000\n")
    (group / "memory.max").write_text("max\n")
    monkeypatch.setattr(device, "SYS", tmp_path)
    assert device.usable_cores() >= free[0]
    assert device.usable_ram_bytes() >= free[1]


@pytest.mark.parametrize(
    ("quota", "pinned"),
    [("max", [[2, 3]]), ("800000", [[2, 3]]), ("400000", [])],
)
def test_under_a_quota_ranks_are_pinned_to_no_cores_that_other_containers_take_too(
    small_graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    quota: str, pinned: list[list[int]],
) -> None:  # fmt: skip
    plan = make_plan(small_graph, tmp_path / "plan", ranks=2, sample_threads=1)
    group = tmp_path / "fs/cgroup"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text(f"{quota} 100000\n")
    monkeypatch.setattr(device, "SYS", tmp_path)
    monkeypatch.setattr(device, "set_threads", lambda _: None)
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda _: set(range(8)))
    found: list[list[int]] = []
    monkeypatch.setattr(device, "pin_to", found.append)
    device.use_threads(plan, 1, pin=True)
    assert found == pinned


def test_huge_page_state_is_the_bracketed_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    (folder / "enabled").write_text("always [madvise] never\n")
    monkeypatch.setattr(device, "SYS", tmp_path)
    assert device.machine_facts()["huge_pages"] == "madvise"


def test_set_threads_reaches_torch():
    import torch

    before = torch.get_num_threads()
    try:
        device.set_threads(1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


DENORMALS = """
import numba, numpy, torch
from gnnplan.runtime.device import flush_denormals, set_threads

@numba.njit(parallel=True)
def half(values, out):
    for i in numba.prange(values.size):
        out[i] = values[i] * numpy.float32(0.5)

assert flush_denormals()
set_threads(2)
small = numpy.full(1 << 20, 2e-38, numpy.float32)  # its half is below the least normal number
halved = numpy.full_like(small, numpy.nan)
half(small, halved)
torched = torch.from_numpy(small) * 0.5
leaf = torch.from_numpy(small).requires_grad_()
(leaf * 0.5).backward(torch.from_numpy(small))
print(numpy.count_nonzero(halved), torch.count_nonzero(torched).item(),
      torch.count_nonzero(leaf.grad).item())
"""


def test_numbers_too_small_to_compute_with_fast_are_zero_in_all_threads():
    # In a process of its own: threads that were started before keep their ways.
    words = [sys.executable, "-c", DENORMALS]
    ended = subprocess.run(words, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["0", "0", "0"]


def gpus(near: list[list[int]]) -> list[Device]:
    """Ranks on GPUs of one host, with the cores next to each."""
    return [
        Device(rank=rank, kind="cuda", index=rank, cores=cores) for rank, cores in enumerate(near)
    ]


def test_ranks_run_on_cores_next_to_their_gpus_each_on_its_own():
    low, high = list(range(8)), list(range(8, 16))
    shares = device.cores_of_ranks(gpus([low, low, high, high]), range(16), 2)
    assert shares == {0: [0, 1], 1: [2, 3], 2: [8, 9], 3: [10, 11]}
    # The order of ranks does not matter to whose cores are whose.
    shares = device.cores_of_ranks(gpus([high, low, high, low]), range(16), 3)
    assert shares == {0: [8, 9, 10], 1: [0, 1, 2], 2: [11, 12, 13], 3: [3, 4, 5]}


def test_near_cores_that_do_not_reach_are_filled_up_by_those_that_nobody_is_next_to():
    shares = device.cores_of_ranks(gpus([[0, 1, 2], [0, 1, 2], [5]]), range(8), 2)
    assert shares == {0: [0, 1], 1: [2, 3], 2: [4, 5]}


def test_with_fewer_cores_than_wanted_ranks_share_the_near_ones():
    shares = device.cores_of_ranks(gpus([[0, 1], [2, 3], []]), range(4), 2)
    assert shares == {0: [0, 1], 1: [2, 3], 2: []}
    # Cores that this process may not use are none of its own.
    shares = device.cores_of_ranks(gpus([[0, 1], [6, 7]]), [0, 1], 2)
    assert shares == {0: [0, 1], 1: []}


def test_ranks_on_cores_have_consecutive_ones():
    ranks = [Device(rank=rank, kind="cpu") for rank in range(3)]
    assert device.cores_of_ranks(ranks, [1, 3, 5, 7, 9, 11], 2) == {
        0: [1, 3], 1: [5, 7], 2: [9, 11],
    }  # fmt: skip
    assert device.cores_of_ranks(ranks, [1, 3], 2) == {0: [], 1: [], 2: []}
