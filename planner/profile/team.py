"""Timing processes that compute at once, as the ranks of a job would.

    with Team(2) as team:
        answers = team.time(request, ranks=2)

Processes are started once and told by line what to do. A line is sent to all of them when all are
ready, so that they compute at the same time.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

from gnnplan.planner.profile.cache import keep_answer
from gnnplan.planner.profile.protocol import LoadingAnswer, TimingAnswer, TimingRequest
from gnnplan.planner.workload import ProcessCost
from gnnplan.runtime import codec
from gnnplan.runtime.comm.route import check_loopback
from gnnplan.runtime.errors import WorkerFailed
from gnnplan.runtime.faults.failure import last_error_line
from gnnplan.runtime.process import with_huge_pages

STOP_SECONDS = 5.0
TIMING = "gnnplan.planner.profile.timing_process"
"""Default module of a process: it times the model."""


class _Member:
    def __init__(self, module: str) -> None:
        # The profiler's own log would end up in the words of an error.
        environment = with_huge_pages(
            os.environ | {"PYTHONUNBUFFERED": "1", "KINETO_LOG_LEVEL": "99"}
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._errors: list[str] = []
        self._drain = threading.Thread(target=self._collect, daemon=True)
        self._drain.start()

    def _collect(self) -> None:
        for line in _stream(self._process.stderr):
            self._errors.append(line.rstrip())

    def send(self, line: str) -> None:
        try:
            stdin = _stream(self._process.stdin)
            stdin.write(line + "\n")
            stdin.flush()
        except OSError:
            raise self._failure() from None

    def receive(self) -> str:
        line = _stream(self._process.stdout).readline()
        if not line:
            raise self._failure()
        return line.strip()

    def pin(self, cores: set[int]) -> None:
        if hasattr(os, "sched_setaffinity"):
            for task in os.listdir(f"/proc/{self._process.pid}/task"):  # noqa: PTH208
                os.sched_setaffinity(int(task), cores)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it may be gone already, with unsent lines
            _stream(self._process.stdin).close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._drain.join(STOP_SECONDS)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _failure(self) -> WorkerFailed:
        self._process.wait()
        self._drain.join(STOP_SECONDS)
        last = self._errors[-1] if self._errors else f"exit code {self._process.returncode}"
        words = last_error_line("\n".join(self._errors)) or last
        return WorkerFailed(f"timing the model failed: {words}")


def _stream(stream: Any) -> Any:
    assert stream is not None
    return stream


class Team:
    """Up to `size` processes that time the model at once; `module` speaks the protocol."""

    def __init__(self, size: int, module: str = TIMING) -> None:
        self._members: list[_Member] = []
        if size > 1:
            check_loopback()
        try:
            self.process, compiled = self._start(size, module)
            if compiled:  # which took seconds and bytes that a rank does not take
                self.close()
                self.process, _ = self._start(size, module)
        except BaseException:
            self.close()
            raise

    def _start(self, size: int, module: str) -> tuple[ProcessCost, bool]:
        """Start the processes; return what one costs, and whether any compiled kernels."""
        start = time.perf_counter()
        self._members = [_Member(module) for _ in range(size)]
        ready = [json.loads(member.receive()) for member in self._members]
        cost = ProcessCost(
            start_seconds=time.perf_counter() - start,
            resident_bytes=max(each["resident_bytes"] for each in ready),
        )
        return cost, any(each["compiled"] for each in ready)

    def __enter__(self) -> "Team":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def time(self, request: TimingRequest, ranks: int) -> list[TimingAnswer]:
        """Have the first `ranks` processes take the same steps, adding their gradients."""
        with tempfile.TemporaryDirectory(prefix="gnnplan-timing-") as folder:
            meeting = str(Path(folder) / "meeting")
            texts = [
                json.dumps(codec.to_plain(replace(request, rank=r, ranks=ranks, meeting=meeting)))
                for r in range(ranks)
            ]
            answers = self.ask(texts, request.threads)
        return [codec.decode(TimingAnswer, json.loads(answer)) for answer in answers]

    def load(self, request: TimingRequest, ranks: int) -> LoadingAnswer:
        """Have the first `ranks` processes time a loader's work at once; the first one answers."""
        assert request.loading is not None
        threads = request.threads + int(request.loading.beside)
        texts = [json.dumps(codec.to_plain(replace(request, rank=r))) for r in range(ranks)]
        answers = self.ask(texts, threads)
        return codec.decode(LoadingAnswer, json.loads(answers[0]))

    def ask(self, requests: Sequence[str], threads: int) -> list[str]:
        """Have one process for each request (a line) answer it, all computing at once.

        Each gets `threads` cores of its own where there are enough. WorkerFailed: a process ended.
        """
        chosen = self._members[: len(requests)]
        for member, text in zip(chosen, requests, strict=True):
            member.send(text)
        for member in chosen:
            member.receive()
        self._pin(chosen, threads)
        for member in chosen:
            member.send("go")
        return [member.receive() for member in chosen]

    def _pin(self, members: list[_Member], threads: int) -> None:
        """Give each process cores of its own where there are enough, as a run does."""
        usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        fits = len(members) * threads <= len(usable)
        for i, member in enumerate(members):
            mine = set(usable[i * threads : (i + 1) * threads]) if fits else set(usable)
            if mine:
                member.pin(mine)

    def close(self) -> None:
        """End all processes."""
        for member in self._members:
            member.close()
        self._members = []


MODULES = ("gnnplan.planner.cli.main", "torch.distributed.run")
"""Modules that the two launching processes import while ranks run."""
_MEASURE = """
import importlib, sys
from gnnplan.planner.profile.cache import keep_answer
from gnnplan.planner.profile.protocol import private_bytes
importlib.import_module(sys.argv[1])
print(private_bytes())
from gnnplan.runtime.process import leave
leave(0)
"""
WAIT_SECONDS = 120.0


def launcher_bytes() -> int:
    """Measure private bytes that launching takes of its host, once per installed version."""
    libraries = [metadata.version(name) for name in ("gnnplan", "torch")]
    found = keep_answer(
        ["launcher", sys.version, *libraries],
        ProcessCost,
        lambda: ProcessCost(
            start_seconds=0.0, resident_bytes=0, launcher_bytes=private_bytes_of(MODULES)
        ),
    )
    assert not isinstance(found, str)
    return found.launcher_bytes


def private_bytes_of(modules: Sequence[str]) -> int:
    """Sum private bytes of processes that have imported one module each."""
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", _MEASURE, module],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for module in modules
        ]
        for process in started:
            stack.callback(process.kill)
        try:
            answers = [process.communicate(timeout=WAIT_SECONDS) for process in started]
        except subprocess.TimeoutExpired:
            raise WorkerFailed(
                f"expected {' and '.join(modules)} to be imported within {WAIT_SECONDS:.0f} s, "
                "found them still busy; try again on a quieter machine"
            ) from None
    for module, process, (_, errors) in zip(modules, started, answers, strict=True):
        if process.returncode != 0:
            words = errors.strip().splitlines() or [f"exit code {process.returncode}"]
            said = last_error_line(errors) or words[-1]
            raise WorkerFailed(f"{module} could not be started: {said}")
    return sum(int(out.split()[-1]) for out, _ in answers)
