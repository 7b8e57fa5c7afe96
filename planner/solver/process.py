"""Solving in a child process with a hard limit: a solver that hangs or overruns is killed.

One child serves all programmes of a search, since starting it takes longer than most of them.
"""

import atexit
import os
import pickle
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from planner.solver.lp import Failure, Point
from planner.solver.program import LinearProgram

GRACE_SECONDS = 5.0
"""What a solver may overrun its limit by before it is killed."""
START_SECONDS = 120.0
"""What a child may take to start on a busy machine."""


class Child:
    """A solver process, started when first asked."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()

    def solve(self, linear: LinearProgram, *, seconds: float, solver: str = "") -> Point | Failure:
        """Solve, or say why not; never takes much longer than `seconds`."""
        with self._lock:
            fresh = self._connection is None
            connection = self._connection or self._start()
            try:
                connection.send_bytes(pickle.dumps((linear, seconds, solver)))
                grace = GRACE_SECONDS + (START_SECONDS if fresh else 0.0)
                if not connection.poll(seconds + grace):
                    self._stop()
                    return Failure(why=f"no answer in {seconds:g} s; the solver was stopped")
                answer = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError) as error:
                self._stop()
                return Failure(why=f"the solver's process ended ({type(error).__name__})")
        if not isinstance(answer, Point | Failure):
            return Failure(why="the solver's process gave no answer")
        return answer

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


SHARED = Child()
"""The process that the planner's programmes go to."""
atexit.register(SHARED.close)
