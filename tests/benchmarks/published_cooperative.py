"""The published cooperative table from presets: vertices by a graph law, links, a roofline."""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.stages.all_reduce import gpu_all_reduce
from gnnplan.planner.cost.stages.exchange_gpu import BatchSizes, GpuStep, gpu_batch_seconds
from gnnplan.planner.graph_presets import graph_preset, preset_law
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.profile.community_law import LawCounts, count_batch
from gnnplan.planner.profile.operations import (
    LayerShape,
    Operation,
    aggregation,
    elementwise,
    product,
)
from gnnplan.runtime.plan.schema import Threads
from tests.benchmarks.published_tables import (
    COOPERATIVE_CACHE,
    COOPERATIVE_FANOUTS,
    GLOBAL_BATCH,
    UVA_OVERHEAD,
)
from tests.reference.cache_hits import dependent_hit_rate, frozen_hit_rate
from tests.support.candidates import candidate_of_ranks

MACHINES = {4: "a100x4", 8: "a100x8", 16: "v100x16"}
GRAPHS = {"papers100M": "papers100m-both", "mag240M": "mag240m-all"}
SAMPLERS = {"NS": "neighbor", "LABOR-0": "labor"}
KAPPA = 256
HIDDEN = 1024
"""As the authors' launch scripts for several GPUs set them."""
RELATIONS = 5
"""Of mag240M: directed relations, each with a matrix of its own, in OGB's baseline."""
Array = NDArray[np.float64]
FROZEN = 1024
"""Steps of a run from which its numbers are taken to stand still while a cache keeps a row."""
SAMPLED_NODES = 100_000
"""Nodes that stand for all of a graph where a cache is modelled."""
FLOAT_BYTES, ITEM_BYTES = 4, {"float16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table, seconds."""

    samp: float
    feat: float
    fb: float
    feat_nocache: float = 0.0
    """Features where every row comes from the host."""
    feat_cache: float = 0.0
    """Features with a cache, of independent batches."""

    @property
    def total(self) -> float:
        """In line, as the table adds them up [R9]."""
        return self.samp + self.feat + self.fb


def candidate_of(machine: MachineModel) -> Candidate:
    """All of a machine's GPUs as one clique."""
    names = tuple(gpu.name for gpu in machine.gpus)
    return candidate_of_ranks(
        num_ranks=len(names),
        threads=Threads(compute=1, sample=0, gather=1),
        prefetch_depth=2,
        policy="none",
        gpus=names,
        cliques=(tuple(range(len(names))),),
    )


@functools.cache
def model_row(pes: int, dataset: str, sampler: str, mode: str) -> Row:
    """A line of the table by our models; `feat` is the last feature column's cache."""
    seeds, machine = GLOBAL_BATCH[pes], load_preset(MACHINES[pes])
    candidate, like = candidate_of(machine), graph_preset(GRAPHS[dataset])
    name, together = SAMPLERS[sampler], mode == "Coop"
    share = pes if together else 1
    whole = count_batch(
        preset_law(like), seeds if together else seeds / pes, COOPERATIVE_FANOUTS, name,
        ranks_together=share,
    )  # fmt: skip
    sizes = BatchSizes(
        owned=[vertices / share for vertices in whole.vertices],
        asked=whole.asked if together else whole.vertices[1:],
        edges=[edges / share for edges in whole.edges],
        cooperative=together,
        entries=sum(whole.entries) / share if name == "labor" else 0.0,
    )

    def step(misses: float) -> GpuStep:
        return gpu_batch_seconds(
            machine,
            candidate,
            sizes,
            row_bytes=like.feature_dim * ITEM_BYTES[like.feature_dtype],
            hidden_bytes=HIDDEN * FLOAT_BYTES,
            miss_rate=misses,
        )

    def features(misses: float) -> float:
        far = misses * (step(1.0).features - step(0.0).features)
        return step(misses).features + far * (1 / UVA_OVERHEAD.row_share - 1)

    independent = miss_rate(whole, share, kappa=1)
    last = miss_rate(whole, share, kappa=KAPPA) if name == "labor" else independent
    widths = [like.feature_dim, HIDDEN, HIDDEN, like.classes]
    compute = _roofline(machine, dataset, sizes, widths)
    parameters = sum(a * b * _matrices(dataset) for a, b in itertools.pairwise(widths))
    reduced = gpu_all_reduce(machine, candidate, float(FLOAT_BYTES * parameters)).seconds
    return Row(
        samp=step(last).sample + UVA_OVERHEAD.batch_seconds,
        feat=features(last),
        fb=UVA_OVERHEAD.compute_factor * compute + step(last).exchange + reduced,
        feat_nocache=features(1.0),
        feat_cache=features(independent),
    )


def miss_rate(batch: LawCounts, share: int, *, kappa: int) -> float:
    """Share of its input rows that a PE's LRU cache of 2M rows lacks [A7].

    A PE that owns 1/P of the vertices has 2M slots for those alone.
    """
    slots = COOPERATIVE_CACHE * share
    return refilled_misses(batch.nodes, batch.chance, batch.seen, slots, kappa)


def refilled_misses(
    nodes: Array, chance: Array, seen: Array, slots: float, kappa: int = 1
) -> float:
    """Share of reads that a cache which keeps what was read last misses, after many batches [A7].

    sum_v 1 - (1 - p_v)^tau = C,  misses = sum_v p_v (1 - p_v)^tau / sum_v p_v

    Dependent batches, whose numbers change over `kappa` steps, are counted on nodes that stand for
    the others.

    Args:
        nodes: how many there are of each class.
        chance: p, that a batch touches one.
        seen: chance that the last hop's lists name one.
        slots: C, rows of the cache.
        kappa: steps of a run; 1 for independent batches.
    """
    if slots >= float(nodes @ (chance > 0)):
        return 0.0
    if kappa > 1:
        return _dependent_misses(nodes, chance, seen, slots, kappa)
    stay = np.log1p(-np.clip(chance, 0.0, 1 - 1e-12))
    low, high = -20.0, 40.0
    for _ in range(80):
        middle = (low + high) / 2
        held = float(nodes @ -np.expm1(stay * math.exp(middle)))
        low, high = (middle, high) if held < slots else (low, middle)
    return float((nodes * chance) @ np.exp(stay * math.exp(low))) / float(nodes @ chance)


def _dependent_misses(nodes: Array, chance: Array, seen: Array, slots: float, kappa: int) -> float:
    counts = np.round(nodes / nodes.sum() * SAMPLED_NODES).astype(int)
    p = np.repeat(chance, counts)
    named = np.repeat(np.maximum(seen, 1e-300), counts)
    q = np.minimum(1.0, p / named)
    places = round(slots / float(nodes.sum()) * len(p))
    if kappa >= FROZEN:
        return 1 - frozen_hit_rate(p / q, q, places)
    return 1 - dependent_hit_rate(p / q, q, places, kappa)


def _matrices(dataset: str) -> int:
    return 1 if dataset == "papers100M" else RELATIONS + 1


def _roofline(machine: MachineModel, dataset: str, sizes: BatchSizes, widths: list[int]) -> float:
    """Forward and backward of GCN (papers100M) or R-GCN (mag240M) on one PE's blocks."""
    flops = machine.table("gpu_flops").at(ranks=1.0)
    kernel = machine.table("gpu_kernel").at(ranks=1.0)
    memory = min(x.bandwidth_bytes_per_second for x in machine.links if x.name.endswith(".hbm"))
    depth = len(sizes.edges)
    total = 0.0
    for layer in range(depth):
        hop = depth - 1 - layer
        shape = LayerShape(
            num_src=sizes.asked[hop],
            num_dst=sizes.owned[hop],
            num_edges=sizes.edges[hop],
            in_dim=widths[layer],
            out_dim=widths[layer + 1],
            inputs=layer == 0,
            heads=1,
        )
        for op in convolution(shape, _matrices(dataset)):
            total += max(op.flops / flops, op.moved_bytes / memory) + kernel
    return total


def convolution(shape: LayerShape, matrices: int) -> Iterator[Operation]:
    """Means of the inputs, then products with so many matrices (DGL's order for a <= b)."""
    a, b = shape.in_dim, shape.out_dim
    first = a <= b
    rows = shape.num_dst if first else shape.num_src
    yield aggregation(shape, min(a, b))
    for _ in range(matrices):
        yield product(rows, a, b)
        yield product(rows, a, b)  # gradient of the weights
        if not shape.inputs:
            yield product(rows, b, a)  # gradient of the rows
    if not (shape.inputs and first):
        yield aggregation(shape, min(a, b))
    yield elementwise(shape.num_dst, b)
    yield elementwise(shape.num_dst, b, passes=3)


@functools.cache
def sampled_counts(dataset: str, sampler: str) -> dict[str, float]:
    """Vertices and edges of 1000 seeds by hop, as the sampler table names them."""
    law = preset_law(graph_preset(dataset))
    found = count_batch(law, 1000.0, COOPERATIVE_FANOUTS, SAMPLERS[sampler])
    vertices = {f"V{hop}": found.vertices[hop] for hop in (3, 2, 1)}
    return vertices | {f"E{hop}": found.edges[hop] for hop in (2, 1, 0)}
