"""Which rank hangs: judged from heartbeats, by counters and the watcher's own monotonic clock.

A rank is hung when it gives no sign of life for `limit_seconds` (stopped, or stuck with the
interpreter's lock), or when no rank of the host enters another stage of training for
`STALL_SHARE * limit_seconds`, or `PATIENCE` times the longest stage so far where that is longer.
Named is then the rank that is furthest behind: the others wait for it where ranks meet. Where that
rank itself waits in a collective, it is a link (or another host's watcher names the rank).

The watcher's clock advances by at most `MAX_TICK_SECONDS` per look: a pause of the whole machine,
or a jump of its clock, is not held against anyone.

What torchrun's process does beside starting ranks: watch them, end a hung one, say what ended.

A hung rank is ended by SIGKILL, which turns it into a failed one: torchrun then ends the others
and starts all again from the last checkpoint, as often as it may. What ended an attempt is written
to the run folder at once. An error that starting again cannot cure uses up the restarts.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnnplan.runtime import codec
from gnnplan.runtime.faults.failure import EndedRank, ended_ranks, is_final
from gnnplan.runtime.faults.heartbeat import VARIABLE, Beat, HeartbeatTable, Phase
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.limits import killed_text, memory_group
from gnnplan.runtime.plan.io import load_plan

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


CONFIG_FILE = "run.json"
NO_RANKS_SECONDS = 60.0
"""Longest time without any rank after the first ones were started: the rendezvous is stuck."""

LEAVE_SECONDS = 20.0
"""Longest time that torchrun may take to notice a rank's end, and to end after the last one."""


class Supervisor:
    """Watches one host's ranks of one job.

    Args:
        failure_file: launch.json in the errors folder of the run.
    """

    def __init__(self, failure_file: Path) -> None:
        self._file = failure_file
        self._run_folder = failure_file.parent.parent
        self._ended: list[EndedRank] = []
        self._hangs: dict[int, Hang] = {}
        self._failed = False
        """An attempt has ended and the next one has not begun."""
        self._pids: set[int] = set()
        self._waited_seconds = 0.0
        """For torchrun to see an end, or to start the next attempt."""
        group = memory_group()
        self._oom_kills = 0 if group is None else group.oom_kills
        self._config = _config_of(self._run_folder)

    def start(self) -> None:
        """Watch from now on, where the job is one of `runtime.worker`; else only note ends."""
        if self._config is None or not hasattr(os, "memfd_create"):
            return
        plan = load_plan(Path(self._config.plan_folder))
        table = HeartbeatTable(plan.num_ranks)
        os.environ[VARIABLE] = table.name
        watcher = Watcher(limit_seconds=self._config.hang_seconds)
        threading.Thread(target=self._watch, args=(table, watcher), daemon=True).start()

    def note(self, attempt: int, exit_codes: Mapping[int, int]) -> bool:
        """Write down which ranks ended an attempt, and how; True where it was the last one.

        Args:
            attempt: restarts before it.
            exit_codes: by rank, the first that ended first.
        """
        killed = self._killed_for_memory(exit_codes)
        for rank, code in exit_codes.items():
            hang = self._hangs.get(rank)
            line = (
                killed if killed and code == -signal.SIGKILL else "" if hang is None else hang.line
            )
            ended = EndedRank(
                attempt=attempt, rank=rank, exit_code=code, line=line, final=bool(killed)
            )
            self._ended.append(ended)
            sys.stderr.write(f"attempt {attempt}: rank {rank} ended with {code} {line}\n")
        self._hangs.clear()
        self._failed, self._waited_seconds = True, 0.0
        self._write()
        return bool(killed) or is_final(self._run_folder, attempt)

    def refuse(self, line: str) -> None:
        """Write down why the job never began."""
        sys.stderr.write(f"{line}\n")
        self._ended.append(EndedRank(attempt=0, rank=-1, exit_code=1, line=line, final=True))
        self._write()

    def leave(self) -> None:
        """End this process soon, whatever torchrun waits for: all that is to be said is written.

        It takes its leave of the rendezvous, which may lie behind a link that is down. Ranks that
        are left end with their parent.
        """
        timer = threading.Timer(LEAVE_SECONDS, os._exit, [1])
        timer.daemon = True
        timer.start()

    def _killed_for_memory(self, exit_codes: Mapping[int, int]) -> str:
        """The out-of-memory killer's victim and the plan's sum; empty where it killed nobody."""
        group = memory_group()
        victims = [r for r, c in exit_codes.items() if c == -signal.SIGKILL]
        if group is None or not victims or group.oom_kills <= self._oom_kills:
            return ""
        if self._config is None:
            return f"rank {victims[0]}: ended by the out-of-memory killer"
        return killed_text(load_plan(Path(self._config.plan_folder)), victims[0], group)

    def _write(self) -> None:
        known = [each for each in ended_ranks(self._run_folder) if each not in self._ended]
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            codec.write_text_atomically(self._file, codec.dumps([*known, *self._ended]))
        except OSError as error:
            sys.stderr.write(f"{self._file}: not written ({error})\n")

    def _watch(self, table: HeartbeatTable, watcher: Watcher) -> None:
        last = time.monotonic()
        while True:
            time.sleep(LOOK_SECONDS)
            processes = rank_processes()
            beats = [table.read(each.local_rank) for each in processes]
            beats = [
                beat if beat is not None and beat.pid == process.pid else None
                for process, beat in zip(processes, beats, strict=True)
            ]
            now = time.monotonic()
            hang = watcher.look(now, processes, beats)
            if hang is not None and hang.pid not in {h.pid for h in self._hangs.values()}:
                self._end(hang)
            self._hurry_torchrun(
                {each.pid for each in processes}, min(now - last, MAX_TICK_SECONDS)
            )
            last = now

    def _end(self, hang: Hang) -> None:
        sys.stderr.write(f"{hang.line}; ended\n")
        self._hangs[hang.rank], self._waited_seconds = hang, 0.0
        if is_own_child(hang.pid):
            os.kill(hang.pid, signal.SIGKILL)

    def _hurry_torchrun(self, pids: set[int], seconds: float) -> None:
        """Leave in its place where torchrun itself is stuck, as behind a link that is down."""
        if pids - self._pids:
            self._pids |= pids
            self._failed = False  # the next attempt has begun
        if not (self._failed or self._hangs):
            self._waited_seconds = 0.0
            return
        self._waited_seconds += seconds
        if self._hangs and self._waited_seconds > LEAVE_SECONDS:  # it has not noticed the end
            hang = next(iter(self._hangs.values()))
            self._give_up(max(hang.attempt, 0), hang.rank, hang.line)
        if self._failed and self._waited_seconds > NO_RANKS_SECONDS:
            attempt = max([each.attempt for each in self._ended], default=0) + 1
            reason = f"no rank could be started again within {NO_RANKS_SECONDS:.0f} s (rendezvous)"
            self._give_up(attempt, -1, reason)

    def _give_up(self, attempt: int, rank: int, line: str) -> None:
        code = -int(signal.SIGKILL)
        ended = EndedRank(attempt=attempt, rank=rank, exit_code=code, line=line, final=True)
        self._ended.append(ended)
        self._write()
        sys.stderr.write(f"{line}; torchrun is stuck and left\n")
        os._exit(1)


def supervise(supervisor: Supervisor) -> None:
    """Let torchrun's agent tell the supervisor about every failed attempt."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    # torchrun calls nobody between two attempts; its agent's look at the ranks is the one place
    # that sees every attempt's end, with the exit codes.
    agents: Any = LocalElasticAgent
    look: Callable[..., Any] = agents._monitor_workers

    def look_and_tell(agent: Any, group: Any) -> Any:
        result = look(agent, group)
        if result.failures:
            attempt = group.spec.max_restarts - agent._remaining_restarts
            codes = sorted(result.failures.items(), key=lambda item: item[1].timestamp)
            if supervisor.note(attempt, {rank: f.exitcode for rank, f in codes}):
                agent._remaining_restarts = 0
            if agent._remaining_restarts == 0:
                supervisor.leave()
        return result

    agents._monitor_workers = look_and_tell


def _config_of(run_folder: Path) -> RunConfig | None:
    """The run's configuration; None where `launch` wrote none (a user's own script)."""
    try:
        return codec.decode(RunConfig, codec.parse((run_folder / CONFIG_FILE).read_bytes()))
    except (OSError, ValueError):
        return None
