"""A plan run by the launcher in a memory control group, and the most that its ranks ever took."""

import statistics
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.memory_groups import LimitedGroup, limited_group

SAMPLE_SECONDS = 0.01
RUN_SECONDS = 240.0
"""Cuts off a run that hangs; far above what one takes on a busy machine."""
UNLIMITED = 2**42
ROOT = Path(__file__).resolve().parents[2]
TRAIN = """
import sys
from pathlib import Path
from gnnplan.runtime import launch
launch.train(Path(sys.argv[1]), run_folder=Path(sys.argv[2]), epochs=int(sys.argv[3]),
             max_steps=int(sys.argv[4]), eval_every=0, max_restarts=0, force=True,
             hang_seconds=120.0)
"""
"""`force`: the plan was made under another limit of memory, which is part of what a machine is."""


@dataclass(kw_only=True, slots=True)
class Peaks:
    """Most resident bytes that no file backs, each of one moment."""

    ranks: int = 0
    """All ranks together."""
    each: dict[str, int] = field(default_factory=dict[str, int])
    """By LOCAL_RANK."""
    launcher: int = 0
    """The launcher and torchrun: the median while ranks run, since a process that is just forked
    shows its parent's bytes once more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A run in a group."""

    code: int
    kills: int
    peaks: Peaks
    tail: str
    """The last words of one that failed."""


def run_limited(folder: Path, run: Path, limit_bytes: int, *, epochs: int, steps: int) -> Ended:
    """Train under the plan in a group of its own.

    Args:
        folder: the plan.
        run: the run's folder.
        limit_bytes: of the group.
        epochs: to train for.
        steps: after which it ends.

    Raises:
        NoGroups: no group can be made; the text says why.
    """
    with limited_group(limit_bytes) as group:
        peaks, done = Peaks(), threading.Event()
        thread = threading.Thread(target=_watch, args=(group, peaks, done))
        thread.start()
        words = [sys.executable, "-c", TRAIN, str(folder), str(run), str(epochs), str(steps)]
        try:
            ended = subprocess.run(
                ["sh", "-c", f'{group.join_words()}; exec "$@"', "sh", *words],
                cwd=ROOT, capture_output=True, text=True, check=False, timeout=RUN_SECONDS,
            )  # fmt: skip
        finally:
            done.set()
            thread.join()
        return Ended(
            code=ended.returncode, kills=group.kills(), peaks=peaks, tail=ended.stderr[-500:]
        )


def _watch(group: LimitedGroup, peaks: Peaks, done: threading.Event) -> None:
    """Keep the peaks of the group's processes until `done`."""
    known: dict[str, str] = {}
    launchers: list[int] = []
    while not done.wait(SAMPLE_SECONDS):
        ranks = launcher = 0
        for pid in group.processes():
            size = _private_bytes(pid)
            rank = known.get(pid) or _local_rank(pid)
            if rank:
                known[pid] = rank
                ranks += size
                peaks.each[rank] = max(peaks.each.get(rank, 0), size)
            else:
                launcher += size
        peaks.ranks = max(peaks.ranks, ranks)
        if ranks:
            launchers.append(launcher)
            peaks.launcher = round(statistics.median(launchers))


def _private_bytes(pid: str) -> int:
    """Resident bytes of a process that no file backs; 0 once it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    kept = (line.split() for line in status.splitlines() if line.startswith(("RssAnon", "RssSh")))
    return sum(int(words[1]) * 1024 for words in kept)


def _local_rank(pid: str) -> str:
    """Which of torchrun's ranks a process is; "" for another."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((v[11:].decode() for v in variables if v.startswith(b"LOCAL_RANK=")), "")
