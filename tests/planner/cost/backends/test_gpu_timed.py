"""Stages of a rank whose sampler and model were timed on a GPU, added up by hand."""

from dataclasses import replace

import pytest

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.backends.gpu import GpusBackend
from gnnplan.planner.cost.backends.gpu_lanes import lanes_of, timed_gain
from gnnplan.planner.cost.rank_times import RankTimes
from gnnplan.planner.cost.step import StepTimes, combine_ranks, unsized_seconds
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.workload import GpuLoop, GpuSample, GpuTiming, ModelTiming
from gnnplan.runtime.plan.schema import Threads
from gnnplan.runtime.stages import Stage
from tests.planner.cost.by_hand import at, work
from tests.planner.cost.test_gpu import ROW, candidate, rows
from tests.support.profiles import timing

PCIE, HBM = 16 * 3.938e9 * 0.75, 4.8e12
WRITTEN = 1000 * ROW / (HBM * 0.85)
"""Of a batch's 1000 rows."""


def loop(captured: bool, ahead: bool, step: float, **stages: float) -> GpuLoop:
    """Its stages in milliseconds."""
    seconds = {name: value / 1e3 for name, value in stages.items()}
    spread = 0.03 if captured else 0.02
    return GpuLoop(
        captured=captured, ahead=ahead, step_seconds=step / 1e3, stages=seconds, spread=spread
    )


TIMED = GpuTiming(
    sample=GpuSample(seconds=2e-3, host_seconds=1.9e-3, spread=0.02),
    captured=GpuSample(seconds=6e-4, host_seconds=2e-4, spread=0.03),
    topology="replicated",
    handing_seconds=3e-4,
    device_seconds=1e-3,
    loops=[
        loop(False, False, 6.0, seeds=0.05, sample=2.2, gather=0.25, copy=0.05, batch=0.1,
             wait=2.7, forward_backward=3.0, optimizer=0.25),
        loop(False, True, 5.5, seeds=0.1, sample=3.0, gather=0.5, copy=0.1, batch=0.2,
             wait=1.0, forward_backward=4.0, optimizer=0.4),
        loop(True, False, 4.2, seeds=0.05, sample=0.5, gather=0.25, copy=0.05, batch=0.1,
             wait=1.0, forward_backward=2.9, optimizer=0.25),
        loop(True, True, 3.6, seeds=0.1, sample=1.1, gather=0.6, copy=0.1, batch=0.2,
             wait=0.3, forward_backward=3.0, optimizer=0.25),
    ],
)  # fmt: skip


@pytest.fixture
def machine() -> MachineModel:
    return load_preset("h200x1")


def model() -> ModelTiming:
    """By itself a step takes 3 ms, of which the GPU works 1 ms; 2.5 ms on the host."""
    return replace(timing(100, 1), gpu=TIMED, host_seconds=2.5e-3)


def price(
    machine: MachineModel, chosen: Candidate, captured_bytes: int = 0, **by_place: float
) -> RankTimes:
    return GpusBackend().stage_times(
        work(
            chosen, machine, rows(**by_place), timing=model(), row_bytes=ROW,
            captured_bytes=captured_bytes,
        )
    )  # fmt: skip


def on_device(machine: MachineModel) -> Candidate:
    return candidate(machine, 1, topology="replicated")


def ahead_of(chosen: Candidate) -> Candidate:
    return replace(chosen, threads=Threads(sample=1))


def step_of(machine: MachineModel, chosen: Candidate, captured_bytes: int = 0) -> StepTimes:
    rank = price(machine, chosen, captured_bytes, own=1000.0)
    # Batches of one size: chance adds nothing.
    return combine_ranks(chosen, machine, [replace(rank, loader_sigma=0.0, trainer_sigma=0.0)])


@pytest.mark.parametrize(("captured", "ahead"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_what_was_timed_is_predicted_as_it_was(
    machine: MachineModel, captured: int, ahead: int
) -> None:
    chosen = on_device(machine)
    found = step_of(machine, ahead_of(chosen) if ahead else chosen, captured * 10**6)
    expected = TIMED.loop(captured=bool(captured), ahead=bool(ahead))
    assert found.seconds == pytest.approx(expected.step_seconds)
    for name in ("seeds", "sample", "gather", "copy", "batch", "forward_backward", "optimizer"):
        assert found.stages[name] == pytest.approx(expected.stages[name]), name
    # With what no stage has: .05, .1, .05 and .05 ms.
    training = expected.stages["forward_backward"] + expected.stages["optimizer"]
    assert found.stages["wait"] == pytest.approx(expected.step_seconds - training)


def test_a_small_batch_saves_no_launch_of_a_timed_loop(machine: MachineModel) -> None:
    # The loops took 6 and 4.2 ms, of which the host starts 1.9 or .2, .3 and 2.5 ms.
    for captured, started in ((0, 4.7e-3), (10**6, 3.0e-3)):
        found = price(machine, on_device(machine), captured_bytes=captured, own=1.0)
        assert found.device.host - found.device.host_shrinking == pytest.approx(started)
        assert unsized_seconds(on_device(machine), found) == pytest.approx(started)
        assert found.compute_slope == pytest.approx(2e-3)  # 20 us a seed


def test_lists_elsewhere_come_on_top(machine: MachineModel) -> None:
    near, far = price(machine, on_device(machine), own=1.0), price(
        machine, candidate(machine, 1), own=1.0
    )  # fmt: skip
    # 2000 edges and 400 lists, 64 B each over PCIe instead of 32 B in the GPU's memory.
    elsewhere = 2400 * 64 / PCIE - 2400 * 32 / (HBM * 0.6)
    assert at(far, "sample") - at(near, "sample") == pytest.approx(elsewhere)
    assert far.device.links - near.device.links == pytest.approx(2400 * 64 / PCIE)
    assert near.stages[Stage.SAMPLE].provenance.startswith("measured")
    assert near.stages[Stage.SAMPLE].spread == 0.02


def test_one_graph_has_the_loop_of_its_own(machine: MachineModel) -> None:
    found = price(machine, on_device(machine), captured_bytes=10**6, own=1.0)
    assert at(found, "sample") == pytest.approx(5e-4)
    assert found.device.memory > 4e-4  # what the host does not account for
    assert "one CUDA graph" in found.stages[Stage.SAMPLE].provenance
    assert found.stages[Stage.FORWARD_BACKWARD].spread == 0.03


def test_a_stacks_batches_share_the_hosts_part(machine: MachineModel) -> None:
    alone = price(machine, on_device(machine), own=1.0)
    stacked = price(machine, replace(on_device(machine), bulk_batches=8, bulk_bytes=10**6), own=1.0)
    # 38 kernels alone (2 hops); (30 + 46.7 x 2 + 7 x 3) / 8 + 3.3 + 2.3 x 2 in a stack of 8.
    kernels = (30 + 46.7 * 2 + 7 * 3) / 8 + 3.3 + 2.3 * 2
    saved = 1.9e-3 * (1 - kernels / 38)
    # Of 2 ms by itself the loop's 2.2; of 1.9 + .3 + 2.5 ms of the host the loop's 6.
    assert at(alone, "sample") - at(stacked, "sample") == pytest.approx(2.2e-3 * saved / 2e-3)
    assert alone.device.host - stacked.device.host == pytest.approx(6e-3 * saved / 4.7e-3)


def test_in_line_a_gather_hides_while_the_host_starts_the_model(machine: MachineModel) -> None:
    # 20,000 rows over PCIe take 217 us, and the device has 2.25 ms of the step to itself.
    line, many = on_device(machine), 400_000.0
    assert at(price(machine, line, host=20_000.0), "gather") == pytest.approx(2.5e-4)
    device = many * ROW / PCIE + WRITTEN
    assert at(price(machine, line, host=many), "gather") == pytest.approx(device - 2.25e-3)
    assert at(price(machine, ahead_of(line), host=many), "gather") == pytest.approx(device)


def test_lanes_are_bound_by_what_the_gpu_does_and_not_by_what_the_host_takes(
    machine: MachineModel,
) -> None:
    ahead = ahead_of(on_device(machine))
    found = price(machine, ahead, own=1000.0)
    lanes = lanes_of(ahead, machine, found)
    assert lanes.training == pytest.approx(4.4e-3)
    assert lanes.on_gpu == pytest.approx(found.device.memory + 1e-3)
    assert lanes.on_host == pytest.approx(5.5e-3)
    assert lanes.bottleneck == "host"


def test_capturing_gains_what_was_timed(machine: MachineModel) -> None:
    line = on_device(machine)
    assert timed_gain(TIMED, line) == pytest.approx(1.8e-3)
    assert timed_gain(TIMED, ahead_of(line)) == pytest.approx(1.9e-3)
    assert timed_gain(replace(TIMED, captured=None), line) == 0.0
