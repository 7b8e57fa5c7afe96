"""Replay a plan's batches on a machine model."""

from pathlib import Path
from typing import Any

from api.jobs.events import JobContext
from api.jobs.work.inputs import machine_of, write_result
from planner.profile.cache import load_record
from planner.queries.simulate import simulate
from runtime.plan.io import load_plan


def run(request: dict[str, Any], job: JobContext) -> dict[str, Any]:
    """Count exactly what the batches read, and model their time."""
    folder = Path(request["plan_folder"])
    if request["machine"] is None:
        machine = load_record(load_plan(folder)).machine
    else:
        machine = machine_of(request, job.progress)
    found = simulate(folder, machine, batches=request["batches"], progress=job.progress)
    write_result(job, found)
    return {}
