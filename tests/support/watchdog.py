"""Ends the processes that a hanging test started, and its interpreter where that does not free it.

Run beside pytest as a process of its own: a hang in native code may hold the interpreter's lock,
and a thread would be met by tests that count threads or fork. Each line of its input says how many
seconds the test that begins may last; an empty line says that it is over.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

OWNER = "GNNPLAN_TEST_OWNER"
"""Environment variable that every process a test starts inherits: pytest's process id."""
_TICKS = os.sysconf("SC_CLK_TCK")
_ROUNDS, _PAUSE_SECONDS = 50, 0.02


def seconds_since_boot() -> float:
    """Read the clock by which the system dates processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def end_processes(owner: int, since: float, spared: int = 0) -> list[str]:
    """Kill what a test started, until nothing of it is left.

    Args:
        owner: process id of the pytest that ran the test.
        since: when the test began, in seconds since boot.
        spared: process id of one that is left alone: the clock tells two hundredths of a second
            at best, and the watchdog of a short run may be no older than its first test.

    Returns:
        One line for each process: its id and command.
    """
    ended: dict[int, str] = {}
    for _ in range(_ROUNDS):
        left = [pid for pid in _started(owner, since) if pid != spared]
        if not left:
            break
        for pid in left:
            ended.setdefault(pid, f"{pid} {_read(pid, 'cmdline').replace(chr(0), ' ').strip()}")
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(_PAUSE_SECONDS)
    return list(ended.values())


def _started(owner: int, since: float) -> Iterator[int]:
    """Living processes that descend from `owner` or carry its mark, this one left out."""
    parents: dict[int, int] = {}
    living: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        stat = _read(pid, "stat").rpartition(")")[2].split()
        if stat:
            parents[pid] = int(stat[1])
            if stat[0] not in "ZX" and int(stat[19]) >= int(since * _TICKS) - 1:
                living.append(pid)
    mark = f"{OWNER}={owner}"
    for pid in living:
        ancestors, at = list[int](), parents[pid]
        while at in parents and at not in ancestors:
            ancestors.append(at)
            at = parents[at]
        marked = mark in _read(pid, "environ").split("\0")
        if pid not in (owner, os.getpid()) and (owner in ancestors or marked):
            yield pid


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def watch(owner: int, patience: float) -> None:
    """Serve the lines on standard input until it ends.

    Args:
        owner: pytest's process id.
        patience: seconds beyond a test's limit at which its processes are killed, and again beyond
            that at which `owner` is aborted, which writes the stacks of its threads.
    """
    since, waits = 0.0, list[float]()
    while True:
        ready, _, _ = select.select([0], [], [], waits[0] if waits else None)
        if ready:
            lines = os.read(0, 1 << 16).decode().split("\n")
            if lines == [""]:
                return
            since = seconds_since_boot()
            waits = [float(lines[-2]) + patience, patience] if lines[-2] else []
        else:
            end_processes(owner, since)
            if len(waits) == 1:
                os.kill(owner, signal.SIGABRT)
            del waits[0]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch(int(sys.argv[1]), float(sys.argv[2]))
