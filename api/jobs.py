"""The planning lane: one job at a time, each in a spawned process that can be ended."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from api.storage import JobRow, Storage
from api.work import run_plan_job

LONGEST_SECONDS = 3600.0


class PlanningLane:
    """A thread that claims queued jobs and runs each in its own process."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="planning-lane", daemon=True)

    def start(self) -> None:
        """Take over what an earlier service left, then serve the queue."""
        self._storage.requeue_running()
        self._wake.set()
        self._thread.start()

    def notify(self) -> None:
        """Say that a job was queued."""
        self._wake.set()

    def stop(self) -> None:
        """End the running job's process (it is planned again at the next start) and return."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(timeout=5)
            self._wake.clear()
            while not self._stopping.is_set() and (job := self._storage.claim_job()) is not None:
                self._execute(job)

    def _execute(self, job: JobRow) -> None:
        out = self._storage.data_dir / "plans" / job.id
        out.parent.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=run_plan_job, args=(sender, json.loads(job.request), str(out))
        )
        process.start()
        sender.close()
        outcome = self._follow(job.id, receiver)
        end_process(process)
        if self._stopping.is_set() and outcome is None:
            return
        self._record(job, outcome, process.exitcode)

    def _follow(self, job_id: str, pipe: Connection) -> tuple[Any, ...] | None:
        """Relay progress until the job says how it ended; None where it died silently."""
        waited = 0.0
        while not self._stopping.is_set() and waited < LONGEST_SECONDS:
            if not pipe.poll(0.2):
                waited += 0.2
                continue
            try:
                message = pipe.recv()
            except EOFError:
                return None
            if message[0] != "progress":
                return message
            self._storage.set_progress(job_id, message[1], message[2])
        if waited >= LONGEST_SECONDS:
            return ("problem", "timeout", 504, f"planning took over {LONGEST_SECONDS:.0f} s")
        return None

    def _record(self, job: JobRow, outcome: tuple[Any, ...] | None, exit_code: int | None) -> None:
        if outcome is not None and outcome[0] == "done":
            out = self._storage.data_dir / "plans" / job.id
            kept = self._storage.add_plan(outcome[1], out)
            if kept != out:
                shutil.rmtree(out, ignore_errors=True)
            self._storage.finish_job(job.id, result=f"/v1/plans/{outcome[1]}", problem=None)
            return
        if outcome is None:
            outcome = ("problem", "job-died", 500, f"the job's process ended with {exit_code}")
        problem = {
            "type": outcome[1],
            "title": "Planning failed",
            "status": outcome[2],
            "detail": outcome[3],
            "instance": f"/v1/jobs/{job.id}",
        }
        self._storage.finish_job(job.id, result=None, problem=problem)


def end_process(process: BaseProcess) -> None:
    """Wait briefly for a job's process, then end its whole group."""
    process.join(timeout=2)
    if process.is_alive() and process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join(timeout=5)
