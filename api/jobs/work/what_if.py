"""Price a plan's request with another machine or budget."""

from pathlib import Path
from typing import Any

from api.jobs.events import JobContext
from api.jobs.work.inputs import write_result
from planner.queries.inverse import cheapest_for
from planner.queries.whatif import whatif
from runtime.plan.io import load_plan


def run(request: dict[str, Any], job: JobContext) -> dict[str, Any]:
    """Plan again from the cached profile with something changed; nothing is measured."""
    plan, changes = load_plan(Path(request["plan_folder"])), request["changes"]
    target = request["target_epoch_seconds"]
    if target is None:
        write_result(job, whatif(plan, changes))
    else:
        write_result(job, cheapest_for(plan, target, changes))
    return {}
