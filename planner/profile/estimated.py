"""Estimate what batches ask for, and profiles of first answers, without drawing or timing.

    nodes and edges by type, or a graph's lists -> classes of nodes that are alike
        -> expected nodes and edges of each hop by type -> a profile, or sizes of each layer's
        relations -> kernels of the cost file -> roofline

Nodes of a class have lists of about one length, which name each other independently (DEC-184). The
runtime trains R-GCN on typed graphs; R-GAT has a cost here and no training yet (DEC-163).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.cost.request import seeds_per_rank
from gnnplan.planner.cost.stages.host import UPDATE_STARTS, start_seconds
from gnnplan.planner.machine.model import MachineModel, make_table
from gnnplan.planner.placement.order import HeatGroups
from gnnplan.planner.profile.analytic import expected_draws, lognormal_classes
from gnnplan.planner.profile.cache import Profile
from gnnplan.planner.profile.community_law import Numbers, mean_drawn
from gnnplan.planner.profile.operations import FLOAT_BYTES, Operation, elementwise, product
from gnnplan.planner.profile.roofline import (
    RooflineRate,
    product_rate,
    rates_of_cores,
    rooflines,
    update_operation,
)
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import (
    PROCESS,
    SCALES,
    BatchProfile,
    Combination,
    Hotness,
    ModelTiming,
    Spread,
    WorkloadProfile,
)
from gnnplan.runtime import codec
from gnnplan.runtime.graph.dataset import Graph, is_typed, types_of
from gnnplan.runtime.graph.format import refuse_unreadable
from gnnplan.runtime.plan.schema import Workload

COSTS = Path(__file__).with_name("models.yaml")
COSTED = ("rgat",)
"""Models that the cost file has."""
SPREAD = 1.2
"""Standard deviation of the logarithm of degrees of a graph of which only sizes are known."""
MOST_GROUPS = 512
"""Groups of equal heat in which nodes are placed, about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TypedGraph:
    """Node types and relations of a graph: what `--types FILE` holds."""

    seeds: str
    """Type of the training nodes."""
    nodes: dict[str, int]
    edges: list[tuple[str, str, int]]
    """Type of sources, type of targets, edges of each relation: targets' lists name sources."""

    def __post_init__(self) -> None:
        unknown = {kind for a, b, _ in self.edges for kind in (a, b)} | {self.seeds}
        if missing := sorted(unknown - set(self.nodes)):
            raise ValueError(
                f"expected node types among {', '.join(self.nodes)}, found {missing[0]}"
            )
        if (
            min([*self.nodes.values(), *(count for _, _, count in self.edges)]) < 1
            or not self.edges
        ):
            raise ValueError("expected at least one node of each type and edge of each relation")
        if all(target != self.seeds for _, target, _ in self.edges):
            raise ValueError(f"expected edges whose targets are of {self.seeds}, the seeds' type")


def read_types(path: Path) -> TypedGraph:
    """Read a graph's types; InputError where the file is missing or damaged."""
    import yaml  # on use: the command line starts without it

    with refuse_unreadable(path, "a YAML file of seeds, nodes and edges by type"):
        return codec.decode(TypedGraph, yaml.safe_load(path.read_text()))


@dataclass(frozen=True, kw_only=True, slots=True)
class TypedFrontiers:
    """Expected vertices and edges of a batch by hop."""

    shares: list[Numbers]
    """Probability that a node is reached up to each hop, seeds first, by class."""
    expanded: list[Numbers]
    """Probability that a node is expanded by each hop, by class."""
    edges: list[Numbers]
    """Edges drawn of each relation, by hop."""


def expand_types(
    nodes: Numbers,
    weight: Numbers,
    start: Numbers,
    draws: Sequence[Numbers],
    *,
    every_hop: bool,
) -> TypedFrontiers:
    """Return the expected frontiers of a batch.

    Args:
        nodes: nodes of each class, shape [classes].
        start: chance to be a seed, shape [classes].
        weight: chance that an edge of a relation comes from one given node, [classes, relations].
        draws: mean neighbours drawn of a node's lists, by hop, each [classes, relations].
        every_hop: whether each hop expands all nodes so far, or those that the last one added.
    """
    shares, expanded, edges = [start], list[Numbers](), list[Numbers]()
    for each in draws:
        known = shares[-2] if expanded and not every_hop else np.zeros_like(start)
        expanded.append(shares[-1] - known)
        edges.append((nodes * expanded[-1]) @ each)
        shares.append(1.0 - (1.0 - shares[-1]) * np.exp(-(weight @ edges[-1])))
    return TypedFrontiers(shares=shares, expanded=expanded, edges=edges)


@dataclass(frozen=True, kw_only=True, slots=True)
class RelationShape:
    """Sizes of one relation of a layer: rows of its two types, and its edges."""

    source: float
    target: float
    edges: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TypedBatch:
    """Expected batch of a typed graph; lists go from the seeds outwards."""

    vertices: list[dict[str, float]]
    """Nodes of each type up to each hop."""
    edges: list[list[float]]
    """Edges drawn of each relation at each hop."""
    heat: HeatGroups
    every_hop: bool

    def profile(self, seeds: int, error: float) -> BatchProfile:
        """Return the batch as the cost model takes it; `error` is of its input nodes."""
        vertices = [list(each.values()) for each in self.vertices]
        return typed_profile(vertices, self.edges, seeds, error, every_hop=self.every_hop)

    def layers(self, typed: TypedGraph) -> list[list[RelationShape]]:
        """Return the sizes of each layer's relations, the outermost layer first."""
        drawn = np.asarray(self.edges)
        blocks = drawn if self.every_hop else np.cumsum(drawn, axis=0)
        return [
            [
                RelationShape(source=far[a], target=near[b], edges=float(count))
                for (a, b, _), count in zip(typed.edges, block, strict=True)
                if near[b] > 0
            ]
            for near, far, block in reversed(
                list(zip(self.vertices[:-1], self.vertices[1:], blocks, strict=True))
            )
        ]


def typed_batch(
    typed: TypedGraph, seeds: float, fanouts: Sequence[int], *, every_hop: bool
) -> TypedBatch:
    """Return the expected batch: of each relation a fan-out per list, as of one type of edges.

    Lists of a relation are log-normal in length, and name each node of the source type with a
    log-normal weight of its own.
    """
    laws = {kind: lognormal_classes(count, count, SPREAD) for kind, count in typed.nodes.items()}
    every, size = list(laws), len(laws[typed.seeds].nodes)
    of = {kind: slice(i * size, (i + 1) * size) for i, kind in enumerate(every)}
    nodes = np.concatenate([laws[kind].nodes for kind in every])
    weight, into = np.zeros((nodes.size, len(typed.edges))), dict.fromkeys(every, 0)
    drawn = [np.zeros_like(weight) for _ in fanouts]
    for column, (source, target, count) in enumerate(typed.edges):
        weight[of[source], column] = laws[source].weight
        into[target] += count
        lengths = laws[target].degree * (count / typed.nodes[target])
        for each, fanout in zip(drawn, fanouts, strict=True):
            each[of[target], column] = lengths if fanout < 0 else mean_drawn(lengths, fanout)
    start = np.zeros(nodes.size)
    start[of[typed.seeds]] = min(1.0, seeds / typed.nodes[typed.seeds])
    found = expand_types(nodes, weight, start, drawn, every_hop=every_hop)
    vertices = [
        {kind: float(nodes[of[kind]] @ share[of[kind]]) for kind in every} for share in found.shares
    ]
    edges = [each.tolist() for each in found.edges]
    reads = dict.fromkeys(every, 0.0)
    for (_, target, _), drawn in zip(typed.edges, np.sum(found.edges, axis=0), strict=True):
        reads[target] += float(drawn)
    chance = found.shares[-1]
    spread = np.concatenate([np.full(size, reads[k] / typed.nodes[k]) for k in every])
    lengths = np.concatenate([laws[k].degree * (into[k] / typed.nodes[k]) for k in every])
    heat = HeatGroups.of(nodes, chance, spread, lengths, MOST_GROUPS)
    return TypedBatch(vertices=vertices, edges=edges, heat=heat, every_hop=every_hop)


def typed_profile(
    vertices: Sequence[Sequence[float] | NDArray[Any]],
    edges: Sequence[Sequence[float] | NDArray[Any]],
    seeds: int,
    error: float,
    *,
    every_hop: bool,
) -> BatchProfile:
    """Return a batch of nodes up to each hop and edges drawn by type; `error` is of its inputs."""
    drawn = [float(sum(each)) for each in edges]
    blocks = drawn if every_hop else np.cumsum(drawn).tolist()
    outer = np.asarray(edges[-1]) if every_hop else np.sum(np.asarray(edges), axis=0)
    return BatchProfile(
        seeds_per_rank=seeds,
        num_batches=1,
        vertices=[Spread.expected(float(sum(each))) for each in vertices],
        edges=[Spread.expected(each) for each in drawn],
        block_edges=[Spread.expected(each) for each in reversed(blocks)],
        input_standard_error=error,
        half_epoch_error=0.0,
        edge_types=(outer / max(1e-300, float(outer.sum()))).tolist(),
        node_types=[float(each) / float(sum(vertices[-1])) for each in vertices[-1]],
    )


CHUNK_EDGES, CHUNK_NODES = 1 << 22, 1 << 18
"""Edges, and nodes with their lists, that are read at a time."""
ALIKE, STEPS = 1.3, 96
"""Ratio of longest to shortest list of a class; number of classes of lengths."""
TYPED_ERROR = 0.1
"""Relative standard error of the input nodes of a typed graph's batches (DEC-184)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TypedLists:
    """Classes of a typed graph's nodes by their lists; arrays by class are [classes, types]."""

    class_of: NDArray[np.int64]
    """Class of each node, shape [N]."""
    nodes: Numbers
    kind: NDArray[np.int64]
    """Node type of each class."""
    weight: Numbers
    """Chance that an edge of each type comes from one given node."""
    lengths: Numbers
    """Mean neighbours of each edge type."""
    draws: list[Numbers]
    """Mean neighbours drawn of each edge type, by hop."""


def read_lists(graph: Graph, fanouts: Sequence[Sequence[int]]) -> TypedLists:
    """Group a typed graph's nodes by what its lists say of them; `fanouts` are [types][hops]."""
    assert graph.edge_type is not None
    indptr, num_types = np.asarray(graph.indptr), len(fanouts)
    class_of, kind = _group_nodes(graph, np.diff(indptr))
    nodes, shape = np.bincount(class_of).astype(np.float64), (kind.size, num_types)
    sums = {k: np.zeros(shape) for k in {-1, *(k for each in fanouts for k in each)}}
    sources, columns = np.zeros(shape), np.arange(num_types)
    for first, last in _chunks(indptr):
        part = slice(int(indptr[first]), int(indptr[last]))
        types = np.asarray(graph.edge_type[part], np.int64)
        rows = np.repeat(np.arange(last - first), np.diff(indptr[first : last + 1]))
        counts = np.bincount(rows * num_types + types, minlength=(last - first) * num_types)
        mine = (class_of[first:last, None] * num_types + columns).ravel()
        for k, total in sums.items():
            drawn = counts if k < 0 else np.minimum(counts, k)
            total += np.bincount(mine, drawn, minlength=total.size).reshape(shape)
        ends = class_of[graph.indices[part]] * num_types + types
        sources += np.bincount(ends, minlength=sources.size).reshape(shape)
    means = {k: total / nodes[:, None] for k, total in sums.items()}
    hops = list(zip(*fanouts, strict=True))
    return TypedLists(
        class_of=class_of,
        nodes=nodes,
        kind=kind,
        weight=sources / nodes[:, None] / np.maximum(1.0, sources.sum(axis=0)),
        lengths=means[-1],
        draws=[np.stack([means[k][:, r] for r, k in enumerate(hop)], 1) for hop in hops],
    )


def _group_nodes(
    graph: Graph, lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each node's class by its type, its lists' length and its mentions; classes' types."""
    named, size = np.zeros(graph.num_nodes, np.int64), max(CHUNK_EDGES, graph.num_nodes)
    for first in range(0, graph.num_edges, size):
        named += np.bincount(graph.indices[first : first + size], minlength=graph.num_nodes)
    kinds = np.zeros(1, np.int64) if graph.node_type is None else np.asarray(graph.node_type)
    key = (kinds * STEPS + _steps(lengths)) * STEPS + _steps(named)
    present = np.flatnonzero(np.bincount(key))
    place = np.zeros(int(key.max()) + 1, np.int64)
    place[present] = np.arange(present.size)
    return place[key], present // STEPS**2


def _steps(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return (np.log1p(counts) / math.log(ALIKE)).astype(np.int64)


def _chunks(indptr: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield first and end of each range of nodes whose lists are read together."""
    first = 0
    while first < len(indptr) - 1:
        last = int(indptr.searchsorted(int(indptr[first]) + CHUNK_EDGES, "right")) - 1
        last = min(len(indptr) - 1, first + CHUNK_NODES, max(first + 1, last))
        yield first, last
        first = last


def _typed_draws(
    graph: Graph, settings: PlanSettings
) -> Callable[[int], tuple[BatchProfile, Hotness]]:
    """Return a function that predicts the batch of so many seeds of a typed graph."""
    work, names = settings.workload, types_of(graph).edge_types
    law = read_lists(graph, [work.type_fanouts.get(name, work.fanouts) for name in names])
    training = np.bincount(law.class_of[graph.train_idx], minlength=law.nodes.size)
    every_hop, kinds = settings.dialect == "every_hop", int(law.kind.max()) + 1

    def draw(seeds: int) -> tuple[BatchProfile, Hotness]:
        start = min(seeds, graph.num_train) / max(1, graph.num_train) * training / law.nodes
        found = expand_types(law.nodes, law.weight, start, law.draws, every_hop=every_hop)
        vertices = [np.bincount(law.kind, law.nodes * s, minlength=kinds) for s in found.shares]
        batch = typed_profile(vertices, found.edges, seeds, TYPED_ERROR, every_hop=every_hop)
        entries = sum(float((law.nodes * e) @ law.lengths.sum(axis=1)) for e in found.expanded)
        reads = np.sum(np.stack(found.expanded) * np.sum(law.draws, axis=2), axis=0)
        kept = batch.node_types if graph.x_by_type else []
        hot = Hotness.expected(seeds, found.shares[-1], reads, law.class_of)
        return replace(batch, node_types=kept, list_entries=entries), hot

    return draw


def estimated_profile(
    graph: Graph,
    settings: PlanSettings,
    machine: MachineModel,
    combinations: Sequence[Combination],
    *,
    gpus: bool,
) -> Profile:
    """Return what a graph's lists say of batches, and rates of the model.

    Nothing is drawn or timed. Of a graph of one type `indptr` and the training nodes are read, of
    a typed one its lists too. Ranks that share batches or the topology are left out: what they
    exchange has to be counted.
    """
    alone, work = [replace(c, parts=False) for c in combinations if not c.shared], settings.workload
    if is_typed(work):
        draw = _typed_draws(graph, settings)
    else:
        links = str(graph.task) == "link"
        draw = expected_draws(graph.indptr, graph.train_idx, settings, links=links)
    found = {
        seeds: draw(seeds)
        for seeds in sorted({seeds_per_rank(work.batch_size, c.num_ranks) for c in alone})
    }
    numbers = WorkloadProfile(
        graph_fingerprint=graph.fingerprint,
        sampler_fingerprint="law of the lists",
        batches=[found[seeds][0] for seeds in sorted(found, reverse=True)],
        process=PROCESS,
        notes=["estimated: batches by the law of the lists' lengths, seconds by rates"],
    )
    if gpus:
        timing = rooflines(graph, settings, machine, alone, numbers)
    else:
        timing = rates_of_cores(graph, settings, machine, alone, numbers)
    return Profile(
        numbers=replace(numbers, timing=timing),
        hotness={seeds: hot for seeds, (_, hot) in found.items()},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CostedKernel:
    """Kernels of a model's layer that do the same work."""

    kind: Literal["product", "sum", "passes"]
    """product: rows by an in x out matrix; sum: rows along edges; passes: rows read or written."""
    rows: list[Literal["source", "target", "edges"]]
    """Rows of the work: the sum over these of the layer's sources, targets or edges."""
    columns: Literal["in", "out", "heads"] = "out"
    """Columns of each row."""
    passes: int = 2
    """Number of times that a row is read or written; kind `passes` alone has it."""
    times: int = 1
    """Number of such kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCost:
    """What a model that the runtime does not train would cost, layer by layer."""

    source: str
    relation: list[CostedKernel]
    """Kernels of each relation of a layer, forward and back."""
    target: list[CostedKernel]
    """Kernels of the layer's targets, whatever the relations."""
    starts: list[float]
    """Kernels that the host starts for a pass, for each layer, and for each relation of a layer."""


def read_cost(model: str) -> ModelCost:
    """Read a model's entry of the cost file."""
    import yaml  # on use: the command line starts without it

    return codec.decode(ModelCost, yaml.safe_load(COSTS.read_text())[model])


def costed_timing(
    cost: ModelCost,
    workload: Workload,
    machine: MachineModel,
    layers: Sequence[Sequence[RelationShape]],
    *,
    ranks: int,
    in_dim: int,
    num_outputs: int,
) -> ModelTiming:
    """Return the roofline of a model by its cost entry; layers are the outermost first."""
    hidden = [workload.hidden] * (len(layers) - 1)
    widths = list(zip([in_dim, *hidden], [*hidden, num_outputs], strict=True))
    flops, start = product_rate(machine, workload), start_seconds(machine)
    slowest = min(x.bandwidth_bytes_per_second for x in machine.links if x.name.endswith(".hbm"))
    # Rows of half the bytes are moved in half the time; what a product gains is the GPU's affair.
    times = 2.0 if workload.precision == "bfloat16" else 1.0
    rate = RooflineRate(flops=flops.at(ranks=1.0), bytes=times * slowest)
    relations = sum(len(layer) for layer in layers)
    each_pass, each_layer, each_relation = cost.starts
    started = start * (each_pass + each_layer * len(layers) + each_relation * relations)
    parameters = sum(len(y) * (a * b + 3 * b) for y, (a, b) in zip(layers, widths, strict=True))
    worked = sum(
        rate.seconds(each)
        for depth, (layer, columns) in enumerate(zip(layers, widths, strict=True))
        for each in _costed(cost, layer, columns, workload.heads, inputs=depth == 0)
    )
    kept = sum(
        (each.source + each.target) * b + 2 * each.edges * workload.heads
        for layer, (_, b) in zip(layers, widths, strict=True)
        for each in layer
    )
    # Parameters, gradients and moments stay in float32.
    update = replace(rate, bytes=slowest).seconds(update_operation(parameters))
    one = {"ranks": [ranks], "threads": [1]}
    return ModelTiming(
        forward_backward=make_table(
            "seconds", {"scale": SCALES} | one, [max(started, worked * x) for x in SCALES],
            flops.spread, provenance="derived",
        ),
        optimizer=make_table(
            "seconds", one, [max(update, UPDATE_STARTS * start)], flops.spread, provenance="derived"
        ),
        num_parameters=parameters,
        host_seconds=started + UPDATE_STARTS * start,
        device_seconds=worked + update,
        activation_bytes=round(FLOAT_BYTES * kept / times),
    )  # fmt: skip


def _costed(
    cost: ModelCost,
    layer: Sequence[RelationShape],
    columns: tuple[int, int],
    heads: int,
    *,
    inputs: bool,
) -> Iterator[Operation]:
    """Yield a layer's kernels; a layer that reads the features needs no gradient of its rows."""
    wide = {"in": columns[0], "out": columns[1], "heads": heads}
    whole = RelationShape(
        source=0.0, target=max((each.target for each in layer), default=0.0), edges=0.0
    )
    for shape, kernels in [*((each, cost.relation) for each in layer), (whole, cost.target)]:
        for kernel in kernels:
            rows = sum(getattr(shape, name) for name in kernel.rows)
            for _ in range(kernel.times):
                match kernel.kind:
                    case "product":
                        for _ in range(2 if inputs else 3):
                            yield product(rows, *columns)
                    case "sum":
                        summed = wide[kernel.columns] * FLOAT_BYTES
                        yield Operation(
                            flops=rows * wide[kernel.columns], moved_bytes=rows * summed
                        )
                    case "passes":
                        yield elementwise(rows, wide[kernel.columns], kernel.passes)
