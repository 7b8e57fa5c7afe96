"""Tests for planner/probe/disk.py."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnplan.planner.probe import disk
from gnnplan.planner.probe.context import QUICK, ProbeContext
from gnnplan.planner.probe.team import State, Team


def context(folder: Path) -> ProbeContext:
    """A context whose team is this process."""

    class Here(Team):
        def run(self, task: str, *, ranks: int | None = None, **arguments: Any) -> list[Any]:
            function = getattr(disk, task.partition(":")[2])
            return [function(State(rank=rank), **arguments) for rank in range(ranks or 1)]

    return ProbeContext(team=Here(1), sizes=replace(QUICK, disk_rounds=3), cores=1, scratch=folder)


def test_direct_reads_are_measured_on_every_grid_point(tmp_path: Path):
    here = context(tmp_path)
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
    here = context(tmp_path)
    assert disk.measure(here) == {}
    assert "direct reads refused (Invalid argument)" in here.notes[0]
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_has_a_smaller_file(tmp_path: Path) -> None:
    disk.write_file(tmp_path / "small.bin", 64 << 20, seconds=0.0)
    assert (tmp_path / "small.bin").stat().st_size == 4 << 20


def test_how_far_apart_readers_end_is_what_the_slower_still_reads_alone() -> None:
    alike = np.array([3.0, 3.0])
    typical = np.array([2.0, 3.0])
    assert disk.apart_share(alike, typical) == disk.LEAST_APART
    # At 2 one of two is done; a third of the other's is left, which alone takes 2/3 as long:
    # 2 + (4 - 2) * 2 / 3 = 10 / 3; the mean is done at 8 / 3, a fifth before.
    assert disk.apart_share(np.array([4.0, 2.0]), typical) == pytest.approx(0.2)
    # Alone it is no slower than beside others, whatever was measured.
    assert disk.apart_share(np.array([4.0, 2.0]), np.array([9.0, 3.0])) == pytest.approx(0.25)
    # Three, of which k take k seconds a read each: done at 1, 1 + 2 / 3 and 1 + 2 / 3 + 1 / 3.
    three = disk.apart_share(np.array([3.0, 2.0, 1.0]), np.array([1.0, 2.0, 3.0]))
    assert three == pytest.approx(1 - (1 + 5 / 3 + 2) / 3 / 2)


def test_each_reader_keeps_to_its_share_of_the_cores(tmp_path: Path, monkeypatch):
    path = tmp_path / "disk.bin"
    disk.write_file(path, 4 << 20)
    before, seen = sorted(os.sched_getaffinity(0)), list[list[int]]()
    monkeypatch.setattr(disk, "open_direct", lambda path: os.open(path, os.O_RDONLY))

    def look(*args: Any) -> float:
        seen.append(sorted(os.sched_getaffinity(0)))
        return 1e-4

    monkeypatch.setattr(disk, "seconds_per_read", look)
    for rank in range(2):
        disk.read_task(
            State(rank=rank),
            path=path,
            ranks_here=2,
            points=[(4096, 1)],
            point_seconds=0.01,
            start_at=0.0,
        )
    half = len(before) // 2
    # Where a core each is not to be had, readers run wherever the system puts them.
    shares = [before[:half], before[half : 2 * half]] if half else [before, before]
    assert seen == shares
    assert sorted(os.sched_getaffinity(0)) == before
    assert disk.share_of_cores(0, 10_000) == []
