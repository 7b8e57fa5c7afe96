"""Which of several errors is shown, and when starting again is useless."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gnnplan.runtime import codec
from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import BudgetExceeded, PlanError, WorkerFailed
from gnnplan.runtime.faults.failure import (
    ERRORS_FOLDER,
    LAUNCH_FAILURE,
    EndedRank,
    attempt_line,
    clear_failures,
    failure_of,
    is_final,
    record_failure,
)
from gnnplan.runtime.train.recovery import begin
from tests.support.inprocess import run_in_process

LOST = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1")


def ended(folder: Path, *ends: EndedRank) -> None:
    (folder / ERRORS_FOLDER).mkdir(exist_ok=True)
    codec.write_text_atomically(folder / ERRORS_FOLDER / LAUNCH_FAILURE, codec.dumps(list(ends)))


def end(rank: int, code: int, line: str = "", attempt: int = 0) -> EndedRank:
    return EndedRank(attempt=attempt, rank=rank, exit_code=code, line=line)


def test_a_ranks_own_error_comes_before_its_consequences(tmp_path: Path) -> None:
    record_failure(tmp_path, 0, LOST)
    record_failure(tmp_path, 1, ValueError("seven  is\nwrong"))
    assert "rank 1: ValueError: seven is wrong" in str(failure_of(tmp_path, tmp_path / "log"))


def test_a_killed_rank_comes_before_consequences_and_before_torchruns_own_signal(
    tmp_path: Path,
) -> None:
    record_failure(tmp_path, 0, LOST)
    ended(tmp_path, end(2, -15), end(1, -9), end(0, 1))
    text = str(failure_of(tmp_path, tmp_path / "log"))
    assert text.startswith("rank 1: ended by SIGKILL (out of memory?); output in")


def test_a_rank_that_gave_no_answer_is_not_said_to_be_out_of_memory(tmp_path: Path) -> None:
    record_failure(tmp_path, 0, RuntimeError("[gloo/x.cc:129] Timed out waiting 10000ms for send"))
    ended(tmp_path, end(0, 1), end(1, -9))  # it was stopped, and torchrun ended it in the end
    text = str(failure_of(tmp_path, tmp_path / "log"))
    assert text.startswith("rank 0: [gloo/x.cc:129] Timed out waiting 10000ms for send")
    assert "no answer from rank 1; output in" in text


def test_where_the_rest_was_ended_by_torchrun_the_consequence_is_shown(tmp_path: Path) -> None:
    record_failure(tmp_path, 1, LOST)
    ended(tmp_path, end(0, -15), end(1, 1))
    assert "rank 1: RuntimeError: [gloo" in str(failure_of(tmp_path, tmp_path / "log"))


def test_a_known_reason_comes_first(tmp_path: Path) -> None:
    record_failure(tmp_path, 0, ValueError("secondary"))
    ended(tmp_path, end(1, -9, "rank 1: hung in gather of step 3"))
    assert str(failure_of(tmp_path, tmp_path / "log")).startswith("rank 1: hung in gather of step")


def test_the_last_attempt_counts_and_earlier_ones_are_remembered(tmp_path: Path) -> None:
    record_failure(tmp_path, 0, ValueError("now"), attempt=2)
    ended(tmp_path, end(1, -9, "rank 1: hung", attempt=1), end(0, 1, attempt=2))
    assert "rank 0: ValueError: now" in str(failure_of(tmp_path, tmp_path / "log"))
    assert attempt_line(tmp_path, 1) == "rank 1: hung"
    assert attempt_line(tmp_path, 0) == "a rank ended without a word"


def test_errors_on_purpose_keep_their_class_and_are_final(tmp_path: Path) -> None:
    record_failure(tmp_path, 0, BudgetExceeded("1 + 1 = 2"))
    assert is_final(tmp_path, 0)
    assert not is_final(tmp_path, 1)
    error = failure_of(tmp_path, tmp_path / "log")
    assert isinstance(error, BudgetExceeded)
    record_failure(tmp_path, 0, PlanError("plan again"))
    assert isinstance(failure_of(tmp_path, tmp_path / "log"), PlanError)


@pytest.mark.parametrize(
    ("line", "attempt", "progress", "final"),
    [
        ("again", 1, "checkpoint-4", True),
        ("another", 1, "checkpoint-4", False),
        ("again", 1, "checkpoint-6", False),
        ("again", 2, "checkpoint-4", False),
    ],
)
def test_the_same_error_without_progress_is_final(
    tmp_path: Path, line: str, attempt: int, progress: str, final: bool
) -> None:
    record_failure(tmp_path, 0, ValueError("again"), attempt=0, progress="checkpoint-4")
    assert not is_final(tmp_path, 0)
    record_failure(tmp_path, 0, ValueError(line), attempt=attempt, progress=progress)
    assert is_final(tmp_path, attempt) == final


def test_a_lost_peer_twice_is_not_final(tmp_path: Path) -> None:
    for attempt in (0, 1):
        record_failure(tmp_path, 0, LOST, attempt=attempt)
    assert not is_final(tmp_path, 1)


def test_the_order_does_not_depend_on_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_failure(tmp_path, 1, ValueError("first"))
    monkeypatch.setattr("time.time", lambda: 0.0)
    record_failure(tmp_path, 0, ValueError("second"))
    assert "rank 1: ValueError: first" in str(failure_of(tmp_path, tmp_path / "log"))


def test_a_full_disk_leaves_the_error_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device", str(path), text[:0])

    monkeypatch.setattr(codec, "write_text_atomically", full)
    record_failure(tmp_path, 3, ValueError("seven"))
    assert "rank 3: ValueError: seven (not recorded" in capsys.readouterr().err
    log = SimpleNamespace(write=lambda text: full(tmp_path, text))
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", log)
        record_failure(tmp_path, 3, ValueError("seven"))  # the log lies on the same disk


def test_a_job_that_a_signal_ended_says_so(tmp_path: Path) -> None:
    error = failure_of(tmp_path, tmp_path / "log", -9)
    assert isinstance(error, WorkerFailed)
    assert str(error).startswith("the job was ended by SIGKILL, --resume goes on; output in")


def test_a_new_run_starts_without_old_errors(tmp_path: Path) -> None:
    record_failure(tmp_path, 0, ValueError("old"))
    ended(tmp_path, end(0, 1))
    clear_failures(tmp_path)
    assert "without an error" in str(failure_of(tmp_path, tmp_path / "log"))


@pytest.mark.parametrize("first", ["consequence", "nothing", "signal"])
def test_a_restart_is_noted_in_the_words_of_the_host_that_knows_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Rank 1 was killed on the second host; the first one saw no more than that it is gone."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    if first == "consequence":
        record_failure(folders[0], 0, LOST)
        ended(folders[0], end(0, 1))
    elif first == "signal":
        ended(folders[0], end(0, -15))
    ended(folders[1], end(1, -9))

    def notes(comm: Communicator) -> list[str]:
        job: Any = SimpleNamespace(
            config=SimpleNamespace(run_path=folders[comm.rank], resume=False),
            loop=SimpleNamespace(comm=comm),
            events=SimpleNamespace(emit=lambda event, line: None),
            plan=SimpleNamespace(plan_id=""),
            trials=None,
            notes=[],
            warn=lambda line: None,
        )
        begin(job)
        return job.notes

    told = ["restart 1: rank 1: ended by SIGKILL (out of memory?)"]
    assert run_in_process(2, notes) == [told, told]


@pytest.mark.parametrize(("free", "told"), [(4096, True), (1 << 30, False)])
def test_a_full_disk_is_named_where_it_left_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, told: bool
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    line = str(failure_of(tmp_path, tmp_path / "ranks.log", 1))
    assert line.startswith("the job ended without a report and without an error")
    assert ("4,096 bytes free: make room, and --resume goes on" in line) == told
