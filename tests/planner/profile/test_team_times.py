"""Timing processes: the model at once on every rank, and loading beside it."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from gnnplan.planner.cost.stages.gather import QUEUE_DEPTH, disk_rate, expected_factor
from gnnplan.planner.profile.model_seconds import with_loading
from gnnplan.planner.profile.protocol import LoadingAnswer, LoadingRequest, TimedDisk
from gnnplan.planner.profile.team import Team
from gnnplan.runtime import codec
from gnnplan.runtime.errors import WorkerFailed
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.schema import Sampler
from tests.support.machines import machine
from tests.support.profiles import profile as by_hand
from tests.support.timings import request


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    """Two processes, of which a test takes one or both."""
    with Team(2) as started:
        yield started


@pytest.mark.distributed
def test_a_timing_process_loads_the_dataset_beside_the_model(
    small_graph: Graph, team: Team
) -> None:
    asked = LoadingRequest(
        graph=str(small_graph.path), sampler=Sampler(), num_ranks=1, shared=False, beside=True
    )
    wanted = replace(request(), in_dim=small_graph.feature_dim, loading=asked, times_loading=True)
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
    assert line.sample_seconds > 0
    assert set(line.gathers) == {"gather", "mapped_gather"}
    assert all(gather.seconds > 0 for gather in line.gathers.values())
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
    assert factor == pytest.approx(expected_factor(0.01 / 40 / reads))
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


@pytest.mark.distributed
def test_ranks_wait_for_each_other_on_batches_that_they_draw(
    small_graph: Graph, team: Team
) -> None:
    loading = LoadingRequest(
        graph=str(small_graph.path), sampler=Sampler(), num_ranks=2, shared=False, beside=False
    )
    asked = replace(request(), in_dim=small_graph.feature_dim, loading=loading)
    drew = team.time(asked, ranks=2)
    alike = team.time(replace(asked, loading=replace(loading, shared=True)), ranks=2)
    for own in drew:
        assert own.own_batches
        assert len(own.all_reduce) == asked.steps
        assert min(own.all_reduce) > 0
    # Ranks that share a batch have parts of it, which are timed on synthetic blocks alone.
    for equal in alike:
        assert not equal.own_batches
        assert len(equal.all_reduce) == 3 * asked.steps


@pytest.mark.distributed
def test_two_processes_time_the_model_at_once_and_report_its_failure(team: Team) -> None:
    """The last test of the file: its processes end with their failure."""
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
