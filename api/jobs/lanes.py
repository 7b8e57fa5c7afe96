"""Run the service's workers: threads that claim jobs and see each to its end."""

import fcntl
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from gnnplan.api.errors import ServiceError
from gnnplan.api.jobs.execution import Ended, Execution
from gnnplan.api.jobs.recording import (
    crash_problem,
    problem_of,
    record_outcome,
    timeout_problem,
)
from gnnplan.api.jobs.registry import KINDS, LANES, PLANNING
from gnnplan.api.storage.job_queue import Ending
from gnnplan.api.storage.storage import LOCK_FILE, Storage, private_descriptor
from gnnplan.api.storage.tables import JobRow
from gnnplan.runtime.errors import InputError

LOOK_SECONDS = 1.0
"""Longest time until a worker sees a job that another service has queued or lost."""
LOG = logging.getLogger("gnnplan.jobs")

OnEnd = Callable[[JobRow, str, float], None]
"""Called with each ended job, its state and the seconds of its attempt."""
CheckStart = Callable[[JobRow], None]
"""Called with each job before its work begins; raises ServiceError or InputError to refuse it."""


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
