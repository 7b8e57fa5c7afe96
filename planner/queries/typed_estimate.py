"""Estimate typed graphs: a law of batches by node type, and models that a cost file describes.

    nodes and edges by type -> expected nodes and edges of each hop by type -> sizes of each layer's
        relations -> kernels of the cost file -> roofline

The runtime trains R-GCN on typed graphs; R-GAT has a cost here and no training yet (DEC-163).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from gnnplan.planner.cost.stages.host import UPDATE_STARTS, start_seconds
from gnnplan.planner.machine.model import MachineModel, make_table
from gnnplan.planner.placement.order import HeatGroups
from gnnplan.planner.profile.analytic import lognormal_classes
from gnnplan.planner.profile.community_law import mean_drawn
from gnnplan.planner.profile.roofline import (
    FLOAT_BYTES,
    OPTIMIZER_PASSES,
    Operation,
    RooflineRate,
    elementwise,
    product,
    product_rate,
)
from gnnplan.planner.workload import SCALES, BatchProfile, ModelTiming, Spread
from gnnplan.runtime import codec
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


def read_types(path: Path) -> TypedGraph:
    """Read a graph's types; InputError where the file is missing or damaged."""
    import yaml  # on use: the command line starts without it

    with refuse_unreadable(path, "a YAML file of seeds, nodes and edges by type"):
        return codec.decode(TypedGraph, yaml.safe_load(path.read_text()))


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
        drawn = [sum(each) for each in self.edges]
        blocks = drawn if self.every_hop else np.cumsum(drawn).tolist()
        last, inputs = self.edges[-1], self.vertices[-1]
        return BatchProfile(
            seeds_per_rank=seeds,
            num_batches=1,
            vertices=[Spread.expected(sum(each.values())) for each in self.vertices],
            edges=[Spread.expected(each) for each in drawn],
            block_edges=[Spread.expected(each) for each in reversed(blocks)],
            input_standard_error=error,
            half_epoch_error=0.0,
            edge_types=[each / max(1e-300, sum(last)) for each in last],
            node_types=[each / sum(inputs.values()) for each in inputs.values()],
        )

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
    share = {kind: np.zeros_like(law.nodes) for kind, law in laws.items()}
    share[typed.seeds] += min(1.0, seeds / typed.nodes[typed.seeds])
    before = {kind: np.zeros_like(law.nodes) for kind, law in laws.items()}

    def held() -> dict[str, float]:
        return {kind: float(laws[kind].nodes @ share[kind]) for kind in laws}

    vertices, edges, reads = [held()], list[list[float]](), dict.fromkeys(laws, 0.0)
    for fanout in fanouts:
        expanded = {k: share[k] - (0.0 if every_hop else before[k]) for k in laws}
        before, missed = dict(share), {k: 1.0 - share[k] for k in laws}
        edges.append([])
        for source, target, count in typed.edges:
            lists = laws[target]
            lengths = lists.degree * (count / typed.nodes[target])
            taken = lengths if fanout < 0 else mean_drawn(lengths, fanout)
            drawn = float((lists.nodes * expanded[target]) @ taken)
            missed[source] = missed[source] * np.exp(-drawn * laws[source].weight)
            edges[-1].append(drawn)
            reads[target] += drawn
        share = {kind: 1.0 - missed[kind] for kind in laws}
        vertices.append(held())
    every = list(laws)
    nodes = np.concatenate([laws[kind].nodes for kind in every])
    chance = np.concatenate([share[kind] for kind in every])
    spread = np.concatenate([np.full(laws[k].nodes.size, reads[k] / typed.nodes[k]) for k in every])
    into = {k: sum(n for _, target, n in typed.edges if target == k) for k in every}
    lengths = np.concatenate([laws[k].degree * (into[k] / typed.nodes[k]) for k in every])
    heat = HeatGroups.of(nodes, chance, spread, lengths, MOST_GROUPS)
    return TypedBatch(vertices=vertices, edges=edges, heat=heat, every_hop=every_hop)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostedKernel:
    """Kernels of a model's layer, by what they work on."""

    kind: Literal["product", "sum", "passes"]
    """product: rows by a matrix of in x out; sum: rows added up along edges; passes: over rows."""
    rows: list[Literal["source", "target", "edges"]]
    """Rows that it works on, added up."""
    columns: Literal["in", "out", "heads"] = "out"
    passes: int = 2
    """Reads and writes of each row, of kind passes."""
    times: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCost:
    """What a model that the runtime does not train would cost, layer by layer."""

    source: str
    relation: list[CostedKernel]
    """Kernels of each relation of a layer, forward and back."""
    target: list[CostedKernel]
    """Kernels of the layer's targets, whatever the relations."""
    starts: list[float]
    """Starts of the host for a pass, for each layer, and for each relation of a layer."""


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
    half = workload.precision == "bfloat16"
    rounded = replace(workload, precision="tf32") if half else workload
    flops, start = product_rate(machine, rounded), start_seconds(machine)
    slowest = min(x.bandwidth_bytes_per_second for x in machine.links if x.name.endswith(".hbm"))
    # In half the bytes products take half of TF32's seconds, by the GPUs' data sheets.
    times = 2.0 if half else 1.0
    rate = RooflineRate(flops=times * flops.at(ranks=1.0), bytes=times * slowest)
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
    update = rate.seconds(
        Operation(flops=10.0 * parameters, moved_bytes=4.0 * OPTIMIZER_PASSES * parameters)
    )
    one = {"ranks": [ranks], "threads": [1]}
    return ModelTiming(
        forward_backward=make_table(
            "seconds", {"scale": SCALES} | one, [max(started, worked * x) for x in SCALES],
            flops.spread, provenance="derived",
        ),
        optimizer=make_table(
            "seconds", one, [max(update, UPDATE_STARTS * start)], flops.spread, provenance="derived"
        ),
        num_parameters=round(parameters),
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
