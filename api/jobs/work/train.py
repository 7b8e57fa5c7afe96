"""Train under a plan; an attempt after the first goes on from the last checkpoint."""

import time
from pathlib import Path
from typing import Any

from api.jobs.events import JobContext
from api.jobs.work.inputs import write_result

STEP_EVENT_SECONDS = 0.5
"""Least time between two step events that are handed on."""
OTHER_NAMES = {"end": "trained"}
"""Of the ranks' events whose names say something else to followers: `end` is a stream's last."""


class Relay:
    """Hands on what the ranks write, and the share that is done.

    Args:
        job: whose followers are told.
        epochs: of the run.
    """

    def __init__(self, job: JobContext, epochs: int) -> None:
        self._job, self._epochs = job, epochs
        self._told = 0.0

    def __call__(self, event: dict[str, Any], place: tuple[int, int] | None = None) -> None:
        """One event of the ranks, and where it was read."""
        name = str(event.get("event", "event"))
        if name == "step":
            if time.monotonic() - self._told < STEP_EVENT_SECONDS:
                return
            self._told = time.monotonic()
        name = OTHER_NAMES.get(name, name)
        data = {key: value for key, value in event.items() if key != "event"}
        self._job.event(name, data, place=place)
        if isinstance(event.get("share"), float):
            done = (int(event.get("epoch", 0)) + event["share"]) / self._epochs  # counted from 0
            self._job.progress(f"epoch {event.get('epoch')}", done)


def run(request: dict[str, Any], job: JobContext) -> dict[str, Any]:
    """Start the plan's ranks here, or on the cluster that the request names, and follow them."""
    run_folder = Path(request["runs"]) / job.folder.name
    relay = Relay(job, int(request["options"]["epochs"]))
    if "ray_address" in request:
        from api.jobs.work.train_ray import train_on_cluster

        write_result(job, train_on_cluster(request, job, run_folder, relay))
        return {}
    from runtime.launch.launch import train

    report = train(
        Path(request["plan_folder"]),
        run_folder=run_folder,
        resume=job.attempt > 1,
        progress=relay,
        **request["options"],
    )
    write_result(job, report)
    return {}
