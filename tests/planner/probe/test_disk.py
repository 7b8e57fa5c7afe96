"""Tests for planner/probe/disk.py."""

import os
from pathlib import Path
from typing import Any

import pytest

from planner.probe import disk
from planner.probe.context import ProbeContext
from planner.probe.sizes import QUICK
from planner.probe.team import Team
from planner.probe.worker import State


def context(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ProbeContext:
    """A context whose team is this process."""

    class Here(Team):
        def run(self, task: str, *, ranks: int | None = None, **arguments: Any) -> list[Any]:
            function = getattr(disk, task.partition(":")[2])
            return [function(State(rank=rank), **arguments) for rank in range(ranks or 1)]

    monkeypatch.setattr(disk, "ROUNDS", 3)
    return ProbeContext(team=Here(1), sizes=QUICK, cores=1, scratch=folder)


def test_direct_reads_are_measured_on_every_grid_point(tmp_path: Path, monkeypatch):
    here = context(tmp_path, monkeypatch)
    tables = disk.measure(here)
    if not tables:
        pytest.skip(f"this file system refuses direct reads: {here.notes}")
    table = tables["disk_read"]
    assert table.axes == ["read_bytes", "queue_depth", "readers"]
    assert len(table.values) == len(QUICK.disk_read_bytes) * len(QUICK.disk_queue_depths)
    small = table.at(read_bytes=4096, queue_depth=1, readers=1)
    assert 1e-7 < small < 1.0
    assert table.at(read_bytes=65536, queue_depth=1, readers=1) >= small
    assert set(tables) == {"disk_read"}
    assert list(tmp_path.iterdir()) == []


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
