"""Rounds of timings: everything once in each, more where they differ, and which is kept."""

from dataclasses import replace
from typing import Any

import pytest

from planner.probe.timing import Patience
from planner.profile.loader_seconds import InLine, LoadingAnswer
from planner.profile.model_seconds import STEPS
from planner.profile.protocol import TimingRequest
from planner.profile.team import Team
from planner.profile.timing_rounds import (
    MOST_ROUNDS,
    MOST_STEPS,
    ROUNDS,
    SCALE_SECONDS,
    STEP_ROUNDS,
    TimedBatch,
    time_all,
)
from planner.settings import PlanSettings
from planner.workload import Combination
from runtime.graph.dataset import Graph
from runtime.plan.schema import Workload
from tests.support.profiles import profile as by_hand
from tests.support.timings import answer


class Recorded(Team):
    """A team that answers at once, every round as it was told."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds
        self.calls: list[Any] = []
        self.requests: list[TimingRequest] = []

    def time(self, request: TimingRequest, ranks: int) -> list[Any]:
        """So many ranks' answers."""
        seconds = self.seconds[self.calls.count((ranks, request.threads))]
        self.calls.append((ranks, request.threads))
        self.requests.append(request)
        line = InLine(sample_seconds=seconds / 10, sample_spread=0.0, gathers={})
        return [replace(answer(seconds), all_reduce=[seconds] * 3, in_line=line)] * ranks

    def load(self, request: TimingRequest, ranks: int) -> LoadingAnswer:
        """A start of the disk for each round."""
        seconds = self.seconds[self.calls.count(f"load {ranks}")]
        self.calls.append(f"load {ranks}")
        self.requests.append(request)
        return LoadingAnswer(after_wait=None, beside={}, disk_start_seconds=seconds)


def test_a_round_goes_through_all_ranks_and_threads_and_their_loading(small_graph: Graph) -> None:
    settings = PlanSettings(workload=Workload(batch_size=100, fanouts=[3, 2]))
    batches = by_hand(50, 10).numbers.batches
    one = [Combination(ranks=1, threads=t) for t in (2, 1)]
    two = [Combination(ranks=2, threads=1)]
    wanted = [
        TimedBatch(batch=batches[0], combinations=one, settings=settings),
        TimedBatch(batch=batches[1], combinations=two, settings=settings),
    ]
    team, told = Recorded([3.0, 1.9, 1.8, *[2.0] * 6]), list[float]()
    found = time_all(
        small_graph, wanted, team, lambda _, share: told.append(share), Patience(lambda: 0.0)
    )
    first, others = [(1, 1), (1, 2), "load 1", (2, 1), "load 2"], [(1, 1), (1, 2), (2, 1)]
    assert team.calls == first * ROUNDS + others * (STEP_ROUNDS - ROUNDS)
    assert told == [i / (3 * STEP_ROUNDS) for i in range(3 * STEP_ROUNDS)]
    for each, ranks, threads in zip(found, (1.0, 2.0), (2.0, 1.0), strict=True):
        middle = each.model.forward_backward.at(scale=1.0, ranks=ranks, threads=threads)
        assert middle == pytest.approx(2 * 2.0)  # of scale 1 the fourth quickest's
        assert each.in_line is not None
        assert each.in_line.sample_seconds == 0.2
        assert each.loading.disk_start_seconds == 1.9  # in the middle of three
    # Steps follow the loading of a rank of as many.
    assert [each.loading.num_ranks for each in team.requests if each.loading][:5] == [1, 1, 1, 2, 2]
    assert [each.times_loading for each in team.requests][:5] == [False, False, True, False, True]


def one_batch() -> TimedBatch:
    """One rank with one thread."""
    return TimedBatch(
        batch=by_hand(50, 10).numbers.batches[0],
        combinations=[Combination(ranks=1, threads=1)],
        settings=PlanSettings(workload=Workload(batch_size=100, fanouts=[3, 2])),
    )


@pytest.mark.parametrize(
    ("seconds", "rounds", "kept"),
    [
        ([1.5, 1.6, 1.0, *[1.55] * 6, 1.5, 1.05], 11, 1.5),  # until two agree
        # A bound: never two that agree; the fifth is kept of twelve.
        ([3.0, 1.0, 4.0, 1.2, 1.4, *[5.0] * 6, 1.6, 1.8], MOST_ROUNDS, 3.0),
        ([1.07, 1.0, 3.0, *[1.08] * 6], STEP_ROUNDS, 1.08),
    ],
)
def test_rounds_that_differ_are_followed_by_more_until_the_two_quickest_agree(
    small_graph: Graph, seconds: list[float], rounds: int, kept: float
) -> None:
    team = Recorded(seconds)
    (each,) = time_all(small_graph, [one_batch()], team, None, Patience(lambda: 0.0))
    assert team.calls.count((1, 1)) == rounds
    assert team.calls.count("load 1") == ROUNDS
    found = each.model.forward_backward.at(scale=1.0, ranks=1, threads=1)
    assert found == pytest.approx(2 * kept)
    # Of the same round.
    assert each.in_line is not None
    assert each.in_line.sample_seconds == pytest.approx(kept / 10)


def test_progress_counts_the_rounds_that_fit(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.profile.timing_rounds.MORE_SECONDS", 0.0)
    team, told = Recorded([1.0] * ROUNDS), list[float]()
    time_all(
        small_graph, [one_batch()], team, lambda _, share: told.append(share), Patience(lambda: 0.0)
    )
    assert told == [0.0, *[number / ROUNDS for number in range(1, ROUNDS)]]


def impatient(team: Recorded, disturbed: int) -> Patience:
    """Takes what there is, of a machine that is disturbed until so many rounds of steps were."""
    return Patience(lambda: 3.0 if team.calls.count((1, 1)) < disturbed else 0.0)


def test_rounds_that_were_disturbed_are_left_out_and_made_up_for(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.profile.timing_rounds.STEP_ROUNDS", ROUNDS)
    team = Recorded([1.0, 1.0, 1.5, 1.55])
    (each,) = time_all(small_graph, [one_batch()], team, None, impatient(team, 2))
    assert team.calls.count((1, 1)) == 4
    assert each.model.forward_backward.at(scale=1.0, ranks=1, threads=1) == pytest.approx(2 * 1.55)
    assert each.in_line is not None
    assert each.in_line.sample_seconds == pytest.approx(0.155)
    # Loading followed the first round while the machine was still disturbed.
    assert each.loading.disk_start_seconds == pytest.approx((1.0 + 1.5) / 2)


@pytest.mark.parametrize(("seconds", "rounds"), [(60.0, MOST_ROUNDS), (0.0, ROUNDS + 1)])
def test_a_machine_that_is_always_disturbed_is_timed_as_it_is(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch, seconds: float, rounds: int
) -> None:
    monkeypatch.setattr("planner.profile.timing_rounds.MORE_SECONDS", seconds)
    team = Recorded([2.0, 1.5, *[1.6] * MOST_ROUNDS])
    (each,) = time_all(small_graph, [one_batch()], team, None, impatient(team, 1000))
    assert team.calls.count((1, 1)) == rounds
    assert each.model.forward_backward.at(scale=1.0, ranks=1, threads=1) == pytest.approx(2 * 1.6)


@pytest.mark.parametrize("seconds", [0.0001, 0.004, 1.0])
def test_steps_of_later_rounds_fill_a_time(small_graph: Graph, seconds: float) -> None:
    team = Recorded([seconds] * MOST_ROUNDS)
    time_all(small_graph, [one_batch()], team, None, Patience(lambda: 0.0))
    first, *later = [each.steps for each in team.requests if not each.times_loading]
    mean = sum(answer(seconds).forward_backward) / 3
    assert first == STEPS
    filling = max(STEPS, min(MOST_STEPS, round(SCALE_SECONDS / mean + 0.5)))
    assert later == [filling] * (STEP_ROUNDS - 1)


@pytest.mark.parametrize(("seconds", "rounds"), [(60.0, STEP_ROUNDS), (0.0, ROUNDS)])
def test_rounds_that_take_longer_than_there_is_are_not_begun(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch, seconds: float, rounds: int
) -> None:
    monkeypatch.setattr("planner.profile.timing_rounds.MORE_SECONDS", seconds)
    team = Recorded([1.0] * MOST_ROUNDS)
    time_all(small_graph, [one_batch()], team, None, Patience(lambda: 0.0))
    assert team.calls.count((1, 1)) == rounds
