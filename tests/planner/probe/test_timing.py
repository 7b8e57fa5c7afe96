"""Tests for planner/probe/timing.py, with clocks and timers of our own."""

import time

import numpy as np
import pytest

from gnnplan.planner.probe.timing import (
    Interlude,
    noise_floor,
    robust_spread,
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


def test_robust_spread_is_the_coefficient_of_variation_of_normal_samples():
    samples = np.random.default_rng(0).normal(10.0, 0.5, size=20_000)
    assert robust_spread(list(samples)) == pytest.approx(0.05, rel=0.03)


def test_robust_spread_ignores_one_outlier():
    assert robust_spread([1.0] * 9 + [100.0]) == 0.0


def test_noisy_samples_and_one_alone_are_uncertain_where_a_limit_is_set():
    assert not summarize(QUIET, limit=0.1).uncertain
    assert summarize(NOISY, limit=0.1).uncertain
    assert summarize([1.0], limit=0.1).uncertain
    assert not summarize([1.0]).uncertain


def test_no_samples_are_refused():
    with pytest.raises(ValueError, match="at least one sample"):
        summarize([])


def test_timed_calls_at_least_the_least_and_until_the_time_is_up():
    clock = FakeClock()

    def kernel() -> None:
        clock.now += 2.0

    assert timed(kernel, seconds=1.0, least=3, clock=clock) == [2.0, 2.0, 2.0]
    assert len(timed(kernel, seconds=9.0, least=1, clock=clock)) == 5


def test_calls_that_take_too_long_are_fewer_than_the_least_but_one():
    clock = FakeClock()

    def kernel() -> None:
        clock.now += 2.0

    assert len(timed(kernel, seconds=1.0, least=9, most=3.0, clock=clock)) == 2
    assert len(timed(kernel, seconds=1.0, least=9, most=0.0, clock=clock)) == 1


def test_what_comes_before_a_call_is_not_timed():
    calls, moments = list[str](), iter(np.arange(100.0))
    found = timed(
        lambda: calls.append("kernel"),
        seconds=0.0,
        least=3,
        clock=lambda: float(next(moments)),
        before=lambda: calls.append("before"),
    )
    assert calls == ["before", "kernel"] * 3
    assert found == [1.0, 1.0, 1.0]


def test_an_interlude_can_be_repeated():
    interlude = Interlude(rows=8, columns=4)
    assert interlude() is None
    assert interlude() is None


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
