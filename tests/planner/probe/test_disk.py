"""Tests for planner/probe/disk.py."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from planner.probe import disk
from planner.probe.context import ProbeContext
from planner.probe.sizes import QUICK
from planner.probe.team import Team
from planner.probe.worker import State


def context(folder: Path, monkeypatch: pytest.MonkeyPatch, *, cores: int = 1) -> ProbeContext:
    """A context whose team is this process."""

    class Here(Team):
        def run(self, task: str, *, ranks: int | None = None, **arguments: Any) -> list[Any]:
            assert ranks == 1
            function = getattr(disk, task.partition(":")[2])
            return [function(State(rank=0), **arguments)]

    monkeypatch.setattr(disk, "ROUNDS", 3)
    return ProbeContext(team=Here(1), sizes=QUICK, cores=cores, scratch=folder)


def test_direct_reads_are_measured_on_every_grid_point(tmp_path: Path, monkeypatch):
    here = context(tmp_path, monkeypatch)
    tables = disk.measure(here)
    if not tables:
        pytest.skip(f"this file system refuses direct reads: {here.notes}")
    table = tables["disk_read"]
    assert len(table.values) == len(QUICK.disk_read_bytes) * len(QUICK.disk_queue_depths)
    small = table.at(read_bytes=4096, queue_depth=1)
    assert 1e-7 < small < 1.0
    assert table.at(read_bytes=65536, queue_depth=1) >= small
    assert "disk_beside" not in tables  # of one core
    assert list(tmp_path.iterdir()) == []


def test_compute_is_measured_beside_reads_of_every_size(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(disk, "BESIDE_ROUNDS", 3)
    here = context(tmp_path, monkeypatch, cores=2)
    tables = disk.measure(here)
    if not tables:
        pytest.skip(f"this file system refuses direct reads: {here.notes}")
    table = tables["disk_beside"]
    assert table.points == [list(QUICK.disk_read_bytes)]
    assert all(value >= 1.0 for value in table.values)
    assert not [t for t in threading.enumerate() if "ThreadPool" in t.name]  # readers have ended


def test_what_is_computed_beside_reads_really_is(tmp_path: Path, monkeypatch):
    # Each round reads while the second stretch of bursts lasts, and only then.
    path = tmp_path / "rows.bin"
    disk.write_file(path, 2**22)
    try:
        os.close(disk.open_direct(path))
    except OSError as error:
        pytest.skip(f"this file system refuses direct reads: {error}")
    reads: list[int] = []
    real = disk.read_blocks_at

    def counting(*arguments: Any) -> int:
        reads.append(1)
        return real(*arguments)

    before: list[int] = []

    def bursts(burst: Any, **_: Any) -> list[float]:
        first = len(reads)
        time.sleep(0.05)
        before.append(len(reads) - first)
        return [1.0]

    monkeypatch.setattr(disk, "read_blocks_at", counting)
    monkeypatch.setattr(disk, "timed", bursts)
    found = disk.beside_task(State(rank=0), path=path, read_bytes=4096, repeats=1, rounds=2)
    assert found == [1.0, 1.0]
    assert before[0] == before[2] == 0
    assert min(before[1], before[3]) > 0


def test_where_direct_reads_are_refused_the_table_is_left_out_and_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = os.open

    def refusing(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)
    here = context(tmp_path, monkeypatch)
    assert disk.measure(here) == {}
    assert "direct reads refused (Invalid argument)" in here.notes[0]
    assert list(tmp_path.iterdir()) == []
