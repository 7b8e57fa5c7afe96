"""Run the service's workers: threads of each lane claim jobs and see every attempt to its end."""

import contextlib
import fcntl
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

from sqlalchemy.exc import OperationalError

from gnnplan.api.errors import ServiceError
from gnnplan.api.jobs.process import (
    EVENTS_FILE,
    LOG_FILE,
    OUTCOME_FILE,
    REQUEST_FILE,
    Tail,
    event_of,
)
from gnnplan.api.jobs.recording import (
    crash_problem,
    problem_of,
    record_outcome,
    timeout_problem,
)
from gnnplan.api.storage.job_queue import LEASE_SECONDS, Ending, JobQueue
from gnnplan.api.storage.storage import LOCK_FILE, Storage, open_private, private_descriptor
from gnnplan.api.storage.tables import JobRow
from gnnplan.runtime import codec
from gnnplan.runtime.errors import InputError

PLANNING = "planning"
PROBING = "probing"
EXCLUSIVE = "exclusive"
LANES = (PLANNING, PROBING, EXCLUSIVE)
"""Jobs of one lane wait for each other: planning, profiling and simulation; jobs that first probe
this machine for minutes; jobs that need every rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of job."""

    work: str
    """`module:function` that does the work; imported by the job's process alone."""
    lane: str = PLANNING
    limit_seconds: float = 3600.0
    """Longest time of an attempt, unless the request says less."""
    most_crashes: int = 3
    """Number of attempts without an outcome after which the job fails."""
    scope: str = "plan"
    """Scope of keys that may make such jobs, and end their own."""


KINDS = {
    "noop": Kind(work="gnnplan.api.jobs.process:wait", limit_seconds=600.0, most_crashes=20),
    "plan": Kind(work="gnnplan.api.jobs.planning:make_plan"),
    "profile": Kind(work="gnnplan.api.jobs.planning:profile_graph"),
    "simulate": Kind(work="gnnplan.api.jobs.planning:simulate_plan"),
    "why-not": Kind(work="gnnplan.api.jobs.planning:hold_policy"),
    "what-if": Kind(work="gnnplan.api.jobs.planning:change_plan"),
    "train": Kind(
        work="gnnplan.api.jobs.train:run", lane=EXCLUSIVE, limit_seconds=7 * 86400.0, scope="run"
    ),
}


LOOK_SECONDS = 1.0
"""Longest time until a worker sees a job that another service has queued or lost."""
TICK_SECONDS = 0.2
RENEW_SECONDS = 5.0
PROGRESS_SECONDS = 0.5
"""Least seconds between two writes of a job's progress to the database."""
STOP_SECONDS = 15.0
"""Seconds between asking a job to end and killing it; training needs 10 to stop its ranks."""
ENTRY = "import sys; from gnnplan.api.jobs.process import main; sys.exit(main(sys.argv[1:]))"
"""Program of a job's process; `python -m` would double the time of a short job."""
ROOT = Path(__file__).resolve().parents[2]
LOG = logging.getLogger("gnnplan.jobs")

OnEnd = Callable[[JobRow, str, float], None]
"""Called with each ended job, its state and the seconds of its attempt."""
CheckStart = Callable[[JobRow], None]
"""Called with each job before its work begins; raises ServiceError or InputError to refuse it."""
Ended = Literal["exited", "cancelled", "timeout", "stopped", "lost"]


class Execution:
    """One attempt at a claimed job.

    `asked` returns "stopped" or "cancelled" where the attempt is to end, else None.
    """

    def __init__(
        self, queue: JobQueue, job: JobRow, folder: Path, asked: Callable[[], Ended | None]
    ) -> None:
        self._queue, self._job, self._folder, self._asked = queue, job, folder, asked
        self._events = Tail(folder / EVENTS_FILE)
        self._wrote_progress = self._renewed = 0.0
        self.exit_code = 0

    def run(self) -> Ended:
        """Do the work, unless an earlier attempt has done it; return what ended the attempt."""
        self._folder.mkdir(0o700, parents=True, exist_ok=True)
        codec.write_text_atomically(self._folder / REQUEST_FILE, self._job.request, mode=0o600)
        if self.outcome() is not None:
            return "exited"
        self._events.skip_to_end()
        process = self._spawn()
        try:
            ended = self._follow(process)
            if ended != "exited":
                ask_to_end(process)
        finally:
            self.exit_code = end_group(process)
        # What was finished in the meantime is kept; only a job that was to end stays unfinished.
        return ended

    def outcome(self) -> dict[str, Any] | None:
        """Return the outcome of the work; None where there is none."""
        try:
            return json.loads((self._folder / OUTCOME_FILE).read_text())
        except (OSError, ValueError):
            return None

    def _spawn(self) -> "subprocess.Popen[bytes]":
        job = self._job
        work = KINDS[job.kind].work
        command = [sys.executable, "-c", ENTRY, str(self._folder)]
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        with open_private(self._folder / LOG_FILE) as log:
            return subprocess.Popen(
                [*command, str(job.attempt), work],
                stdin=subprocess.PIPE,  # the leash: it ends the job when this process is gone
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "PYTHONUNBUFFERED": "1"},
            )

    def _follow(self, process: "subprocess.Popen[bytes]") -> Ended:
        deadline = time.monotonic() + self._job.time_limit_seconds
        self._renewed = time.monotonic()
        with watch_process(process.pid) as has_ended:
            while not has_ended(TICK_SECONDS):
                self._relay()
                if (asked := self._asked()) is not None:
                    return asked
                if time.monotonic() > deadline:
                    return "timeout"
                if time.monotonic() - self._renewed > RENEW_SECONDS:
                    kept = self._renew()
                    if kept is None:
                        return "lost"
                    if kept:
                        return "cancelled"
        return "exited"

    def _renew(self) -> bool | None:
        """Extend the lease, as `JobQueue.renew`; a database may be away while the lease lasts."""
        asked = time.monotonic()
        try:
            kept = self._queue.renew(self._job)
        except OperationalError:
            if asked - self._renewed > LEASE_SECONDS - RENEW_SECONDS:
                raise
            return False
        self._renewed = asked
        return kept

    def _relay(self) -> None:
        if time.monotonic() - self._wrote_progress < PROGRESS_SECONDS:
            return
        newest: dict[str, Any] | None = None
        for _, line in self._events.lines():
            event = event_of(line)
            if event is not None and event["event"] == "progress":
                newest = event.get("data", {})
        if newest is not None:
            self._wrote_progress = time.monotonic()
            stage, share = newest.get("stage", ""), newest.get("share")
            if isinstance(share, int | float) and 0.0 <= share <= 1.0:
                with contextlib.suppress(OperationalError):  # it is told of again
                    self._queue.progress(self._job, str(stage), float(share))


@contextlib.contextmanager
def watch_process(pid: int):
    """Give a function that waits some seconds for a process and returns whether it has ended."""
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)

        def has_ended(seconds: float) -> bool:
            return bool(poll.poll(seconds * 1000))

        yield has_ended
    finally:
        os.close(descriptor)


def ask_to_end(process: "subprocess.Popen[bytes]") -> None:
    """Ask a job's process to end, and give it time to stop what it has started."""
    process.send_signal(signal.SIGTERM)
    with watch_process(process.pid) as has_ended:
        has_ended(STOP_SECONDS)


def end_group(process: "subprocess.Popen[bytes]") -> int:
    """Kill a job's process group; return the exit code of its first process."""
    # The first process is not reaped yet, so nobody else can have its number.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    if process.stdin is not None:
        process.stdin.close()
    return code


class Lanes:
    """The workers of a service: some for the planning lane, one for each other lane."""

    def __init__(
        self,
        storage: Storage,
        *,
        planning_workers: int = 1,
        check_start: CheckStart | None = None,
        on_end: OnEnd | None = None,
    ) -> None:
        self._storage = storage
        self._check_start, self._on_end = check_start, on_end
        self._owner = uuid.uuid4().hex
        self._stopping = threading.Event()
        self._wake = {lane: threading.Event() for lane in LANES}
        self._cancelled: set[str] = set()
        self._lock: int | None = None
        self._former = ""
        widths = {lane: planning_workers if lane == PLANNING else 1 for lane in LANES}
        self._threads = [
            threading.Thread(target=self._serve, args=(lane,), name=f"{lane}-{i}", daemon=True)
            for lane, width in widths.items()
            for i in range(width)
        ]

    def hold(self) -> None:
        """Hold the data folder for this service, unless it is held."""
        if self._lock is None:
            self._lock, self._former = lock_folder(self._storage.data_dir)

    def start(self) -> None:
        """Take over jobs that an earlier service of this data folder left, then begin to work."""
        self.hold()
        assert self._lock is not None
        if self._former:
            taken = self._storage.jobs.take_over(self._former)
            LOG.info("taken over", extra={"jobs": taken})
        sign_folder(self._lock, self._owner)
        for lane in LANES:
            self.notify(lane)  # jobs may wait already
        for thread in self._threads:
            thread.start()

    def notify(self, lane: str) -> None:
        """Wake a lane's workers for a queued job."""
        self._wake[lane].set()

    def cancel(self, job_id: str) -> None:
        """End a job that runs here, whose row is marked as cancelled already."""
        self._cancelled.add(job_id)

    def stop(self) -> None:
        """Stop the running jobs, queue them again, and wait for the workers."""
        self._stopping.set()
        for event in self._wake.values():
            event.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self.release()

    def release(self) -> None:
        """Let go of the data folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def alive(self) -> bool:
        """Return whether every worker is alive."""
        return all(thread.is_alive() for thread in self._threads)

    def _serve(self, lane: str) -> None:
        while not self._stopping.is_set():
            self._wake[lane].wait(timeout=LOOK_SECONDS)
            self._wake[lane].clear()
            try:
                while not self._stopping.is_set():
                    job = self._storage.jobs.claim(lane, self._owner)
                    if job is None:
                        break
                    self._wake[lane].set()  # there may be one more for a neighbour
                    self._attempt(job)
            except Exception:
                # The database may be away for a while: the lease runs out, nothing is lost.
                LOG.exception("a job could not be seen to its end", extra={"lane": lane})
                self._stopping.wait(LOOK_SECONDS)

    def _end_reason(self, job: JobRow) -> Ended | None:
        if job.id in self._cancelled:
            return "cancelled"
        return "stopped" if self._stopping.is_set() else None

    def _attempt(self, job: JobRow) -> None:
        started = time.monotonic()
        LOG.info("started", extra=_words(job))
        if job.cancel:
            self._finish(job, Ending(state="cancelled"), started)
            return
        folder = self._storage.job_folder(job.id)
        execution = Execution(self._storage.jobs, job, folder, lambda: self._end_reason(job))
        if execution.outcome() is None and (problem := self._refusal(job)) is not None:
            self._finish(job, Ending(state="failed", problem=problem), started)
            return
        ended = execution.run()
        outcome = execution.outcome()
        if outcome is not None and ended != "lost":
            self._finish(job, record_outcome(self._storage, job, outcome), started)
        elif ended == "cancelled":
            self._finish(job, Ending(state="cancelled"), started)
        elif ended == "timeout":
            problem = timeout_problem(job.time_limit_seconds)
            self._finish(job, Ending(state="failed", problem=problem), started)
        elif ended == "exited":
            self._crashed(job, execution.exit_code, started)
        elif ended == "stopped":
            self._storage.jobs.give_back(job, "interrupted")
        self._cancelled.discard(job.id)

    def _refusal(self, job: JobRow) -> dict[str, Any] | None:
        """Return the problem of a job that may not begin; None where it may."""
        if self._check_start is None:
            return None
        try:
            self._check_start(job)
        except ServiceError as error:
            title = HTTPStatus(error.status).phrase
            found = {"type": error.kind, "title": title, "status": error.status}
            return found | {"detail": error.detail}
        except InputError as error:
            return problem_of(error)
        return None

    def _crashed(self, job: JobRow, exit_code: int, started: float) -> None:
        LOG.warning("process died", extra={**_words(job), "exit_code": exit_code})
        crashes = job.crashes + 1
        if crashes < KINDS[job.kind].most_crashes:
            self._storage.jobs.give_back(job, "crashed")
            return
        problem = crash_problem(exit_code, crashes)
        self._finish(job, Ending(state="failed", problem=problem), started)

    def _finish(self, job: JobRow, ending: Ending, started: float) -> None:
        if not self._storage.jobs.finish(job, ending):
            LOG.warning("another attempt has taken over", extra=_words(job))
            return
        seconds = time.monotonic() - started
        LOG.info(
            "ended", extra={**_words(job), "state": ending.state, "seconds": round(seconds, 3)}
        )
        if self._on_end is not None:
            self._on_end(job, ending.state, seconds)


def _words(job: JobRow) -> dict[str, object]:
    return {
        "job_id": job.id,
        "kind": job.kind,
        "attempt": job.attempt,
        "request_id": job.request_id,
    }


def lock_folder(data_dir: Path) -> tuple[int, str]:
    """Lock a data folder; return the lock and the name of the service that held it before."""
    descriptor = private_descriptor(data_dir / LOCK_FILE, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise InputError(
            f"{data_dir}: expected a data folder of its own, found another service on it; stop "
            "that or choose another --data-dir"
        ) from None
    return descriptor, os.pread(descriptor, 64, 0).decode(errors="replace").strip()


def sign_folder(lock: int, owner: str) -> None:
    """Write this service's name into the lock, once it has taken over the jobs."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, owner.encode(), 0)
