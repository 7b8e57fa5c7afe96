"""Timing processes, the cache, and the key that decides what is measured again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.cost.disk_rates import QUEUE_DEPTH, disk_rate
from planner.errors import SettingsError
from planner.profiling import cache, model_seconds, profile as module
from planner.profiling.batches import sampler_of
from planner.profiling.draw import drawer
from planner.profiling.loader_seconds import (
    InLine,
    LoadingAnswer,
    LoadingRequest,
    TimedDisk,
    TimedGather,
)
from planner.profiling.model_seconds import (
    loading_request,
    model_timing,
    timing_request,
    with_loading,
)
from planner.profiling.presample import presample
from planner.profiling.profile import Wanted, profile_key, profiles
from planner.profiling.quick_rounds import is_apart, quick_in_line, quickest_but_one
from planner.profiling.synthetic import BatchShape, synthetic_batch
from planner.profiling.team import Team
from planner.profiling.timing_request import TimingAnswer, TimingRequest
from planner.settings import PlanSettings
from planner.workload import Combination, ProcessCost
from runtime import codec
from runtime.errors import WorkerFailed
from runtime.graph.dataset import Graph
from runtime.plan import Sampler, Workload
from tests.support.machines import machine
from tests.support.profiles import profile as by_hand

COMBINATIONS = [Combination(ranks=1, threads=1)]


def answer(seconds: float) -> TimingAnswer:
    return TimingAnswer(
        forward_backward=[seconds, 2 * seconds, 3 * seconds],
        spread=0.1,
        optimizer_seconds=0.5,
        batch_seconds=0.25,
        warmup_seconds=1.0,
        num_parameters=7,
        activation_bytes=9,
        all_reduce=[0.05 * seconds, 0.1 * seconds, 0.15 * seconds],
    )


def request(model: str = "sage") -> TimingRequest:
    return TimingRequest(
        workload=Workload(model=model, hidden=8, fanouts=[3, 2]),
        in_dim=4,
        num_classes=3,
        task="multiclass",
        shape=BatchShape(vertices=[20, 60, 120], edges=[60, 120]),
        scales=[0.5, 1.0, 2.0],
        threads=1,
        steps=3,
    )


def test_a_profile_comes_back_as_it_was_kept(tmp_path: Path) -> None:
    kept = by_hand(50, 10)
    cache.save("key", kept, tmp_path)
    found = cache.load("key", tmp_path)
    assert found is not None
    assert found.numbers == kept.numbers
    assert set(found.hotness) == {10, 5}
    assert np.array_equal(found.hotness[10].features, kept.hotness[10].features)
    assert [p.name for p in tmp_path.iterdir()] == ["key"]


def test_a_profile_that_is_made_piece_by_piece_is_kept_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = by_hand(50, 10)
    monkeypatch.setattr(cache, "MAPPED_BYTES", 1)  # as of a large graph
    with cache.staged("key", tmp_path) as made:
        put_away = {seeds: made.keep(hotness) for seeds, hotness in wanted.hotness.items()}
        assert cache.load("key", tmp_path) is None
        made.finish(wanted.numbers)
    found = cache.load("key", tmp_path)
    assert found is not None
    assert found.numbers == wanted.numbers
    for seeds, hotness in wanted.hotness.items():
        assert np.array_equal(found.hotness[seeds].first_half, hotness.first_half)
        assert np.array_equal(put_away[seeds].topology, hotness.topology)
        assert not put_away[seeds].first_half.flags.owndata

    def fails() -> None:
        with cache.staged("other", tmp_path) as made:
            made.keep(wanted.hotness[10])
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fails()
    with cache.staged("third", tmp_path) as made:
        made.keep(wanted.hotness[10])  # never finished
    assert [p.name for p in tmp_path.iterdir()] == ["key"]


def test_a_damaged_profile_counts_as_absent(tmp_path: Path) -> None:
    cache.save("key", by_hand(50, 10), tmp_path)
    (tmp_path / "key" / "first_half_10.npy").write_bytes(b"")
    assert cache.load("key", tmp_path) is None
    cache.save("key", by_hand(50, 10), tmp_path)
    assert cache.load("key", tmp_path) is not None
    assert cache.load("other", tmp_path) is None


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "profiles"
    monkeypatch.delenv("GNNPLAN_CACHE")
    assert cache.cache_folder().name == "profiles"


def test_what_changes_the_work_changes_the_key(small_graph: Graph) -> None:
    base = PlanSettings()
    same = replace(base, workload=replace(base.workload, learning_rate=1.0))
    others = [
        replace(base, workload=replace(base.workload, hidden=8)),
        replace(base, workload=replace(base.workload, fanouts=[3, 3])),
        replace(base, workload=replace(base.workload, batch_size=7)),
        replace(base, dialect="every_hop"),
    ]
    key = profile_key(small_graph, base, machine(), COMBINATIONS)
    assert profile_key(small_graph, same, machine(), COMBINATIONS) == key
    for other in others:
        assert profile_key(small_graph, other, machine(), COMBINATIONS) != key
    elsewhere = replace(machine(), fingerprint="1" * 32)
    assert profile_key(small_graph, base, elsewhere, COMBINATIONS) != key


def test_a_profile_ends_with_the_gather_tables_that_it_was_held_against(small_graph: Graph) -> None:
    base, here = PlanSettings(), machine()
    key = profile_key(small_graph, base, here, COMBINATIONS)
    gather = here.tables["gather"]
    anew = replace(gather, values=[1.1 * value for value in gather.values])
    again = replace(here, tables=here.tables | {"gather": anew})
    assert profile_key(small_graph, base, again, COMBINATIONS) != key
    disk = replace(here, tables=here.tables | {"disk_read": gather})
    assert profile_key(small_graph, base, disk, COMBINATIONS) != key
    other = replace(here, tables=here.tables | {"copy": gather})
    assert profile_key(small_graph, base, other, COMBINATIONS) == key


@pytest.mark.parametrize(
    ("cores", "threads", "beside"), [(1, 1, False), (2, 1, True), (3, 2, True), (8, 4, True)]
)
def test_the_model_leaves_a_core_to_the_loader_thread_that_is_timed(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch, cores: int, threads: int, beside: bool
) -> None:
    monkeypatch.setattr(model_seconds, "usable_core_ids", lambda: list(range(cores)))
    mine = [Combination(ranks=1, threads=t) for t in (1, 2, 4)]
    batch = by_hand(50, 10).numbers.batches[0]
    found = loading_request(small_graph, PlanSettings(), batch, mine)
    assert found.threads == threads
    assert found.loading is not None
    assert found.loading.beside == beside


def test_a_timing_process_loads_the_dataset_beside_the_model(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = LoadingRequest(
        graph=str(small_graph.path), sampler=Sampler(), num_ranks=1, shared=False, beside=True
    )
    wanted = replace(request(), in_dim=small_graph.feature_dim, loading=asked, times_loading=True)
    with Team(1) as team:
        found = team.load(wanted, 1)
        alone = team.load(replace(wanted, loading=replace(asked, beside=False)), 1)
        (steps,) = team.time(replace(wanted, times_loading=False), 1)
    assert set(found.beside) == {"sample", "gather", "disk"}
    assert all(each.work > 0.0 and each.step >= 1.0 for each in found.beside.values())
    assert alone.beside == {}
    for each in (found, alone):
        assert each.after_wait is not None
        assert each.after_wait.wait_seconds > 0
    line = steps.in_line
    assert line is not None
    assert 0 < line.sample_seconds < 1
    assert set(line.gathers) == {"gather", "mapped_gather"}
    assert all(0 < gather.seconds < 1 for gather in line.gathers.values())
    timing = next(iter(by_hand(50, 10).numbers.timing.values()))
    timed = with_loading(timing, line, found, None, 1)
    assert (timed.sample_seconds, timed.beside) == (line.sample_seconds, found.beside)
    assert (timed.after_wait, timed.gather_factors) == (found.after_wait, {})
    held = with_loading(timing, line, found, machine(), 1).gather_factors
    # 40 requests of 8 KiB in 10 ms and .4 ms for the first, by hand.
    timed_reads = TimedDisk(seconds=0.0104, requests=40.0, request_bytes=8192.0)
    known = replace(found, disk=timed_reads, disk_start_seconds=0.0004)
    reads = disk_rate(machine(), 8192.0, QUEUE_DEPTH, 1).seconds
    factor = with_loading(timing, line, known, machine(), 1).gather_factors["disk_read"]
    assert factor == pytest.approx(0.01 / 40 / reads)
    without = with_loading(timing, line, replace(found, disk=None), machine(), 1)
    assert "disk_read" not in without.gather_factors
    for name, gather in line.gathers.items():
        each = machine().table(name).at(row_bytes=1, working_set_bytes=1, readers=1)
        assert held[name] == pytest.approx(gather.seconds / (gather.rows * each))


def test_as_many_processes_load_at_once_as_a_job_has_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = LoadingRequest(graph="graph", sampler=Sampler(), num_ranks=2, shared=False, beside=True)
    sent: list[tuple[list[str], int]] = []
    answers = [
        codec.dumps(LoadingAnswer(after_wait=None, beside={}, disk_start_seconds=s))
        for s in (1.0, 2.0)
    ]

    def ask(_team: Team, texts: list[str], threads: int) -> list[str]:
        sent.append((texts, threads))
        return answers

    monkeypatch.setattr(Team, "ask", ask)
    team = object.__new__(Team)  # no process is started: what is sent is looked at
    found = team.load(replace(request(), threads=3, loading=asked, times_loading=True), 2)
    ((texts, threads),) = sent
    assert len(texts) == 2
    # Each draws batches of its own, as ranks do.
    assert [json.loads(text).pop("rank") for text in texts] == [0, 1]
    assert texts[0].replace('"rank": 0', '"rank": 1') == texts[1]
    assert threads == 3 + 1
    assert found.disk_start_seconds == 1.0


def test_ranks_that_computed_at_once_are_averaged() -> None:
    found = model_timing(
        [
            (Combination(ranks=2, threads=1), [answer(1.0), answer(3.0)]),
            (Combination(ranks=2, threads=2), [answer(1.0), answer(1.0)]),
        ]
    )
    assert found.forward_backward.at(scale=1.0, ranks=2.0, threads=1.0) == pytest.approx(4.0)
    assert found.forward_backward.at(scale=1.0, ranks=2.0, threads=2.0) == pytest.approx(2.0)
    assert (found.num_parameters, found.batch_seconds) == (7, 0.25)
    assert found.all_reduce is not None
    assert found.all_reduce.at(ranks=2.0, threads=1.0) == pytest.approx(0.2)
    # Means over the ranks .1, .2, .3: 1.645 x 1.25 x (.1 / 1.349) / sqrt(3) / .2, by hand.
    assert found.all_reduce.spread == pytest.approx(0.44, abs=1e-4)
    alone = [(Combination(ranks=1, threads=1), [replace(answer(1.0), all_reduce=[])])]
    assert model_timing(alone).all_reduce is None


def test_a_wait_for_each_other_is_in_the_exchange_though_each_rank_rarely_waits() -> None:
    first = replace(answer(1.0), all_reduce=[2.0, 0.0, 2.0, 0.0, 0.0])
    second = replace(answer(1.0), all_reduce=[0.0, 2.0, 0.0, 2.0, 0.0])
    found = model_timing([(Combination(ranks=2, threads=1), [first, second])])
    assert found.all_reduce is not None
    # By hand: the ranks' mean is 1, 1, 1, 1, 0; either's own median is 0.
    assert found.all_reduce.at(ranks=2.0, threads=1.0) == 1.0


def test_the_quickest_round_but_one_is_kept() -> None:
    lucky, usual, disturbed = (
        [answer(1.0), answer(1.0)], [answer(1.0), answer(1.2)], [answer(1.0), answer(3.0)],
    )  # fmt: skip
    assert (
        quickest_but_one([disturbed, usual, lucky])[0].forward_backward == usual[0].forward_backward
    )
    slow = [replace(a, all_reduce=[9.0]) for a in usual]
    found = quickest_but_one([slow, lucky, disturbed])
    assert [a.forward_backward for a in found] == [a.forward_backward for a in usual]
    assert [a.all_reduce for a in found] == [a.all_reduce for a in lucky]


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
    # Of the model alone the first round would be the quickest, and two of three were disturbed.
    rounds = [loaded(1.0, 3.0, 3.0), loaded(1.1, 1.0, 1.2), loaded(1.2, 4.0, 4.0)]
    assert is_apart(rounds, 1.08)
    rounds.append(loaded(1.1, 1.1, 1.3))
    assert not is_apart(rounds, 1.08)
    found = quick_in_line(rounds)
    assert found is not None
    # By hand: the mean over the ranks; half of 1.1 to 3 of the quickest three's over 1.2.
    assert found.sample_seconds == pytest.approx(1.2)
    assert found.sample_spread == pytest.approx(1.9 / 2 / 1.2)
    assert found.gathers["gather"].seconds == pytest.approx(1.2)
    assert found.gathers["gather"].rows == pytest.approx(120.0)
    assert [a.in_line for a in quickest_but_one(rounds)] == [a.in_line for a in rounds[-1]]
    assert quick_in_line([[answer(1.0)]]) is None


@pytest.mark.parametrize(
    ("name", "parameters", "dialect"),
    [
        ("neighbor", {}, "first_seen"),
        ("labor", {}, "first_seen"),
        ("labor", {"estimator": "plain"}, "first_seen"),
        ("ladies", {"sizes": "20,40"}, "every_hop"),
    ],
)
def test_the_model_is_timed_on_blocks_like_the_samplers(
    small_graph: Graph, name: str, parameters: dict[str, str], dialect: Any
) -> None:
    """An estimator's weights are read by every layer, forward and back."""
    work = Workload(fanouts=[3, 2], batch_size=8, allow="approximate")
    settings = PlanSettings(
        workload=work, sampler=name, sampler_parameters=dict(parameters), dialect=dialect
    )
    batch, _ = presample(small_graph, work, sampler_of(settings), 1)
    drawn = drawer(small_graph, work, sampler_of(settings), 1)(0, 0)
    one = Combination(ranks=1, threads=1)
    made = synthetic_batch(timing_request(small_graph, settings, batch, one).shape, seed=0)
    for real, block in zip(drawn.blocks, made.blocks, strict=True):
        assert (block.weight is None) == (real.weight is None)
        assert block.weight is None or block.weight.shape == (block.num_edges,)


def test_one_batch_size_belongs_to_one_number_of_ranks() -> None:
    with pytest.raises(ValueError, match=r"found \[1, 2\]"):
        model_timing(
            [
                (Combination(ranks=1, threads=1), [answer(1.0)]),
                (Combination(ranks=2, threads=1), [answer(1.0)]),
            ]
        )


@pytest.mark.distributed
def test_two_processes_time_the_model_at_once_and_report_its_failure() -> None:
    with Team(2) as team:
        first, second = team.time(request(), ranks=2)
        assert len(first.forward_backward) == 3
        assert all(s > 0 for s in first.forward_backward + second.forward_backward)
        # 2 SAGE layers: (4 + 4) x 8 + 8, (8 + 8) x 3 + 3 = 123 parameters, by hand.
        assert first.num_parameters == 123
        assert first.activation_bytes > 0
        # A sum for every step of every scale, by either rank.
        assert len(first.all_reduce) == len(second.all_reduce) == 3 * request().steps
        assert min(first.all_reduce + second.all_reduce) > 0
        # Another group of other ranks may follow; one rank adds nothing up.
        (alone,) = team.time(request(), ranks=1)
        assert alone.all_reduce == []
        assert min(team.time(request(), ranks=2)[0].all_reduce) > 0
        assert team.process.resident_bytes > 10_000_000
        with pytest.raises(WorkerFailed, match="nonsense"):
            team.time(request("nonsense"), ranks=1)


class Answering(Team):
    """A team whose processes answer at once, one second more at every opening."""

    openings = 0

    def __init__(self, size: int) -> None:
        del size
        type(self).openings += 1
        self.process = ProcessCost(start_seconds=1.0, resident_bytes=1)

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was started."""

    def time(self, request: TimingRequest, ranks: int) -> list[TimingAnswer]:
        return [replace(answer(float(self.openings)), all_reduce=[0.1] * 3)] * ranks

    def load(self, request: TimingRequest, ranks: int) -> LoadingAnswer:
        return LoadingAnswer(after_wait=None, beside={})


def test_profiles_that_are_compared_are_of_one_sitting(
    small_graph: Graph, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "Team", Answering)
    monkeypatch.setattr(Answering, "openings", 0)
    one = [Combination(ranks=1, threads=1)]
    work = Workload(batch_size=50, fanouts=[3, 2], hidden=8)
    neighbor, full = (
        Wanted(settings=PlanSettings(workload=work, sampler=name), combinations=one)
        for name in ("neighbor", "full")
    )

    def found(*wanted: Wanted, measure: bool = True) -> list[float]:
        made = profiles(small_graph, wanted, machine(), measure=measure)
        timing = [next(iter(each.numbers.timing.values())) for each in made]
        # `answer` has one second of the smallest batch for every second of the opening.
        return [each.forward_backward.values[0] for each in timing]

    assert found(neighbor) == [1.0]
    assert found(neighbor) == [1.0]
    # The other one is new, so both are timed, in the same rounds.
    assert found(neighbor, full) == [2.0, 2.0]
    assert found(full, neighbor) == [2.0, 2.0]
    assert found(neighbor) == found(full) == [2.0]
    # Another workload's sitting replaced one of them: nothing may be measured, or both are.
    labor = replace(neighbor, settings=replace(neighbor.settings, sampler="labor"))
    assert found(neighbor, labor) == [3.0, 3.0]
    assert found(neighbor, full, measure=False) == [3.0, 2.0]
    assert found(neighbor, full) == [4.0, 4.0]
    with pytest.raises(SettingsError, match="expected the profile"):
        profiles(small_graph, [replace(full, combinations=[Combination(ranks=2, threads=1)])],
                 machine(), measure=False)  # fmt: skip
