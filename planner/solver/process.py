"""Solving in a child process with a hard limit: a solver that hangs or overruns is killed.

The limit is on the child's processor seconds: on a busy machine a plan must not depend on how long
others keep the processor. A wall clock limit, far above it, is left for a solver that only waits.

One child serves all programmes of a search, since starting it takes longer than most of them.
"""

import atexit
import os
import pickle
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from planner.solver.lp import Failure, Point
from planner.solver.program import LinearProgram

GRACE_SECONDS = 5.0
"""What a solver may overrun its limit by before it is killed."""
START_SECONDS = 120.0
"""What a child may take to start on a busy machine."""
WALL_FACTOR = 30.0
"""Elapsed seconds for each second of the limit after which a child is given up."""
LOOK_SECONDS = 0.5
"""Between two looks at what a child has used."""


class Child:
    """A solver process, started when first asked."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()

    def solve(self, linear: LinearProgram, *, seconds: float, solver: str = "") -> Point | Failure:
        """Solve, or say why not; never uses much more than `seconds` of a processor.

        Where a solver ends its process, CBC is asked in a fresh one.
        """
        with self._lock:
            answer = self._solve(linear, seconds, solver)
            if answer is not None:
                return answer
            again = self._solve(linear, seconds, "cbc") if not solver else None
            return again or Failure(why="the solver's process ended without an answer")

    def _solve(self, linear: LinearProgram, seconds: float, solver: str) -> Point | Failure | None:
        """The child's answer; None where its process ended."""
        fresh = self._connection is None
        connection = self._connection or self._start()
        try:
            connection.send_bytes(pickle.dumps((linear, seconds * WALL_FACTOR, solver)))
            if not self._wait(connection, seconds, START_SECONDS if fresh else 0.0):
                self._stop()
                return Failure(why=f"no answer in {seconds:g} s; the solver was stopped")
            answer = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            self._stop()
            return None
        if not isinstance(answer, Point | Failure):
            return Failure(why="the solver's process gave no answer")
        return answer

    def _wait(self, connection: Connection, seconds: float, start_seconds: float) -> bool:
        """Whether an answer came within the limits."""
        assert self._process is not None
        pid = self._process.pid
        used = seconds + GRACE_SECONDS + _cpu_seconds(pid)
        used += start_seconds and GRACE_SECONDS  # its imports
        end = time.monotonic() + start_seconds + seconds * WALL_FACTOR + GRACE_SECONDS
        while not connection.poll(LOOK_SECONDS):
            if time.monotonic() > end or _cpu_seconds(pid) > used:
                return connection.poll(0)
        return True

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "planner.solver.child", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        theirs.close()
        self._connection = ours
        return ours

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._connection, self._process = None, None


def _cpu_seconds(pid: int) -> float:
    """Processor seconds a process has used; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


SHARED = Child()
"""The process that the planner's programmes go to."""
atexit.register(SHARED.close)
