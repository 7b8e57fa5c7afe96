"""One second try of what was disturbed or noisy, within a bound."""

from collections.abc import Sequence
from typing import Any

import pytest

from gnnplan.planner.probe.timing import Patience


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

    def patience(self, **how: Any) -> Patience:
        """With this machine."""
        return Patience(self.level, clock=lambda: self.now, **how)


def test_on_a_steady_machine_everything_is_timed_once() -> None:
    machine = Machine([0.5, 0.95])
    patience = machine.patience(seconds=10.0)
    assert [patience.timed(machine.work) for _ in range(3)] == [1.0, 2.0, 3.0]
    assert (patience.timed_seconds, patience.lost_seconds, patience.num_disturbed) == (3.0, 0.0, 0)


@pytest.mark.parametrize("levels", [[3.0, 0.5], [0.5, 3.0, 0.5]])
def test_what_was_disturbed_before_or_after_is_timed_again(levels: list[float]) -> None:
    machine = Machine(levels)
    patience = machine.patience(seconds=10.0)
    assert patience.tried(machine.work) == (2.0, False)
    assert (patience.timed_seconds, patience.lost_seconds, patience.num_disturbed) == (1.0, 1.0, 0)


def test_there_is_one_second_try_and_no_third() -> None:
    machine = Machine([3.0])
    patience = machine.patience(seconds=100.0)
    assert patience.tried(machine.work) == (1.0, True)
    assert (machine.now, patience.num_disturbed) == (2.0, 1)


def test_second_tries_take_no_longer_than_the_bound() -> None:
    machine = Machine([3.0])
    patience = machine.patience(seconds=2.5)
    for _ in range(5):
        patience.timed(machine.work)
    # Two of a second each fit into two and a half.
    assert (machine.now, patience.lost_seconds, patience.num_disturbed) == (7.0, 2.0, 5)


def test_the_bound_grows_with_what_was_timed() -> None:
    machine = Machine([0.5] * 4 + [3.0])
    patience = machine.patience(share=0.5)
    for _ in range(3):
        patience.timed(machine.work)
    # The third is disturbed: 1.5 s are allowed for its second try.
    assert (machine.now, patience.lost_seconds) == (4.0, 1.0)


def test_time_that_is_left_bounds_a_second_try() -> None:
    machine = Machine([3.0])
    left = Patience(machine.level, left=lambda: 2.5 - machine.now, clock=lambda: machine.now)
    left.timed(machine.work)
    assert machine.now == 2.0
    left.timed(machine.work)
    assert machine.now == 3.0


def test_of_two_tries_the_undisturbed_one_is_kept_else_the_less_noisy_one() -> None:
    readings = iter([("noisy", 0.3), ("noisier", 0.4), ("first", 0.3), ("second", 0.2)])

    def noise(found: tuple[str, float]) -> float:
        return found[1]

    calm_again = Machine([3.0, 3.0, 0.5, 0.5]).patience(seconds=10.0)
    assert calm_again.tried(lambda: next(readings), noise) == (("noisier", 0.4), False)
    calm = Patience(lambda: 0.0, seconds=10.0)
    assert calm.tried(lambda: next(readings), noise) == (("second", 0.2), False)


def test_who_has_none_times_once() -> None:
    machine = Machine([3.0])
    patience = machine.patience()
    assert patience.timed(machine.work) == 1.0
    assert patience.num_disturbed == 1
    assert Patience(lambda: 0.0).timed(machine.work) == 2.0
