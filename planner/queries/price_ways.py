"""Price ways to train on one machine from the sizes of a graph alone, in milliseconds each.

    sizes -> law of batches -> ways to use the GPUs -> rows placed by heat -> seconds and memory

No array is as large as the graph. Of ranks whose reads take as long, one is priced for all. Several
hosts that are alike are one of them, with its share of the batch and the gradient summed over all
(DEC-162).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gnnplan.planner.candidate import Candidate, PlacedRows, list_gpus, make_candidate
from gnnplan.planner.cost.memory import Budgets, code_bytes
from gnnplan.planner.cost.model import backend_of, epoch_seconds, fixed_parts, price_step
from gnnplan.planner.cost.rates import INDEX_BYTES, MachineTable
from gnnplan.planner.cost.request import Request, row_bytes, seeds_per_rank
from gnnplan.planner.cost.stages.all_reduce import (
    algorithm_seconds,
    fabric_of,
    gpu_all_reduce,
)
from gnnplan.planner.cost.stages.gather_gpu import read_seconds
from gnnplan.planner.cost.stages.host import start_seconds
from gnnplan.planner.cost.stages.sample import NEIGHBOUR_BYTES
from gnnplan.planner.cost.step import StepTimes
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.graph_presets import graph_preset
from gnnplan.planner.machine.model import MachineModel, make_table
from gnnplan.planner.placement.costs import RowCosts
from gnnplan.planner.placement.order import HeatGroups, place_by_heat, split_rows
from gnnplan.planner.placement.place import Capacity, capacity, gpu_row_costs
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.profile.analytic import GraphLaw, expected_batch, expected_seeds, read_law
from gnnplan.planner.profile.community_law import TYPICAL, CommunityLaw, community_law, law_batch
from gnnplan.planner.profile.estimated import (
    COSTED,
    MOST_GROUPS,
    TypedGraph,
    costed_timing,
    read_cost,
    read_types,
    typed_batch,
)
from gnnplan.planner.profile.roofline import rates_of_cores, rooflines
from gnnplan.planner.queries.estimate import EstimateSettings
from gnnplan.planner.search.dimensions.ranks import DEPTHS, machine_candidates, plans_gpus
from gnnplan.planner.search.search import with_capture
from gnnplan.planner.settings import PlanSettings
from gnnplan.planner.workload import (
    PROCESS,
    BatchProfile,
    Combination,
    ModelTiming,
    WorkloadProfile,
)
from gnnplan.runtime.graph.dataset import open_graph
from gnnplan.runtime.graph.format import GraphMeta, map_array, read_meta
from gnnplan.runtime.graph.generate_draws import Clustering
from gnnplan.runtime.plan.schema import GraphRef, MemoryUse, TopologyPlacement, Workload
from gnnplan.runtime.sampling.registry import BY_TYPE, DEFAULT_SAMPLER

SIZES_ERROR = 0.15
"""Relative standard error of the input nodes of such a graph's batches (DEC-162)."""
MOST_READ = 1 << 22
"""Most nodes of a dataset whose degrees are read."""
DEFAULT_TRAIN, DEFAULT_CLASSES = 0.1, 50
PREFETCH = DEPTHS[0]
Batch = tuple[BatchProfile, HeatGroups]
"""A rank's batches, and the heat of all nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownGraph:
    """Sizes of a graph, and the law of its degrees."""

    graph: GraphRef
    law: GraphLaw | CommunityLaw
    """Of the graph's own degrees, or of its sizes."""
    words: str
    error: float
    """Relative standard error of what the law says of batches; 0: the law's own."""
    every_hop: bool = False
    """Whether a hop expands every node again, not only new ones."""
    typed: TypedGraph | None = None
    """Types of nodes and edges; None where there is one of each."""
    memo: dict[tuple[int, ...], Batch] = field(default_factory=dict[tuple[int, ...], Batch])
    """Batches by the seeds of a rank and the fan-outs."""

    @property
    def sampler(self) -> str:
        """Return the sampler by whose rates batches are drawn."""
        return DEFAULT_SAMPLER if self.typed is None else BY_TYPE

    def batch(self, seeds: int, work: Workload) -> Batch:
        """Return the batches of a rank, and the heat of the graph's nodes."""
        key = (seeds, *work.fanouts)
        if key not in self.memo:
            self.memo[key] = self._counted(seeds, work)
        return self.memo[key]

    def _counted(self, seeds: int, work: Workload) -> Batch:
        drawn = min(seeds, self.graph.num_train)
        if self.typed is not None:
            found = typed_batch(self.typed, drawn, work.fanouts, every_hop=self.every_hop)
            return found.profile(seeds, self.error), found.heat
        dialect, law = "every_hop" if self.every_hop else "first_seen", self.law
        settings = PlanSettings(workload=work, dialect=dialect)
        if isinstance(law, CommunityLaw):
            batch, hotness = law_batch(law, settings, drawn)
            nodes = np.full(hotness.num_vertices, law.nodes / hotness.num_vertices)
            # Of which nodes lists are long is not told: as of those that lists name often.
            hot = hotness.features.astype(np.float64)
            lengths = hot * (law.edges / law.nodes / max(float(hot.mean()), 1e-300))
        else:
            first = expected_seeds(
                law, settings, seeds, num_train=self.graph.num_train, links=False
            )
            batch, hotness = expected_batch(law, settings, seeds, first)
            nodes, lengths = law.classes.nodes, law.classes.degree
        error = max(self.error, batch.input_standard_error)
        batch = replace(batch, seeds_per_rank=seeds, input_standard_error=error)
        chance, reads = (x.astype(np.float64) for x in (hotness.features, hotness.topology))
        return batch, HeatGroups.of(nodes, chance, reads, lengths, MOST_GROUPS)


def know_graph(
    settings: EstimateSettings, dataset: Path | None = None, types: Path | None = None
) -> KnownGraph:
    """Return the sizes of the graph that is asked for; given ones go before a known graph's.

    Raises:
        SettingsError: a size is missing, cannot be, or there is no such data set.
        DatasetError: the folder is no dataset, or the file of types is damaged.
    """
    typed = None if types is None else read_types(types)
    known, words = _known_sizes(settings, dataset, typed)
    given = {
        "nodes": settings.nodes, "edges": settings.edges, "features": settings.features,
        "dtype": None if settings.dtype == "auto" else settings.dtype, "train": settings.train,
        "classes": settings.classes,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    graph = _graph_of(known | given, settings.like or (dataset.name if dataset else "graph"))
    every_hop = settings.dialect == "every_hop"
    counts = {"nodes", "edges", "train"} & set(given)
    if dataset is not None and graph.num_nodes <= MOST_READ and not counts:
        law, words, error = _law_of(dataset), f"{words}, its degrees read", 0.0
    elif settings.like is not None:
        law, error = _law_like(graph, graph_preset(settings.like).law), 0.0
    else:
        law, words, error = _law_like(graph), f"{words}, clustered as usual", SIZES_ERROR
    return KnownGraph(
        graph=graph, law=law, words=words, error=error, every_hop=every_hop, typed=typed
    )


def _graph_of(sizes: dict[str, Any], name: str) -> GraphRef:
    missing = [f"--{each}" for each in ("nodes", "edges", "features") if each not in sizes]
    if missing:
        raise SettingsError(
            "estimate: expected --nodes, --edges and --features, --like NAME or a dataset, found "
            f"no {' and '.join(missing)}"
        )
    nodes = round(sizes["nodes"])
    return GraphRef(
        name=name,
        path="",
        fingerprint="",
        num_nodes=nodes,
        num_edges=round(sizes["edges"]),
        feature_dim=sizes["features"],
        feature_dtype=sizes.get("dtype", "float32"),
        num_classes=sizes.get("classes", DEFAULT_CLASSES),
        task="multiclass",
        num_train=max(1, round(sizes.get("train", DEFAULT_TRAIN) * nodes)),
    )


def _law_like(graph: GraphRef, clustering: Clustering = TYPICAL) -> CommunityLaw:
    """Return the law of a graph of which sizes are known, and perhaps its clustering."""
    share = graph.num_train / graph.num_nodes
    return community_law(graph.num_nodes, graph.num_edges, share, clustering)


def _known_sizes(
    settings: EstimateSettings, dataset: Path | None, typed: TypedGraph | None
) -> tuple[dict[str, Any], str]:
    """Return sizes by the names of settings, and where they are from."""
    if typed is not None:
        counts = (count for _, _, count in typed.edges)
        return {"nodes": sum(typed.nodes.values()), "edges": sum(counts)}, "sizes by type as given"
    if settings.like is not None:
        like = graph_preset(settings.like)
        return {
            "nodes": like.nodes, "edges": like.edges, "features": like.feature_dim,
            "dtype": like.feature_dtype, "train": like.train_share, "classes": like.classes,
        }, f"sizes like {settings.like.lower()}"  # fmt: skip
    if dataset is None:
        return {}, "sizes as given"
    meta = read_meta(dataset)
    _refuse_kinds(dataset, meta)
    found: dict[str, Any] = {
        "nodes": meta.num_nodes, "edges": meta.num_edges, "dtype": meta.feature_dtype,
        "train": map_array(dataset / "train_idx.npy").shape[0] / meta.num_nodes,
    }  # fmt: skip
    found |= {"features": meta.feature_dim} if meta.feature_dim else {}
    return found | (
        {"classes": meta.num_classes} if meta.num_classes else {}
    ), f"sizes of {dataset}"


def _refuse_kinds(dataset: Path, meta: GraphMeta) -> None:
    """Refuse graphs whose batches the law of one type of edges does not describe."""
    kind = "links to predict" if meta.task == "link" else ""
    kind = "several edge types" if len(meta.edge_types) > 1 else kind
    if kind:
        raise SettingsError(
            f"{dataset}: expected a graph of one edge type with nodes to predict, found {kind}; "
            "`gnnplan plan` takes it"
        )


def _law_of(dataset: Path) -> GraphLaw:
    graph = open_graph(dataset, validate=False)
    law = read_law(graph.indptr, graph.train_idx.reshape(-1))
    return replace(law, class_of=np.arange(law.classes.nodes.size, dtype=np.uint16))


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedWay:
    """One way to train on a machine, with its price or a lower bound of it."""

    request: Request
    candidate: Candidate
    step: StepTimes
    """Of steady batches, until `exact` prices those that vary."""
    half_width: float
    """Relative half-width of the step's interval."""
    memories: dict[str, MemoryUse]
    rows: PlacedRows

    def epoch_seconds(self, num_train: int, batch_size: int) -> float:
        """Return the seconds of an epoch in global batches of all hosts."""
        return epoch_seconds(num_train, batch_size, self.step.seconds, self.step.fill_seconds)

    def exact(self) -> "PricedWay":
        """Price the step with batches that vary."""
        firsts = _first_alike(self.request, self.candidate)
        step, half = price_step(self.request, self.candidate, self.rows, firsts)
        return replace(self, step=step, half_width=half)

    @property
    def headroom(self) -> int:
        """Return the bytes left in the fullest memory; negative where one is too small."""
        return min(each.headroom for each in self.memories.values())


def best_way(ways: Sequence[PricedWay]) -> PricedWay:
    """Return the fastest way that fits, exactly priced; where none does, what lacks least.

    Ways whose lower bound is above the best one's price are not priced any further.
    """
    fitting = [way for way in ways if way.headroom >= 0 and math.isfinite(way.step.seconds)]
    if not fitting:
        return max(ways, key=lambda way: way.headroom)
    best: PricedWay | None = None
    for way in sorted(fitting, key=lambda way: way.step.seconds):
        if best is not None and way.step.seconds >= best.step.seconds:
            break
        found = way.exact()
        if best is None or found.step.seconds < best.step.seconds:
            best = found
    assert best is not None
    return best


def price_ways(
    machine: MachineModel,
    settings: PlanSettings,
    known: KnownGraph,
    *,
    hosts: int = 1,
    model: str = "",
) -> Iterator[PricedWay]:
    """Price every way to train on the GPUs, or cores, of one of several hosts that are alike."""
    graph, work, gpus = known.graph, settings.workload, plans_gpus(machine)
    every = [
        way
        for way in machine_candidates(settings, machine, ("none",))
        if way.prefetch_depth == PREFETCH and (hosts == 1 or way.num_ranks > 1)
    ]
    ways = list({_price_key(machine, way, row_bytes(graph)): way for way in every}.values())
    if not ways:
        raise SettingsError(
            f"{machine.name}: expected several GPUs on each of {hosts} hosts, found one; ask for "
            "more --devices, or for one host"
        )
    ways += [
        replace(way, topology=TopologyPlacement(policy="cached"))
        for way in ways
        if gpus and way.topology.policy == "host" and known.typed is None
    ]
    batches, heats = dict[int, BatchProfile](), dict[int, HeatGroups]()
    for seeds in {seeds_per_rank(work.batch_size, way.num_ranks) for way in ways}:
        batches[seeds], heats[seeds] = known.batch(seeds, work)
    numbers = WorkloadProfile(
        graph_fingerprint="",
        sampler_fingerprint="law of the graph's sizes",
        batches=[batches[seeds] for seeds in sorted(batches, reverse=True)],
        process=PROCESS,
    )
    combinations = [
        Combination(ranks=ranks, threads=threads)
        for ranks, threads in sorted({(way.num_ranks, way.threads.compute) for way in ways})
    ]
    numbers = replace(
        numbers, timing=_timing(known, settings, machine, combinations, numbers, model)
    )
    joined = {each.ranks: _of_hosts(machine, each.ranks, hosts) for each in combinations}
    done = set[tuple[object, ...]]()
    for way in sorted(ways, key=lambda way: way.topology.policy != "replicated"):
        # Where every row and list is on the GPU no other place of lists is faster.
        if (way.gpus, way.cliques, way.threads.sample) in done:
            continue
        request = Request(
            graph=graph, workload=work, profile=numbers, machine=joined[way.num_ranks],
            sampler=known.sampler, every_hop=known.every_hop, budgets=Budgets(),
        )  # fmt: skip
        heat = heats[seeds_per_rank(work.batch_size, way.num_ranks)]
        for each in dict.fromkeys((way, with_capture(settings, request, way))):
            found = price_way(request, each, heat)
            whole = set(found.rows.ranks[0].shares) == {"own"}
            if way.topology.policy == "replicated" and whole and found.headroom >= 0:
                done.add((way.gpus, way.cliques, way.threads.sample))
            yield found


def _price_key(machine: MachineModel, way: Candidate, stored: int) -> tuple[object, ...]:
    """Return what the price of a way depends on: GPUs that are joined alike are alike."""
    plain = (way.num_ranks, way.threads, way.topology.policy)
    if not way.gpus:
        return plain
    reads = [read_seconds(machine, way, size) for size in (stored, NEIGHBOUR_BYTES)]
    rates = tuple(tuple(sorted(each[place])) for each in reads for place in sorted(each))
    sizes = tuple(sorted(len(clique) for clique in way.cliques))
    return (*plain, sizes, rates, gpu_all_reduce(machine, way, MESSAGES[5]).seconds)


def _timing(
    known: KnownGraph,
    settings: PlanSettings,
    machine: MachineModel,
    combinations: Sequence[Combination],
    numbers: WorkloadProfile,
    model: str,
) -> dict[str, ModelTiming]:
    """Return the model's seconds for each way to use the ranks, by roofline."""
    graph, work = known.graph, settings.workload
    if not plans_gpus(machine):
        if known.typed is not None:
            raise SettingsError(f"{machine.name}: expected GPUs for a typed graph, found cores")
        return rates_of_cores(graph, settings, machine, combinations, numbers)
    if known.typed is None or model not in COSTED:
        return rooflines(graph, settings, machine, combinations, numbers)
    cost, found = read_cost(model), dict[str, ModelTiming]()
    for each in combinations:
        seeds = seeds_per_rank(work.batch_size, each.num_ranks)
        batch = typed_batch(known.typed, seeds, work.fanouts, every_hop=known.every_hop)
        found[each.key(work.batch_size)] = costed_timing(
            cost, work, machine, batch.layers(known.typed),
            ranks=each.ranks, in_dim=graph.feature_dim, num_outputs=graph.num_classes,
        )  # fmt: skip
    return found


MESSAGES = [float(10**power) for power in range(1, 11)]
"""Bytes at which sums over several hosts are tabulated."""


def _of_hosts(machine: MachineModel, gpus: int, hosts: int) -> MachineModel:
    """Return one of several hosts, whose GPUs sum gradients with those of all."""
    if hosts == 1:
        return machine
    pair = load_preset(f"{machine.name}:2")
    names = [[g.name for g in pair.gpus if g.host == h][:gpus] for h in (0, 1)]
    both = [name for each in names for name in each]
    ranks = tuple(range(gpus)), tuple(range(gpus, 2 * gpus))
    fabric = replace(fabric_of(pair, make_candidate(list_gpus(pair, both, ranks))), hosts=hosts)
    start = start_seconds(machine)
    values = [min(algorithm_seconds(size, fabric).values()) + start for size in MESSAGES]
    summed = make_table(
        "seconds", {"bytes": MESSAGES, "ranks": [gpus]}, values,
        machine.table(MachineTable.GPU_MESSAGE).spread, provenance="derived",
    )  # fmt: skip
    return machine.with_tables({MachineTable.NCCL_ALL_REDUCE: summed})


def price_way(request: Request, candidate: Candidate, heat: HeatGroups) -> PricedWay:
    """Place the rows of a way to train by their heat, and price it."""
    placed = _placed(request, candidate, heat)
    firsts = _first_alike(request, candidate)
    step, half = price_step(request, candidate, placed, firsts, varied=False)
    parts = [fixed_parts(request, candidate, 0, placed.code_bytes)] * candidate.num_ranks
    memories = backend_of(candidate).memory_use(request, candidate, placed, parts)
    return PricedWay(
        request=request, candidate=candidate, step=step, half_width=half, memories=memories,
        rows=placed,
    )  # fmt: skip


def _first_alike(request: Request, candidate: Candidate) -> list[int]:
    """Return for each rank the first one whose reads take as long."""
    if not candidate.gpus:
        return [0] * candidate.num_ranks
    machine, sizes = request.machine, (row_bytes(request.graph), NEIGHBOUR_BYTES)
    found = [read_seconds(machine, candidate, size) for size in sizes]
    member = {rank: len(clique) for clique in candidate.cliques for rank in clique}
    firsts = dict[tuple[float, ...], int]()
    return [
        firsts.setdefault((member[g], *(s[g] for each in found for s in each.values())), g)
        for g in range(candidate.num_ranks)
    ]


IN_HOST = RowCosts(local=0.0, host=0.0, disk=1.0)
"""Costs of rows for ranks on cores, which keep no copies."""
LIST_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Shares of a GPU's free memory that are tried for adjacency lists."""


def _placed(request: Request, candidate: Candidate, heat: HeatGroups) -> PlacedRows:
    """Place rows, and lists where GPUs keep hot ones, as takes the least seconds."""
    graph = request.graph
    room, codes = capacity(request, candidate, shared_host=True), code_bytes(graph.num_nodes)
    if not candidate.gpus:
        return place_by_heat(
            candidate, heat, IN_HOST, own_rows=0, host_rows=room.host_rows, code_bytes=codes
        )
    costs, size, shares = gpu_row_costs(request, candidate), 0, dict[str, float]()
    if candidate.topology.policy == "cached":
        size, share = _lists_beside_rows(request, candidate, heat, costs, room)
        shares = {"own": share, "host": 1.0 - share}
    return place_by_heat(
        candidate,
        heat,
        costs,
        own_rows=min(graph.num_nodes, (room.own_bytes - size) // row_bytes(graph)),
        host_rows=room.host_rows,
        code_bytes=codes,
        list_bytes=size,
        list_shares=shares,
    )


def _lists_beside_rows(
    request: Request, candidate: Candidate, heat: HeatGroups, costs: RowCosts, room: Capacity
) -> tuple[int, float]:
    """Return the bytes for lists with which reads take least, and the reads that they serve."""
    graph = request.graph
    ids = read_seconds(request.machine, candidate, NEIGHBOUR_BYTES)
    own, host = max(ids["own"]), max(ids["host"])
    drawn = float(heat.nodes @ heat.reads)
    entry = INDEX_BYTES if graph.num_nodes < 2**31 else 2 * INDEX_BYTES
    mapped = graph.num_nodes if room.host_rows is None else room.host_rows
    members = max(len(clique) for clique in candidate.cliques)

    def tried(part: float) -> tuple[float, int, float]:
        size = min(int(part * room.own_bytes), entry * graph.num_edges)
        share = heat.kept_lists(size, entry)
        rows = (room.own_bytes - size) // row_bytes(graph)
        _, seconds = split_rows(heat, costs, members=members, own_rows=rows, host_rows=mapped)
        return seconds + drawn * (share * own + (1.0 - share) * host), size, share

    _, size, share = min(tried(part) for part in LIST_SHARES)
    return size, share
