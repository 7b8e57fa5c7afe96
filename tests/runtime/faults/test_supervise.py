"""What a job's supervisor says of its ranks' ends: on the log, and in the folder of the run."""

import signal
from pathlib import Path

import pytest

from gnnplan.runtime.faults.failure import ERRORS_FOLDER, LAUNCH_FAILURE, ended_ranks
from gnnplan.runtime.faults.watch import Supervisor


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
