"""Count the bytes of a graph that ranks and hosts keep beside feature rows.

They are there for as long as training lasts, so rows have room in what they leave. A GPU whose
batches the host draws keeps none of them.
"""

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.memory import BatchTail
from gnnplan.planner.cost.rates import (
    INDPTR_BYTES,
    indices_bytes,
    ranks_here,
    topology_bytes,
)
from gnnplan.planner.cost.request import Request, sampler_of
from gnnplan.planner.workload import BatchProfile
from gnnplan.runtime.graph.dataset import is_typed
from gnnplan.runtime.plan.schema import Sampler, Workload
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
ROW_BYTES = 8
"""Bytes of a node's row in the table of its type."""


def graph_parts(request: Request, candidate: Candidate, batch: BatchProfile) -> dict[str, int]:
    """Return the bytes of the graph that a rank keeps on its GPU, by what they hold.

    Source: docs/formulas.md 8.10.
    """
    sampler = sampler_of(request.user_sampler, candidate)
    if not draws_on_gpu(request, sampler):
        return {"topology": 0}
    graph, more = request.graph, node_parts(request, candidate)
    if draws_by_weights(sampler):
        in_parts = candidate.topology.policy == "partitioned"
        share = candidate.topology.replication / candidate.num_ranks if in_parts else 1
        more["edge weights"] = round(WEIGHT_BYTES * graph.num_edges * share)
    if candidate.owner == "partition":
        more["owners"] = OWNER_BYTES * graph.num_nodes
    return {"topology": _topology_bytes(request, candidate, batch), **more}


def node_parts(request: Request, candidate: Candidate) -> dict[str, int]:
    """Return the bytes of tables by node that a rank keeps: the sampler's and GCN's.

    Source: docs/formulas.md 8.10.
    """
    work, sampler = request.workload, sampler_of(request.user_sampler, candidate)
    each = {"sampler tables": find_sampler(sampler.name).node_bytes}
    if work.model == "gcn" and work.gcn_norm == "full":
        each["degrees"] = DEGREE_BYTES + (LOOPS_BYTES if request.self_loops else 0)
    return {name: size * request.graph.num_nodes for name, size in each.items() if size}


def core_draw_bytes(request: Request, candidate: Candidate, batch: BatchProfile) -> int:
    """Return the bytes in which a rank's cores draw, beside relabelling tables.

    W (a N + b D) of W threads, N nodes and D neighbours in the lists that the largest batch
    expands; a and b bytes of the sampler. Those of a stack are the stack's.
    """
    sampler = sampler_of(request.user_sampler, candidate)
    spec, scale = find_sampler(sampler.name), BatchTail.of(batch).scale
    threads = max(1, candidate.threads.sample) if candidate.bulk_batches == 1 else 0
    listed = spec.core_list_bytes(parameters_of(sampler)) * batch.list_entries * scale
    return round(threads * (spec.draw_bytes * request.graph.num_nodes + listed))


def listed_bytes(request: Request, candidate: Candidate, batch: BatchProfile) -> int:
    """Return the bytes in which a GPU draws from whole lists, of all batches of a stack.

    k (a D + b E) of D neighbours in the lists that the largest batch expands and E edges, k batches
    to a stack, and a and b bytes of the sampler.
    """
    sampler = sampler_of(request.user_sampler, candidate)
    if not draws_on_gpu(request, sampler):
        return 0
    listed, drawn = find_sampler(sampler.name).list_bytes(parameters_of(sampler))
    largest = BatchTail.of(batch)
    each = listed * batch.list_entries * largest.scale + drawn * largest.edges
    return round(candidate.bulk_batches * each)


def host_parts(request: Request, candidate: Candidate) -> dict[str, int]:
    """Return the bytes of the graph that a host holds for its ranks, by what they hold.

    The lists, which ranks on cores may have in parts instead; weights by which cores draw; a typed
    graph's lists sorted by type, once for all ranks (of GPUs, while they start or are scored); and
    for each rank where nodes' rows stand in tables by type.

    Source: docs/formulas.md 8.10.
    """
    graph, batches = request.graph, request.profile.batches
    sampler = sampler_of(request.user_sampler, candidate)
    in_ranks = candidate.topology.policy == "partitioned" and not candidate.gpus
    found = {"topology": 0 if in_ranks else topology_bytes(graph)}
    if draws_by_weights(sampler) and not (candidate.gpus and draws_on_gpu(request, sampler)):
        found["edge weights"] = WEIGHT_BYTES * graph.num_edges
    if is_typed(request.workload):
        types = max((len(batch.edge_types) for batch in batches), default=0)
        ends = INDPTR_BYTES * (graph.num_nodes * max(1, types) + 1)
        found["lists by type"] = ends + indices_bytes(graph)
        if any(batch.node_types for batch in batches):
            found["rows by type"] = ROW_BYTES * graph.num_nodes * ranks_here(candidate)
    return found


def draws_by_weights(sampler: Sampler) -> bool:
    """Return whether a sampler reads the graph's edge weights."""
    return parameters_of(sampler).get("weights", "none") != "none"


def draws_on_gpu(request: Request, sampler: Sampler) -> bool:
    """Return whether a GPU draws the batches of a plan with that sampler, else the host."""
    task, work = request.graph.task, request.workload
    return not why_cores_draw(task, work, sampler, sparse=request.sparse)


def why_cores_draw(task: str, workload: Workload, sampler: Sampler, *, sparse: bool) -> str:
    """Say what of a plan for GPUs makes cores draw its batches; empty where the GPUs draw them.

    >>> why_cores_draw("multiclass", Workload(), Sampler(), sparse=True)
    'sparse features, which cores gather for GPUs'
    """
    if sparse:
        return "sparse features, which cores gather for GPUs"
    why = why_on_host(sampler, links=task == "link", types=is_typed(workload))
    if not find_sampler(sampler.name).gpu:
        why = "it has no form on GPUs"
    return f"sampler {sampler.name}, by which cores draw for GPUs ({why})" if why else ""


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
