"""BNS-GCN's tables from presets: bytes, memory, rooflines, links."""

import functools
import itertools
from dataclasses import dataclass

import numpy as np

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.stages.all_reduce import gpu_all_reduce
from gnnplan.planner.cost.stages.exchange_gpu import exchange_seconds
from gnnplan.planner.cost.systems import find_system
from gnnplan.planner.fullgraph.formulas import epoch_bytes, published_bytes
from gnnplan.planner.graph_presets import graph_preset
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.profile.analytic import DegreeClasses, lognormal_classes
from gnnplan.planner.profile.operations import LayerShape, layer_operations
from gnnplan.runtime.plan.schema import Threads
from tests.benchmarks.published_tables import BNS_INDUCTIVE, BNS_LINEAR, BNS_MODELS
from tests.support.candidates import candidate_of_ranks

BNS_MACHINE = "rtx-2080ti-x10"
FLOAT_BYTES, ID_BYTES = 4, 8


def chosen(machine: MachineModel, count: int) -> Candidate:
    """The first GPUs of a machine, as one clique."""
    return candidate_of_ranks(
        num_ranks=count,
        threads=Threads(compute=1, sample=0, gather=1),
        prefetch_depth=2,
        policy="none",
        gpus=tuple(gpu.name for gpu in machine.gpus[:count]),
        cliques=(tuple(range(count)),),
    )


def sage_seconds(machine: MachineModel, shapes: list[LayerShape]) -> float:
    """Forward and backward of SAGE by the roofline."""
    return layers_seconds(machine, [("sage", shape) for shape in shapes])


def layers_seconds(machine: MachineModel, layers: list[tuple[str, LayerShape]]) -> float:
    """Forward and backward of layers, each of a model, by the roofline."""
    flops = machine.table("gpu_flops").at(ranks=1.0)
    kernel = machine.table("gpu_kernel").at(ranks=1.0)
    memory = min(x.bandwidth_bytes_per_second for x in machine.links if x.name.endswith(".hbm"))
    return sum(
        max(op.flops / flops, op.moved_bytes / memory) + kernel
        for model, shape in layers
        for op in layer_operations(model, shape)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingGraph:
    """The graph that an epoch aggregates over, and the model's layers."""

    nodes: float
    edges: float
    widths: list[int]
    graph_layers: int
    """Layers that aggregate; the others multiply alone."""

    @property
    def exchanged(self) -> list[int]:
        """Widths up to the last layer that aggregates: what is exchanged before each of them."""
        return self.widths[: self.graph_layers + 1]

    def sent_bytes(self, rows: float) -> float:
        """Bytes of so many boundary rows over an epoch; the first layer's sums are known."""
        sizes = self.exchanged
        return float(epoch_bytes(rows, sizes, precomputed=True, id_bytes=ID_BYTES))


@functools.cache
def training_graph(name: str) -> TrainingGraph:
    """What the released scripts train on: inductive ones the training nodes and their own edges."""
    like, share = graph_preset(name), 1.0
    if name in BNS_INDUCTIVE:
        share = like.train_share
    layers, hidden = BNS_MODELS[name]
    return TrainingGraph(
        nodes=like.nodes * share,
        edges=like.edges * share**2,
        widths=[like.feature_dim, *[hidden] * (layers - 1), like.classes],
        graph_layers=layers - BNS_LINEAR.get(name, 0),
    )


@functools.cache
def training_classes(name: str) -> DegreeClasses:
    """Degrees of the training graph, by the law of its data set."""
    graph = training_graph(name)
    return lognormal_classes(round(graph.nodes), round(graph.edges), graph_preset(name).law.spread)


@functools.cache
def random_boundary(name: str, parts: int) -> float:
    """Boundary nodes of a random partition, over all parts: (m - 1) sum_v 1 - exp(-d_v / m)."""
    classes = training_classes(name)
    return (parts - 1) * float(classes.nodes @ -np.expm1(-classes.degree / parts))


def cut_share(name: str, parts: int, boundary: float) -> float:
    """Share of the edges that cross: a random cut's, in proportion to the boundary (assumed)."""
    return (parts - 1) / parts * min(1.0, boundary / random_boundary(name, parts))


def crossing_share(name: str, parts: int, keep: float) -> float:
    """Share of the boundary nodes that some kept edge still needs, keeping each with a chance.

    sum_v 1 - exp(-keep d_v / m) over sum_v 1 - exp(-d_v / m)

    Nodes on the boundary are taken to have a random cut's edges across (assumed, as in
    `cut_share`): one or hundreds, so the mean number would overrate what crosses.
    """
    classes = training_classes(name)
    some, every = (
        float(classes.nodes @ -np.expm1(-x * classes.degree / parts)) for x in (keep, 1.0)
    )
    return some / every


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """One epoch of full-graph training."""

    seconds: float
    sent_bytes: float
    memory_bytes: float


def _layers(
    graph: TrainingGraph, inner: float, halo: float, edges: float
) -> list[tuple[str, LayerShape]]:
    """Layers of a part: one whose sums are known, those that aggregate, and linear ones."""
    found: list[tuple[str, LayerShape]] = []
    for layer, (a, b) in enumerate(itertools.pairwise(graph.widths)):
        aggregates = 0 < layer < graph.graph_layers
        shape = LayerShape(
            num_src=inner + (halo if aggregates else 0.0),
            num_dst=inner,
            num_edges=edges if aggregates else 0.0,
            in_dim=a,
            out_dim=b,
            inputs=layer == 0,
            heads=1,
        )
        found.append(("sage" if layer < graph.graph_layers else "gcn", shape))
    return found


def _memory_bytes(graph: TrainingGraph, inner: int, halo: float, keep: float) -> float:
    """The published formula, in which layers that do not aggregate have no halo."""
    first = published_bytes(inner, 0, graph.widths[:2], keep)
    inside = published_bytes(inner, halo, graph.widths[1 : graph.graph_layers + 1], keep)
    linear = itertools.pairwise(graph.widths[graph.graph_layers :])
    return float(first + inside) + sum(FLOAT_BYTES * inner * (a + b) for a, b in linear)


def bns_epoch(
    name: str, parts: int, boundary: float, *, rows: float, edges_kept: float, memory_keep: float
) -> Epoch:
    """An epoch on so many RTX 2080 Ti, mean part, exchanged as the machine's backend does.

    Args:
        name: data set.
        parts: m.
        boundary: Vol, boundary nodes over all parts.
        rows: share of them that cross.
        edges_kept: share of all edges that are aggregated.
        memory_keep: p of the memory formula.
    """
    graph, machine = training_graph(name), load_preset(BNS_MACHINE)
    inner, halo = graph.nodes / parts, boundary / parts
    candidate = chosen(machine, parts)
    edges = edges_kept * graph.edges / parts
    compute = layers_seconds(machine, _layers(graph, inner, rows * halo, edges))
    sent = graph.sent_bytes(rows * boundary)
    parameters = sum(2 * a * b for a, b in itertools.pairwise(graph.widths))
    calls = 2 * (graph.graph_layers - 1)
    exchanged = exchange_seconds(machine, candidate, sent / parts)
    exchanged += (calls - 1) * exchange_seconds(machine, candidate, 0.0)
    reduced = gpu_all_reduce(machine, candidate, float(FLOAT_BYTES * parameters)).seconds
    return Epoch(
        seconds=compute + exchanged + reduced + find_system("bns-gcn").overhead.batch_seconds,
        sent_bytes=sent,
        memory_bytes=_memory_bytes(graph, round(inner), halo, memory_keep)
        + 4 * FLOAT_BYTES * parameters,
    )


def bns_method(name: str, parts: int, boundary: float, method: str, keep: float = 0.1) -> Epoch:
    """BNS, BES or DropEdge at the number of edges that boundary sampling with p leaves."""
    cut = cut_share(name, parts, boundary)
    left = 1 - cut * (1 - keep)
    each = {"BNS": None, "BES": keep, "DropEdge": left}[method]
    rows = keep if each is None else crossing_share(name, parts, each)
    return bns_epoch(name, parts, boundary, rows=rows, edges_kept=left, memory_keep=min(1.0, rows))
