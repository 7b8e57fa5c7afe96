"""The probe ends with a machine: with fewer points where time is short, what plans need always."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gnnplan.planner.cli.main import main
from gnnplan.planner.machine.model import MachineModel, Table, check_machine
from gnnplan.planner.probe import memory, probe as subject, sampling
from gnnplan.planner.probe.context import QUICK, ProbeContext, smallest
from gnnplan.planner.probe.grid import Budget
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.probe.team import OutOfTime, Team
from gnnplan.planner.probe.timing import summarize
from gnnplan.runtime.errors import WorkerFailed

HANG = {"task": "gnnplan.planner.probe.timing:noise_task", "kernel_seconds": 3600.0, "repeats": 2}
IDLE = {"start": 5.0, "memory": 30.0, "sampling": 30.0, "computing": 2.0,
        "exchange between ranks": 40.0, "overlap": 10.0, "disk": 10.0}  # fmt: skip
"""Seconds of a full probe's subjects on an idle machine."""
NEEDED_SECONDS = sum(IDLE[name] for name in subject.NEEDED)
SIZES = subject.FULL.exchange_bytes
POINTS = len(SIZES)


class Clock:
    """Seconds that pass when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))


@pytest.mark.distributed
def test_a_team_waits_for_all_its_tasks_together_no_longer_than_its_time() -> None:
    with Team(1, until=0.0) as team:
        with pytest.raises(OutOfTime, match="no time is left"):
            team.run(
                "gnnplan.planner.probe.timing:noise_task", ranks=1, kernel_seconds=1.0, repeats=1
            )
        team.kill()


@pytest.mark.distributed
def test_a_probe_whose_processes_never_answer_ends_in_time_and_names_the_ways_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subject.collectives, "join", lambda context: context.team.run(**HANG))
    monkeypatch.setattr(subject, "QUICK_SECONDS", 1.0)
    assert main(["probe", "--quick", "--seconds", "1", "-o", str(tmp_path / "m.json")]) == 1
    said = capsys.readouterr().err
    assert "within 4 s" in said
    for way in ("--seconds N", "--machine FILE", "--machine PRESET", "gnnplan machine list"):
        assert way in said
    assert said.count("\n") == 1
    assert not (tmp_path / "m.json").exists()
    assert not list((tmp_path / "cache").glob("probe-*"))


# Subjects whose points take a clock's seconds instead of measuring.


class IdleTeam(Team):
    """A team without processes."""

    def __enter__(self) -> "IdleTeam":
        return self

    def run(self, task: str, *, ranks: int | None = None, **arguments: Any) -> list[Any]:
        """Answer nothing at once."""
        return [0.0]


def probed(
    monkeypatch: pytest.MonkeyPatch, slower: float, **stuck: float
) -> tuple[MachineModel, dict[str, int], float]:
    """Probe on a clock: the machine, points measured by subject, and the seconds that passed.

    The points measured are those after what plans need, which are two of each subject.

    Args:
        monkeypatch: of the test.
        slower: than an idle machine.
        stuck: seconds of a subject's first point instead, by the subject's first word.
    """
    clock, seen = Clock(), dict[str, int]()
    tables = load_preset("cpu-2core").tables
    one = tables["disk_read"]  # of a preset, for one reader
    tables["disk_read"] = replace(one, axes=[*one.axes, "readers"], points=[*one.points, [1.0]])
    kinds = {
        "memory": ("copy", "gather", "mapped_gather"),
        "exchange between ranks": ("all_",),
        "sampling": ("sample_",),
        "computing": ("core_",),
        "disk": ("disk_",),
        "overlap": ("overlap_", "beside", "compute_"),
    }

    def measure(name: str, context: ProbeContext) -> dict[str, Table]:
        def point(_: object) -> object:
            is_full = not context.sizes.corners_only
            seconds = stuck.get(name.split()[0]) if is_full else None
            done, end = clock.now + (seconds or slower * IDLE[name] / POINTS), context.team.until
            assert end is not None
            clock.now = max(clock.now, min(done, end))
            if done >= end:
                raise OutOfTime(name)
            return summarize([1.0])

        axes = {"point": context.sizes.exchange_bytes}
        found: Any = context.walk(axes, point)
        if not context.sizes.corners_only:
            seen[name] = len(found)
        uncertain = context.table(name, "s", axes, found)[name].uncertain
        mine = {k: t for k, t in tables.items() if k.startswith(kinds[name])}
        return {k: replace(t, uncertain=uncertain) for k, t in mine.items()}

    def start(context: ProbeContext) -> None:
        del context
        clock.now += slower * IDLE["start"]

    monkeypatch.setattr(subject, "Team", IdleTeam)
    monkeypatch.setattr(subject, "Budget", partial(Budget, clock=clock))
    monkeypatch.setattr(subject.time, "monotonic", clock)
    monkeypatch.setattr(subject, "_noise", lambda context: 0.01)
    monkeypatch.setattr(subject, "inventory", lambda: None)
    monkeypatch.setattr(subject.collectives, "join", start)
    subjects: Any = [(n, share, partial(measure, n)) for n, share, _ in subject.SUBJECTS]
    monkeypatch.setattr(subject, "SUBJECTS", subjects)
    return subject.probe(), seen, clock.now - Clock.now


def test_an_idle_machine_is_measured_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, seen, took = probed(monkeypatch, 1.0)
    check_machine(machine)
    assert seen == {name: POINTS for name, _, _ in subject.SUBJECTS}
    assert took == pytest.approx(sum(IDLE.values()) + 2 / POINTS * NEEDED_SECONDS)
    assert not [note for note in machine.notes if note.startswith("time: ")]
    assert not machine.table("sample_edge").uncertain


@pytest.mark.parametrize("slower", [1.5, 2.0])
def test_on_a_slow_machine_every_subject_has_points_and_the_probe_ends_in_time(
    monkeypatch: pytest.MonkeyPatch, slower: float
) -> None:
    machine, seen, took = probed(monkeypatch, slower)
    check_machine(machine)
    assert took <= subject.FULL_SECONDS
    assert list(seen) == [name for name, _, _ in subject.SUBJECTS]
    assert min(seen.values()) >= 1
    assert sum(seen.values()) < POINTS * len(seen)
    assert machine.extent == "full"


@pytest.mark.parametrize("slower", [5.0, 8.0, 20.0])
def test_on_a_very_slow_machine_what_plans_need_is_measured_whatever_the_limit(
    monkeypatch: pytest.MonkeyPatch, slower: float
) -> None:
    machine, seen, took = probed(monkeypatch, slower)
    check_machine(machine)
    least = slower * (IDLE["start"] + 2 / POINTS * NEEDED_SECONDS)
    assert took <= max(least + 1e-6, subject.FULL_SECONDS)
    assert "disk" not in seen
    for table in ("copy", "all_reduce", "sample_edge"):
        assert machine.table(table).uncertain
    notes = [note for note in machine.notes if note.startswith("time: ")]
    assert any("measured at few points only within 180 s: " in note for note in notes)
    assert any("not measured within 180 s: overlap, disk" in note for note in notes)


def test_a_machine_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerFailed, match="to what plans need within 720 s") as found:
        probed(monkeypatch, 100.0)
    assert "--machine PRESET" in str(found.value)


@pytest.mark.parametrize("stuck", [name for name, _, _ in subject.SUBJECTS])
def test_a_subject_that_hangs_costs_no_more_than_itself_and_those_after_it(
    monkeypatch: pytest.MonkeyPatch, stuck: str
) -> None:
    machine, seen, _ = probed(monkeypatch, 1.0, **{stuck.split()[0]: 1000.0})
    check_machine(machine)
    subjects = [name for name, _, _ in subject.SUBJECTS]
    assert list(seen) == subjects[: subjects.index(stuck)]
    assert {"copy", "sample_edge", "all_reduce"} <= set(machine.tables)
    assert ("disk_read" in machine.tables) == ("disk" in seen)
    assert ("overlap_eta" in machine.tables) == ("overlap" in seen)


# Real subjects, whose processes take a clock's seconds for each byte and node.


class Sized(Team):
    """Two processes on a clock: preparing takes seconds by size, and a reading some."""

    def __init__(self, clock: Clock, slower: float) -> None:
        super().__init__(2)  # starts none
        self.clock, self.slower, self.prepared = clock, slower, list[int]()

    def run(self, task: str, *, ranks: int | None = None, **asked: Any) -> list[Any]:
        """Let the clock's seconds pass."""
        size = asked.get("num_nodes", 0) or asked.get("num_bytes", 0) // 2**10
        self.clock.now += self.slower * size * 4e-6
        if task.rpartition(":")[2] in ("generate_task", "prepare_own"):
            self.prepared.append(size)
        return [20 * size] * (ranks or self.size)

    def run_together(self, task: str, *, ranks: int | None = None, **asked: Any) -> list[Any]:
        """Find the same seconds for each reading."""
        self.clock.now += self.slower * 0.02
        drawn = ([1e-3, 1e-3], [(1000 * asked.get("num_seeds", 1), 900)] * 2)
        found = {"sample_task": drawn, "gather_task": [1e-7] * 2, "copy": [1e-2] * 2}
        return [found[task.rpartition(":")[2]]] * (ranks or self.size)


@pytest.mark.parametrize(("slower", "is_late"), [(1.0, False), (20.0, True)])
def test_large_preparations_are_left_out_where_time_is_short(
    tmp_path: Path, slower: float, is_late: bool
) -> None:
    clock = Clock()
    team = Sized(clock, slower)
    context = ProbeContext(team=team, sizes=smallest(QUICK), cores=2, scratch=tmp_path)
    context.budget = Budget(clock=clock)
    memory.measure(context)
    sampling.measure(context)
    small = [QUICK.working_set_bytes[0] // 2**10, QUICK.graph_nodes[0]]
    assert team.prepared == small
    context.begin(QUICK, Budget(15.0, clock), lambda: 0.0)
    with context.budget.within(0.5):
        tables = memory.measure(context)
    tables |= sampling.measure(context)
    large = [QUICK.working_set_bytes[1] // 2**10, *QUICK.graph_nodes]
    assert team.prepared == small + (small if is_late else large)
    assert tables["gather"].points[2] == list(QUICK.working_set_bytes)
    for name in ("gather", "sample_edge"):
        assert tables[name].uncertain is is_late
    for word in ("time: gather: not reached", "sampling: graphs of 262144 nodes not reached"):
        assert any(word in note for note in context.notes) is is_late


def test_points_found_in_haste_stand_in_for_those_that_time_did_not_reach(tmp_path: Path) -> None:
    context = ProbeContext(team=Team(2), sizes=smallest(QUICK), cores=2, scratch=tmp_path)
    corners = {(1,): summarize([1.0]), (100,): summarize([100.0])}
    assert context.table("t", "s", {"x": [1, 100]}, corners)["t"].uncertain
    context.begin(QUICK, Budget(0.0), lambda: 0.0)
    table = context.table("t", "s", {"x": [1, 10, 100]}, {(1,): summarize([2.0])})["t"]
    assert table.values == pytest.approx([2.0, 200.0**0.5, 100.0])
    assert table.uncertain
