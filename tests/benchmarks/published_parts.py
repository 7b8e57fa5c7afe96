"""BNS-GCN's tables and Tripathy's efficiencies from presets: bytes, memory, rooflines, links."""

import functools
import itertools
from dataclasses import dataclass

import numpy as np

from planner.candidate import Candidate
from planner.cost.full_graph import crossing_rows, epoch_bytes
from planner.cost.full_graph_memory import published_bytes
from planner.cost.gpu_all_reduce import gpu_all_reduce
from planner.cost.gpu_reads import memory_seconds_per_byte, read_seconds, ways
from planner.cost.gpu_sample import NEIGHBOUR_BYTES, OFFSETS_BYTES, gpu_sample_seconds
from planner.cost.matrix import fetch_words, largest_replication, replications
from planner.graph_law import frontiers
from planner.graph_presets import graph_preset
from planner.machine import MachineModel
from planner.machine_routes import byte_seconds
from planner.probe.presets import load_preset
from planner.profiling.roofline import LayerShape, layer_operations
from runtime.plan import Threads
from tests.benchmarks.published_cooperative import classes_of
from tests.benchmarks.published_tables import (
    BATCHES,
    BNS_MODELS,
    TRIPATHY_BATCH,
    TRIPATHY_FANOUTS,
    TRIPATHY_HIDDEN,
)

BNS_MACHINE = "rtx-2080ti-x10"
FEWEST, MOST = 4, 64
"""GPUs between which the efficiency is taken; assumed for all, they are not in the text at hand."""
FLOAT_BYTES, ID_BYTES = 4, 8
CALLS = 3
"""All-to-alls of one fetch: counts, ids, rows (formulas 4.8)."""


def chosen(machine: MachineModel, count: int) -> Candidate:
    """The first GPUs of a machine, as one clique."""
    return Candidate(
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
        )
        for layer, (a, b) in enumerate(itertools.pairwise(widths))
    ]
    compute = sage_seconds(machine, shapes)
    sent = epoch_bytes(rows * boundary, widths, id_bytes=ID_BYTES)
    parameters = sum(2 * a * b for a, b in itertools.pairwise(widths))
    peers = max(byte_seconds(ways(machine, candidate).peer).values())
    reduced = gpu_all_reduce(machine, candidate, float(FLOAT_BYTES * parameters)).seconds
    memory = published_bytes(round(inner), halo, widths, memory_keep)
    return Epoch(
        seconds=compute + float(sent) / parts * peers + reduced,
        sent_bytes=float(sent),
        memory_bytes=float(memory) + 4 * FLOAT_BYTES * parameters,
    )


def edges_per_boundary_node(name: str, parts: int, boundary: float) -> float:
    """Mean edges of a boundary node into the part that needs it."""
    return max(1.0, cut_share(name, parts, boundary) * graph_preset(name).edges / boundary)


def bns_method(name: str, parts: int, boundary: float, method: str, keep: float = 0.1) -> Epoch:
    """BNS, BES or DropEdge at the number of edges that boundary sampling with p leaves."""
    cut = cut_share(name, parts, boundary)
    left = 1 - cut * (1 - keep)
    per_node = edges_per_boundary_node(name, parts, boundary)
    each = {"BNS": None, "BES": keep, "DropEdge": left}[method]
    rows = keep if each is None else float(crossing_rows([round(per_node)], each))
    return bns_epoch(name, parts, boundary, rows=rows, edges_kept=left, memory_keep=min(1.0, rows))


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledEpoch:
    """An epoch of matrix-based sampling with SAGE."""

    seconds: float
    sample_seconds: float
    replication: int


@functools.cache
def tripathy_epoch(name: str, gpus: int) -> ScaledEpoch:
    """An epoch on Perlmutter: adjacency on every GPU, features in p/c block rows, the best c."""
    machine, like = load_preset(f"perlmutter:{gpus // 4}"), graph_preset(name)
    batch = frontiers(classes_of(name), TRIPATHY_BATCH, TRIPATHY_FANOUTS, "neighbor")
    inputs, edges = batch.count(len(TRIPATHY_FANOUTS)), batch.edges
    candidate = chosen(machine, gpus)
    launch = machine.table("gpu_kernel").at(ranks=1.0)
    one = chosen(machine, 4)
    ids, offsets = (
        max(read_seconds(machine, one, size)["own"]) for size in (NEIGHBOUR_BYTES, OFFSETS_BYTES)
    )
    sample = gpu_sample_seconds(
        sum(edges),
        sum(batch.count(hop) for hop in range(len(edges))),
        len(edges),
        neighbour_seconds=ids,
        offsets_seconds=offsets,
        hash_seconds=ids,
        kernel_seconds=launch,
    )
    widths = [like.feature_dim, TRIPATHY_HIDDEN, TRIPATHY_HIDDEN, like.classes]
    depth = len(edges)
    shapes = [
        LayerShape(
            num_src=batch.count(depth - layer),
            num_dst=batch.count(depth - layer - 1),
            num_edges=edges[depth - layer - 1],
            in_dim=widths[layer],
            out_dim=widths[layer + 1],
            inputs=layer == 0,
        )
        for layer in range(depth)
    ]
    compute = sage_seconds(machine, shapes)
    parameters = sum(2 * a * b for a, b in itertools.pairwise(widths))
    reduced = gpu_all_reduce(machine, candidate, float(FLOAT_BYTES * parameters)).seconds
    whole = like.nodes * like.feature_dim * FLOAT_BYTES
    adjacency = FLOAT_BYTES * like.edges + ID_BYTES * like.nodes
    memory = next(m.capacity_bytes for m in machine.memories if m.kind == "device")
    most = max(
        1, largest_replication(gpus, memory * 0.9, whole, adjacency, topology_partitioned=False)
    )
    fetches = {
        c: _fetch_seconds(machine, gpus, c, inputs, like.feature_dim)
        for c in replications(gpus, most)
    }
    best = min(fetches, key=lambda c: (fetches[c], c))
    local = inputs * like.feature_dim * FLOAT_BYTES * memory_seconds_per_byte(machine, one)
    steps = -(-BATCHES[name] // gpus)
    step = sample + fetches[best] + local + compute + reduced
    return ScaledEpoch(seconds=steps * step, sample_seconds=steps * sample, replication=best)


def _fetch_seconds(
    machine: MachineModel, gpus: int, copies: int, inputs: float, width: int
) -> float:
    """All-to-allv in a process column: its ranks in one host over NVLink, the others by the NIC."""
    ranks = gpus // copies
    if ranks == 1:
        return 0.0
    moved = fetch_words(inputs, width, gpus, copies) * FLOAT_BYTES
    mates = max(1, min(4, gpus) // copies) - 1
    near = mates / (ranks - 1)
    peers = max(byte_seconds(ways(machine, chosen(machine, 4)).peer).values())
    message = machine.table("gpu_message").at(ranks=4.0)
    inside, outside, wait = near * moved * peers, 0.0, mates * message
    if near < 1:
        nic = min(
            x.bandwidth_bytes_per_second
            for x in machine.links
            if x.name.startswith("nic") and x.name.endswith((".out", ".in"))
        )
        outside = (1 - near) * moved / nic
        wait += (ranks - 1 - mates) * machine.table("host_message").at(ranks=1.0)
    return max(inside, outside) + CALLS * wait
