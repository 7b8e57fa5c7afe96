"""Watch a host's ranks from torchrun's process: name and end a hung one, and record what ended.

A rank is hung when it gives no sign of life for `limit_seconds` (stopped, or stuck with the
interpreter's lock), or when no rank of the host enters another stage of training for
`STALL_SHARE * limit_seconds`, or `PATIENCE` times the longest stage so far where that is longer.
The rank furthest behind is named: others wait for it where ranks meet. Where it waits in a
collective itself, a link is at fault, or another host's rank. Each look advances the watcher's
clock by at most `MAX_TICK_SECONDS`, so a pause of the whole machine is held against nobody.

A hung rank is ended by SIGKILL: torchrun then ends the others and starts all again from the last
checkpoint, as often as it may. An error that starting again cannot cure uses up the restarts.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnnplan.runtime import codec
from gnnplan.runtime.faults.failure import (
    EndedRank,
    ended_ranks,
    is_final,
    plan_on_trial,
    write_to_log,
)
from gnnplan.runtime.faults.heartbeat import VARIABLE, Beat, HeartbeatTable, Phase
from gnnplan.runtime.launch.config import RunConfig
from gnnplan.runtime.limits import killed_text, memory_group
from gnnplan.runtime.plan.io import load_plan

LOOK_SECONDS = 0.25
MAX_TICK_SECONDS = 1.0
STALL_SHARE = 1.25
"""Share of the limit: later than silence, for a silent rank elsewhere is the better name."""
PATIENCE = 10.0
START_SECONDS = 120.0
"""Most seconds from a rank's start to its first sign of life (imports)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A rank's process on this host."""

    pid: int
    rank: int
    local_rank: int
    stopped: bool
    """Whether a signal has stopped it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """A hung rank, with its process and a line for the user."""

    rank: int
    pid: int
    attempt: int
    line: str


@dataclass(kw_only=True, slots=True)
class _Seen:
    """Last signs of one process, in seconds of the watcher's clock."""

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
        """Return the hang that shows now, if any.

        `now` is in seconds of a monotonic clock; `beats` has each process's row, perhaps None.
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
    """List the ranks that this process (torchrun) has started and that still run."""
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
    """Return whether the process is still a child of this one, its number not given away."""
    try:
        stat = (Path("/proc") / str(pid) / "stat").read_text()
    except OSError:
        return False
    return int(stat.rpartition(")")[2].split()[1]) == os.getpid()


CONFIG_FILE = "run.json"
NO_RANKS_SECONDS = 60.0
"""Most seconds without any rank after the first ones; the rendezvous is stuck then."""

LEAVE_SECONDS = 20.0
"""Most seconds for torchrun to notice a rank's end, and to end after the last one."""


class Supervisor:
    """Watches one host's ranks of one job; `failure_file` is launch.json in its errors folder."""

    def __init__(self, failure_file: Path) -> None:
        self._file = failure_file
        self._run_folder = failure_file.parent.parent
        self._ended: list[EndedRank] = []
        self._hangs: dict[int, Hang] = {}
        self._failed = False  # an attempt has ended and the next one has not begun
        self._pids: set[int] = set()
        self._waited_seconds = 0.0  # for torchrun to see an end, or to start the next attempt
        group = memory_group()
        self._oom_kills = 0 if group is None else group.oom_kills
        self._config = _config_of(self._run_folder)

    def start(self) -> None:
        """Begin to watch, where `launch` started the job; a user's own script is not watched."""
        if self._config is None or not hasattr(os, "memfd_create"):
            return
        plan = load_plan(Path(self._config.plan_folder))
        table = HeartbeatTable(plan.num_ranks)
        os.environ[VARIABLE] = table.name
        watcher = Watcher(limit_seconds=self._config.hang_seconds)
        threading.Thread(target=self._watch, args=(table, watcher), daemon=True).start()

    def note(self, attempt: int, exit_codes: Mapping[int, int]) -> bool:
        """Write down which ranks ended an attempt, and how; return whether it was the last one.

        `exit_codes` stand by rank, in the order of their ends.
        """
        killed = self._killed_for_memory(exit_codes)
        final = bool(killed) and plan_on_trial(self._run_folder) is None
        for rank, code in exit_codes.items():
            line = self._hangs[rank].line if rank in self._hangs else ""
            if killed and code == -signal.SIGKILL:
                line = killed
            self._add(attempt, rank, code, line, final=final)
            write_to_log(f"attempt {attempt}: rank {rank} ended with {code} {line}\n")
        self._hangs.clear()
        self._failed, self._waited_seconds = True, 0.0
        self._write()
        return final or is_final(self._run_folder, attempt)

    def refuse(self, line: str) -> None:
        """Write down why the job never began."""
        write_to_log(f"{line}\n")
        self._add(0, -1, 1, line, final=True)
        self._write()

    def leave(self) -> None:
        """End this process soon, for torchrun may wait for a rendezvous behind a dead link.

        Ranks that are left end with their parent.
        """
        timer = threading.Timer(LEAVE_SECONDS, os._exit, [1])
        timer.daemon = True
        timer.start()

    def _killed_for_memory(self, exit_codes: Mapping[int, int]) -> str:
        """Name the out-of-memory killer's victim of this attempt with the plan's sum, if any."""
        group = memory_group()
        victims = [r for r, c in exit_codes.items() if c == -signal.SIGKILL]
        before = self._oom_kills
        self._oom_kills = before if group is None else group.oom_kills
        if group is None or not victims or group.oom_kills <= before:
            return ""
        if self._config is None:
            return f"rank {victims[0]}: ended by the out-of-memory killer"
        folder = plan_on_trial(self._run_folder) or Path(self._config.plan_folder)
        return killed_text(load_plan(folder), victims[0], group)

    def _add(self, attempt: int, rank: int, code: int, line: str, *, final: bool) -> None:
        ended = EndedRank(attempt=attempt, rank=rank, exit_code=code, line=line, final=final)
        self._ended.append(ended)

    def _write(self) -> None:
        known = [each for each in ended_ranks(self._run_folder) if each not in self._ended]
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            codec.write_text_atomically(self._file, codec.dumps([*known, *self._ended]))
        except OSError as error:
            write_to_log(f"{self._file}: not written ({error})\n")

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
        write_to_log(f"{hang.line}; ended\n")
        self._hangs[hang.rank], self._waited_seconds = hang, 0.0
        if is_own_child(hang.pid):
            os.kill(hang.pid, signal.SIGKILL)

    def _hurry_torchrun(self, pids: set[int], seconds: float) -> None:
        """End this process where torchrun itself is stuck, as behind a link that is down."""
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
        self._add(attempt, rank, -int(signal.SIGKILL), line, final=True)
        self._write()
        write_to_log(f"{line}; torchrun is stuck and left\n")
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
            if agent._remaining_restarts <= 0:
                supervisor.leave()
        return result

    agents._monitor_workers = look_and_tell


def _config_of(run_folder: Path) -> RunConfig | None:
    """Read the run's configuration; None where `launch` wrote none (a user's own script)."""
    try:
        return codec.decode(RunConfig, codec.parse((run_folder / CONFIG_FILE).read_bytes()))
    except (OSError, ValueError):
        return None
