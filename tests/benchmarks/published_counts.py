"""Count what a published row's batches touch and its caches hold, by the law of its graph."""

import functools
import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.graph_presets import graph_presets, preset_law
from gnnplan.planner.probe.presets import load_effects, load_preset
from gnnplan.planner.profile.analytic import lognormal_classes
from gnnplan.planner.profile.community_law import (
    CommunityLaw,
    community_law,
    count_batch,
    node_reads,
)
from gnnplan.planner.profile.operations import LayerShape
from tests.benchmarks.published_cases import Case
from tests.benchmarks.published_cooperative import refilled_misses
from tests.benchmarks.published_drawn import drawn_inputs, drawn_misses, scaled
from tests.benchmarks.published_remote import RemoteNodes, remote_nodes
from tests.reference.law_caches import hit_rate, touched_share

FLOAT_BYTES, ITEM_BYTES, ID_BYTES = 4, {"float16": 2, "float32": 4}, 8
RELATIONS = {"mag240m": 5, "mag": 7, "igbh": 7}
"""Directed relations that their baselines have, by the beginning of the data set's name."""
USABLE = 0.95
"""Share of a GPU's memory that a cache may fill with the rest."""
PAGE_CACHE = 0.5
"""Share of a host's memory that keeps pages of a mapped file, where a row says that it does."""
INPUT_COPIES = 2
"""Copies of a batch's input rows beside the cache: read, and being read for the next."""
STATIC = ("optimal", "presample", "degree", "random")
"""Policies of caches that are filled before training."""
HOTTEST = ("sieve", "fifo")
"""Policies of caches that refill themselves and still keep the rows that are read most."""
OWN_CACHES, SHARED_CACHES = ("gnnlab", "sgnn"), ("quiver", "wholegraph", "cugraph-pyg")
"""Frameworks that fill what is free of a GPU's memory with rows, each its own or all together."""
LISTS_ON_GPU = ("sgnn", "wholegraph", "cugraph-pyg")
Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What one trainer's batch touches."""

    vertices: tuple[float, ...]
    """Up to each hop, seeds first."""
    edges: tuple[float, ...]
    entries: float
    nodes: Array
    chance: Array
    seen: Array

    @property
    def inputs(self) -> float:
        """Distinct input nodes."""
        return self.vertices[-1]


@functools.cache
def _counts(law: CommunityLaw, seeds: int, fanouts: tuple[int, ...], sampler: str) -> Counts:
    found = count_batch(law, float(seeds), fanouts, sampler)
    return Counts(
        vertices=tuple(found.vertices),
        edges=tuple(found.edges),
        entries=float(sum(found.entries)),
        nodes=np.asarray(found.nodes, np.float64),
        chance=np.asarray(found.chance, np.float64),
        seen=np.asarray(found.seen, np.float64),
    )


def law_of(case: Case) -> CommunityLaw:
    """The graph law of a case's data set, or one of its class."""
    preset = case.preset
    if case.graph in graph_presets():
        return preset_law(preset)
    share = min(1.0, case.train / preset.nodes)
    return community_law(float(preset.nodes), float(preset.edges), share)


def counts_of(case: Case) -> Counts:
    """What a batch of the case touches."""
    return _counts(law_of(case), round(seeds_of(case)), case.fanouts, case.sampler)


def inputs_of(case: Case, counts: Counts) -> float:
    """Input nodes of a batch, fewer where all hops draw by the same numbers."""
    if case.sampler != "labor" or "layer dependency" not in case.row.words:
        return counts.inputs
    seeds = round(seeds_of(case))
    return counts.inputs * drawn_inputs(law_of(case), seeds, case.fanouts)


def seeds_of(case: Case) -> float:
    """Nodes that a trainer's batch begins with."""
    return float(case.ends * min(case.batch, max(1, int(case.train))))


def row_bytes(case: Case) -> int:
    """Bytes of a stored row."""
    return case.preset.feature_dim * ITEM_BYTES[case.preset.feature_dtype]


def relations_of(case: Case) -> int:
    """Directed relations with a matrix each; 1 where the model has no types."""
    if case.model not in ("rgcn", "rgat"):
        return 1
    return next((n for name, n in RELATIONS.items() if case.graph.startswith(name)), 2)


def layers_of(case: Case, counts: Counts | None) -> list[LayerShape]:
    """Layer sizes, the one that reads inputs first; the whole graph where there are no counts."""
    depth = len(case.fanouts) if counts is not None else max(1, case.row.layers or 3)
    widths = [case.preset.feature_dim, *[case.hidden] * (depth - 1), case.preset.classes]
    shapes: list[LayerShape] = []
    for layer, (a, b) in enumerate(itertools.pairwise(widths)):
        hop = depth - 1 - layer
        if counts is not None:
            size = (counts.vertices[hop + 1], counts.vertices[hop], counts.edges[hop])
        else:
            parts = max(1, case.gpus)
            inner = case.preset.nodes / parts
            size = (inner + boundary_of(case) / parts, inner, case.preset.edges / parts)
        shapes.append(
            LayerShape(
                num_src=size[0], num_dst=size[1], num_edges=size[2], in_dim=a, out_dim=b,
                inputs=layer == 0, heads=case.heads, relations=relations_of(case),
            )
        )  # fmt: skip
    return shapes


# Parts of a graph.


def boundary_of(case: Case) -> float:
    """Boundary nodes over all parts, of parts that keep communities whole."""
    parts = max(1, case.gpus)
    known = case.preset.law if case.graph in graph_presets() else None
    spread, inside = (known.spread, known.inside) if known is not None else (1.3, 0.5)
    classes = lognormal_classes(case.preset.nodes, case.preset.edges, spread)
    crossing = classes.degree * (1 - inside) / parts
    return (parts - 1) * float(classes.nodes @ -np.expm1(-crossing))


def _remote(case: Case) -> RemoteNodes:
    parts = max(1, case.hosts if case.hosts > 1 else case.gpus)
    return remote_nodes(law_of(case), seeds_of(case), case.fanouts, case.sampler, parts)


def remote_rows(case: Case) -> float:
    """Rows that a batch reads of other parts and does not keep, with its seeds in its own.

    A part keeps `replication` times as many rows as it owns: those its batches read most, unless
    the row says that they are chosen by degree.
    """
    found, parts = _remote(case), max(1, case.hosts if case.hosts > 1 else case.gpus)
    policy = "degree" if "deg" in case.row.system.lower() else "presample"
    rows = (case.cache.replication or 0.0) * case.preset.nodes / parts
    return found.reads * (1 - found.kept(rows, policy))


# Caches.


def _static_hits(case: Case, share: float, policy: str) -> float:
    if not 0 < share < 1:
        return float(share >= 1)
    law, seeds, ranks = law_of(case), round(seeds_of(case)), case.trainers
    return _hits(law, seeds, case.fanouts, case.sampler, policy, share, ranks)


@functools.cache
def _hits(
    law: CommunityLaw, seeds: int, fanouts: tuple[int, ...], sampler: str, policy: str,
    share: float, ranks: int,
) -> float:  # fmt: skip
    return hit_rate(law, seeds, fanouts, sampler, policy=policy, share=share, ranks=ranks)  # type: ignore[arg-type]


def _slots(rows: float | None, num_bytes: float | None, each: int) -> float:
    return rows if rows is not None else (0.0 if num_bytes is None else num_bytes / each)


def gpu_hits(case: Case, counts: Counts) -> float:
    """Share of the input rows that the GPU's cache serves."""
    cache, each, nodes = case.cache, row_bytes(case), case.preset.nodes
    slots = _slots(cache.gpu_rows, cache.gpu_bytes, each)
    share = cache.share if cache.share is not None else slots / nodes
    if cache.share is None and not slots:
        share = _free_share(case, counts)
    if case.system in ("graphbolt-uva", "graphbolt-disk") or cache.policy in ("lru", "clock"):
        return 1 - _misses(case, share * nodes)
    policy = cache.policy if cache.policy in STATIC else _policy(case)
    return _static_hits(case, share, policy)


def _policy(case: Case) -> str:
    """Policy of a framework's cache where the row names none.

    Quiver orders rows by degree, and so does the baseline of GNNLab's paper with a cache of its
    own size; where that paper states the cache's share, rows are presampled.
    """
    own_size = case.cache.share is None and case.system == "sgnn"
    return "degree" if case.system == "quiver" or own_size else "presample"


def _misses(case: Case, slots: float) -> float:
    """Misses of a cache that refills itself; dependent batches ask again for what they had."""
    kappa = case.cache.kappa if case.sampler == "labor" else 1
    return _refilled(law_of(case), round(seeds_of(case)), case.fanouts, case.sampler, slots, kappa)


@functools.cache
def _refilled(
    law: CommunityLaw, seeds: int, fanouts: tuple[int, ...], sampler: str, slots: float, kappa: int
) -> float:
    if kappa > 1 and scaled(law, seeds):
        return drawn_misses(law, seeds, fanouts, slots / law.nodes, kappa)
    if kappa > 1:
        counts = _counts(law, seeds, fanouts, sampler)
        return refilled_misses(counts.nodes, counts.chance, counts.seen, slots, kappa)
    found = node_reads(law, count_batch(law, float(seeds), fanouts, sampler))
    return refilled_misses(found.nodes, found.chance, found.chance, slots)


def _free_share(case: Case, counts: Counts) -> float:
    """Share of all rows that fit GPUs beside their lists, a batch and the process.

    Caches that are dealt to a clique's GPUs hold as much together.
    """
    if case.system not in OWN_CACHES + SHARED_CACHES or not case.gpus:
        return 0.0
    machine, each = load_preset(case.machine), row_bytes(case)
    size = machine.memory(machine.gpus[0].memory).capacity_bytes * USABLE
    lists = case.preset.edges * FLOAT_BYTES + case.preset.nodes * ID_BYTES
    together = max(1, case.gpus // case.hosts) if case.system in SHARED_CACHES else 1
    free = size - load_effects()["context_bytes"].value - _batch_bytes(case, counts)
    if case.system in LISTS_ON_GPU or case.sampling == "gpu":
        free -= lists / together
    return min(1.0, max(0.0, free) * together / (each * case.preset.nodes))


def _batch_bytes(case: Case, counts: Counts) -> float:
    """Bytes of a batch's rows and activations on a GPU."""
    shapes = layers_of(case, counts)
    kept = sum(s.num_dst * (s.in_dim + 2 * s.out_dim) for s in shapes)
    blocks = 2 * ID_BYTES * sum(counts.edges)
    rows = INPUT_COPIES * counts.inputs * case.preset.feature_dim * FLOAT_BYTES
    return rows + 2 * FLOAT_BYTES * kept + blocks


def host_hits(case: Case, counts: Counts) -> float:
    """Share of the rows that the GPU's cache lacks that a host's cache serves; else disk does."""
    cache, each, nodes = case.cache, row_bytes(case), float(case.preset.nodes)
    slots = _slots(cache.host_rows, cache.host_bytes, each)
    if "in memory" in case.row.cache.lower():
        return 1.0
    if not slots:
        machine = load_preset(case.machine)
        free = max(m.capacity_bytes for m in machine.memories if m.kind == "host")
        text = case.row.cache.lower()
        cached = "page cache" in text and "limited" not in text
        slots = PAGE_CACHE * free / each if cached else 0.0
    ahead = max(1e-12, 1 - gpu_hits(case, counts))
    reads = case.steps * case.trainers * counts.inputs
    if slots and cache.policy in HOTTEST:
        misses = 1 - _static_hits(case, min(1.0, slots / nodes), "presample")
    else:
        misses = _misses(case, min(nodes, slots)) if slots else ahead
    if case.epoch == 1:  # the cache is filled from the disk, too
        touched = touched_share(law_of(case), seeds_of(case), case.fanouts, case.sampler)
        misses = min(1.0, misses + min(slots, touched * nodes) / reads)
    return 1 - min(1.0, misses / ahead)


def count_value(case: Case) -> float:
    """A count in the row's unit, which no overhead enters."""
    counts, kind = counts_of(case), case.asked.kind
    if kind == "inputs":
        found = inputs_of(case, counts)
    elif kind == "touched":
        found = touched_share(law_of(case), seeds_of(case), case.fanouts, case.sampler)
    elif kind == "remote":
        # Each of the parts trains its share of the epoch's batches; the last ones are smaller.
        found = case.train / case.batch * remote_rows(case)
    elif kind == "memory":
        found = load_effects()["context_bytes"].value + _batch_bytes(case, counts)
    else:
        found = gpu_hits(case, counts) if case.asked.cache == "gpu" else host_hits(case, counts)
        found = 1 - found if kind == "miss" else found
    return found / case.asked.scale
