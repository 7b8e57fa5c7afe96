"""Run one attempt at a job: start its process, follow it, end it, and read its outcome."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from sqlalchemy.exc import OperationalError

from gnnplan.api.jobs.process import (
    EVENTS_FILE,
    LOG_FILE,
    OUTCOME_FILE,
    REQUEST_FILE,
    Tail,
    event_of,
)
from gnnplan.api.jobs.registry import KINDS
from gnnplan.api.storage.job_queue import LEASE_SECONDS, JobQueue
from gnnplan.api.storage.storage import open_private
from gnnplan.api.storage.tables import JobRow
from gnnplan.runtime import codec

TICK_SECONDS = 0.2
RENEW_SECONDS = 5.0
PROGRESS_SECONDS = 0.5
"""Least seconds between two writes of a job's progress to the database."""
STOP_SECONDS = 15.0
"""Seconds between asking a job to end and killing it; training needs 10 to stop its ranks."""
ENTRY = "import sys; from gnnplan.api.jobs.process import main; sys.exit(main(sys.argv[1:]))"
"""Program of a job's process; `python -m` would double the time of a short job."""
ROOT = Path(__file__).resolve().parents[2]

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
