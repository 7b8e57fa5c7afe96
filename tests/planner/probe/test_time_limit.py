"""The probe ends in time: with fewer points where the machine is slow, and ways on else."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from planner.cli.main import main
from planner.machine.model import MachineModel, Table, check_machine
from planner.probe import probe as subject
from planner.probe.budget import Budget
from planner.probe.context import ProbeContext
from planner.probe.presets import load_preset
from planner.probe.team import OutOfTime, Team
from planner.probe.timing import summarize
from runtime.errors import WorkerFailed

HANG = {"task": "planner.probe.timing:noise_task", "kernel_seconds": 3600.0, "repeats": 2}
IDLE = {"start": 5.0, "memory": 30.0, "sampling": 30.0, "exchange between ranks": 40.0,
        "overlap": 10.0, "disk": 10.0}  # fmt: skip
"""Seconds of a full probe's subjects on an idle machine."""
POINTS = 20


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
            team.run("planner.probe.timing:noise_task", ranks=1, kernel_seconds=1.0, repeats=1)
        team.kill()


@pytest.mark.distributed
def test_a_probe_whose_processes_never_answer_ends_in_time_and_names_the_ways_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subject.collectives, "join", lambda context: context.team.run(**HANG))
    assert main(["probe", "--quick", "--seconds", "1", "-o", str(tmp_path / "m.json")]) == 1
    said = capsys.readouterr().err
    assert "within 1 s" in said
    for way in ("--seconds N", "--quick", "--machine PRESET", "gnnplan machine list"):
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
        "disk": ("disk_",),
        "overlap": ("overlap_", "beside", "compute_"),
    }

    def measure(name: str, context: ProbeContext) -> dict[str, Table]:
        def point(_: object) -> object:
            seconds = stuck.get(name.split()[0]) or slower * IDLE[name] / POINTS
            clock.now += seconds
            if clock.now >= (context.team.until or 0.0):
                raise OutOfTime(name)
            return summarize([1.0])

        axes = {"point": list(range(1, POINTS + 1))}
        found: Any = context.walk(axes, point)
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
    assert seen == dict.fromkeys(seen, POINTS)
    assert took == pytest.approx(sum(IDLE.values()))
    assert not [note for note in machine.notes if note.startswith("time: ")]
    assert not machine.table("sample_edge").uncertain


@pytest.mark.parametrize("slower", [2.0, 5.0, 8.0])
def test_on_a_slow_machine_every_subject_has_points_and_the_probe_ends_in_time(
    monkeypatch: pytest.MonkeyPatch, slower: float
) -> None:
    machine, seen, took = probed(monkeypatch, slower)
    check_machine(machine)
    assert took <= subject.FULL_SECONDS
    assert list(seen) == [name for name, _, _ in subject.SUBJECTS]
    assert min(seen.values()) >= 1
    assert sum(seen.values()) < POINTS * len(seen)
    of = {"memory": "copy", "exchange between ranks": "all_reduce", "sampling": "sample_edge"}
    for name, table in of.items():
        is_whole = seen[name] == POINTS
        assert machine.table(table).uncertain is not is_whole
        assert any(n.startswith(f"time: {name}: not reached") for n in machine.notes) != is_whole
    assert machine.extent == "full"


def test_without_what_plans_can_do_without_the_probe_ends_with_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine, seen, _ = probed(monkeypatch, 1.0, overlap=1000.0)
    check_machine(machine)
    assert list(seen) == ["memory", "sampling", "exchange between ranks"]
    assert "sample_edge" in machine.tables
    assert "disk_read" not in machine.tables
    assert "overlap_eta" not in machine.tables
    (note,) = [n for n in machine.notes if n.startswith("time: ")]
    assert note.startswith("time: not measured within 180 s: overlap, disk; run gnnplan probe")


@pytest.mark.parametrize("stuck", subject.NEEDED)
def test_without_what_plans_need_the_line_says_what_and_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, stuck: str
) -> None:
    with pytest.raises(WorkerFailed, match=f"did not come to .*{stuck}.* within 180 s") as caught:
        probed(monkeypatch, 1.0, **{stuck.split()[0]: 1000.0})
    assert "--machine PRESET" in str(caught.value)
