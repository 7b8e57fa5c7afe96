"""Stages of a rank whose sampler and model were timed on a GPU, added up by hand."""

from dataclasses import replace

import pytest

from planner.candidate import Candidate, PlacedRows
from planner.cost.gpu_capture import timed_gain
from planner.cost.gpu_lanes import lanes_of
from planner.cost.gpu_model import gpu_ranks
from planner.cost.rank_seconds import RankSeconds
from planner.machine import MachineModel
from planner.probe.presets import load_preset
from planner.workload import GpuSample, GpuTiming, ModelTiming
from runtime.plan import Threads
from tests.planner.cost.test_gpu import ROW, candidate, rows
from tests.support.profiles import batch_profile, timing

PCIE, HBM = 16 * 3.938e9 * 0.75, 4.8e12
WRITTEN = 1000 * ROW / (HBM * 0.85)
"""Of a batch's 1000 rows."""
TIMED = GpuTiming(
    sample=GpuSample(seconds=2e-3, host_seconds=1.9e-3, spread=0.02),
    captured=GpuSample(seconds=6e-4, host_seconds=2e-4, spread=0.03),
    topology="replicated",
    handing_seconds=3e-4,
    device_seconds=1e-3,
)


@pytest.fixture
def machine() -> MachineModel:
    return load_preset("h200x1")


def model() -> ModelTiming:
    """2 ms forward and backward, 1 ms update, of which the GPU works 1 ms; 2.5 ms on the host."""
    return replace(timing(100, 1), gpu=TIMED, host_seconds=2.5e-3)


def price(
    machine: MachineModel, chosen: Candidate, captured_bytes: int = 0, **by_place: float
) -> RankSeconds:
    placed = PlacedRows(policy="none", ranks=[rows(**by_place)], host_rows=1)
    return gpu_ranks(
        machine, chosen, placed, batch_profile(100), model(), ROW, captured_bytes=captured_bytes
    )[0]


def on_device(machine: MachineModel) -> Candidate:
    return candidate(machine, 1, topology="replicated")


def test_sampling_is_what_was_timed_and_lists_elsewhere_come_on_top(machine: MachineModel) -> None:
    near, far = price(machine, on_device(machine), own=1.0), price(
        machine, candidate(machine, 1), own=1.0
    )  # fmt: skip
    assert near.sample == pytest.approx(2e-3)
    # 2000 edges and 400 lists, 64 B each over PCIe instead of 32 B in the GPU's memory.
    elsewhere = 2400 * 64 / PCIE - 2400 * 32 / (HBM * 0.6)
    assert far.sample - near.sample == pytest.approx(elsewhere)
    assert far.on_links - near.on_links == pytest.approx(2400 * 64 / PCIE)
    assert near.provenance["sample"].startswith("measured")
    assert near.spreads["sample"] == 0.02


def test_one_graph_is_priced_as_it_was_timed(machine: MachineModel) -> None:
    found = price(machine, on_device(machine), captured_bytes=10**6, own=1.0)
    assert found.sample == pytest.approx(6e-4)
    assert found.on_host == pytest.approx(2e-4 + 3e-4 + 2.5e-3)
    assert found.on_gpu > 4e-4  # what the host does not account for
    assert "one CUDA graph" in found.provenance["sample"]


def test_a_stacks_batches_share_the_hosts_part(machine: MachineModel) -> None:
    alone = price(machine, on_device(machine), own=1.0)
    stacked = price(machine, replace(on_device(machine), bulk=8, bulk_bytes=10**6), own=1.0)
    # 38 kernels alone (2 hops); (30 + 46.7 x 2 + 7 x 3) / 8 + 3.3 + 2.3 x 2 in a stack of 8.
    kernels = (30 + 46.7 * 2 + 7 * 3) / 8 + 3.3 + 2.3 * 2
    assert alone.on_host - stacked.on_host == pytest.approx(1.9e-3 * (1 - kernels / 38))
    assert alone.sample - stacked.sample == pytest.approx(1.9e-3 * (1 - kernels / 38))


def test_in_line_a_gather_hides_while_the_host_starts_the_model(machine: MachineModel) -> None:
    # 20,000 rows over PCIe take 217 us, and the device has 2 ms of the step to itself.
    line, many = on_device(machine), 400_000.0
    assert price(machine, line, host=20_000.0).gather == pytest.approx(3e-4)
    device = many * ROW / PCIE + WRITTEN
    assert price(machine, line, host=many).gather == pytest.approx(device - 2e-3)
    ahead = replace(line, threads=Threads(sample=1))
    assert price(machine, ahead, host=many).gather == pytest.approx(device)


def test_lanes_are_bound_by_what_the_gpu_does_and_not_by_what_the_host_takes(
    machine: MachineModel,
) -> None:
    ahead = replace(on_device(machine), threads=Threads(sample=1))
    found = price(machine, ahead, own=1000.0)
    lanes = lanes_of(ahead, machine, found)
    assert lanes.training == pytest.approx(3e-3)
    assert lanes.on_gpu == pytest.approx(found.on_gpu + 1e-3)
    assert lanes.on_host == pytest.approx(1.9e-3 + 3e-4 + 2.5e-3)
    assert lanes.bottleneck == "host"


def test_capturing_gains_what_was_timed() -> None:
    assert timed_gain(TIMED) == pytest.approx(1.4e-3)
    assert timed_gain(replace(TIMED, captured=None)) == 0.0
