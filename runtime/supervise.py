"""What torchrun's process does beside starting ranks: watch them, end a hung one, say what ended.

A hung rank is ended by SIGKILL, which turns it into a failed one: torchrun then ends the others
and starts all again from the last checkpoint, as often as it may. What ended an attempt is written
to the run folder at once. An error that starting again cannot cure uses up the restarts.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runtime import codec
from runtime.cgroup import memory_group
from runtime.config import RunConfig
from runtime.failure import EndedRank, ended_ranks, is_final
from runtime.heartbeat import VARIABLE, HeartbeatTable
from runtime.memory_sum import killed_text
from runtime.plan import load_plan
from runtime.watch import (
    LOOK_SECONDS,
    MAX_TICK_SECONDS,
    Hang,
    Watcher,
    is_own_child,
    rank_processes,
)

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
