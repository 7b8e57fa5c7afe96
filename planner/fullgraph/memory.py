"""Memory of one rank that trains the whole graph: as published, and on cores and GPUs as it is.

Symbols as in `fullgraph.formulas`; n = n_in, k = 2 for SAGE (the node's own row stands beside the
sum), 1 for GCN. For GAT: m rows received, s rows sent, D = heads * width the transformed columns of
a layer, E its edges, k heads, R(x) rows padded for the dense products (`formulas.pad_rows`).
"""

import itertools
from collections.abc import Sequence
from typing import Literal

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost import memory
from gnnplan.planner.cost.memory import (
    RESERVE,
    Budgets,
    gpu_capacity,
    host_bytes,
    host_memory,
    ranks_by_host,
)
from gnnplan.planner.cost.rates import MachineTable, ranks_here, rate_per_rank, topology_bytes
from gnnplan.planner.fullgraph.exchange import crossing_sizes, drops_edges, num_draws
from gnnplan.planner.fullgraph.formulas import (
    SLAB_ROWS,
    PartSizes,
    Product,
    Real,
    kernel_bytes,
    pad_rows,
)
from gnnplan.planner.fullgraph.profile import CutProfile
from gnnplan.planner.machine.model import MachineModel, one_host, prefix_of
from gnnplan.runtime.plan.schema import FullGraph, GraphRef, MemoryUse, Workload


def attention_topology(
    sizes: PartSizes, keep: Real, drawn: int, *, edges_dropped: bool = False
) -> Real:
    """Count ids, inner and halo lists, the block that joins them, and those of each drawn layer.

    `drawn` draws of an epoch are alive together, 0 for p = 1; inner edges may be sampled too
    (DropEdge).

    >>> attention_topology(PartSizes(inner=1, halo=1, sent=1, inner_edges=2, halo_edges=1), 1.0, 0)
    96.0
    """
    n, inner, halo = sizes.inner, sizes.inner_edges, sizes.halo_edges
    ids = 8 * (n + sizes.halo + sizes.sent)
    whole = 3 * 8 * (n + 1) + 4 * (inner + halo) + 4 * (inner + halo)
    kept_inner = keep * inner if edges_dropped else inner
    pointers = (3 if edges_dropped else 2) * 8 * (n + 1)
    each = pointers + 4 * keep * halo + 4 * (kept_inner + keep * halo)
    each += 4 * kept_inner if edges_dropped else 0
    return ids + whole + drawn * (each + 8 * keep * sizes.sent)


def attention_activations(
    sizes: PartSizes, widths: Sequence[int], *, heads: int, keep: Real, received: Real,
    sent: Real, num_seeds: int, precomputed: bool, dropout: bool, edges_dropped: bool = False,
) -> Real:  # fmt: skip
    """Count the largest of what is alive at one moment, with the arguments of `rank_bytes`.

    kept of a layer   m a (rows received) + (n + m) D (h) + (2 n + m) k (scores) + E k (alpha,
                      twice with dropout) + n b (the output, which the next layer reads)
    forward, besides  R(n) D + s a + max((n + m) D, 2 n D); before that, where a <= D, R(n) (a + D)
    backward, besides the largest of
      in the softmax    n D + (n + m) D + (2 n + m) k (the gradient of the output, of h, of scores)
      below it          4 (n + m) D + (n + m) k, with scores and alpha given back
      in the product    n a (what crossed back) + R(n) (D + a) + a slab of the weight's gradient
                        (layers above the first), with h and the received rows given back too
    """
    n, layers = sizes.inner, len(widths) - 1
    alive = peak = 0.0
    edges = (keep if edges_dropped else 1.0) * sizes.inner_edges + keep * sizes.halo_edges
    whole = sizes.inner_edges + sizes.halo_edges
    backward: list[tuple[Real, Real]] = []
    for layer, (a, b) in enumerate(itertools.pairwise(widths)):
        last = layer == layers - 1
        known = precomputed and layer == 0
        m, here = (sizes.halo, whole) if known else (received, edges)
        wide = heads * b if last else b
        alpha = 4 * here * heads * (2 if dropout else 1)
        rows = 0 if known else m * a
        kept = 4 * (rows + (n + m) * wide + (2 * n + m) * heads) + alpha
        leaving = 0 if known else 4 * sent * a
        besides = 4 * pad_rows(n) * wide + leaving + 4 * max((n + m) * wide, 2 * n * wide)
        peak = max(peak, alive + kept + besides)
        if a <= wide:  # the product of padded rows
            peak = max(peak, alive + leaving + 4 * (rows + pad_rows(n) * (a + wide)))
        below = alive + kept
        alive = below + 4 * n * b * (3 if dropout and not last else 1)
        scores = 4 * (2 * n + m) * heads
        softmax = 4 * (n * wide + (n + m) * wide) + scores
        given_back = alpha + scores
        under_it = 16 * (n + m) * wide + 4 * (n + m) * heads - given_back
        product = 4 * (n * a + pad_rows(n) * (wide + a) + min(n, SLAB_ROWS) * wide)
        product -= given_back + 4 * rows
        backward.append((below, max(softmax, under_it, product if layer > 0 else 0)))
    logits = 4 * n * widths[-1]
    loss = 4 * 4 * num_seeds * widths[-1] + logits
    for layer, (below, besides) in enumerate(backward):
        peak = max(peak, below + logits + besides + (loss if layer == layers - 1 else 0))
    return peak


ADAM_COPIES = 4
MODELS = ("sage", "gcn", "gat")
Drop = Literal["nodes", "edges", "boundary-edges"]


def csr_bytes(rows: int, columns: Real, edges: Real) -> Real:
    """Count a weighted block and its transpose: 8 (rows + 1) + 8 (columns + 1) + 2 (4 + 4) edges.

    >>> csr_bytes(3, 2, 4)
    120
    """
    return 8 * (rows + 1) + 8 * (columns + 1) + 16 * edges


def rank_bytes(
    sizes: PartSizes,
    widths: Sequence[int],
    *,
    model: str,
    keep: Real = 1.0,
    num_parameters: int = 0,
    num_seeds: int = 0,
    precomputed: bool = False,
    shared_draw: bool = False,
    dropout: bool = False,
    heads: int = 1,
    drop: Drop = "nodes",
    crossing: tuple[Real, Real] | None = None,
    slices: Sequence[int] = (),
) -> dict[str, int]:
    """Count the peak bytes of one rank with boundary nodes or edges sampled, by part.

    topology     ids of inner, halo and sent nodes; the inner edges in both directions; the halo
                 edges, in both directions for p = 1, else once and p of them per sampled layer
    inputs       n d_0, and the precomputed k n d_0
    model        parameters, gradients, two moments
    activations  the largest of what is alive at one moment: while layer l runs backward
                 sum_{j<=l} (k n d_{j-1} + n d_j) + n d_l (the gradient) + the larger of
                 n d_l + k n d_{l-1}  and  k n d_{l-1} + n d_{l-1} + p (n_bd + sent) d_{l-1};
                 while it runs forward, those before it + k n d_{l-1} + p (n_bd + sent) d_{l-1}
    kernels      what oneDNN keeps for each shape of a dense product
    The weighted sum is linear: received rows are added and given back, not kept.

    With edges sampled, each edge has its id (8 bytes), the rows that cross are those with a kept
    edge (`crossing_rows`, more than p n_bd), and DropEdge also draws the inner edges of each layer.

    Args:
        sizes: of the part.
        widths: d_0 .. d_L.
        model: sage | gcn | gat.
        keep: p.
        num_parameters: of the model.
        num_seeds: training nodes of the part.
        precomputed: the first layer's sums (of gat its rows) are kept, and not received.
        shared_draw: one draw per epoch for all layers.
        dropout: a mask of each hidden layer's output (4 bytes: torch multiplies by it on cores); of
            gat also a second copy of that output.
        heads: of gat.
        drop: what p keeps.
        crossing: rows (received, sent) per layer with edges sampled; None: p of halo and sent.
        slices: nodes of the other parts, where whole slices are sent; two are held at once.
    """
    if model not in MODELS:
        raise ValueError(f"expected model sage, gcn or gat, found {model!r}")
    layers = len(widths) - 1
    drawn = 0 if keep >= 1 else 1 if shared_draw else layers - (1 if precomputed else 0)
    by_edge = drop != "nodes" and keep < 1
    received, sent = crossing or (keep * sizes.halo, keep * sizes.sent)
    if model == "gat":
        topology = attention_topology(sizes, keep, drawn, edges_dropped=drop == "edges")
        known = 4 * sizes.halo * widths[0] if precomputed else 0
        activations = attention_activations(
            sizes, widths, heads=heads, keep=keep, received=received, sent=sent,
            num_seeds=num_seeds, precomputed=precomputed, dropout=dropout,
            edges_dropped=drop == "edges",
        )  # fmt: skip
    else:
        topology = (
            _edge_topology(sizes, keep, drawn, layers, drop, received, sent)
            if by_edge
            else _topology(sizes, keep, drawn)
        )
        sums = 4 * (2 if model == "sage" else 1) * pad_rows(sizes.inner) * widths[0]
        known = sums if precomputed else 0
        activations = _activations(
            sizes, widths, model, received + sent, num_seeds, precomputed, dropout,
            rows=pad_rows(sizes.inner),
        )  # fmt: skip
    if slices:
        ends = 8 * (sizes.inner + 1) * (len(slices) + 1)
        topology += ends + 8 * (sum(slices) + len(slices)) + 16 * sizes.halo_edges
        topology -= 8 * (sizes.halo + 1) + 8 * sizes.halo_edges  # sources of the halo are not asked
    if by_edge:
        topology += 8 * (sizes.inner_edges + sizes.halo_edges)  # an id of each edge
    return {
        "topology": round(topology),
        "inputs": round(4 * sizes.inner * widths[0] + known),
        "model": ADAM_COPIES * 4 * num_parameters,
        "activations": round(activations),
        "kernels": kernel_bytes(_products(sizes, widths, model, heads, received)),
    }


def _products(
    sizes: PartSizes, widths: Sequence[int], model: str, heads: int, received: Real
) -> list[Product]:
    """List the dense product of every layer; of attention another one of the received rows."""
    found: list[Product] = []
    for layer, (a, b) in enumerate(itertools.pairwise(widths)):
        last = layer == len(widths) - 2
        inputs = 2 * a if model == "sage" else a
        outputs = heads * b if model == "gat" and last else b
        for rows in (sizes.inner, received) if model == "gat" else (sizes.inner,):
            found.append(Product(rows=rows, inputs=inputs, outputs=outputs, passes_back=layer > 0))
    return found


def _edge_topology(
    sizes: PartSizes, keep: Real, drawn: int, layers: int, drop: Drop, received: Real, sent: Real
) -> Real:
    """Count whole lists, and those of kept edges by drawn layer; the first has no gradient."""
    n = sizes.inner
    ids = 8 * (n + sizes.halo + sizes.sent)
    whole = 2 * 8 * (n + 1) + 8 * (sizes.inner_edges + sizes.halo_edges)
    outer = 8 * (n + 1) + 8 * keep * sizes.halo_edges
    back = 8 * (received + 1) + 8 * keep * sizes.halo_edges
    inner, inner_back = 0.0, 0.0
    if drop == "edges":
        inner = 8 * (n + 1) + 8 * keep * sizes.inner_edges
        inner_back = inner
    else:
        whole += 8 * (n + 1) + 8 * sizes.inner_edges
    backward = min(drawn, layers - 1)
    return ids + whole + drawn * (outer + inner + 8 * sent) + backward * (back + inner_back)


def _topology(sizes: PartSizes, keep: Real, drawn: int) -> Real:
    n = sizes.inner
    ids = 8 * (n + sizes.halo + sizes.sent)
    inner = csr_bytes(n, n, sizes.inner_edges)
    whole = 8 * (n + 1) + 8 * sizes.halo_edges
    if keep >= 1:
        return ids + inner + csr_bytes(n, sizes.halo, sizes.halo_edges)
    rows, sent = keep * sizes.halo, 8 * keep * sizes.sent
    return ids + inner + whole + drawn * (csr_bytes(n, rows, keep * sizes.halo_edges) + sent)


def _activations(
    sizes: PartSizes, widths: Sequence[int], model: str, crossing: Real,
    num_seeds: int, precomputed: bool, dropout: bool, *, rows: Real,
) -> Real:  # fmt: skip
    n = sizes.inner
    k = 2 if model == "sage" else 1
    last = len(widths) - 2
    loss = 4 * 4 * num_seeds * widths[-1]  # chosen logits, log-softmax, and their gradients
    alive, peak = 0.0, 0.0
    saved: list[float] = []
    for layer, (a, b) in enumerate(itertools.pairwise(widths)):
        known = precomputed and layer == 0
        inputs = 0 if known else 4 * rows * k * a
        across = 0 if known else 4 * crossing * a
        peak = max(peak, alive + inputs + max(across, 4 * rows * b))
        alive += inputs + 4 * rows * b
        alive += 4 * n * b if dropout and layer < last else 0
        saved.append(alive)
    logits = 4 * rows * widths[-1]
    for layer, (a, b) in enumerate(itertools.pairwise(widths)):
        grad = 4 * n * b + (loss if layer == last else logits)
        grad += 4 * n * b if dropout and layer < last else 0
        masked, inputs = 4 * rows * b, 4 * rows * k * a
        most = masked
        if layer > 0:
            most = max(masked + inputs, inputs + 4 * (n + crossing) * a)
        peak = max(peak, saved[layer] + grad + most)
    return peak


def device_bytes(
    sizes: PartSizes, widths: Sequence[int], *, workload: Workload, settings: FullGraph,
    num_parameters: int, num_seeds: int, crossing: PartSizes | None = None,
) -> dict[str, int]:  # fmt: skip
    """Count the peak bytes of one rank on a GPU with boundary nodes or edges sampled, by part.

    Kernels spread gradients over the lists as they are, so no list is kept by source; rows are not
    padded. Blocks of the kept edges are cut on the GPU, while no activation is alive.

    topology     the inner and halo edges with their weights (of gat joined once more, without), and
                 the same of p of the halo edges per sampled layer, with DropEdge of p of the inner
                 ones too; of slices the halo edges once more
    inputs       n d_0, the precomputed rows, training nodes and labels
    activations  as of cores (`rank_bytes`) with what a step keeps of the weights, once more their
                 size (of sage twice: both are joined), or what cutting a block takes

    `crossing` is what the part receives and sends where that is not p of its halo.
    """
    n, (inner, halo) = sizes.inner, (sizes.inner_edges, sizes.halo_edges)
    keep, known = settings.keep, settings.precompute_first_layer
    gat, each = workload.model == "gat", 4 if workload.model == "gat" else 8
    received, sent = rows_held(sizes, settings, crossing)
    ends, drops_inner = 8 * (n + 1), settings.drop == "edges" and keep < 1
    joined = ends + 4 * inner if gat else 0
    topology = 2 * ends + each * (inner + halo) + joined + (4 * halo if gat else 0) + 8 * sizes.sent
    if settings.exchange == "broadcast" and crossing is not None:
        topology += ends * len(crossing.received) + each * halo
    kept_inner = keep * inner if drops_inner else inner
    block = ends + (each + (4 if gat else 0)) * keep * halo + 8 * sent
    block += (ends + 4 * kept_inner if gat else 0) + (ends + each * kept_inner) * drops_inner
    drawn = num_draws(settings, len(widths) - 1)
    topology += drawn * block
    cutting = _cutting_bytes(halo, sizes.halo, keep) if drawn else 0
    if drops_inner:
        cutting = max(cutting, _cutting_bytes(inner, n, keep) + (0 if gat else 5 * inner))
    joining = 20 * max(inner, keep * halo) if gat else 0
    rows = {"gat": sizes.halo, "gcn": n, "sage": 2 * n}[workload.model] if known else 0
    options = {"precomputed": known, "dropout": workload.dropout > 0}
    if gat:
        activations = _device_attention(
            sizes, widths, heads=workload.heads, keep=keep, num_seeds=num_seeds,
            received=received, sent=sent, kept_inner=kept_inner, **options,
        )  # fmt: skip
    else:
        activations = _activations(
            sizes, widths, workload.model, received + sent, num_seeds, known,
            workload.dropout > 0, rows=n,
        )  # fmt: skip
    activations += 4 * num_parameters * (2 if workload.model == "sage" else 1)
    return {
        "topology": round(topology),
        "inputs": round(4 * (n + rows) * widths[0] + 16 * num_seeds),
        "model": ADAM_COPIES * 4 * num_parameters,
        "activations": round(max(activations, cutting, joining)),
    }


def _cutting_bytes(edges: int, sources: int, keep: Real) -> Real:
    """Count what choosing the kept ones of some edges takes on a GPU."""
    return (4 + 1 + 8 + 8 * keep) * edges + 4 * sources


def rows_held(
    sizes: PartSizes, settings: FullGraph, crossing: PartSizes | None
) -> tuple[Real, Real]:
    """Return the rows of a layer that a part receives and sends, as they lie in memory at once."""
    if settings.exchange == "broadcast" and crossing is not None:
        return 2 * max(crossing.received, default=0), sizes.inner
    if drops_edges(settings) and crossing is not None:
        return crossing.halo, crossing.sent
    return settings.keep * sizes.halo, settings.keep * sizes.sent


def _device_attention(
    sizes: PartSizes, widths: Sequence[int], *, heads: int, keep: Real, num_seeds: int,
    precomputed: bool, dropout: bool, received: Real, sent: Real, kept_inner: Real,
) -> Real:  # fmt: skip
    """Count what is alive at most on a GPU: scores lie by edge and head, rows never by edge.

    kept of a layer   m a (rows received) + (n + m) D (h) + n b (the output), and of each edge two
                      ids and four numbers a head (five with dropout)
    forward, besides  2 (n + m) D, or three numbers of each edge and head
    backward, besides n D + 4 (n + m) D + 4 numbers of each edge and head
    """
    n, layers = sizes.inner, len(widths) - 1
    alive = peak = 0.0
    backward: list[Real] = []
    for layer, (a, b) in enumerate(itertools.pairwise(widths)):
        known = precomputed and layer == 0
        m = sizes.halo if known else received
        edges = kept_inner + (sizes.halo_edges if known else keep * sizes.halo_edges)
        wide = heads * b if layer == layers - 1 else b
        across = 0 if known else (received + sent) * a
        rows = 0 if known else m * a
        alive += 4 * (rows + (n + m) * wide + n * b * (3 if dropout else 1))
        alive += 16 * edges + (5 if dropout else 4) * 4 * edges * heads
        peak = max(peak, alive + 4 * max(across - rows, 2 * (n + m) * wide, 3 * edges * heads))
        backward.append(alive + 4 * (n * wide + 4 * (n + m) * wide + 4 * edges * heads))
    logits = 4 * n * widths[-1]
    return max(peak, *backward) + logits + 4 * 4 * num_seeds * widths[-1]


def host_part_bytes(sizes: PartSizes, columns: int, *, edge_ids: bool = False) -> int:
    """Count what a GPU's rank keeps of its part on the host, and its rows until they are copied.

    Ids and lists stay, for the draws and the report.
    """
    each = 12 if edge_ids else 4
    lists = 2 * 8 * (sizes.inner + 1) + each * (sizes.inner_edges + sizes.halo_edges)
    return 8 * (sizes.inner + sizes.halo + sizes.sent) + lists + 4 * sizes.inner * columns


def rank_parts(
    profile: CutProfile, candidate: Candidate, workload: Workload
) -> list[dict[str, int]]:
    """Count the private bytes of every rank by part, the largest part of the graph included."""
    settings = candidate.full_graph
    found: list[dict[str, int]] = []
    moved = crossing_sizes(profile, settings)
    for sizes, seeds, crossing in zip(profile.sizes, profile.seeds, moved, strict=True):
        if candidate.gpus:
            found.append(
                device_bytes(
                    sizes, profile.widths, workload=workload, settings=settings,
                    num_parameters=profile.num_parameters, num_seeds=seeds, crossing=crossing,
                )
            )  # fmt: skip
            continue
        slices = settings.exchange == "broadcast"
        parts = rank_bytes(
            sizes,
            profile.widths,
            model=workload.model,
            keep=settings.keep,
            num_parameters=profile.num_parameters,
            num_seeds=seeds,
            precomputed=settings.precompute_first_layer,
            shared_draw=settings.draws == "shared",
            dropout=workload.dropout > 0,
            heads=workload.heads,
            drop=settings.drop,
            crossing=rows_held(sizes, settings, crossing),
            slices=[rows for rows in crossing.received if rows] if slices else (),
        )
        found.append({"context": profile.process.resident_bytes, **parts})
    return found


def memory_use(
    profile: CutProfile,
    candidate: Candidate,
    workload: Workload,
    graph: GraphRef,
    machine: MachineModel,
    budgets: Budgets,
) -> dict[str, MemoryUse]:
    """Hold every rank against its limit, and the ranks of each host with the mapped adjacency.

    Feature rows are read once into the ranks; the mapping they come from can be dropped again and
    is not counted.
    """
    parts = rank_parts(profile, candidate, workload)
    if candidate.gpus:
        return _gpu_use(parts, profile, candidate, graph, machine, budgets)
    found, hosts = dict[str, MemoryUse](), dict[str, MemoryUse]()
    here = ranks_here(candidate)
    for host in range(candidate.hosts):
        own = one_host(machine, host)
        name, capacity = host_memory(own)
        capacity = capacity if budgets.host_bytes is None else min(capacity, budgets.host_bytes)
        limit = capacity if budgets.device_bytes is None else budgets.device_bytes
        mine = parts[host * here : (host + 1) * here]
        found |= {
            f"rank{host * here + r}": memory.sum_parts(each, limit) for r, each in enumerate(mine)
        }
        shared = {
            "ranks": sum(sum(each.values()) for each in mine),
            "topology": topology_bytes(graph),
            "launcher": profile.process.launcher_bytes,
        }
        hosts[prefix_of(host) + name] = memory.sum_parts(shared, capacity)
    return found | hosts


def _gpu_use(
    parts: list[dict[str, int]],
    profile: CutProfile,
    candidate: Candidate,
    graph: GraphRef,
    machine: MachineModel,
    budgets: Budgets,
) -> dict[str, MemoryUse]:
    """Hold every GPU's part with its context and reserve, and each host's processes."""
    found: dict[str, MemoryUse] = {}
    context = int(rate_per_rank(machine, MachineTable.GPU_CONTEXT, candidate))
    for rank, each in enumerate(parts):
        capacity = gpu_capacity(machine, candidate, rank, budgets)
        taken = {"context": context, "reserve": round(RESERVE * capacity)}
        found[f"rank{rank}"] = memory.sum_parts(each | taken, capacity)
    process = int(rate_per_rank(machine, MachineTable.GPU_PROCESS, candidate))
    for host, ranks in ranks_by_host(machine, candidate).items():
        name, size = host_bytes(machine, host, budgets)
        by_edge = drops_edges(candidate.full_graph)
        lists = [
            host_part_bytes(profile.sizes[rank], graph.feature_dim, edge_ids=by_edge)
            for rank in ranks
        ]
        shared = {
            "ranks": process * len(ranks),
            "parts": sum(lists),
            "topology": topology_bytes(graph),
        }
        found[name] = memory.sum_parts(shared, size)
    return found
