"""Whether the machine keeps its pace."""

import subprocess

import pytest

from planner.probe import pace


def test_equal_work_takes_its_least_or_longer() -> None:
    assert 1.0 <= pace.slowdown(0.05) < 100.0


@pytest.mark.parametrize(
    ("stretches", "expected"),
    [([2.0], 1.0), ([1.0, 1.0, 4.0], 2.0), ([0.1] + [1.0] * 199, (0.1 + 199) / 200)],
)
def test_a_single_quick_stretch_is_no_measure(stretches: list[float], expected: float) -> None:
    assert pace.over_least(stretches) == pytest.approx(expected)


def test_waiting_ends_with_the_neighbours_or_with_the_patience(monkeypatch) -> None:
    found, said, slept = iter([1.6, 1.4, 1.1, 1.5, 1.5]), list[float](), list[float]()
    clock = iter(float(second) for second in range(100))
    monkeypatch.setattr(pace, "slowdown", lambda seconds: next(found))
    monkeypatch.setattr(pace.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(pace.time, "sleep", slept.append)
    assert pace.wait_for_pace(1.25, 60.0, said.append) == 1.1
    assert said == [1.6, 1.4]
    assert slept == [pace.PAUSE_SECONDS] * 2
    # Who has no patience looks once, and goes on.
    assert pace.wait_for_pace(1.25, 0.0, said.append) == 1.5
    assert said == [1.6, 1.4]


def test_work_that_fails_is_not_taken_for_an_answer(monkeypatch) -> None:
    monkeypatch.setattr(pace, "__file__", "/nowhere/pace.py")
    with pytest.raises(subprocess.CalledProcessError):
        pace.slowdown(0.01)
