"""The profile for GPUs: timed where they are here, arithmetic elsewhere, cached either way."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.profile import profile as subject
from gnnplan.planner.profile.profile import gpu_profile
from gnnplan.planner.profile.protocol import GPU, GpuTimingAnswer, GpuTimingReply, GpuTimingRequest
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import GpuLoop, GpuSample
from gnnplan.runtime import codec
from gnnplan.runtime.device import machine_fingerprint
from gnnplan.runtime.errors import SlowerPathWarning, forget_warnings
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Workload

SETTINGS = PlanSettings(workload=Workload(batch_size=64, hidden=8, fanouts=[4, 3]))
ANSWER = GpuTimingAnswer(
    sizes=[0.5, 1.0, 1.5],
    step_seconds=[2e-3, 3e-3, 5e-3],
    optimizer_seconds=5e-4,
    host_seconds=1e-3,
    device_seconds=2e-3,
    spread=0.03,
    sample=GpuSample(seconds=2e-3, host_seconds=1.5e-3, spread=0.02),
    captured=GpuSample(seconds=6e-4, host_seconds=2e-4, spread=0.02),
    handing_seconds=3e-4,
    loops=[
        GpuLoop(
            captured=captured, ahead=ahead, step_seconds=4e-3, stages={"sample": 1e-3}, spread=0.02
        )
        for captured in (False, True)
        for ahead in (False, True)
    ],
    topology="replicated",
    num_parameters=1234,
    activation_bytes=5_000_000,
)


class FakeTeam:
    """Answers requests without a process, and keeps them."""

    asked: list[GpuTimingRequest] = []  # noqa: RUF012 - emptied by the fixture
    reply = GpuTimingReply(answer=ANSWER)

    def __init__(self, size: int) -> None:
        assert size == 1

    def __enter__(self) -> "FakeTeam":
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def ask(self, requests: Sequence[str], threads: int) -> list[str]:
        assert threads >= 1
        FakeTeam.asked += [
            codec.decode(GpuTimingRequest, json.loads(each)[GPU]) for each in requests
        ]
        return [json.dumps(codec.to_plain(FakeTeam.reply)) for _ in requests]


@pytest.fixture(autouse=True)
def team(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path))
    monkeypatch.setattr(subject, "Team", FakeTeam)
    monkeypatch.setattr(FakeTeam, "asked", [])
    monkeypatch.setattr(FakeTeam, "reply", GpuTimingReply(answer=ANSWER))


@pytest.fixture
def here() -> MachineModel:
    """A preset that says it is this machine, measured."""
    preset = load_preset("dgx-a100")
    return replace(preset, provenance="measured", fingerprint=machine_fingerprint())


def test_gpus_that_are_here_are_asked_once_and_remembered(
    small_graph: Graph, here: MachineModel
) -> None:
    found = gpu_profile(small_graph, SETTINGS, here, [1, 2])
    assert [request.seeds for request in FakeTeam.asked] == [64, 32]
    assert all(request.captures for request in FakeTeam.asked)
    timing = found.numbers.timing["64"]
    assert timing.forward_backward.at(scale=1.0, ranks=1.0, threads=1.0) == pytest.approx(2.5e-3)
    assert timing.forward_backward.provenance == "measured"
    assert timing.optimizer.at(ranks=1.0, threads=1.0) == pytest.approx(5e-4)
    assert timing.gpu is not None
    assert (timing.gpu.captured, timing.gpu.loops) == (ANSWER.captured, ANSWER.loops)
    assert (timing.host_seconds, timing.activation_bytes) == (1e-3, 5_000_000)
    again = gpu_profile(small_graph, SETTINGS, here, [1, 2], measure=False)
    assert again.numbers == found.numbers
    assert len(FakeTeam.asked) == 2


def test_of_a_box_of_several_kinds_a_gpu_of_the_planned_kind_is_timed(
    small_graph: Graph, here: MachineModel
) -> None:
    """Here CUDA's first GPU is of another kind, so the planned ones begin at number 1."""
    numbers = {gpu.name: 1 + place for place, gpu in enumerate(here.gpus)}
    placed = [replace(p, number=numbers.get(p.name, p.number)) for p in here.processors]
    gpu_profile(small_graph, SETTINGS, replace(here, processors=placed), [1])
    gpu_profile(small_graph, SETTINGS, here, [1])  # of the same model, but another GPU
    assert [request.gpu for request in FakeTeam.asked] == [1, 0]


def test_gpus_that_are_elsewhere_keep_their_roofline(
    small_graph: Graph, here: MachineModel
) -> None:
    for machine in (load_preset("dgx-a100"), replace(here, fingerprint="another")):
        found = gpu_profile(small_graph, SETTINGS, machine, [1])
        timing = found.numbers.timing["64"]
        assert timing.gpu is None
        assert timing.forward_backward.provenance == "derived"
    assert FakeTeam.asked == []


def test_a_gpu_that_refuses_leaves_the_roofline(
    small_graph: Graph, here: MachineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTeam, "reply", GpuTimingReply(refusal="this torch has no CUDA"))
    forget_warnings()
    with pytest.warns(
        SlowerPathWarning, match="derived and not measured, because this torch has no CUDA"
    ):
        found = gpu_profile(small_graph, SETTINGS, here, [1])
    assert found.numbers.timing["64"].gpu is None
    assert len(FakeTeam.asked) == 1


def test_nothing_is_timed_where_nothing_may_be_measured(
    small_graph: Graph, here: MachineModel
) -> None:
    gpu_profile(small_graph, SETTINGS, load_preset("dgx-a100"), [1])  # batches are cached
    with pytest.raises(SettingsError, match="plan with these settings"):
        gpu_profile(small_graph, SETTINGS, here, [1], measure=False)
    assert FakeTeam.asked == []


def test_a_model_of_ones_own_is_planned_for_where_it_can_be_timed(
    small_graph: Graph, here: MachineModel
) -> None:
    settings = replace(SETTINGS, workload=replace(SETTINGS.workload, model="mine:make"))
    found = gpu_profile(small_graph, settings, here, [1])
    assert found.numbers.timing["64"].num_parameters == 1234
    with pytest.raises(SettingsError, match=r"expected model .* found mine:make"):
        gpu_profile(small_graph, settings, load_preset("dgx-a100"), [1])
