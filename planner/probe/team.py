"""A team of worker processes that measure at the same time.

Real processes, because ranks are: each has its own memory, its own threads and its own sockets. The
team is started once per probe (starting Python with torch costs seconds) and told what to run.
"""

import os
import subprocess
import sys
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from runtime.errors import WorkerFailed
from runtime.models.memory import with_huge_pages

START_AHEAD_SECONDS = 0.01
"""A common start lies this far ahead, so that every worker has its task before it."""


class Team:
    """Worker processes 0 .. size-1; use as a context manager."""

    def __init__(self, size: int, *, timeout_seconds: float = 120.0):
        self.size = size
        self.timeout_seconds = timeout_seconds
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> "Team":
        try:
            for rank in range(self.size):
                self._start(rank)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:  # a worker may wait for ever for one that failed
            for process in self._processes:
                process.kill()
        self.close()

    def _start(self, rank: int) -> None:
        ours, theirs = Pipe()
        descriptor = theirs.fileno()
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "planner.probe.worker", str(descriptor), str(rank)],
            pass_fds=[descriptor],
            env=with_huge_pages(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        theirs.close()
        self._processes.append(process)
        self._pipes.append(ours)

    def run(self, task: str, *, ranks: int | None = None, **arguments: Any) -> list[Any]:
        """Run one task on the first `ranks` workers (all by default) at the same time.

        Args:
            task: `planner.probe.module:function`.
            ranks: how many workers take part; the others stay idle.
            arguments: passed to every worker.

        Returns:
            Each worker's result, by rank.

        Raises:
            WorkerFailed: a worker raised, died or did not answer in time.
        """
        pipes = self._pipes[: self.size if ranks is None else ranks]
        for rank, pipe in enumerate(pipes):
            try:
                pipe.send((task, arguments))
            except (BrokenPipeError, ConnectionError):
                raise WorkerFailed(self._died(rank, task)) from None
        end = time.monotonic() + self.timeout_seconds
        answers = [self._receive(rank, pipe, task, end) for rank, pipe in enumerate(pipes)]
        for rank, (kind, value) in enumerate(answers):
            if kind == "error":
                raise WorkerFailed(f"probe process {rank}: {task}: {value}")
        return [value for _, value in answers]

    def run_together(self, task: str, *, ranks: int | None = None, **arguments: Any) -> list[Any]:
        """Like `run`, with an argument `start_at`: a moment of perf_counter to start at."""
        moment = time.perf_counter() + START_AHEAD_SECONDS
        return self.run(task, ranks=ranks, start_at=moment, **arguments)

    def _receive(self, rank: int, pipe: Connection, task: str, end: float) -> tuple[str, Any]:
        try:
            if not pipe.poll(max(0.0, end - time.monotonic())):
                raise WorkerFailed(
                    f"probe process {rank}: {task}: no answer in {self.timeout_seconds:.0f} s"
                )
            return pipe.recv()
        except (EOFError, ConnectionError):
            raise WorkerFailed(self._died(rank, task)) from None

    def _died(self, rank: int, task: str) -> str:
        code = self._processes[rank].poll()
        return f"probe process {rank}: {task}: ended by itself (exit code {code})"

    def close(self) -> None:
        """End every worker; one that does not leave by itself is killed."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(timeout=2.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._pipes.clear()
        self._processes.clear()
