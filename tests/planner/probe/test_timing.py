"""Tests for planner/probe/timing.py, with clocks and timers of our own."""

import time
from collections.abc import Sequence

import numpy as np
import pytest

from planner.probe.timing import (
    NoisePolicy,
    noise_floor,
    robust_spread,
    settled,
    summarize,
    timed,
    wait_until,
)

QUIET = [1.0, 1.01, 0.99, 1.0, 1.0]
NOISY = [1.0, 3.0, 0.2, 2.0, 1.0]


class FakeClock:
    """A clock that moves only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Attempts:
    """Gives prepared attempts in turn and counts them."""

    def __init__(self, *attempts: Sequence[float]) -> None:
        self.attempts = list(attempts)
        self.made = 0

    def __call__(self) -> Sequence[float]:
        self.made += 1
        return self.attempts[min(self.made, len(self.attempts)) - 1]


def test_robust_spread_is_the_coefficient_of_variation_of_normal_samples():
    samples = np.random.default_rng(0).normal(10.0, 0.5, size=20_000)
    assert robust_spread(list(samples)) == pytest.approx(0.05, rel=0.03)


def test_robust_spread_ignores_one_outlier():
    assert robust_spread([1.0] * 9 + [100.0]) == 0.0


def test_a_quiet_point_is_measured_once():
    attempts = Attempts(QUIET)
    found = settled(attempts, NoisePolicy(limit=0.1))
    assert (attempts.made, found.attempts, found.uncertain) == (1, 1, False)
    assert found.value == 1.0


def test_a_point_that_stays_noisy_is_repeated_three_times_and_marked_uncertain():
    attempts = Attempts(NOISY)
    found = settled(attempts, NoisePolicy(limit=0.1))
    assert (attempts.made, found.attempts, found.uncertain) == (3, 3, True)


def test_a_point_that_becomes_quiet_is_accepted_with_its_attempts_counted():
    attempts = Attempts(NOISY, QUIET, NOISY)
    found = settled(attempts, NoisePolicy(limit=0.1))
    assert (attempts.made, found.attempts, found.uncertain) == (2, 2, False)


def test_of_noisy_attempts_the_quietest_is_kept():
    calmer = [1.0, 1.3, 0.7, 1.2, 0.9]
    found = settled(Attempts(NOISY, calmer, NOISY), NoisePolicy(limit=0.01))
    assert found.spread == robust_spread(calmer)
    assert found.uncertain


def test_nothing_is_repeated_after_the_deadline():
    clock = FakeClock()
    clock.now = 11.0
    attempts = Attempts(NOISY)
    found = settled(attempts, NoisePolicy(limit=0.1, deadline=10.0, clock=clock))
    assert (attempts.made, found.uncertain) == (1, True)


def test_no_samples_are_refused():
    with pytest.raises(ValueError, match="at least one sample"):
        summarize([])


def test_timed_calls_at_least_the_least_and_until_the_time_is_up():
    clock = FakeClock()

    def kernel() -> None:
        clock.now += 2.0

    assert timed(kernel, seconds=1.0, least=3, clock=clock) == [2.0, 2.0, 2.0]
    assert len(timed(kernel, seconds=9.0, least=1, clock=clock)) == 5


def test_noise_floor_of_a_noisy_kernel_is_its_coefficient_of_variation():
    clock = FakeClock()
    factors = iter([1.0] * 4 + [0.9, 1.1] * 5)  # sizing calls first

    def kernel(num_loops: int) -> None:
        clock.now += num_loops * 1e-3 * next(factors)

    # Sizing: 32 loops take 0.032 s; then 10 calls alternate between 0.9 and 1.1: CV 0.1, by hand.
    factors = iter([1.0] + [0.9, 1.1] * 5)
    found = noise_floor(kernel_seconds=1.0, repeats=10, kernel=kernel, clock=clock)
    assert found == pytest.approx(0.1)


def test_noise_floor_is_never_zero():
    clock = FakeClock()

    def kernel(num_loops: int) -> None:
        clock.now += num_loops * 1e-3

    assert noise_floor(kernel_seconds=0.1, repeats=3, kernel=kernel, clock=clock) == 0.005


def test_wait_until_returns_at_the_moment_and_not_before():
    moment = time.perf_counter() + 0.01
    wait_until(moment)
    assert time.perf_counter() >= moment
    wait_until(moment)  # a moment that has passed is not waited for
