"""Seconds of a bounded pipeline, against its law for many batches and against events in order."""

import heapq

import numpy as np
import pytest

from gnnplan.planner.cost.pipeline_time import (
    finish_times,
    period,
    slow_each_other,
    stochastic_period,
)


def test_two_workers_share_the_loaders_work_when_both_slow_each_other_down() -> None:
    # Each of two workers takes 20 s in company, a batch every 10 s, as the trainer does.
    both = {"loader_slowdown": 2.0, "trainer_slowdown": 2.0}
    assert slow_each_other(10.0, 5.0, **both, workers=2) == pytest.approx((20.0, 10.0))
    # Twice the work by twice the workers slows the trainer down just as much.
    for loader, trainer in ((3.0, 7.0), (9.0, 2.0)):
        one = slow_each_other(loader, trainer, loader_slowdown=1.5, trainer_slowdown=1.3)
        two = slow_each_other(
            2 * loader, trainer, loader_slowdown=1.5, trainer_slowdown=1.3, workers=2
        )
        assert two == pytest.approx((2 * one[0], one[1]))


def test_each_is_slowed_down_for_the_share_of_the_time_that_the_other_works() -> None:
    loader, trainer = slow_each_other(4.0, 10.0, loader_slowdown=1.5, trainer_slowdown=1.3)
    cycle = max(loader, trainer)
    # Work done at rate 1 alone and at 1 / slowdown in company adds up to what there is to do.
    assert loader * (trainer / cycle / 1.5 + 1 - trainer / cycle) == pytest.approx(4.0)
    assert trainer * (loader / cycle / 1.3 + 1 - loader / cycle) == pytest.approx(10.0)
    assert slow_each_other(0.0, 0.0, loader_slowdown=2.0, trainer_slowdown=2.0) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("loader", "trainer", "workers", "mean"),
    [(4.0, 10.0, 1, 10.0), (10.0, 4.0, 1, 10.0), (20.0, 4.0, 2, 10.0)],
)
def test_random_times_cost_nothing_where_many_batches_may_wait(
    loader: float, trainer: float, workers: int, mean: float
) -> None:
    found = stochastic_period(loader, trainer, variation=0.2, depth=10_000, workers=workers)
    assert found == pytest.approx(mean, rel=5e-3)


def test_random_times_cost_more_where_few_batches_may_wait() -> None:
    found = [stochastic_period(8.0, 8.0, variation=0.5, depth=d) for d in (1, 2, 4, 64)]
    assert found == sorted(found, reverse=True)
    # One slot, free when its batch is taken: the slower of the two each time. For equal lognormal
    # times E max = 2 m Phi(sigma / sqrt 2), sigma^2 = ln(1 + .5^2).
    assert found[0] == pytest.approx(2 * 8.0 * 0.63088, rel=0.02)
    assert found[-1] == pytest.approx(8.0, rel=0.05)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_batches_leave_when_a_worker_a_slot_and_the_batch_before_allow(
    workers: int, depth: int
) -> None:
    """Against a loader simulated by hand: workers pick batches in order where a slot is free."""
    seconds = np.random.default_rng(workers + 10 * depth).uniform(1, 9, (2, 40))
    found = finish_times(seconds, [depth], workers=workers)
    free, trained, ready = [0.0] * workers, [0.0] * 40, [0.0] * 40
    for m in range(40):
        slot = trained[m - depth] if m >= depth else 0.0
        began = max(found[0, m - workers] if m >= workers else 0.0, slot)
        heapq.heapreplace(free, began + seconds[0, m])
        ready[m] = began + seconds[0, m]
        trained[m] = max(ready[m], trained[m - 1] if m else 0.0) + seconds[1, m]
    assert found[0] == pytest.approx(ready)
    assert found[1] == pytest.approx(trained)


def test_a_pipeline_is_as_slow_as_its_tightest_bound() -> None:
    assert period([4.0, 6.0], workers=[2, 1]) == 6.0
    assert period([8.0, 3.0], workers=[2, 1]) == 4.0
    assert period([4.0, 6.0], depths=[1]) == 10.0
    assert period([4.0, 6.0], depths=[1], freed_at_start=True) == 6.0
    assert period([4.0, 6.0, 2.0], in_flight=2) == 6.0
    assert period([4.0, 6.0], in_flight=1) == 10.0
    assert period([4.0, 6.0, 1.0], shared=[(1.5, [0, 1])]) == 15.0
