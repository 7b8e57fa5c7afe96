"""A rank's row: what it writes is what its watcher reads, in another process too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gnnplan.runtime.faults.heartbeat import VARIABLE, Heartbeat, HeartbeatTable, Phase
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.stages import Stage

CHILD = """
from gnnplan.runtime.faults.heartbeat import Heartbeat, Phase
heartbeat = Heartbeat.join()
heartbeat.begin(Phase.TRAINING)
heartbeat.enter("gather", 7)
heartbeat.enter("all_reduce", 4)
print("ready", flush=True)
input()
"""


def test_a_table_is_empty_until_a_rank_joins() -> None:
    assert [HeartbeatTable(2).read(row) for row in (0, 1)] == [None, None]


def test_another_process_writes_and_this_one_reads() -> None:
    table = HeartbeatTable(3)
    env = os.environ | {
        VARIABLE: table.name, "LOCAL_RANK": "2", "RANK": "6", "TORCHELASTIC_RESTART_COUNT": "1"
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", CHILD],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[3],
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        beat = table.read(2)
        assert beat is not None
        assert (beat.pid, beat.rank, beat.attempt) == (child.pid, 6, 1)
        assert (beat.phase, beat.moves) == (Phase.TRAINING, 3)
        assert (beat.step, beat.stage) == (4, "all_reduce")
        assert (beat.loader_step, beat.loader_stage) == (7, "gather")
        assert beat.where == "all_reduce of step 4"
        child.communicate("\n")
    assert table.read(0) is None


def test_it_beats_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gnnplan.runtime.faults.heartbeat.BEAT_SECONDS", 0.01)
    table = HeartbeatTable(1)
    monkeypatch.setenv(VARIABLE, table.name)
    monkeypatch.setenv("LOCAL_RANK", "0")
    heartbeat = Heartbeat.join()
    while (beat := table.read(0)) is None or beat.beats < 3:
        continue
    heartbeat.close()
    beat = table.read(0)
    assert beat is not None
    assert beat.phase is Phase.FINISHED


def test_a_meter_tells_which_stage_is_entered() -> None:
    heartbeat, meter = Heartbeat(), StageMeter()
    meter.on_enter = heartbeat.enter
    with meter.measure(Stage.OPTIMIZER, 3):
        assert heartbeat.moves == 1
    with pytest.raises(ZeroDivisionError), meter.measure(Stage.OPTIMIZER, 4):
        raise ZeroDivisionError
    assert heartbeat.moves == 2


def test_waiting_for_the_loader_is_named_by_the_loaders_stage() -> None:
    table = HeartbeatTable(1)
    os.environ.update({VARIABLE: table.name, "LOCAL_RANK": "0"})
    try:
        heartbeat = Heartbeat.join()
    finally:
        del os.environ[VARIABLE], os.environ["LOCAL_RANK"]
    heartbeat.begin(Phase.TRAINING)
    heartbeat.enter(Stage.GATHER, 9, True)
    heartbeat.enter(Stage.SAMPLE, 10)  # another thread, on a batch that comes later
    heartbeat.enter(Stage.WAIT, 8)
    beat = table.read(0)
    assert beat is not None
    assert beat.where == "gather of step 9"
    assert beat.meeting
    heartbeat.enter(Stage.BATCH, 9)
    beat = table.read(0)
    assert beat is not None
    assert (beat.where, beat.meeting) == ("batch of step 9", False)
    heartbeat.close()
