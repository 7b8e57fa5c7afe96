"""Is the machine quiet? A small step beside its good moments, and what earlier runs have seen."""

import json
from pathlib import Path

import pytest
import torch

from gnnplan.planner.array_cache import cache_folder
from gnnplan.planner.probe import quiet as module
from gnnplan.planner.probe.doctor import examine
from gnnplan.planner.probe.quiet import (
    SLOW,
    Disturbance,
    disturbance,
    disturbance_notes,
    seen_before,
    step_seconds,
)
from gnnplan.planner.probe.timing import DISTURBED


class Machine:
    """A machine whose small step takes so many milliseconds, and whose clock is told to move."""

    def __init__(self) -> None:
        self.now, self.looks, self.milliseconds = 0.0, 0, 2.0

    def look(self) -> float:
        """Find the seconds of a step."""
        self.looks += 1
        return self.milliseconds * 1e-3

    def slowdowns(self, milliseconds: list[float], apart: float = 1.0) -> list[float]:
        """Look so far apart while a step takes so long."""
        disturbed, found = Disturbance((), self.look, lambda: self.now), list[float]()
        for each in milliseconds:
            self.now += apart
            self.milliseconds = each
            found.append(disturbed.slowdown())
        self.kept = len(disturbed.seen)
        return found


def test_a_glimpse_of_something_better_makes_no_other_moment_a_bad_one() -> None:
    slowdowns = Machine().slowdowns([2.0] * 20 + [1.0] + [2.0] * 20 + [2.2])
    assert slowdowns[-1] == pytest.approx(1.1)


def test_a_quarter_of_the_looks_is_good_enough() -> None:
    assert Machine().slowdowns([4.0] * 60 + [2.0] * 25 + [4.0])[-1] == pytest.approx(2.0)


def test_a_long_disturbance_that_is_looked_at_often_does_not_become_the_rule() -> None:
    # 10 s of good ones, then 6 s in which somebody looks four times a second.
    machine = Machine()
    assert machine.slowdowns([2.0] * 40 + [4.0] * 24, apart=0.25)[-1] == pytest.approx(2.0)
    assert machine.kept == 16


def test_what_is_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LOOKS", 100)
    assert Machine().slowdowns([2.0] * 90 + [3.0] * 100)[-1] == pytest.approx(1.0)


def test_looks_that_follow_each_other_at_once_are_one() -> None:
    machine = Machine()
    disturbed = Disturbance((), machine.look, lambda: machine.now)
    for machine.now in (0.0, 0.1, 0.19, 0.3):
        disturbed.level()
    assert machine.looks == 2


@pytest.mark.parametrize(("milliseconds", "is_disturbed"), [(2.15, False), (2.17, True)])
def test_a_slow_step_disturbs(milliseconds: float, is_disturbed: bool) -> None:
    machine = Machine()
    machine.milliseconds = milliseconds
    level = Disturbance([2e-3] * 9, machine.look).level()
    assert (level >= DISTURBED) is is_disturbed
    assert level == pytest.approx(milliseconds / 2 / SLOW)


def test_what_was_seen_is_remembered(tmp_path: Path) -> None:
    machine = Machine()
    with disturbance(tmp_path, machine.look) as found:
        found.level()
    machine.milliseconds = 4.0
    with disturbance(tmp_path, machine.look) as found:
        assert found.slowdown() == pytest.approx(2.0)
    (path,) = tmp_path.glob("cores-*.json")
    assert json.loads(path.read_text()) == [0.002, 0.004]


@pytest.mark.parametrize(
    "text",
    ["", "{", "\x00", "1", "null", '["x"]', "[null]", "[[1]]", "[-1]", "[0]", "[NaN]", "[1e999]",
     '{"0-1": {"20": 1}}'],
)  # fmt: skip
def test_a_damaged_memory_is_begun_anew(tmp_path: Path, text: str) -> None:
    machine = Machine()
    with disturbance(tmp_path, machine.look) as found:
        found.level()
    (path,) = tmp_path.glob("cores-*.json")
    path.write_text(text)
    assert seen_before(tmp_path) == []
    with disturbance(tmp_path, machine.look) as found:
        assert found.slowdown() == 1.0
    assert json.loads(path.read_text()) == [0.002]


def test_the_step_leaves_threads_and_random_numbers_as_they_were() -> None:
    before, state = torch.get_num_threads(), torch.random.get_rng_state()
    assert 0.0 < step_seconds() < 1.0
    assert torch.get_num_threads() == before
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_doctor_looks_once_and_writes_nothing_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "step_seconds", lambda: 2e-3)

    def found() -> tuple[str, str]:
        (finding,) = [each for each in examine() if each.check == "quiet"]
        return finding.level, finding.found

    assert found() == ("ok", "looked at for the first time")
    assert not list(tmp_path.iterdir())
    with disturbance(cache_folder()) as seen:
        seen.level()
    assert found() == ("ok", "as at its best")
    monkeypatch.setattr(module, "step_seconds", lambda: 5e-3)
    level, words = found()
    assert level == "note"
    assert "takes 2.5 times" in words


def test_the_reader_is_told_of_points_that_were_disturbed() -> None:
    assert disturbance_notes(0) == []
    (note,) = disturbance_notes(7)
    assert note.startswith("disturbed: 7 points were measured")
