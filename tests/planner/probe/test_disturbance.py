"""What disturbs the machine: cores apart, shared, slow."""

import json
from pathlib import Path

import pytest

from planner.probe import quiet as core_distance, quiet as core_sharing, quiet as small_step
from planner.probe.quiet import Disturbance, disturbance
from planner.probe.timing import DISTURBED


@pytest.fixture(autouse=True)
def steady_steps(monkeypatch) -> None:
    monkeypatch.setattr(small_step, "step_seconds", lambda: 2e-3)


@pytest.mark.parametrize(
    ("line_seconds", "copy_seconds", "step_seconds", "disturbed"),
    [
        (2.1e-8, 5.1e-5, 2e-3, False),
        (3.9e-8, 5.9e-5, 2.15e-3, False),
        (4.1e-8, 5e-5, 2e-3, True),
        (2e-8, 6.1e-5, 2e-3, True),
        (2e-8, 5e-5, 2.17e-3, True),
    ],
)
def test_cores_apart_shared_or_slow_disturb(
    monkeypatch, line_seconds, copy_seconds, step_seconds, disturbed
) -> None:
    for module in (core_distance, core_sharing):
        monkeypatch.setattr(module, "usable_core_ids", lambda: [0, 1])
    monkeypatch.setattr(core_distance, "line_seconds", lambda one, other: 2e-8)
    monkeypatch.setattr(core_sharing, "copy_seconds", lambda core: 5e-5)
    found = Disturbance()
    assert found.level() < DISTURBED
    monkeypatch.setattr(core_distance, "line_seconds", lambda one, other: line_seconds)
    monkeypatch.setattr(core_sharing, "copy_seconds", lambda core: copy_seconds)
    monkeypatch.setattr(small_step, "step_seconds", lambda: step_seconds)
    assert (found.level() >= DISTURBED) is disturbed


def test_all_are_remembered_in_one_file(monkeypatch, tmp_path: Path) -> None:
    for module in (core_distance, core_sharing):
        monkeypatch.setattr(module, "usable_core_ids", lambda: [0, 1])
    monkeypatch.setattr(core_distance, "line_seconds", lambda one, other: 2e-8)
    monkeypatch.setattr(core_sharing, "copy_seconds", lambda core: 5e-5)
    with disturbance(tmp_path) as found:
        found.level()
    (path,) = tmp_path.glob("cores-*.json")
    assert json.loads(path.read_text()) == {
        "0-1": {"20": 1}, "0": {"50000": 1}, "1": {"50000": 1}, "step": {"2e+06": 1},
    }  # fmt: skip
    monkeypatch.setattr(core_sharing, "copy_seconds", lambda core: 7e-5)
    with disturbance(tmp_path) as found:
        assert found.level() == pytest.approx(1.4 / 1.2)


def test_a_machine_without_cores_to_keep_to_is_never_disturbed(monkeypatch) -> None:
    for module in (core_distance, core_sharing):
        monkeypatch.setattr(module, "usable_core_ids", list)
    assert Disturbance().level() < DISTURBED
