"""Predict a published figure: counts by the graph law, seconds by a framework's model.

Nothing here is fitted. What is, the overhead of a framework (`published_fit`), is an argument.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.cost.stages.exchange_gpu import card_bandwidth
from gnnplan.planner.cost.systems import (
    EpochWork,
    System,
    SystemOverhead,
    SystemRates,
    epoch_times,
    find_system,
    system_rates,
)
from gnnplan.planner.fullgraph.formulas import epoch_bytes
from gnnplan.planner.graph_presets import GraphPreset, graph_presets, preset_law
from gnnplan.planner.machine.model import MachineModel, num_hosts
from gnnplan.planner.probe.presets import load_effects, load_preset
from gnnplan.planner.profile.analytic import lognormal_classes
from gnnplan.planner.profile.community_law import (
    CommunityLaw,
    community_law,
    count_batch,
    hit_rate,
    touched_share,
)
from gnnplan.planner.profile.roofline import LayerShape, Operation, layer_operations
from tests.benchmarks.published_cooperative import convolution
from tests.benchmarks.published_rows import Case

FLOAT_BYTES, ITEM_BYTES, ID_BYTES = 4, {"float16": 2, "float32": 4}, 8
LINE_IDS = 16
"""Neighbours' ids in a line of 64 bytes, which whole lists are read by."""
LIST_PASSES = 2
RELATIONS = {"mag240m": 5, "mag": 7, "igbh": 7}
"""Directed relations that their baselines have, by the beginning of the data set's name."""
USABLE = 0.95
"""Share of a GPU's memory that a cache may fill with the rest."""
INPUT_COPIES = 2
"""Copies of a batch's input rows beside the cache: read, and being read for the next."""
NETWORK_BYTES_PER_SECOND = 12.5e9
"""Of a host whose network is not stated: 100 Gbit/s."""
STATIC = ("optimal", "presample", "degree", "random")
"""Policies of caches that are filled before training."""
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

    @property
    def inputs(self) -> float:
        """Distinct input nodes."""
        return self.vertices[-1]


@functools.cache
def _counts(law: "_Law", seeds: int, fanouts: tuple[int, ...], sampler: str) -> Counts:
    found = count_batch(law.law, float(seeds), fanouts, sampler)
    return Counts(
        vertices=tuple(found.vertices),
        edges=tuple(found.edges),
        entries=float(sum(found.entries)),
        nodes=np.asarray(found.nodes, np.float64),
        chance=np.asarray(found.chance, np.float64),
    )


@dataclass(frozen=True, eq=False, slots=True)
class _Law:
    law: CommunityLaw


@functools.cache
def _law(preset: GraphPreset, *, known: bool, train: int) -> _Law:
    if known:
        return _Law(preset_law(preset))
    share = min(1.0, train / preset.nodes)
    return _Law(community_law(float(preset.nodes), float(preset.edges), share))


def law_of(case: Case) -> _Law:
    """The graph law of a case's data set, or one of its class."""
    return _law(case.preset, known=case.graph in graph_presets(), train=int(case.train))


def counts_of(case: Case) -> Counts:
    """What a batch of the case touches."""
    seeds = min(case.batch, max(1, int(case.train)))
    return _counts(law_of(case), seeds, case.fanouts, case.sampler)


def row_bytes(case: Case) -> int:
    """Bytes of a stored row."""
    return case.preset.feature_dim * ITEM_BYTES[case.preset.feature_dtype]


def _relations(case: Case) -> int:
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
                inputs=layer == 0, heads=case.heads, relations=_relations(case),
            )
        )  # fmt: skip
    return shapes


def _operations(case: Case, shape: LayerShape) -> Iterator[Operation]:
    """Kernels of a layer: DGL multiplies a GCN's rows before or after the sum, as is cheaper."""
    if case.model == "gcn":
        yield from convolution(shape, 1)
    else:
        named = {"pinsage": "sage", "rgat": "gat"}.get(case.model, case.model)
        yield from layer_operations(named, shape)


def _gpu_memory_rate(machine: MachineModel) -> float:
    names = {gpu.name for gpu in machine.gpus}
    return min(x.bandwidth_bytes_per_second for x in machine.links if x.target in names)


def compute_seconds(case: Case, shapes: list[LayerShape]) -> float:
    """Forward, backward and update by the roofline, without starts."""
    if case.model == "none":
        return 0.0
    machine = load_preset(case.machine)
    if case.gpus:
        table = machine.tables.get("gpu_flops_tf32") if case.system == "wholegraph" else None
        flops = (table or machine.table("gpu_flops")).at(ranks=1.0)
        memory = _gpu_memory_rate(machine)
    else:
        effects = load_effects()
        speed = case.cores ** effects["core_threads_exponent"].value
        flops = effects["core_flops_per_second"].value * speed
        memory = effects["core_bytes_per_second"].value * speed
    work = (op for shape in shapes for op in _operations(case, shape))
    return sum(max(op.flops / flops, op.moved_bytes / memory) for op in work)


def _parameters(case: Case, shapes: list[LayerShape]) -> float:
    matrices = 1 if case.model in ("gcn", "gat") else 1 + _relations(case)
    return float(sum(matrices * s.in_dim * s.out_dim for s in shapes))


# Parts of a graph.


def _outside(case: Case) -> float:
    """Share of a node's edges that a good cut into the case's parts leaves between parts."""
    parts = max(1, case.hosts if case.hosts > 1 else case.gpus)
    clustering = case.preset.law if case.graph in graph_presets() else None
    inside = clustering.inside if clustering is not None else 0.5
    return (1 - inside) * (parts - 1) / parts


def boundary_of(case: Case) -> float:
    """Boundary nodes over all parts, of parts that keep communities whole."""
    parts = max(1, case.gpus)
    known = case.preset.law if case.graph in graph_presets() else None
    spread, inside = (known.spread, known.inside) if known is not None else (1.3, 0.5)
    classes = lognormal_classes(case.preset.nodes, case.preset.edges, spread)
    crossing = classes.degree * (1 - inside) / parts
    return (parts - 1) * float(classes.nodes @ -np.expm1(-crossing))


def remote_share(case: Case, counts: Counts) -> float:
    """Share of a batch's inputs that lie on other hosts, with parts that keep communities whole.

    sum_l (new nodes of hop l) (1 - (1 - c)^l) over all inputs, c the share of edges that cross.
    """
    cut = _outside(case)
    new = np.diff(np.array([0.0, *counts.vertices]))
    far = 1 - (1 - cut) ** np.arange(len(new))
    return float(new @ far) / counts.inputs


def cached_remote(case: Case, counts: Counts) -> float:
    """Share of the remote reads that rows kept of other hosts serve."""
    kept = case.cache.replication
    if not kept:
        return 0.0
    # Each part keeps `kept` times its own rows, of parts - 1 times as many that others own.
    share = kept / max(1, case.hosts - 1)
    policy = "degree" if "deg" in case.row.system.lower() else "presample"
    return _static_hits(case, min(1.0, share), policy)


# Caches.


def _static_hits(case: Case, share: float, policy: str) -> float:
    if share <= 0:
        return 0.0
    if share >= 1:
        return 1.0
    return hit_rate(
        law_of(case).law, float(min(case.batch, int(case.train))), case.fanouts, case.sampler,
        policy=policy, share=share, ranks=case.trainers,  # type: ignore[arg-type]
    )  # fmt: skip


def refilled_misses(counts: Counts, slots: float) -> float:
    """Share of reads that a cache which keeps what was read last misses, after many batches [A7].

    sum_v 1 - (1 - p_v)^tau = C,  misses = sum_v p_v (1 - p_v)^tau / sum_v p_v
    """
    p, nodes = np.clip(counts.chance, 0.0, 1 - 1e-12), counts.nodes
    if slots >= float(nodes @ (p > 0)):
        return 0.0
    stay = np.log1p(-p)

    def held(log_tau: float) -> float:
        return float(nodes @ -np.expm1(stay * math.exp(log_tau)))

    low, high = -20.0, 40.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if held(middle) < slots else (low, middle)
    return float((nodes * p) @ np.exp(stay * math.exp(low))) / float(nodes @ p)


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
        return 1 - _dependent(case, counts, share * nodes)
    policy = cache.policy if cache.policy in STATIC else _policy(case)
    return _static_hits(case, share, policy)


def _policy(case: Case) -> str:
    return "degree" if case.system == "quiver" else "presample"


def _dependent(case: Case, counts: Counts, slots: float) -> float:
    """Misses of a cache that refills itself; dependent batches ask again for what they had.

    Of dependent batches, kappa steps share their numbers more or less: a row that passed is drawn
    again as often as a seed sees it, so that the first of kappa reads alone is as of a new batch.
    """
    misses = refilled_misses(counts, slots)
    if case.sampler != "labor" or case.cache.kappa <= 1:
        return misses
    kappa = case.cache.kappa
    return misses * (1 / kappa + (1 - 1 / kappa) * min(1.0, misses))


def _free_share(case: Case, counts: Counts) -> float:
    """Share of all rows that fit a GPU beside its lists, a batch and the process."""
    if case.system not in ("gnnlab", "sgnn", "quiver") or not case.gpus:
        return 0.0
    machine, each = load_preset(case.machine), row_bytes(case)
    size = machine.memory(machine.gpus[0].memory).capacity_bytes * USABLE
    lists = case.preset.edges * FLOAT_BYTES + case.preset.nodes * ID_BYTES
    free = size - load_effects()["context_bytes"].value - _batch_bytes(case, counts)
    if case.system == "sgnn" or case.sampling == "gpu":
        free -= lists
    return min(1.0, max(0.0, free) / (each * case.preset.nodes))


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
        slots = 0.5 * free / each if "page cache" in case.row.cache.lower() else 0.0
    ahead = max(1e-12, 1 - gpu_hits(case, counts))
    reads = case.steps * counts.inputs
    misses = _dependent(case, counts, min(nodes, slots)) if slots else ahead
    if case.epoch == 1:  # what an epoch touches comes once from the disk
        seeds = float(min(case.batch, int(case.train)))
        touched = touched_share(law_of(case).law, seeds, case.fanouts, case.sampler) * nodes
        misses = max(misses, min(1.0, touched / reads))
    return 1 - min(1.0, misses / ahead)


# Seconds.


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """A time whose overhead is all that is open."""

    case: Case
    system: System
    work: EpochWork
    rates: SystemRates
    hits: float
    host_hits: float
    remote_seconds: float
    """Of a batch's rows from other hosts."""
    exchange_seconds: float
    """Of a step's gradient and, of a graph in parts, its boundary rows; once for all overheads."""
    samplers: int
    batches: float
    """Batches of one trainer in an epoch."""

    def value(self, overhead: SystemOverhead) -> float:
        """The figure in the row's unit."""
        times = epoch_times(
            self.system,
            self.work,
            self.rates,
            overhead=overhead,
            workers=self.case.workers,
            hit_rate=self.hits,
            host_hit_rate=self.host_hits,
            samplers=self.samplers,
        )
        asked, batches = self.case.asked, self.batches
        if set(asked.stages) >= {"sample", "features", "compute"}:
            far = batches * self.remote_seconds
            serial = self.system.overlap in ("in_line", "workers")
            whole = times.epoch_seconds + far if serial else max(times.epoch_seconds, far)
            whole += batches * self.exchange_seconds
            seconds = whole / batches if asked.per == "step" else whole
        else:
            each = sum(getattr(times, stage) for stage in asked.stages)
            each += self.remote_seconds if "features" in asked.stages else 0.0
            each += self.exchange_seconds if "exchange" in asked.stages else 0.0
            seconds = each if asked.per == "step" else each * batches
        if asked.kind == "time":
            return seconds / asked.scale
        return self._amount() / max(1e-12, seconds) / asked.scale

    def _amount(self) -> float:
        """What a rate counts, in an epoch."""
        work, per = self.work, self.case.asked.per
        each = {
            "edges": work.edges,
            "bytes": work.input_rows * work.row_bytes,
            "seeds": float(self.case.batch * self.case.trainers),
            "step": 1.0,
        }[per]
        return each * self.batches


@functools.cache
def _rates(machine: str, gpus: int, each: int, cores: int) -> SystemRates:
    found = load_preset(machine)
    use = min(gpus, len(found.gpus))
    return replace(system_rates(found, use, each), cores=cores * num_hosts(found))


def _system(case: Case) -> System:
    """The framework, with lists and rows where the row's settings say."""
    found = find_system(case.system)
    changed: dict[str, str] = {}
    if case.sampling:
        changed["sampling"] = case.sampling
    if case.rows:
        changed["rows"] = case.rows
    if _all_on_gpus(case) and found.cache == "none":
        changed["cache"] = "own"
    return replace(found, **changed) if changed else found  # type: ignore[arg-type]


def _all_on_gpus(case: Case) -> bool:
    text = f"{case.row.cache} {case.row.notes}".lower()
    if "allcuda" in text or "all in gpu" in text:
        return True
    return case.system == "wholegraph" and "gpu memory" in text and "host memory" not in text


def priced(case: Case) -> Priced:
    """Everything of a time but the overhead."""
    if not case.fanouts:
        return _full_graph(case)
    counts, each = counts_of(case), row_bytes(case)
    system, shapes = _system(case), layers_of(case, counts)
    edges = sum(counts.edges)
    expanded = sum(counts.vertices[:-1])
    if case.sampler == "labor":  # whole lists are read, by lines
        edges = max(edges, expanded + LIST_PASSES * counts.entries / LINE_IDS)
    hits = 1.0 if _all_on_gpus(case) else gpu_hits(case, counts) if system.cache != "none" else 0.0
    if system.kind == "disk" and system.cache == "none":
        hits = 0.0
    batches = float(case.steps)
    rates = _rates(case.machine, case.gpus, each, case.cores)
    if system.overlap == "factored" and case.gpus > 1:
        batches *= case.trainers / rates.gpus  # of all GPUs, those that sample alone included
    work = EpochWork(
        batches=batches,
        input_rows=counts.inputs,
        edges=edges,
        expanded=expanded,
        row_bytes=each,
        compute_seconds=compute_seconds(case, shapes),
    )
    return Priced(
        case=case,
        system=system,
        work=work,
        rates=rates,
        hits=hits,
        host_hits=host_hits(case, counts) if system.kind == "disk" else 1.0,
        remote_seconds=_remote_seconds(case, counts, each),
        exchange_seconds=rates.reduce_seconds(FLOAT_BYTES * _parameters(case, shapes)),
        samplers=case.samplers,
        batches=float(case.steps),
    )


def _remote_seconds(case: Case, counts: Counts, each: int) -> float:
    """Seconds of a batch's rows over a host's cards, which its GPUs share."""
    words = case.row.words
    if case.hosts <= 1 or "replicated" in words:
        return 0.0
    if case.system == "wholegraph":
        share = (case.hosts - 1) / case.hosts if "over all" in words else 0.0
    else:
        share = remote_share(case, counts) * (1 - cached_remote(case, counts))
    machine = load_preset(case.machine)
    card = case.network
    if not card:
        card = card_bandwidth(machine) if num_hosts(machine) > 1 else NETWORK_BYTES_PER_SECOND
    ranks = -(-max(1, case.gpus) // case.hosts)
    return share * counts.inputs * each * ranks / card


def _full_graph(case: Case) -> Priced:
    """A case that trains all of a graph at once, in parts."""
    shapes = layers_of(case, None)
    widths = [shapes[0].in_dim, *(s.out_dim for s in shapes)]
    kept = 1.0
    for word in case.row.words.split():
        if word.startswith("p=") and word[2:].replace(".", "", 1).isdecimal():
            kept = float(word[2:])
    parts = max(1, case.gpus)
    sent = float(epoch_bytes(kept * boundary_of(case), widths, id_bytes=ID_BYTES)) / parts
    work = EpochWork(
        batches=1.0,
        input_rows=0.0,
        edges=0.0,
        expanded=0.0,
        row_bytes=row_bytes(case),
        compute_seconds=compute_seconds(case, shapes),
    )
    rates = _rates(case.machine, parts, row_bytes(case), case.cores)
    exchanged = rates.send_seconds(sent, 2.0 * len(shapes))
    return Priced(
        case=case,
        system=_system(case),
        work=work,
        rates=rates,
        hits=0.0,
        host_hits=1.0,
        remote_seconds=0.0,
        exchange_seconds=exchanged + rates.reduce_seconds(FLOAT_BYTES * _parameters(case, shapes)),
        samplers=0,
        batches=1.0,
    )


# Counts.


def count_value(case: Case) -> float:
    """A count in the row's unit, which no overhead enters."""
    counts, kind = counts_of(case), case.asked.kind
    if kind == "inputs":
        found = counts.inputs
    elif kind == "touched":
        seeds = float(min(case.batch, int(case.train)))
        found = touched_share(law_of(case).law, seeds, case.fanouts, case.sampler)
    elif kind == "remote":
        left = remote_share(case, counts) * (1 - cached_remote(case, counts))
        # Each of the parts trains its share of the epoch's batches.
        found = case.steps * case.trainers * counts.inputs * left
    elif kind == "memory":
        found = load_effects()["context_bytes"].value + _batch_bytes(case, counts)
    else:
        found = gpu_hits(case, counts) if case.asked.cache == "gpu" else host_hits(case, counts)
        found = 1 - found if kind == "miss" else found
    return found / case.asked.scale
