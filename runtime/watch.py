"""Which rank hangs: judged from heartbeats, by counters and the watcher's own monotonic clock.

A rank is hung when it gives no sign of life for `limit_seconds` (stopped, or stuck with the
interpreter's lock), or when no rank of the host enters another stage of training for
`STALL_SHARE * limit_seconds`, or `PATIENCE` times the longest stage so far where that is longer.
Named is then the rank that is furthest behind: the others wait for it where ranks meet. Where that
rank itself waits in a collective, it is a link (or another host's watcher names the rank).

The watcher's clock advances by at most `MAX_TICK_SECONDS` per look: a pause of the whole machine,
or a jump of its clock, is not held against anyone.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runtime.heartbeat import Beat, Phase

LOOK_SECONDS = 0.25
MAX_TICK_SECONDS = 1.0
STALL_SHARE = 1.25
"""A stall is judged a little later than silence: a silent rank elsewhere is the better name."""
PATIENCE = 10.0
START_SECONDS = 120.0
"""Longest that a rank may take from its process's start to its first sign of life (imports)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A rank's process on this host."""

    pid: int
    rank: int
    local_rank: int
    stopped: bool
    """True where it is stopped by a signal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """What is wrong, and whose process to end."""

    rank: int
    pid: int
    attempt: int
    line: str


@dataclass(kw_only=True, slots=True)
class _Seen:
    """What was last seen of one process, and when by the watcher's clock."""

    since: float
    beats: int = -1
    silent_since: float = 0.0
    stopped: bool = False


@dataclass(kw_only=True)
class Watcher:
    """Judges what it is shown; `look` is called again and again."""

    limit_seconds: float
    start_seconds: float = START_SECONDS
    _clock: float = 0.0
    _last: float | None = None
    _seen: dict[int, _Seen] = field(default_factory=dict[int, _Seen])
    _moves: tuple[tuple[int, int], ...] = ()
    _moved: float = 0.0
    _longest: float = 0.0

    def look(
        self, now: float, processes: Sequence[Process], beats: Sequence[Beat | None]
    ) -> Hang | None:
        """The hang that shows now, if any.

        Args:
            now: Seconds of a monotonic clock.
            processes: The ranks' processes on this host.
            beats: The row of each, None where it is not (yet) that process's.
        """
        if self._last is not None:
            self._clock += min(max(now - self._last, 0.0), MAX_TICK_SECONDS)
        self._last = now
        for pid in set(self._seen) - {process.pid for process in processes}:
            del self._seen[pid]
        silent = [
            hang
            for process, beat in zip(processes, beats, strict=True)
            if (hang := self._silence(process, beat)) is not None
        ]
        if silent:
            return silent[0]
        known = [beat for beat in beats if beat is not None]
        return self._stall(known) if known and len(known) == len(processes) else None

    def _silence(self, process: Process, beat: Beat | None) -> Hang | None:
        seen = self._seen.setdefault(
            process.pid, _Seen(since=self._clock, silent_since=self._clock)
        )
        if beat is None:
            if process.stopped != seen.stopped:
                seen.stopped, seen.silent_since = process.stopped, self._clock
            silent = self._clock - seen.silent_since
            late = self._clock - seen.since > self.start_seconds
            if late or (process.stopped and silent > self.limit_seconds):
                return _hang(process, None, "starting", self._clock - seen.since)
            return None
        if beat.beats != seen.beats or beat.phase is Phase.FINISHED:
            seen.beats, seen.silent_since = beat.beats, self._clock
        silent = self._clock - seen.silent_since
        return None if silent <= self.limit_seconds else _hang(process, beat, beat.where, silent)

    def _stall(self, beats: list[Beat]) -> Hang | None:
        moves = tuple((beat.pid, beat.moves) for beat in beats)
        training = all(beat.phase is Phase.TRAINING for beat in beats)
        warm = all(beat.step >= 1 for beat in beats)  # the first step may compile
        if moves != self._moves or not (training and warm):
            if {pid for pid, _ in moves} != {pid for pid, _ in self._moves}:
                self._longest = 0.0
            elif training and warm:
                self._longest = max(self._longest, self._clock - self._moved)
            self._moves, self._moved = moves, self._clock
            return None
        seconds = self._clock - self._moved
        if seconds <= max(STALL_SHARE * self.limit_seconds, PATIENCE * self._longest):
            return None
        last = min(beats, key=lambda beat: beat.place)
        together = len(beats) > 1 and len({beat.place for beat in beats}) == 1
        if last.meeting or together:
            line = (
                f"rank {last.rank}: hung in {last.where} with every rank of its host, no progress "
                f"for {seconds:.0f} s: a link is down or too slow, or another host's rank hangs"
            )
        else:
            line = f"rank {last.rank}: hung in {last.where}, no progress for {seconds:.0f} s"
        return Hang(rank=last.rank, pid=last.pid, attempt=last.attempt, line=line)


def _hang(process: Process, beat: Beat | None, where: str, seconds: float) -> Hang:
    how = "stopped by a signal" if process.stopped else "no sign of life"
    return Hang(
        rank=process.rank,
        pid=process.pid,
        attempt=-1 if beat is None else beat.attempt,
        line=f"rank {process.rank}: hung in {where}, {how} for {seconds:.0f} s",
    )


def rank_processes() -> list[Process]:
    """The ranks that this process (torchrun) has started and that still run."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue  # the thread ended meanwhile
        found += [p for pid in children if (p := _process(int(pid))) is not None]
    return sorted(found, key=lambda process: process.rank)


def _process(pid: int) -> Process | None:
    folder = Path("/proc") / str(pid)
    try:
        state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        words = (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return None  # it ended meanwhile
    variables = dict(word.split(b"=", 1) for word in words if b"=" in word)
    if state in "ZX" or b"LOCAL_RANK" not in variables:
        return None
    return Process(
        pid=pid,
        rank=int(variables[b"RANK"]),
        local_rank=int(variables[b"LOCAL_RANK"]),
        stopped=state in "Tt",
    )


def is_own_child(pid: int) -> bool:
    """True where the process is still a child of this one: its number was not given away."""
    try:
        stat = (Path("/proc") / str(pid) / "stat").read_text()
    except OSError:
        return False
    return int(stat.rpartition(")")[2].split()[1]) == os.getpid()
