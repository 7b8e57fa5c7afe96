"""Timings within a time: what is visited, what is left out, what is kept and what is said."""

from dataclasses import replace
from typing import Any

import pytest

from gnnplan.planner.profile.protocol import (
    InLine,
    LoadingAnswer,
    TimedDisk,
    TimedGather,
    TimingAnswer,
    TimingRequest,
)
from gnnplan.planner.profile.schedule import (
    APART,
    LEAST_SECONDS,
    ROUNDS,
    TimedBatch,
    in_line_of,
    middle,
    middle_round,
    time_all,
)
from gnnplan.planner.profile.team import Team
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import Combination, Interference
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Workload
from tests.support.clock import FakeClock
from tests.support.profiles import profile as by_hand
from tests.support.timings import answer

SETTINGS = PlanSettings(workload=Workload(batch_size=100, fanouts=[3, 2]))


class Recorded(Team):
    """A team that answers at once, every round as it was told, and takes its time to do so."""

    def __init__(
        self, seconds: dict[tuple[int, int], list[float]], clock: FakeClock, late: float = 0.0
    ) -> None:
        """Seconds of each round by (ranks, threads); each visit is `late` by some seconds."""
        self.seconds, self.clock, self.late = seconds, clock, late
        self.calls: list[Any] = []
        self.requests: list[TimingRequest] = []

    def time(self, request: TimingRequest, ranks: int) -> list[TimingAnswer]:
        """So many ranks' answers."""
        number = self.calls.count((ranks, request.threads))
        seconds = self.seconds[ranks, request.threads][number]
        self._take((ranks, request.threads), request)
        line = InLine(sample_seconds=seconds / 10, sample_spread=0.0, gathers={})
        found = replace(answer(seconds), optimizer_seconds=1e-3, all_reduce=[0.0], in_line=line)
        return [found] * ranks

    def load(self, request: TimingRequest, ranks: int) -> LoadingAnswer:
        """A start of the disk for each round."""
        number = self.calls.count(f"load {ranks}")
        self._take(f"load {ranks}", request)
        return LoadingAnswer(after_wait=None, beside={}, disk_start_seconds=1.0 + number)

    def _take(self, what: object, request: TimingRequest) -> None:
        self.calls.append(what)
        self.requests.append(request)
        self.clock.sleep(request.seconds + self.late)


def two_sizes() -> list[TimedBatch]:
    """One rank with one thread or two, and two ranks."""
    batches = by_hand(50, 10).numbers.batches
    one = [Combination(ranks=1, threads=t) for t in (2, 1)]
    two = [Combination(ranks=2, threads=1)]
    return [
        TimedBatch(batch=batches[0], combinations=one, settings=SETTINGS),
        TimedBatch(batch=batches[1], combinations=two, settings=SETTINGS),
    ]


def one_size() -> list[TimedBatch]:
    """One rank with one thread."""
    return [replace(two_sizes()[0], combinations=[Combination(ranks=1, threads=1)])]


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gnnplan.planner.profile.model_seconds.usable_core_ids", lambda: [0, 1])


def test_a_round_visits_what_each_size_needs_and_then_all_that_may_win(small_graph: Graph) -> None:
    clock, told = FakeClock(), list[tuple[str, float]]()
    even = {(1, 1): [2.0] * 3, (1, 2): [2.0] * 3, (2, 1): [2.0] * 3}
    team = Recorded(even, clock)
    found = time_all(
        small_graph, two_sizes(), team, lambda *said: told.append(said), 60.0, clock.perf_counter
    )
    first = [(1, 1), (2, 1), "load 1", "load 2", (1, 2)]
    assert team.calls == [*first, (1, 1), (1, 2), "load 1", (2, 1), "load 2"]
    assert told[0] == ("timing neighbor, 1 rank x 1 thread: round 1 of 2, at most 60 s more", 0.0)
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert clock.now <= 60.0
    for each, ranks, threads in zip(found, (1.0, 2.0), (2.0, 1.0), strict=True):
        table = each.model.forward_backward
        assert table.at(scale=1.0, ranks=ranks, threads=threads) == pytest.approx(4.0)
        assert not table.uncertain
        assert each.notes == []
        assert each.in_line is not None
        assert each.in_line.sample_seconds == 0.2
        assert each.loading.disk_start_seconds == 1.0  # the lower of two
    # Bytes are looked at once for each size.
    steps = [each for each in team.requests if not each.times_loading]
    assert [each.counts_bytes for each in steps] == [True, True, *[False] * 4]


def test_what_loses_by_more_than_its_interval_is_timed_twice_and_briefly(
    small_graph: Graph,
) -> None:
    clock = FakeClock()
    team = Recorded({(1, 1): [1.0] * 3, (1, 2): [1.1] * 3, (2, 1): [5.0, 4.9]}, clock)
    slow = time_all(small_graph, two_sizes(), team, None, 60.0, clock.perf_counter)[1]
    assert team.calls.count((2, 1)) == 2
    assert team.calls.count("load 2") == 1
    assert team.calls.count((1, 2)) == ROUNDS
    assert slow.notes == [
        "neighbor, 2 ranks x 1 thread: slower than another by more than its interval after 2 rounds"
    ]
    assert team.calls[-1] == (2, 1)
    assert team.requests[-1].seconds == LEAST_SECONDS
    # What is known of the others bounds how long a step is worth looking at.
    others = [each for each in team.requests if (each.threads, each.times_loading) == (2, False)]
    assert others[0].hopeless_seconds < 10.0


@pytest.mark.parametrize(("slow", "rounds"), [(5.0, 1), (1.2, ROUNDS)])
def test_no_round_is_begun_where_no_way_can_gain_enough(
    small_graph: Graph, slow: float, rounds: int
) -> None:
    clock = FakeClock()
    team = Recorded({(1, 1): [slow] * 3, (1, 2): [1.0] * 3, (2, 1): [slow] * 3}, clock)
    time_all(small_graph, two_sizes(), team, None, 60.0, clock.perf_counter, enough=0.05)
    assert team.calls.count((1, 2)) == rounds
    again = Recorded(team.seconds, FakeClock())
    time_all(small_graph, two_sizes(), again, None, 60.0, again.clock.perf_counter)
    assert again.calls.count((1, 2)) == ROUNDS


def test_what_one_disturbed_round_left_behind_comes_back(small_graph: Graph) -> None:
    clock = FakeClock()
    team = Recorded({(1, 1): [1.0] * 3, (1, 2): [6.0, 0.8, 0.82], (2, 1): [5.0] * 2}, clock)
    found = time_all(small_graph, two_sizes(), team, None, 60.0, clock.perf_counter)[0]
    assert team.calls.count((1, 2)) == 3  # a short second look, and one more since they differ
    table = found.model.forward_backward
    assert table.at(scale=1.0, ranks=1, threads=2) == pytest.approx(2 * 0.82)
    assert not table.uncertain


@pytest.mark.parametrize(
    ("seconds", "rounds", "kept", "uncertain"),
    [
        ([1.0, 1.0 + APART / 2, 9.0], 2, 1.0, False),
        ([1.5, 1.0, 1.05], 3, 1.05, False),  # the second try tells which was disturbed
        ([1.5, 1.0, 1.25], 3, 1.25, True),
    ],
)
def test_rounds_that_differ_are_followed_by_one_more(
    small_graph: Graph, seconds: list[float], rounds: int, kept: float, uncertain: bool
) -> None:
    clock = FakeClock()
    team = Recorded({(1, 1): seconds}, clock)
    (each,) = time_all(small_graph, one_size(), team, None, 60.0, clock.perf_counter)
    assert team.calls.count((1, 1)) == rounds
    table = each.model.forward_backward
    assert table.at(scale=1.0, ranks=1, threads=1) == pytest.approx(2 * kept)
    assert table.uncertain is uncertain
    assert len(each.notes) == uncertain
    if uncertain:
        assert each.notes[0].endswith("uncertain, the quickest two of 3 rounds differ by 25%")
        assert table.spread >= 0.125
    assert each.in_line is not None  # of the same round
    assert each.in_line.sample_seconds == pytest.approx(kept / 10)


@pytest.mark.parametrize("late", [0.0, 1.0, 30.0])
def test_all_of_it_ends_in_time_however_late_each_visit_is(small_graph: Graph, late: float) -> None:
    clock = FakeClock()
    team = Recorded({key: [1.0, 1.5, 1.0] for key in ((1, 1), (1, 2), (2, 1))}, clock, late)
    found = time_all(small_graph, two_sizes(), team, None, 20.0, clock.perf_counter)
    # Once for each size, and no visit that is known not to fit.
    needed = 2 * (late + 2.0)
    assert clock.now <= max(needed, 20.0 + late / 2)
    said = [note for each in found for note in each.notes]
    if late == 30.0:
        assert team.calls == [(1, 1), (2, 1)]
        assert said == [
            "neighbor, 1 rank x 1 thread: uncertain, timed in one round",
            "neighbor, 1 rank x 2 threads: not reached in time; priced as the nearest that was",
            "neighbor, loading on 1 rank: not reached in time",
            "neighbor, 2 ranks x 1 thread: uncertain, timed in one round",
            "neighbor, loading on 2 ranks: not reached in time",
        ]
        assert found[0].model.forward_backward.uncertain
        assert found[0].loading == LoadingAnswer(after_wait=None, beside={})
        assert min(each.seconds for each in team.requests) >= LEAST_SECONDS


def test_of_three_rounds_the_one_in_the_middle_is_kept() -> None:
    lucky, usual, disturbed = (
        [answer(1.0), answer(1.0)], [answer(1.0), answer(1.2)], [answer(1.0), answer(3.0)],
    )  # fmt: skip
    kept = middle_round([disturbed, usual, lucky])
    assert [a.forward_backward for a in kept] == [a.forward_backward for a in usual]
    slow = [replace(a, all_reduce=[9.0]) for a in usual]
    found = middle_round([slow, lucky, disturbed])
    assert [a.forward_backward for a in found] == [a.forward_backward for a in usual]
    assert [a.all_reduce for a in found] == [a.all_reduce for a in lucky]
    assert middle_round([usual, lucky])[1].forward_backward == lucky[1].forward_backward


def loaded(seconds: float, *sampled: float) -> list[TimingAnswer]:
    """Ranks' answers whose batches took so long to sample, and whose rows as long."""
    return [
        replace(
            answer(seconds),
            in_line=InLine(
                sample_seconds=each,
                sample_spread=0.01,
                gathers={
                    "gather": TimedGather(
                        seconds=each, rows=100.0 * each, row_bytes=64, table_bytes=6400
                    )
                },
            ),
        )
        for each in sampled
    ]


def test_what_is_done_before_steps_is_of_the_round_that_is_kept() -> None:
    # Of the model alone the first round would be the quickest; two of three were disturbed.
    rounds = [loaded(1.0, 3.0, 3.0), loaded(1.1, 1.0, 1.2), loaded(1.1, 1.1, 1.3)]
    found = in_line_of(rounds)
    assert found is not None
    # By hand: the mean over the ranks; half of 1.1 to 3 over 1.2.
    assert found.sample_seconds == pytest.approx(1.2)
    assert found.sample_spread == pytest.approx(1.9 / 2 / 1.2)
    assert found.gathers["gather"].seconds == pytest.approx(1.2)
    assert found.gathers["gather"].rows == pytest.approx(120.0)
    assert in_line_of([[answer(1.0)]]) is None


def test_each_number_of_loading_is_the_middle_of_the_rounds() -> None:
    rounds = [
        LoadingAnswer(
            after_wait=None,
            beside={"disk": Interference(work=work, step=step)},
            disk=TimedDisk(seconds=work / 10, requests=4.0, request_bytes=4096.0),
        )
        for work, step in ((1.3, 3.5), (1.2, 1.0), (0.8, 1.1))
    ]
    found = middle(rounds)
    assert found.beside == {"disk": Interference(work=1.2, step=1.1)}
    assert found.disk == TimedDisk(seconds=0.12, requests=4.0, request_bytes=4096.0)
    assert middle(rounds[:2]).beside["disk"] == Interference(work=1.2, step=1.0)
