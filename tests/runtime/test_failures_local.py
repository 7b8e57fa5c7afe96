"""Faults that one rank in this process meets: full disks, damaged files, clocks, memory."""

import json
import logging
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gnnplan.runtime import codec, worker
from gnnplan.runtime.errors import GnnplanError
from gnnplan.runtime.faults.failure import ERRORS_FOLDER
from gnnplan.runtime.faults.heartbeat import Heartbeat
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.launch import launch
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.report import RunReport
from gnnplan.runtime.train.recovery import EPOCHS_FILE, list_checkpoints, save_checkpoint
from tests.support.faults import EPOCHS, INTERVAL, SAVED, STEPS, plan_to_disturb


def train(plan: Path, run: Path, **settings: Any) -> RunReport:
    run.mkdir(parents=True, exist_ok=True)
    defaults: dict[str, Any] = {
        "epochs": EPOCHS, "eval_every": 0, "pin": False, "checkpoint_every_steps": INTERVAL,
        "keep_checkpoints": 3,
    }  # fmt: skip
    return worker.run(
        RunConfig(plan_folder=str(plan), run_folder=str(run), **(defaults | settings))
    )


@pytest.fixture(scope="module")
def plan(small_graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plan_to_disturb(small_graph, tmp_path_factory.mktemp("plans") / "plan", ranks=1)


@pytest.fixture(scope="module")
def undisturbed(plan: Path, tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    return train(plan, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root; as root this test must run")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take all room that is left."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        file.writelines(bytes(1024) for _ in range(1024))
    return path


def test_a_disk_that_is_full_costs_checkpoints_and_one_warning_not_the_training(
    plan: Path, undisturbed: RunReport, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(plan, small_disk, max_steps=4)
    before = {path.name: path.read_bytes() for path in list_checkpoints(small_disk / "checkpoints")}
    assert [name[11:21] for name in before] == ["0000000002", "0000000004"]
    filler = fill(small_disk)
    with caplog.at_level(logging.WARNING), pytest.raises(GnnplanError) as error:
        train(plan, small_disk, resume=True)
    # No room for the report either: that is the end, and it says how to get it.
    assert "the report cannot be written" in str(error.value)
    assert "--resume" in str(error.value)
    assert sum("no checkpoint after step 5" in line for line in caplog.messages) == 1
    assert sum("no checkpoint after" in line for line in caplog.messages) == 1
    after = {path.name: path.read_bytes() for path in list_checkpoints(small_disk / "checkpoints")}
    assert after == before
    filler.unlink()
    resumed = train(plan, small_disk, resume=True)
    assert resumed.losses == undisturbed.losses[4:]


def test_a_disk_with_room_again_gets_checkpoints_again(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = codec.write_bytes_atomically, []

    def full_at_first(path: Path, data: bytes, **mode: int) -> None:
        if path.suffix == ".pt":
            calls.append(path)
            if len(calls) <= 3:
                raise OSError(28, "No space left on device")
        write(path, data, **mode)

    monkeypatch.setattr(codec, "write_bytes_atomically", full_at_first)
    report = train(plan, tmp_path)
    assert len(calls) == len(SAVED)
    assert sum("no checkpoint after step 2" in note for note in report.notes) == 1
    assert sum("no checkpoint" in note for note in report.notes) == 1
    found = list_checkpoints(tmp_path / "checkpoints")
    assert [int(path.name[11:21]) for path in found] == list(SAVED[-3:])


def test_a_report_that_found_no_room_is_written_by_resuming(
    plan: Path, undisturbed: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def full(path: Path, text: str, **mode: int) -> None:
            raise OSError(28, "No space left on device", str(path), text[:0])

        patch.setattr(codec, "write_text_atomically", full)
        with pytest.raises(GnnplanError, match="the report cannot be written"):
            train(plan, tmp_path)
    report = train(plan, tmp_path, resume=True)
    assert (report.losses, report.first_step) == ([], STEPS)
    assert [e.loss for e in report.epochs] == [e.loss for e in undisturbed.epochs]


@pytest.mark.parametrize("damaged", [1, 2])
def test_damaged_checkpoints_are_passed_over_with_a_note(
    plan: Path, undisturbed: RunReport, tmp_path: Path, damaged: int
) -> None:
    train(plan, tmp_path, max_steps=7)
    for path in list_checkpoints(tmp_path / "checkpoints")[-damaged:]:
        path.write_bytes(path.read_bytes()[:100])
    report = train(plan, tmp_path, resume=True)
    start = {1: 5, 2: 4}[damaged]
    assert report.first_step == start
    assert report.losses == undisturbed.losses[start:]
    assert sum("is damaged" in note for note in report.notes) == damaged
    assert (tmp_path / "events.jsonl").read_text().count("is damaged") == damaged


def test_a_run_that_finds_nothing_to_go_on_from_says_so_at_once(plan: Path, tmp_path: Path) -> None:
    report = train(plan, tmp_path, max_steps=1, resume=True)
    (line,) = report.notes
    assert line == "no checkpoint to resume from; started at the beginning"
    assert json.dumps({"event": "warning", "line": line}) in (tmp_path / "events.jsonl").read_text()


def test_without_the_epochs_before_training_goes_on_and_says_so(
    plan: Path, undisturbed: RunReport, tmp_path: Path
) -> None:
    train(plan, tmp_path, max_steps=7)
    kept = tmp_path / "checkpoints" / EPOCHS_FILE
    kept.write_bytes(kept.read_bytes().replace(b"loss", b"l0ss"))
    report = train(plan, tmp_path, resume=True)
    assert report.losses == undisturbed.losses[report.first_step :]
    assert any(str(kept) in note and "begins after epoch 0" in note for note in report.notes)
    assert [e.epoch for e in report.epochs] == list(range(1, EPOCHS))
    assert [e.loss for e in report.epochs] == [e.loss for e in undisturbed.epochs[1:]]


def test_a_fresh_run_sets_an_earlier_runs_checkpoints_aside(
    plan: Path, undisturbed: RunReport, tmp_path: Path
) -> None:
    """Otherwise a restart of the second run would take the end of the first for its own."""
    train(plan, tmp_path)
    report = train(plan, tmp_path, max_steps=2)
    found = list_checkpoints(tmp_path / "checkpoints")
    assert [int(path.name[11:21]) for path in found] == [2]
    aside = list_checkpoints(tmp_path / "checkpoints.previous")
    assert [int(path.name[11:21]) for path in aside] == list(SAVED[-3:])
    assert any("checkpoints of an earlier run" in note for note in report.notes)
    resumed = train(plan, tmp_path, resume=True)
    assert resumed.losses == undisturbed.losses[2:]


def test_ranks_that_start_again_take_no_more_steps_than_the_run_may(
    plan: Path, undisturbed: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(plan, tmp_path, max_steps=4)
    with monkeypatch.context() as patch:
        patch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        report = train(plan, tmp_path, max_steps=9)
    assert (report.first_step, report.losses) == (4, undisturbed.losses[4:9])
    assert train(plan, tmp_path, max_steps=3, resume=True).losses == undisturbed.losses[9:12]


def test_a_host_without_the_checkpoints_knows_how_far_they_are(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same error after newer checkpoints is worth another start there too; without, it is not.

    Each attempt takes the run to some steps, then fails on the second host.
    """
    place: dict[str, Any] = {"plan_folder": str(plan), "pin": False}
    there = RunConfig(run_folder=str(tmp_path / "host1"), **place)
    final = list[bool]()
    for attempt, steps in enumerate((4, 9, 9)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        heartbeat = Heartbeat()
        here = RunConfig(
            run_folder=str(tmp_path), epochs=EPOCHS, eval_every=0, max_steps=steps,
            checkpoint_every_steps=INTERVAL, **place,
        )  # fmt: skip
        worker.run(here, heartbeat)
        worker.record_end(there, ValueError("again"), heartbeat)
        document = codec.parse((tmp_path / "host1" / ERRORS_FOLDER / "rank0.json").read_bytes())
        final.append(document["final"])
    assert final == [False, False, True]


@pytest.mark.parametrize("jump", ["past", "future"])
def test_a_clock_jump_changes_nothing(
    plan: Path, undisturbed: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: str
) -> None:
    """A day back or forth at step 6: losses, times and what resuming starts from stay right."""
    monkeypatch.setattr(time, "time", time.time)  # put back what the model patches
    monkeypatch.setenv("GNNPLAN_TEST_FAULT", f"0:6:{jump}")
    report = train(plan, tmp_path, max_steps=9)
    assert report.losses == undisturbed.losses[:9]
    assert all(0 <= epoch.seconds < 3600 for epoch in report.epochs)
    assert 0 <= report.step_seconds.p10 <= report.step_seconds.p90 < 3600
    monkeypatch.delenv("GNNPLAN_TEST_FAULT")
    assert train(plan, tmp_path, resume=True).losses == undisturbed.losses[9:]


def test_events_survive_a_full_disk(tmp_path: Path) -> None:
    from gnnplan.runtime.train.job import Events

    events = Events(Path("/dev/full"))
    events.emit("epoch", epoch=1)
    events.emit("epoch", epoch=2)
    events.close()
    kept = Events(tmp_path / "events.jsonl")
    kept.emit("epoch", epoch=3)
    kept.close()
    assert (tmp_path / "events.jsonl").read_text() == '{"event": "epoch", "epoch": 3}\n'


@pytest.mark.parametrize("way", ["anew", "resumed", "started again"])
def test_what_killed_ranks_left_of_checkpoints_is_swept(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """One is as large as a checkpoint, and each kill amid a save would leave another."""
    train(plan, tmp_path, max_steps=4)
    folder = tmp_path / "checkpoints"
    newest = list_checkpoints(folder)[-1]
    left, mine = folder / f".{newest.name}.0123456789ab", folder / ".notes.0123456789ab"
    for path in (left, mine):
        path.write_bytes(newest.read_bytes()[:1000])
    if way == "started again":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(plan, tmp_path, max_steps=7, resume=way == "resumed")
    aside = tmp_path / "checkpoints.previous"
    assert mine.is_file() or (aside / mine.name).is_file()
    assert list(tmp_path.glob("*/.checkpoint-*")) == []


def test_what_a_killed_launcher_left_of_a_runs_files_is_swept(tmp_path: Path) -> None:
    names = ("run.json", "trials.json", "trying.json", "ranks.json", "report.json", "outcome.json")
    for name in names:
        (tmp_path / f".{name}.0123456789ab").write_text("{")
    launch.prepare_run(tmp_path, RunConfig(plan_folder="p", run_folder=str(tmp_path)))
    assert [path.name for path in tmp_path.glob(".*")] == [".outcome.json.0123456789ab"]


@pytest.mark.parametrize("resume", [False, True])
def test_checkpoints_are_set_aside_before_any_rank_starts(tmp_path: Path, resume: bool) -> None:
    """A rank that fails before its first step is restarted from nothing, not from an older run."""
    save_checkpoint(tmp_path / "checkpoints", 7, {"steps": 7}, keep=1)
    config = RunConfig(plan_folder="p", run_folder=str(tmp_path), resume=resume)
    launch.prepare_run(tmp_path, config)
    assert len(list_checkpoints(tmp_path / "checkpoints")) == (1 if resume else 0)
    assert len(list_checkpoints(tmp_path / "checkpoints.previous")) == (0 if resume else 1)
