"""Train under a plan; an attempt after the first goes on from the last checkpoint."""

from pathlib import Path
from typing import Any

from api.jobs.context import JobContext
from api.jobs.work.inputs import write_result
from api.jobs.work.train_events import Relay


def run(request: dict[str, Any], job: JobContext) -> dict[str, Any]:
    """Start the plan's ranks here, or on the cluster that the request names, and follow them."""
    run_folder = Path(request["runs"]) / job.folder.name
    relay = Relay(job, int(request["options"]["epochs"]))
    if "ray_address" in request:
        from api.jobs.work.train_ray import train_on_cluster

        write_result(job, train_on_cluster(request, job, run_folder, relay))
        return {}
    from runtime.launch import train

    report = train(
        Path(request["plan_folder"]),
        run_folder=run_folder,
        resume=job.attempt > 1,
        progress=relay,
        **request["options"],
    )
    write_result(job, report)
    return {}
