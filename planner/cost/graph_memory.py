"""Count the bytes of a graph that a rank keeps on its GPU beside feature rows.

They are there for as long as training lasts, so rows have room in what they leave. A rank whose
batches the host draws keeps none of them.
"""

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.rates import INDPTR_BYTES, indices_bytes
from gnnplan.planner.cost.request import Request, sampler_of
from gnnplan.planner.workload import BatchProfile
from gnnplan.runtime.graph.dataset import is_typed
from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.sampling.registry import find_sampler, parameters_of, why_on_host

ADDRESS_BYTES = 8
"""Bytes of a list's address, where lists lie in several memories."""
TYPE_BYTES = 4
"""Bytes of a node's type."""
WEIGHT_BYTES = 4
"""Bytes of an edge's weight."""
DEGREE_BYTES, LOOPS_BYTES = 8, 4
"""Bytes of a node's degree, and of the number of its self-loops."""
OWNER_BYTES = 8
"""Bytes of the rank that owns a node."""


def graph_parts(request: Request, candidate: Candidate, batch: BatchProfile) -> dict[str, int]:
    """Return the bytes of the graph that a rank keeps on its GPU, by what they hold.

    Source: docs/formulas.md 8.10.
    """
    sampler = sampler_of(request.user_sampler, candidate)
    if not draws_on_gpu(request, sampler):
        return {"topology": 0}
    graph, work = request.graph, request.workload
    more = {"sampler tables": find_sampler(sampler.name).gpu_node_bytes * graph.num_nodes}
    if draws_by_weights(sampler):
        in_parts = candidate.topology.policy == "partitioned"
        share = candidate.topology.replication / candidate.num_ranks if in_parts else 1
        more["edge weights"] = round(WEIGHT_BYTES * graph.num_edges * share)
    if work.model == "gcn" and work.gcn_norm == "full":
        each = DEGREE_BYTES + (LOOPS_BYTES if request.self_loops else 0)
        more["degrees"] = each * graph.num_nodes
    if candidate.owner == "partition":
        more["owners"] = OWNER_BYTES * graph.num_nodes
    kept = {name: size for name, size in more.items() if size}
    return {"topology": _topology_bytes(request, candidate, batch), **kept}


def draws_by_weights(sampler: Sampler) -> bool:
    """Return whether a sampler reads the graph's edge weights."""
    return parameters_of(sampler).get("weights", "none") != "none"


def draws_on_gpu(request: Request, sampler: Sampler) -> bool:
    """Return whether a GPU draws the batches of a plan with that sampler, else the host."""
    if request.sparse:
        return False
    links, types = request.graph.task == "link", is_typed(request.workload)
    can = bool(find_sampler(sampler.name).gpu)
    return can and not why_on_host(sampler, links=links, types=types)


def _topology_bytes(request: Request, candidate: Candidate, batch: BatchProfile) -> int:
    """Return the bytes of the topology beside the lists that the rank keeps of its own.

    Every list's begin is on the GPU, of typed graphs one per edge type, and the sources' types. Of
    lists in several memories each has an address besides. A grid counts its own part (`Grid`).
    """
    graph, policy = request.graph, candidate.topology.policy
    lists = graph.num_nodes * max(1, len(batch.edge_types))
    size = INDPTR_BYTES * (lists + 1) + TYPE_BYTES * graph.num_nodes * bool(batch.node_types)
    if policy == "replicated":
        size += indices_bytes(graph)
    elif policy == "cached":
        size += ADDRESS_BYTES * (lists + 1)
    return size
