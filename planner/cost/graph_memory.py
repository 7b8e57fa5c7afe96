"""Count the bytes of a graph that ranks and hosts keep beside feature rows.

They are there for as long as training lasts, so rows have room in what they leave. A GPU whose
batches the host draws keeps none of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.memory import TRAINING_BATCHES, BatchTail, tail
from gnnplan.planner.cost.rates import (
    INDPTR_BYTES,
    index_bytes,
    indices_bytes,
    ranks_here,
    topology_bytes,
)
from gnnplan.planner.cost.request import Request, sampler_of
from gnnplan.planner.workload import BatchProfile, Spread
from gnnplan.runtime.graph.dataset import is_typed
from gnnplan.runtime.models import product_comes_first
from gnnplan.runtime.plan.schema import Sampler, Workload
from gnnplan.runtime.sampling.registry import (
    DrawBytes,
    Estimator,
    find_sampler,
    is_default,
    law_of,
    parameters_of,
    why_on_host,
)

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


def draw_bytes(request: Request, candidate: Candidate, batch: BatchProfile, *, on_gpu: bool) -> int:
    """Return the bytes in which a rank's GPU, or its cores, draw, beside relabelling.

    m (a D + b E + c min(D, N) + d N) of m batches of a GPU's stack, or threads on cores, D
    neighbours in the lists that the largest batch expands, E edges and N nodes; a to d bytes of the
    sampler. A GPU for which cores draw takes none; what a stack on cores takes is the stack's.
    """
    sampler, nodes = sampler_of(request.user_sampler, candidate), request.graph.num_nodes
    if on_gpu and not draws_on_gpu(request, sampler):
        return 0
    each = _draws(sampler, on_gpu=on_gpu)
    largest, stacks = BatchTail.of(batch), candidate.bulk_batches
    many = stacks if on_gpu else _threads(candidate) if stacks == 1 else 0
    listed = batch.list_entries * largest.scale
    edges = largest.edges if on_gpu else sum(_tails(batch, batch.edges))
    size = each.neighbour * listed + each.edge * edges + each.source * min(listed, nodes)
    return round(many * (size + each.node * nodes))


def sampling_bytes(request: Request, candidate: Candidate, batch: BatchProfile) -> int:
    """Return the bytes in which a rank's cores draw: workspaces of its threads, and their draws.

    Layers are drawn with a workspace's table alone.
    """
    sampler = sampler_of(request.user_sampler, candidate)
    each = _workspace_bytes(request, sampler, batch)
    return _threads(candidate) * each + draw_bytes(request, candidate, batch, on_gpu=False)


@dataclass(frozen=True, slots=True)
class _BlockSizes:
    """Sizes of one block of the largest batch."""

    rows: float
    sources: float
    edges: float
    """Number of edges, with the self-loops that the model's blocks have."""


def block_bytes(request: Request, candidate: Candidate, batch: BatchProfile) -> float:
    """Return the bytes of the largest batch's blocks, as the loader hands them out.

    sum 8 (T n + 1) + 4 e over blocks of n rows, T edge types and e edges, and 4 e more where edges
    have weights. Nested blocks are parts of the outermost, but GCN, and ranks that share a batch,
    make its own of each.
    """
    work, types = request.workload, max(1, len(batch.edge_types))
    gcn = work.model == "gcn"
    law = law_of(sampler_of(request.user_sampler, candidate))
    weighted = gcn or law.estimator is not Estimator.PLAIN
    blocks = _blocks(request, batch)
    apart = gcn or request.every_hop or candidate.batching == "cooperative"
    held = blocks if apart else blocks[:1]
    ends = types + 1 if types > 1 else 1
    size = sum(8 * (ends * each.rows + 1) + (4 + 4 * weighted) * each.edges for each in held)
    return size + (TYPE_BYTES * held[0].sources if batch.node_types else 0)


def step_parts(request: Request, batch: BatchProfile) -> dict[str, int]:
    """Return the bytes that a step on cores makes of its batch's blocks.

    8 (n + 1) + 8 e of a block of n sources and e edges, whose gradients go by source, and 8 n more
    while it is made: of all but the outermost, whose inputs need none where they are summed first.
    GAT joins self-loops to blocks in their place. Of T edge types each has its own block, and its
    own by source.
    """
    work, types = request.workload, max(1, len(batch.edge_types))
    size = making = 0.0
    for layer, each in enumerate(_blocks(request, batch)):
        if work.model == "gat":
            size += 8 * (each.rows + 1) + 4 * (each.edges + each.rows)
            continue
        if types > 1:
            size += 8 * types * (each.rows + 1) + 4 * each.edges
        if layer > 0 or _product_first(request, each, types):
            size += 8 * types * (each.sources + 1) + 8 * each.edges
            making = max(making, 8 * each.sources)
    return {"blocks by source": round(size + making)}


def _product_first(request: Request, block: _BlockSizes, types: int) -> bool:
    """Return whether the first layer multiplies its inputs before it sums them."""
    work, graph = request.workload, request.graph
    outputs = work.hidden if work.num_layers > 1 or graph.task == "link" else graph.num_classes
    if work.precision != "float32" or work.model == "rgcn":
        return True  # of edge types the inputs are mapped first, so they need gradients
    return product_comes_first(
        round(block.sources), round(block.rows), block.edges / types, graph.feature_dim, outputs,
        device="cpu", trains=True, inner=False,
    )  # fmt: skip


def _blocks(request: Request, batch: BatchProfile) -> list[_BlockSizes]:
    """Return the blocks of the largest batch, outermost first."""
    vertices = _tails(batch, batch.vertices)[::-1]
    loops = request.workload.model == "gcn"
    return [
        _BlockSizes(rows, sources, edges + loops * rows)
        for edges, sources, rows in zip(
            _tails(batch, batch.block_edges), vertices[:-1], vertices[1:], strict=True
        )
    ]


def _workspace_bytes(request: Request, sampler: Sampler, batch: BatchProfile) -> int:
    """Return the bytes of a thread's workspace at the largest batch.

    Before a hop is drawn, room is made for its narrow fan-out from every row.
    """
    from gnnplan.runtime.sampling.choose.uniform import in_lanes  # on use: with numba
    from gnnplan.runtime.sampling.workspace import workspace_bytes

    work, nodes = request.workload, request.graph.num_nodes
    if not _draws(sampler, on_gpu=False).by_rows:
        most = round(BatchTail.of(batch).vertices)
        return workspace_bytes(nodes, 0, rows=most, edges=0, nodes=most)
    types = max(1, len(batch.edge_types))
    uniform = is_default(sampler.name, sampler.parameters)
    narrow = in_lanes(work.fanouts)
    fanouts = _fanouts(work, types, narrow=narrow) if uniform else []
    lanes = uniform and types == 1 and request.graph.task != "link" and in_lanes(fanouts)
    vertices, drawn = _tails(batch, batch.vertices), _tails(batch, batch.edges)
    rows = edges = most_edges = most_nodes = 0.0
    for hop, found in enumerate(drawn):
        expanded = vertices[hop]
        if hop > 0 and not request.every_hop:
            expanded -= vertices[hop - 1]
        rows += types * expanded
        room = max(found, expanded * fanouts[hop]) if hop < len(fanouts) else found
        most_edges = max(most_edges, edges + room)
        most_nodes = max(most_nodes, min(nodes, vertices[hop] + room))
        edges += found
    return workspace_bytes(
        nodes, index_bytes(request.graph), rows=round(rows), edges=round(most_edges),
        nodes=round(most_nodes), chosen=not lanes,
    )  # fmt: skip


def _fanouts(work: Workload, types: int, *, narrow: bool) -> list[int]:
    """Return the edges per row for which room is made at each hop, over all edge types."""
    by_type = list(work.type_fanouts.values())
    by_type += [work.fanouts] * (types - len(by_type))
    known = types > 1 or narrow
    return [sum(each) if min(each) > 0 and known else -1 for each in zip(*by_type, strict=False)]


def _tails(batch: BatchProfile, spreads: Sequence[Spread]) -> list[float]:
    return [tail(each, batch.num_batches, TRAINING_BATCHES) for each in spreads]


def _draws(sampler: Sampler, *, on_gpu: bool) -> DrawBytes:
    return find_sampler(sampler.name).draw_bytes(parameters_of(sampler), on_gpu)


def _threads(candidate: Candidate) -> int:
    return max(1, candidate.threads.sample)


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
