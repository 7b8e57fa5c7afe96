"""Train under a plan; an attempt after the first goes on from the last checkpoint."""

import time
from pathlib import Path
from typing import Any

from api.jobs.context import JobContext
from api.jobs.work.inputs import write_result
from runtime.launch import train

STEP_EVENT_SECONDS = 0.5
"""Least time between two step events that are handed on."""


def run(request: dict[str, Any], job: JobContext) -> dict[str, Any]:
    """Start the plan's ranks and follow them."""
    told = 0.0

    def follow(event: dict[str, Any]) -> None:
        nonlocal told
        name = str(event.get("event", "event"))
        if name == "step":
            if time.monotonic() - told < STEP_EVENT_SECONDS:
                return
            told = time.monotonic()
        job.event(name, {key: value for key, value in event.items() if key != "event"})
        if isinstance(event.get("share"), float):
            done = (int(event.get("epoch", 1)) - 1 + event["share"]) / request["options"]["epochs"]
            job.progress(f"epoch {event.get('epoch')}", done)

    report = train(
        Path(request["plan_folder"]),
        run_folder=Path(request["runs"]) / job.folder.name,
        resume=job.attempt > 1,
        progress=follow,
        **request["options"],
    )
    write_result(job, report)
    return {}
