"""Tests for planner/profile/timing_rounds.py."""

from dataclasses import replace

from planner.profile.loader_seconds import LoadingAnswer, TimedDisk
from planner.profile.timing_rounds import middle_loading
from planner.workload import ColdCachePenalty, Interference, LoopOverhead


def answer(factor: float) -> LoadingAnswer:
    """Everything took `factor` times as long as in another round."""
    return LoadingAnswer(
        after_wait=ColdCachePenalty(wait_seconds=0.02 * factor, seconds=0.003 * factor),
        beside={"gather": Interference(work=0.9, step=1.0 + 0.1 * factor)},
        disk=TimedDisk(seconds=0.01 * factor, requests=50.0, request_bytes=4096.0),
        handing=LoopOverhead(seeds=2e-5 * factor, labels=3e-5 * factor, between=1e-4 * factor),
        disk_start_seconds=0.0004 * factor,
    )


def test_a_disk_that_is_slow_in_one_round_of_three_is_not_taken_for_slow() -> None:
    slow = replace(answer(1.0), disk=TimedDisk(seconds=0.016, requests=50.0, request_bytes=4096.0))
    found = middle_loading([answer(1.0), slow, answer(1.0)])
    assert found == answer(1.0)


def test_each_number_is_the_middle_of_its_own_rounds() -> None:
    rounds = [answer(3.0), answer(1.0), answer(2.0)]
    mixed = [replace(rounds[0], disk_start_seconds=0.0001), *rounds[1:]]
    found = middle_loading(mixed)
    assert found.disk_start_seconds == 0.0004
    assert replace(found, disk_start_seconds=0.0008, beside={}) == replace(answer(2.0), beside={})
    # Of what is beside steps, the round that slowed them least, work and all.
    assert found.beside == answer(1.0).beside


def test_work_beside_steps_is_of_the_rounds_that_slowed_steps_least() -> None:
    def beside(*works: tuple[float, float]) -> Interference:
        rounds = [
            replace(answer(1.0), beside={"disk": Interference(work=work, step=step)})
            for work, step in works
        ]
        return middle_loading(rounds).beside["disk"]

    assert beside((0.9, 1.0), (1.25, 1.1), (1.3, 1.2)) == Interference(work=0.9, step=1.0)
    # Where all slowed them alike, none is better than another.
    assert beside((1.25, 1.0), (0.81, 1.0), (0.97, 1.004)) == Interference(work=0.97, step=1.0)


def test_what_was_not_timed_stays_so() -> None:
    bare = LoadingAnswer(after_wait=None, beside={})
    assert middle_loading([bare, bare, bare]) == bare
    assert middle_loading([answer(1.0)]) == answer(1.0)
