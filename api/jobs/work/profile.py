"""Profile a graph under a workload."""

from typing import Any

from api.jobs.events import JobContext
from api.jobs.work.inputs import PROBED, graph_of, machine_of, settings_of, write_result
from planner.pipeline import searches_for
from planner.progress import portion
from planner.search.samplers import with_samplers
from runtime import codec
from runtime.graph.dataset import open_graph


def run(request: dict[str, Any], job: JobContext) -> dict[str, Any]:
    """Draw batches and time the model, or read what was measured before."""
    graph = open_graph(graph_of(request))
    machine = machine_of(request, portion(job.progress, 0.0, PROBED))
    each_sampler = with_samplers(graph, settings_of(request)).by_sampler()
    search = searches_for(
        graph, each_sampler, machine, progress=portion(job.progress, PROBED, 1.0)
    )[0]
    numbers = search.request.profile
    write_result(job, numbers)
    return {
        "profile_id": codec.content_hash(numbers)[:32],
        "graph": graph.name,
        "graph_fingerprint": graph.fingerprint,
        "machine": machine.name[:128],
    }
