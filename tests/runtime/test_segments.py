"""Names in shared memory: gone with their owners, or at the start of the next job."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gnnplan.runtime import folders
from gnnplan.runtime.features.device_rows import attach_segment, create_segment
from gnnplan.runtime.folders import Segment, sweep_segments
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.launch.launch import run_ranks
from tests.support.plans import make_plan

OWNER = """
import os, sys
from pathlib import Path
from gnnplan.runtime import folders
folders.SHARED_MEMORY = Path(sys.argv[1])
segment = folders.Segment(4096)
print(segment.path, flush=True)
sys.stdin.read()
os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(folders, "SHARED_MEMORY", folder)
    return folder


def owner_of_one(folder: Path) -> tuple["subprocess.Popen[str]", Path]:
    """A process with a segment; it is killed when its stdin closes."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_killed_owners_segment_is_swept_and_a_living_ones_is_not(shared_memory: Path) -> None:
    killed, left = owner_of_one(shared_memory)
    living, kept = owner_of_one(shared_memory)
    mine = Segment(4096)
    try:
        killed.communicate()
        assert killed.returncode == -9
        assert left.exists()
        assert sweep_segments() == 1
        assert not left.exists()
        assert kept.exists()
        assert Path(mine.path).exists()
        assert sweep_segments() == 0
    finally:
        living.communicate()
        mine.remove()
    assert sweep_segments() == 1
    assert not list(shared_memory.iterdir())


def test_a_segment_without_a_name_serves_those_who_have_mapped_it() -> None:
    segment, room = create_segment(8)
    other = attach_segment(segment.path, 8)
    segment.remove()
    assert not Path(segment.path).exists()
    room[:3] = b"abc"
    assert other[:3] == b"abc"
    assert sweep_segments() == 0


def test_a_sweep_leaves_what_is_not_a_segment(shared_memory: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.touch()
    (shared_memory / "gnnplan-abcdefgh").symlink_to(outside)
    (shared_memory / "gnnplan-dataset0").mkdir()
    for name in ("gnnplan-my-notes.txt", "gnnplan-abcdefghi", "other-abcdefgh"):
        (shared_memory / name).touch()
    before = sorted(shared_memory.iterdir())
    assert sweep_segments() == 0
    assert sorted(shared_memory.iterdir()) == before
    assert outside.exists()


def test_no_segment_is_lost_to_sweeps_that_run_while_it_is_made(shared_memory: Path) -> None:
    ended = threading.Event()

    def sweep() -> None:
        while not ended.is_set():
            sweep_segments()

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        for _ in range(200):
            segment = Segment(16)
            assert Path(segment.path).exists()
            attach_segment(segment.path, 16)
            segment.remove()
    finally:
        ended.set()
        sweeper.join()
    assert not list(shared_memory.iterdir())


def test_too_little_memory_leaves_no_name(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        Segment(4096)
    assert not list(shared_memory.iterdir())


def test_a_job_frees_what_killed_ones_left_before_it_starts(
    shared_memory: Path, small_graph: Graph, tmp_path: Path
) -> None:
    killed, left = owner_of_one(shared_memory)
    killed.communicate()
    plan = make_plan(small_graph, tmp_path / "plan")
    looks = [sys.executable, "-c", f"import os, sys; sys.exit(os.path.exists({str(left)!r}))"]
    with run_ranks(looks, plan, {}) as job:
        assert job.wait() == 0
