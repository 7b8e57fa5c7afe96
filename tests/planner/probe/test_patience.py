"""Timing while the machine is as good as it gets."""

from collections.abc import Sequence

import pytest

from planner.probe.host import disturbance_notes
from planner.probe.timing import PAUSE_SECONDS, Patience, undisturbed


class Machine:
    """A machine whose clock moves when it is told to, disturbed as a list says."""

    def __init__(self, levels: Sequence[float]) -> None:
        self.now, self.found = 0.0, list(levels)

    def level(self) -> float:
        """The next of the list; the last for ever."""
        return self.found.pop(0) if len(self.found) > 1 else self.found[0]

    def work(self) -> float:
        """Takes a second; the moment it ends."""
        self.now += 1.0
        return self.now

    def sleep(self, seconds: float) -> None:
        """Moves the clock."""
        self.now += seconds

    def patience(self, **how: float) -> Patience:
        """With this machine."""
        return Patience(self.level, clock=lambda: self.now, sleep=self.sleep, **how)


def test_on_a_steady_machine_everything_is_timed_once() -> None:
    machine = Machine([0.5, 0.95])
    patience = machine.patience(seconds=10.0)
    assert [patience.timed(machine.work) for _ in range(3)] == [1.0, 2.0, 3.0]
    assert (patience.timed_seconds, patience.lost_seconds) == (3.0, 0.0)


def test_it_waits_for_the_machine_before_timing() -> None:
    machine = Machine([3.0, 3.0, 0.5])
    patience = machine.patience(seconds=10.0)
    assert patience.timed(machine.work) == pytest.approx(1.0 + 2 * PAUSE_SECONDS)
    assert patience.lost_seconds == pytest.approx(2 * PAUSE_SECONDS)
    assert patience.num_disturbed == 0


def test_what_was_slowed_down_meanwhile_is_timed_again() -> None:
    machine = Machine([0.5, 3.0, 0.5])  # before, after; before, after
    patience = machine.patience(seconds=10.0)
    assert patience.timed(machine.work) == 2.0
    assert (patience.timed_seconds, patience.lost_seconds) == (1.0, 1.0)


def test_patience_ends_and_what_there_is_is_taken() -> None:
    machine = Machine([3.0])
    patience = machine.patience(seconds=1.0)
    found = patience.timed(machine.work)
    assert patience.num_disturbed == 1
    assert patience.lost_seconds == pytest.approx(1.0, abs=PAUSE_SECONDS)
    assert found == pytest.approx(2.0, abs=PAUSE_SECONDS)
    # No more is waited afterwards.
    assert patience.timed(machine.work) == found + 1.0


def test_patience_grows_with_what_was_timed() -> None:
    machine = Machine([0.5, 0.5, 3.0])
    patience = machine.patience(share=0.5)
    patience.timed(machine.work)  # undisturbed
    before = machine.now
    patience.timed(machine.work)
    # Half a second for the first, of which the second, timed so, gives half a second more.
    assert patience.num_disturbed == 1
    assert machine.now - before <= 1.0 + 1.0 + 0.5 + 2 * PAUSE_SECONDS
    assert patience.lost_seconds > 0.0


def test_what_was_timed_in_vain_gives_no_patience() -> None:
    machine = Machine([0.5, 0.5] + [0.5, 3.0] * 20)  # only ever slow at the end
    patience = machine.patience(share=1.0)
    patience.timed(machine.work)
    patience.timed(machine.work)
    # One second kept and the one at hand allow two in vain; the third is kept as it is.
    assert (machine.now, patience.lost_seconds, patience.timed_seconds) == (4.0, 2.0, 2.0)
    assert patience.num_disturbed == 1


def test_who_has_none_times_once() -> None:
    machine = Machine([3.0])
    patience = machine.patience()
    assert patience.timed(machine.work) == 1.0
    assert patience.num_disturbed == 1
    assert undisturbed().timed(machine.work) == 2.0


def test_the_reader_is_told_of_cores_that_were_far_apart() -> None:
    quiet = Machine([0.5]).patience(seconds=5.0)
    quiet.timed(lambda: None)
    assert disturbance_notes(quiet) == []
    machine = Machine([3.0])
    patience = machine.patience(seconds=3.0)
    patience.timed(machine.work)
    (note,) = disturbance_notes(patience)
    assert note.startswith("cores: for 3 s of the probe")
    assert "1 points were taken so" in note
