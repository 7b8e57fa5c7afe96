"""Price a plan under a policy that it did not take."""

from pathlib import Path
from typing import Any

from api.jobs.events import JobContext
from api.jobs.work.inputs import write_result
from planner.queries.why_not import why_not
from runtime.plan.io import load_plan


def run(request: dict[str, Any], job: JobContext) -> dict[str, Any]:
    """Hold the policy against the plan, from the cached profile."""
    write_result(job, why_not(load_plan(Path(request["plan_folder"])), request["policy"]))
    return {}
