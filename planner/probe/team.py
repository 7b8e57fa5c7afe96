"""A team of worker processes that measure at the same time.

Real processes, because ranks are: each has its own memory, threads and sockets. The team is started
once per probe (starting Python with torch costs seconds) and told what to run: a task is a function
of a probe module named `module:function`; it gets the worker's `State` and keyword arguments. What
it leaves in `state.kept` lives until the team ends, so preparation and measurement are two tasks. A
worker is `python -m gnnplan.planner.probe.team DESCRIPTOR RANK`.
"""

import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import IO, Any, ClassVar

from gnnplan.runtime.errors import WorkerFailed
from gnnplan.runtime.faults.failure import last_error_line
from gnnplan.runtime.process import leave, with_huge_pages

LAST_WORDS_SECONDS = 2.0
START_AHEAD_SECONDS = 0.01
"""Seconds that a common start lies ahead, so that every worker has its task before it."""


class OutOfTime(WorkerFailed):
    """The team's time is over; its processes may still be at work on the last task."""


class Team:
    """Worker processes 0 .. size-1; use as a context manager.

    A task is waited for until `until`, a reading of time.monotonic, else `timeout_seconds`.
    """

    program: ClassVar[str] = "gnnplan.planner.probe.team"
    """Module that a worker runs; it ends with `main`."""

    def __init__(self, size: int, *, timeout_seconds: float = 120.0, until: float | None = None):
        self.size = size
        self.timeout_seconds = timeout_seconds
        self.until = until
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._outputs: list[IO[bytes]] = []

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
            self.kill()
        self.close()

    def _start(self, rank: int) -> None:
        ours, theirs = Pipe()
        descriptor = theirs.fileno()
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        output = tempfile.TemporaryFile()  # noqa: SIM115  kept until the process has ended
        self._outputs.append(output)
        process = subprocess.Popen(
            [sys.executable, "-m", self.program, str(descriptor), str(rank)],
            pass_fds=[descriptor],
            env=with_huge_pages(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
        )
        theirs.close()
        self._processes.append(process)
        self._pipes.append(ours)

    def run(self, task: str, *, ranks: int | None = None, **arguments: Any) -> list[Any]:
        """Run a task, named `module:function`, on the first `ranks` workers at the same time.

        `arguments` are passed to it. Returns each worker's result, by rank.

        Raises:
            WorkerFailed: a worker raised, died or did not answer in time.
            OutOfTime: the team's time is over.
        """
        end = time.monotonic() + self.timeout_seconds if self.until is None else self.until
        if self.until is not None and time.monotonic() >= end:
            raise OutOfTime(f"{task}: no time is left for it")
        pipes = self._pipes[: self.size if ranks is None else ranks]
        for rank, pipe in enumerate(pipes):
            try:
                pipe.send((task, arguments))
            except (BrokenPipeError, ConnectionError):
                raise WorkerFailed(self._died(rank, task)) from None
        answers = [self._receive(rank, pipe, task, end) for rank, pipe in enumerate(pipes)]
        for rank, (kind, value) in enumerate(answers):
            if kind == "error":
                raise WorkerFailed(f"probe process {rank}: {task}: {value}")
        return [value for _, value in answers]

    def run_together(self, task: str, *, ranks: int | None = None, **arguments: Any) -> list[Any]:
        """Run a task with an argument `start_at`: a moment of perf_counter to start at."""
        moment = time.perf_counter() + START_AHEAD_SECONDS
        return self.run(task, ranks=ranks, start_at=moment, **arguments)

    def _receive(self, rank: int, pipe: Connection, task: str, end: float) -> tuple[str, Any]:
        try:
            if not pipe.poll(max(0.0, end - time.monotonic())):
                if self.until is not None:
                    raise OutOfTime(f"probe process {rank}: {task}: no answer in time")
                raise WorkerFailed(
                    f"probe process {rank}: {task}: no answer in {self.timeout_seconds:.0f} s"
                )
            return pipe.recv()
        except (EOFError, ConnectionError):
            raise WorkerFailed(self._died(rank, task)) from None

    def _died(self, rank: int, task: str) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(LAST_WORDS_SECONDS)
        self._outputs[rank].seek(0)
        said = last_error_line(self._outputs[rank].read().decode(errors="replace"))
        code = self._processes[rank].poll()
        words = f"{said}; exit code {code}" if said else f"exit code {code}"
        return f"probe process {rank}: {task}: ended by itself ({words})"

    def kill(self) -> None:
        """End every worker at once, whatever it is doing."""
        for process in self._processes:
            process.kill()

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
        for output in self._outputs:
            output.close()
        self._pipes.clear()
        self._processes.clear()
        self._outputs.clear()


PACKAGE = "gnnplan.planner.probe."


@dataclass(slots=True)
class State:
    """What a worker keeps between tasks."""

    rank: int
    kept: dict[str, Any] = field(default_factory=dict[str, Any])


def run_task(state: State, name: str, arguments: dict[str, Any]) -> Any:
    """Run one named task of the probe package; other names raise ValueError."""
    module, _, function = name.partition(":")
    if not module.startswith(PACKAGE) or not function:
        raise ValueError(f"expected a task of {PACKAGE}*, found {name!r}")
    return getattr(importlib.import_module(module), function)(state, **arguments)


def serve(connection: Connection, rank: int) -> None:
    """Answer tasks until the other side closes or sends None."""
    state = State(rank=rank)
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        if request is None:
            return
        try:
            answer = ("value", run_task(state, *request))
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{os.path.basename(last.filename)}:{last.lineno}"  # noqa: PTH119
            answer = ("error", f"{type(error).__name__}: {error} ({place})")
        connection.send(answer)


def main() -> None:
    """Serve the descriptor given on the command line."""
    serve(Connection(int(sys.argv[1])), int(sys.argv[2]))


if __name__ == "__main__":
    main()
    leave(0)
