"""The probe ends in time: coarser where the machine is slow, and with ways on where that fails."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from planner.cli.main import main
from planner.machine.model import MachineModel, Table, check_machine
from planner.probe import probe as subject
from planner.probe.context import FULL, HASTY, QUICK, ProbeContext, ladder_from
from planner.probe.presets import load_preset
from planner.probe.probe import START_SECONDS, TimeLimit
from planner.probe.team import OutOfTime, Team
from runtime.errors import WorkerFailed

LADDER = [FULL, QUICK, HASTY]
HANG = {"task": "planner.probe.timing:noise_task", "kernel_seconds": 3600.0, "repeats": 2}


class Clock:
    """Seconds that pass when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNNPLAN_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("slower", "expected"),
    [(0.5, FULL), (1.0, FULL), (1.7, FULL), (2.2, QUICK), (10.0, QUICK), (11.0, HASTY)],
)
def test_what_is_left_is_measured_as_finely_as_the_pace_allows(
    slower: float, expected: object
) -> None:
    clock = Clock()
    limit = TimeLimit(300.0, clock=clock)
    clock.now += slower * START_SECONDS
    assert limit.slowness == pytest.approx(max(1.0, slower))
    assert limit.fitting(LADDER, 0.05) == expected


def test_the_pace_is_that_of_all_that_was_measured() -> None:
    clock = Clock()
    limit = TimeLimit(300.0, clock=clock)
    clock.now += START_SECONDS
    limit.passed(FULL, 0.5)
    clock.now += 3 * 75
    assert limit.slowness == pytest.approx((8 + 225) / (8 + 75))
    assert limit.fitting(LADDER, 0.5) == QUICK
    clock.now = limit.end
    assert limit.fitting(LADDER, 0.9) == HASTY


def test_coarser_sizes_follow_finer_ones() -> None:
    assert ladder_from(FULL) == [FULL, QUICK, HASTY]
    assert ladder_from(QUICK) == [QUICK, HASTY]


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


# Subjects that take a clock's seconds instead of measuring.


class IdleTeam(Team):
    """A team without processes."""

    def __enter__(self) -> "IdleTeam":
        return self


def probed(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[str, Callable[[str], float]]
) -> tuple[MachineModel, list[tuple[str, str]]]:
    """A probe of 300 s on a clock, and which subjects were measured with which sizes.

    Args:
        monkeypatch: of the test.
        seconds: what a subject takes, by its name, of the name of its sizes.
    """
    clock, seen = Clock(), list[tuple[str, str]]()
    tables = load_preset("cpu-2core").tables
    known = {name: replace(table, uncertain=False) for name, table in tables.items()}
    one = known["disk_read"]  # of a preset, for one reader
    known["disk_read"] = replace(one, axes=[*one.axes, "readers"], points=[*one.points, [1.0]])
    kinds = {
        "memory": ("copy", "gather", "mapped_gather"),
        "exchange between ranks": ("all_",),
        "sampling": ("sample_",),
        "disk": ("disk_",),
        "overlap": ("overlap_", "beside", "compute_"),
    }

    def measure(name: str, context: ProbeContext) -> dict[str, Table]:
        size = "hasty" if context.sizes.exchange_steps == HASTY.exchange_steps else ""
        seen.append((name, size or context.sizes.name))
        clock.now += seconds[name](seen[-1][1])
        if clock.now >= (context.team.until or 0.0):
            raise OutOfTime(name)
        return {k: t for k, t in known.items() if k.startswith(kinds[name])}

    def start(context: ProbeContext) -> None:
        del context
        clock.now += seconds["start"]("")

    monkeypatch.setattr(subject, "Team", IdleTeam)
    monkeypatch.setattr(subject, "TimeLimit", partial(TimeLimit, clock=clock))
    monkeypatch.setattr(subject, "_noise", lambda context: 0.01)
    monkeypatch.setattr(subject, "slowdown", lambda seconds: 1.0)
    monkeypatch.setattr(subject, "inventory", lambda: None)
    monkeypatch.setattr(subject.collectives, "join", start)
    subjects: Any = [(n, share, partial(measure, n)) for n, share, _ in subject.SUBJECTS]
    monkeypatch.setattr(subject, "SUBJECTS", subjects)
    return subject.probe(), seen


def of_idle(factor: float) -> dict[str, Callable[[str], float]]:
    """Subjects that take so many times what they take on an idle machine."""
    idle = {"full": FULL, "quick": QUICK, "hasty": HASTY}
    shares = [share for _, share, _ in subject.SUBJECTS] + [subject.GPUS[1]]
    names = [name for name, _, _ in subject.SUBJECTS]

    def of(part: float, size: str) -> float:
        return factor * part * idle[size].idle_seconds

    parts = {n: b - a for n, a, b in zip(names, shares, shares[1:], strict=False)}
    found: dict[str, Callable[[str], float]] = {n: partial(of, p) for n, p in parts.items()}
    return found | {"start": lambda _: factor * START_SECONDS}


def test_an_idle_machine_is_measured_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, seen = probed(monkeypatch, of_idle(1.0))
    check_machine(machine)
    assert {size for _, size in seen} == {"full"}
    assert not [note for note in machine.notes if note.startswith("time: ")]
    assert not machine.table("sample_edge").uncertain


@pytest.mark.parametrize("factor", [3.0, 8.0, 20.0])
def test_a_slow_machine_is_measured_coarsely_and_marked_uncertain(
    monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    machine, seen = probed(monkeypatch, of_idle(factor))
    check_machine(machine)
    assert [name for name, _ in seen] == [name for name, _, _ in subject.SUBJECTS]
    coarse = [name for name, size in seen if size != "full"]
    (note,) = [n for n in machine.notes if n.startswith("time: ")]
    assert f"uncertain, of {', '.join(coarse)}; run gnnplan probe again" in note
    of = {"memory": "copy", "exchange between ranks": "all_reduce", "sampling": "sample_edge"}
    assert "memory" in coarse
    for name, table in of.items():
        assert machine.table(table).uncertain == (name in coarse)
    assert machine.extent == "full"


def test_without_what_plans_can_do_without_the_probe_ends_with_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine, seen = probed(monkeypatch, of_idle(1.0) | {"disk": lambda _: 1000.0})
    check_machine(machine)
    assert seen[-1][0] == "disk"
    assert "sample_edge" in machine.tables
    assert "disk_read" not in machine.tables
    assert "overlap_eta" not in machine.tables
    assert any(
        note.startswith("time: not measured within 300 s: disk, overlap;") for note in machine.notes
    )


@pytest.mark.parametrize("stuck", ["memory", "exchange between ranks", "sampling"])
def test_without_what_plans_need_the_line_says_what_and_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, stuck: str
) -> None:
    with pytest.raises(WorkerFailed, match=f"did not come to .*{stuck}.* within 300 s") as caught:
        probed(monkeypatch, of_idle(1.0) | {stuck: lambda _: 1000.0})
    assert "--machine PRESET" in str(caught.value)
