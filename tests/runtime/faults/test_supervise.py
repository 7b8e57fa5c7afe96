"""What a job's supervisor says of its ranks' ends: on the log, and in the folder of the run."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from gnnplan.runtime.faults import watch
from gnnplan.runtime.faults.failure import ERRORS_FOLDER, LAUNCH_FAILURE, ended_ranks
from gnnplan.runtime.faults.watch import Hang, Supervisor
from gnnplan.runtime.limits import MemoryGroup


def test_how_each_rank_ended_is_logged_and_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / ERRORS_FOLDER / LAUNCH_FAILURE
    file.parent.mkdir()
    supervisor = Supervisor(file)
    assert not supervisor.note(0, {1: -signal.SIGKILL, 0: 1})
    supervisor.refuse("the ports are taken")
    told = capsys.readouterr().err.splitlines()
    assert [line.strip() for line in told] == [
        "attempt 0: rank 1 ended with -9",
        "attempt 0: rank 0 ended with 1",
        "the ports are taken",
    ]
    written = ended_ranks(tmp_path)
    assert [(end.rank, end.exit_code, end.final) for end in written] == [
        (1, -9, False),
        (0, 1, False),
        (-1, 1, True),
    ]


def test_a_hung_rank_is_ended_though_the_log_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the thread that watches would end instead."""
    killed = list[tuple[int, int]]()
    monkeypatch.setattr(watch.os, "kill", lambda *call: killed.append(call))
    monkeypatch.setattr(watch, "is_own_child", lambda pid: pid == 7)

    def refuse(text: str) -> None:
        raise OSError(28, "No space left on device", text[:0])

    monkeypatch.setattr("sys.stderr", SimpleNamespace(write=refuse))
    supervisor = Supervisor(tmp_path / ERRORS_FOLDER / LAUNCH_FAILURE)
    supervisor._end(Hang(rank=0, pid=7, attempt=0, line="rank 0: hung"))
    supervisor.note(0, {0: -signal.SIGKILL})
    monkeypatch.undo()
    assert killed == [(7, signal.SIGKILL)]
    assert ended_ranks(tmp_path)[0].line == "rank 0: hung"


def test_a_kill_for_memory_is_held_against_the_attempt_that_it_ended_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Someone else's SIGKILL of a later attempt is no want of memory."""
    kills = iter([0, 1, 1, 2])

    def group() -> MemoryGroup:
        return MemoryGroup(folder=tmp_path, limit_bytes=1, usage_bytes=1, oom_kills=next(kills))

    monkeypatch.setattr(watch, "memory_group", group)
    supervisor = Supervisor(tmp_path / ERRORS_FOLDER / LAUNCH_FAILURE)
    for attempt in range(3):
        supervisor.note(attempt, {0: -signal.SIGKILL})
    told = ["out-of-memory killer" in end.line for end in ended_ranks(tmp_path)]
    assert told == [True, False, True]
