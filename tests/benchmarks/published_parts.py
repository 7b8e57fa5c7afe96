"""BNS-GCN's tables from presets: bytes, memory, rooflines, links."""

import functools
import itertools
from dataclasses import dataclass

import numpy as np

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.stages.all_reduce import gpu_all_reduce
from gnnplan.planner.cost.stages.gather_gpu import find_routes
from gnnplan.planner.fullgraph.formulas import epoch_bytes, published_bytes
from gnnplan.planner.graph_presets import graph_preset
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.machine.routes import byte_seconds
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.profile.roofline import LayerShape, layer_operations
from gnnplan.runtime.plan.schema import Threads
from tests.benchmarks.published_cooperative import classes_of
from tests.benchmarks.published_tables import BNS_MODELS
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
    flops = machine.table("gpu_flops").at(ranks=1.0)
    kernel = machine.table("gpu_kernel").at(ranks=1.0)
    memory = min(x.bandwidth_bytes_per_second for x in machine.links if x.name.endswith(".hbm"))
    return sum(
        max(op.flops / flops, op.moved_bytes / memory) + kernel
        for shape in shapes
        for op in layer_operations("sage", shape)
    )


@functools.cache
def random_boundary(name: str, parts: int) -> float:
    """Boundary nodes of a random partition, over all parts: (m - 1) sum_v 1 - exp(-d_v / m)."""
    classes = classes_of(name)
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
    classes = classes_of(name)
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


def bns_epoch(
    name: str, parts: int, boundary: float, *, rows: float, edges_kept: float, memory_keep: float
) -> Epoch:
    """An epoch on so many RTX 2080 Ti, mean part.

    Args:
        name: data set.
        parts: m.
        boundary: Vol, boundary nodes over all parts.
        rows: share of them that cross.
        edges_kept: share of all edges that are aggregated.
        memory_keep: p of the memory formula.
    """
    like, machine = graph_preset(name), load_preset(BNS_MACHINE)
    layers, hidden = BNS_MODELS[name]
    widths = [like.feature_dim, *[hidden] * (layers - 1), like.classes]
    inner, halo = like.nodes / parts, boundary / parts
    candidate = chosen(machine, parts)
    shapes = [
        LayerShape(
            num_src=inner + rows * halo,
            num_dst=inner,
            num_edges=edges_kept * like.edges / parts,
            in_dim=a,
            out_dim=b,
            inputs=layer == 0,
            heads=1,
        )
        for layer, (a, b) in enumerate(itertools.pairwise(widths))
    ]
    compute = sage_seconds(machine, shapes)
    sent = epoch_bytes(rows * boundary, widths, id_bytes=ID_BYTES)
    parameters = sum(2 * a * b for a, b in itertools.pairwise(widths))
    peers = max(byte_seconds(find_routes(machine, candidate).peer).values())
    reduced = gpu_all_reduce(machine, candidate, float(FLOAT_BYTES * parameters)).seconds
    memory = published_bytes(round(inner), halo, widths, memory_keep)
    return Epoch(
        seconds=compute + float(sent) / parts * peers + reduced,
        sent_bytes=float(sent),
        memory_bytes=float(memory) + 4 * FLOAT_BYTES * parameters,
    )


def bns_method(name: str, parts: int, boundary: float, method: str, keep: float = 0.1) -> Epoch:
    """BNS, BES or DropEdge at the number of edges that boundary sampling with p leaves."""
    cut = cut_share(name, parts, boundary)
    left = 1 - cut * (1 - keep)
    each = {"BNS": None, "BES": keep, "DropEdge": left}[method]
    rows = keep if each is None else crossing_share(name, parts, each)
    return bns_epoch(name, parts, boundary, rows=rows, edges_kept=left, memory_keep=min(1.0, rows))
