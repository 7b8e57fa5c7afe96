"""A job that does nothing, for as long as it is asked to: health checks and durability tests."""

import time
from typing import Any

from api.jobs.events import JobContext


def run(request: dict[str, Any], job: JobContext) -> dict[str, Any]:
    """Sleep `seconds` in `steps` pieces, with progress after each."""
    steps = int(request["steps"])
    for step in range(steps):
        time.sleep(float(request["seconds"]) / steps)
        job.progress("waiting", (step + 1) / steps)
    return {}
