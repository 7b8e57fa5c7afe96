"""Find the plan of a request."""

from typing import Any

from api.fingerprints import graph_fingerprint, request_key
from api.jobs.events import JobContext
from api.jobs.recording import PLAN_FOLDER
from api.jobs.work.inputs import PROBED, factors_of, graph_of, machine_of, settings_of
from planner.pipeline import plan
from planner.progress import portion


def run(request: dict[str, Any], job: JobContext) -> dict[str, Any]:
    """Plan into the job's folder."""
    graph, settings = graph_of(request), settings_of(request)
    job.progress("machine", 0.0)
    machine = machine_of(request, portion(job.progress, 0.0, PROBED))
    fingerprint = graph_fingerprint(graph)
    factors = factors_of(request, machine, fingerprint)
    made = plan(
        graph,
        settings,
        machine=machine,
        out=job.folder / PLAN_FOLDER,
        progress=portion(job.progress, PROBED, 1.0),
        calibrate=bool(request["calibrated"]),
    )
    key = request_key(fingerprint, machine, settings, factors)
    return {"plan_id": made.plan_id, "request_key": key}
