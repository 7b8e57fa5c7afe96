"""Timing sampling and the model where kernels run: a GPU, or Triton's interpreter."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from gnnplan.planner.profile import gpu_timing
from gnnplan.planner.profile.gpu_timing import GpuTimed
from gnnplan.planner.profile.protocol import GpuTimingAnswer, GpuTimingRequest
from gnnplan.runtime import codec, meter
from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.graph.dataset import open_graph
from gnnplan.runtime.graph.generate import generate_rmat
from gnnplan.runtime.plan.schema import Sampler, Workload
from gnnplan.runtime.train import minibatch, overlap
from gnnplan.runtime.train.streams import streams_of
from tests.support.clock import FakeClock, TickingClock


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("graphs") / "g"
    generate_rmat(place, num_nodes=300, degree=6, feature_dim=12, num_classes=3, seed=2)
    return place


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("STEPS", 1), ("WARM_STEPS", 1), ("BATCHES", 2)):
        monkeypatch.setattr(gpu_timing, name, value)
    for name, value in (("LOOP_STEPS", 2), ("LOOP_WARM_STEPS", 1), ("ROUNDS", 1)):
        monkeypatch.setattr(gpu_timing, name, value)


def asked(folder: Path, sampler: str = "neighbor", **changes: Any) -> GpuTimingRequest:
    workload = Workload(
        model=changes.pop("model", "sage"), num_layers=2, hidden=8, fanouts=[3, 2], batch_size=24
    )
    values: dict[str, Any] = {
        "graph": str(folder), "workload": workload, "sampler": Sampler(name=sampler), "seeds": 24,
        "scales": [0.6, 1.0, 1.6], "captures": False,
    }  # fmt: skip
    return GpuTimingRequest(**{**values, **changes})


def test_every_part_of_a_step_is_timed(
    folder: Path, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = TickingClock()
    for reads in (gpu_timing, overlap, meter, minibatch):
        monkeypatch.setattr(reads, "time", clock)
    found = GpuTimed(asked(folder, captures=True), kernel_device).run()
    assert len(found.sizes) == len(found.step_seconds) == 3
    assert found.sizes == sorted(found.sizes)
    assert 1.0 in found.sizes
    assert min(found.step_seconds) > found.optimizer_seconds > 0
    assert found.captured is not None
    for each in (found.sample, found.captured):
        assert 0 < each.host_seconds <= each.seconds
    assert found.topology == "replicated"
    # Two layers of sage: 2 a b + b each.
    assert found.num_parameters == 2 * 12 * 8 + 8 + 2 * 8 * 3 + 3
    assert found.device_seconds > 0
    assert found.handing_seconds >= 0
    ways = {(each.captured, each.ahead) for each in found.loops}
    assert ways == {(False, False), (False, True), (True, False), (True, True)}
    for each in found.loops:
        assert each.spread >= 0
        own = ("wait", "forward_backward", "optimizer")
        assert all(each.stages[name] > 0 for name in (*own, "sample", "gather", "seeds", "batch"))
        # The one step that counts holds them all.
        assert each.step_seconds >= sum(each.stages[name] for name in own)
        if not each.ahead:
            assert each.stages["wait"] >= each.stages["sample"]
    assert codec.decode(GpuTimingAnswer, codec.to_plain(found)) == found
    if kernel_device.type == "cuda":
        assert found.activation_bytes > 0


def test_a_loops_step_is_its_parts_and_what_lies_between_none_of_them_twice(
    folder: Path, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, parts = FakeClock(), GpuTimed(asked(folder), kernel_device).loop_parts(None)
    for reads in (overlap, meter, minibatch):
        monkeypatch.setattr(reads, "time", clock)
    for owner, name, seconds in (
        (gpu_timing.SeedsStage, "submit", 0.001),
        (gpu_timing.DeviceSampleStage, "submit", 0.002),
        (gpu_timing.DeviceGatherStage, "submit", 0.004),
        (gpu_timing.DeviceBatchStage, "submit", 0.008),
        (gpu_timing, "add_labels", 0.016),  # by the training thread, in its wait
        (minibatch.TrainLoop, "_forward_backward", 0.032),
        (minibatch.Precision, "unscale", 0.064),
        (minibatch.TrainLoop, "step", 0.128),  # between
    ):
        clock.lasts(monkeypatch, owner, name, seconds)
    making = {"seeds": 0.001, "sample": 0.002, "gather": 0.004, "batch": 0.008}
    in_line, by_a_thread = gpu_timing.time_loops(parts, kernel_device)
    for found, wait in ((in_line, sum(making.values()) + 0.016), (by_a_thread, 0.016)):
        own = {"wait": wait, "forward_backward": 0.032, "optimizer": 0.064}
        for name, seconds in (making | own).items():
            assert found.stages[name] == pytest.approx(seconds), (name, found.ahead)
        assert found.step_seconds == pytest.approx(sum(own.values()) + 0.128)
    assert (in_line.ahead, by_a_thread.ahead) == (False, True)


@pytest.mark.parametrize(("model", "sampler"), [("gcn", "neighbor"), ("gat", "neighbor")])
def test_models_with_weights_are_timed_as_the_loader_hands_them_over(
    folder: Path, kernel_device: torch.device, model: str, sampler: str
) -> None:
    found = GpuTimed(asked(folder, sampler, model=model), kernel_device).run()
    assert found.captured is None
    assert len(found.step_seconds) == 3


def test_what_cannot_be_captured_is_sampled_kernel_by_kernel(
    folder: Path, kernel_device: torch.device
) -> None:
    found = GpuTimed(asked(folder, "labor", captures=True, scales=[1.0]), kernel_device).run()
    assert found.captured is None
    assert [(each.captured, each.ahead) for each in found.loops] == [(False, False), (False, True)]
    assert found.sizes == [1.0]


def test_batches_of_a_loop_are_those_of_a_run(
    folder: Path, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LOOP_STEPS", 4), ("ROUNDS", 2)):
        monkeypatch.setattr(gpu_timing, name, value)
    seen: list[tuple[int, int, int]] = []
    step = gpu_timing.TrainLoop.step

    def watched(loop: Any, batch: Any, index: int) -> float:
        assert batch.x.shape == (batch.drawn.n_id.numel(), 12)
        assert batch.y.shape == (batch.num_seeds,)
        seen.append((batch.epoch, batch.step, batch.num_seeds))
        return step(loop, batch, index)

    monkeypatch.setattr(gpu_timing.TrainLoop, "step", watched)
    timed = GpuTimed(asked(folder, scales=[1.0]), kernel_device)
    train = len(open_graph(folder).train_idx)
    gpu_timing.time_loops(timed.loop_parts(None), kernel_device)
    # Two ways in turns, two rounds of 4 steps each: every step once by each way, in order.
    assert len(seen) == 16
    assert seen[:4] == seen[4:8]
    assert seen[8:12] == seen[12:]
    per_epoch = -(-train // 24)
    assert [(e, s) for e, s, _ in seen[:4] + seen[8:12]] == [divmod(i, per_epoch) for i in range(8)]
    assert max(count for _, _, count in seen) == min(24, train)


def test_a_training_set_smaller_than_the_batch_has_one_size(
    folder: Path, kernel_device: torch.device
) -> None:
    request = asked(folder, seeds=10_000)
    timed = GpuTimed(request, kernel_device)
    found = timed.run()
    # All three sizes are the whole training set; edges drawn of it differ by chance alone.
    assert np.allclose(found.sizes, 1.0, atol=0.2)
    assert len(found.step_seconds) == len(found.sizes)


def test_a_request_is_timed_on_the_gpu_that_it_names_with_that_one_current(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, timed = list[torch.device](), list[torch.device]()

    class Refusing:
        def __init__(self, _: GpuTimingRequest, device: torch.device) -> None:
            timed.append(device)
            raise SamplerError("enough")

    monkeypatch.setattr(gpu_timing, "GpuTimed", Refusing)
    monkeypatch.setattr(gpu_timing, "set_threads", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    found = gpu_timing.answer_request(asked(folder, gpu=3))
    assert found.refusal == "enough"
    assert current == timed == [torch.device("cuda", 3)]


def test_threads_of_a_loop_choose_the_gpu_first(
    folder: Path, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, entered = streams_of(kernel_device), list[str]()
    monkeypatch.setattr(
        type(streams), "enter_thread", lambda _: entered.append(threading.current_thread().name)
    )
    gpu_timing.time_loops(GpuTimed(asked(folder), kernel_device).loop_parts(None), kernel_device)
    assert entered == ["prefetch-0"]


def test_a_timed_call_begins_and_ends_when_the_gpu_has_nothing_left_to_do(
    folder: Path, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    class Waited:
        def synchronize(self) -> None:
            done.append("wait")

    timed = GpuTimed(asked(folder), kernel_device)
    monkeypatch.setattr(gpu_timing, "processor_of", lambda device: Waited())
    task = gpu_timing._Task(lambda _: done.append("run"), lambda: done.append("prepare"))
    assert len(timed._in_turns([task])[0]) == 1
    assert done[-4:] == ["prepare", "wait", "run", "wait"]
