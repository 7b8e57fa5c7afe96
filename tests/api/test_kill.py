"""Whoever is killed, no accepted job is lost, and none is done twice."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gnnplan.api.jobs.lanes import ask_to_end
from gnnplan.api.storage.storage import Storage
from tests.support.service import ENDED, ServiceProcess

pytestmark = pytest.mark.distributed


def test_a_process_that_is_asked_to_end_is_told_so_and_waited_for() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        ask_to_end(process)
        assert process.poll() == -signal.SIGTERM
    finally:
        process.kill()


def kill_at_random(service: ServiceProcess, dice: random.Random) -> None:
    """Kill one of its jobs' processes, or the service, which is started again."""
    workers = service.workers()
    if workers and dice.random() < 0.6:
        try:
            os.kill(dice.choice(workers), signal.SIGKILL)
        except ProcessLookupError:
            return
    else:
        service.kill()
        service.start()


def submit(service: ServiceProcess, count: int) -> list[str]:
    return [
        service.call("POST", "/v1/jobs", {"seconds": 0.01}, {"Idempotency-Key": f"n{i}"})["id"]
        for i in range(count)
    ]


def wait_for(service: ServiceProcess, ids: list[str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    waiting = list(ids)
    while waiting:
        assert time.monotonic() < deadline, f"{len(waiting)} jobs have not ended"
        waiting = [
            i for i in waiting[:1] if service.call("GET", f"/v1/jobs/{i}")["state"] not in ENDED
        ] + waiting[1:]
        time.sleep(0.05 if waiting else 0)


def check_once(data_dir: Path, ids: list[str]) -> dict[str, int]:
    """Each job ended once; returns how, by outcome of attempts."""
    storage = Storage(data_dir)
    outcomes: dict[str, int] = {}
    try:
        for job_id in ids:
            row = storage.jobs.get(job_id)
            assert row is not None
            assert row.state in ENDED
            attempts = [a.outcome for a in storage.jobs.attempts(job_id)]
            ends = [o for o in attempts if o in ENDED]
            assert len(ends) == 1, attempts
            assert attempts[-1] == row.state
            assert len(set(attempts) - {"crashed", "interrupted", row.state}) == 0, attempts
            for outcome in attempts:
                outcomes[outcome or "open"] = outcomes.get(outcome or "open", 0) + 1
    finally:
        storage.close()
    return outcomes


def soak(
    folder: Path, *, jobs: int, kills: int, seed: int, seconds: float, most_pause_seconds: float
) -> dict[str, int]:
    """Queue jobs, kill at random moments while they run, and let what is left end.

    With the outcomes comes under `waiting` how many had not ended when the last kill fell.
    """
    dice = random.Random(seed)
    service = ServiceProcess(folder / "data", "--writes-per-second", "100000")
    service.start()
    try:
        ids = submit(service, jobs)
        assert len(set(ids)) == jobs
        for _ in range(kills):
            time.sleep(dice.random() * most_pause_seconds)
            kill_at_random(service, dice)
        waiting = sum(service.call("GET", f"/v1/jobs/{i}")["state"] not in ENDED for i in ids)
        assert submit(service, jobs) == ids
        wait_for(service, ids, seconds)
        assert service.stop() == -signal.SIGTERM  # uvicorn ends in order, then by the signal
    finally:
        if service.process is not None and service.process.poll() is None:
            service.kill()
    return {**check_once(folder / "data", ids), "waiting": waiting}


@pytest.mark.slow
def test_a_few_jobs_survive_kills(tmp_path: Path):
    outcomes = soak(tmp_path, jobs=12, kills=2, seed=1, seconds=600, most_pause_seconds=0.3)
    assert outcomes["succeeded"] == 12


@pytest.mark.slow
def test_a_hundred_jobs_survive_many_kills(tmp_path: Path):
    outcomes = soak(tmp_path, jobs=100, kills=20, seed=2, seconds=3600, most_pause_seconds=0.3)
    assert outcomes["succeeded"] == 100
    assert outcomes.get("crashed", 0) > 0
    assert outcomes.get("interrupted", 0) > 0


def test_a_job_whose_work_is_done_is_not_done_again(tmp_path: Path):
    service = ServiceProcess(tmp_path / "data")
    service.start()
    try:
        job = service.call("POST", "/v1/jobs", {"seconds": 0})["id"]
        wait_for(service, [job], 600)
        service.stop()
        storage = Storage(tmp_path / "data")
        outcome = storage.job_folder(job) / "outcome.json"
        before = outcome.read_bytes(), outcome.stat().st_ino
        # As if the service had been killed between the outcome and its row.
        from sqlalchemy import update

        from gnnplan.api.storage.tables import JobRow

        with storage.database.writing() as session:
            session.execute(update(JobRow).values(state="queued", finished_seconds=None))
        storage.close()
        service.start()
        wait_for(service, [job], 600)
        assert service.call("GET", f"/v1/jobs/{job}")["state"] == "succeeded"
        assert (outcome.read_bytes(), outcome.stat().st_ino) == before
    finally:
        service.stop()
