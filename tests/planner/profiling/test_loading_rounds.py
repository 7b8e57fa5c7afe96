"""Tests for planner/profiling/loading_rounds.py."""

from dataclasses import replace

import pytest

from planner.profiling.loader_seconds import LoadingAnswer, TimedDisk, TimedGather
from planner.profiling.loading_rounds import middle_loading
from planner.workload import AfterWait, Beside, Handing


def answer(factor: float) -> LoadingAnswer:
    """Everything took `factor` times as long as in another round."""
    return LoadingAnswer(
        sample_seconds=0.001 * factor,
        gathers={
            "gather": TimedGather(
                seconds=0.002 * factor, rows=100.0, row_bytes=64, table_bytes=6400
            )
        },
        after_wait=AfterWait(wait_seconds=0.02 * factor, seconds=0.003 * factor),
        beside={"gather": Beside(work=0.9, step=1.0 + 0.1 * factor)},
        disk=TimedDisk(seconds=0.01 * factor, requests=50.0, request_bytes=4096.0),
        handing=Handing(seeds=2e-5 * factor, labels=3e-5 * factor, between=1e-4 * factor),
        disk_start_seconds=0.0004 * factor,
    )


def test_a_disk_that_is_slow_in_one_round_of_three_is_not_taken_for_slow() -> None:
    slow = replace(answer(1.0), disk=TimedDisk(seconds=0.016, requests=50.0, request_bytes=4096.0))
    found = middle_loading([answer(1.0), slow, answer(1.0)])
    assert found == answer(1.0)


def test_each_number_is_the_middle_of_its_own_rounds() -> None:
    rounds = [answer(3.0), answer(1.0), answer(2.0)]
    mixed = [replace(rounds[0], sample_seconds=0.0005), *rounds[1:]]
    found = middle_loading(mixed)
    assert found.sample_seconds == 0.001
    spread = found.sample_spread
    expected = replace(answer(2.0), beside={}, sample_spread=spread)
    assert replace(found, sample_seconds=0.002, beside={}) == expected
    # Of what is beside steps, the round that slowed them least, work and all.
    assert found.beside == answer(1.0).beside


def test_work_beside_steps_is_of_the_rounds_that_slowed_steps_least() -> None:
    def beside(*works: tuple[float, float]) -> Beside:
        rounds = [
            replace(answer(1.0), beside={"disk": Beside(work=work, step=step)})
            for work, step in works
        ]
        return middle_loading(rounds).beside["disk"]

    assert beside((0.9, 1.0), (1.25, 1.1), (1.3, 1.2)) == Beside(work=0.9, step=1.0)
    # Where all slowed them alike, none is better than another.
    assert beside((1.25, 1.0), (0.81, 1.0), (0.97, 1.004)) == Beside(work=0.97, step=1.0)


def test_the_spread_of_sampling_is_of_its_repeats_or_of_its_rounds() -> None:
    alike = [replace(answer(1.0), sample_spread=each) for each in (0.3, 0.02, 0.04)]
    assert middle_loading(alike).sample_spread == 0.04
    # 0.8, 1.0 and 1.1 of the middle one: half of 0.3.
    apart = [replace(answer(each), sample_spread=0.02) for each in (0.8, 1.0, 1.1)]
    assert middle_loading(apart).sample_spread == pytest.approx(0.15)


def test_what_was_not_timed_stays_so() -> None:
    bare = LoadingAnswer(sample_seconds=1.0, gathers={}, after_wait=None, beside={})
    assert middle_loading([bare, bare, bare]) == bare
    assert middle_loading([answer(1.0)]) == answer(1.0)
