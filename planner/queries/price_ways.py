"""Price ways to train on one machine from the sizes of a graph alone, in milliseconds each.

    sizes -> law of batches -> ways to use the GPUs -> rows placed by heat -> seconds and memory

No array is as large as the graph. Of ranks whose reads take as long, one is priced for all. Several
hosts that are alike are one of them, with its share of the batch and the gradient summed over all
(DEC-162).
"""

import bisect
import functools
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gnnplan.planner.candidate import Candidate, PlacedRows, RankRows, list_gpus, make_candidate
from gnnplan.planner.cost.backends.gpu import least_seconds
from gnnplan.planner.cost.memory import Budgets, code_bytes
from gnnplan.planner.cost.model import (
    backend_of,
    batch_and_timing,
    epoch_seconds,
    fixed_parts,
    price_step,
)
from gnnplan.planner.cost.rank_times import RankWork
from gnnplan.planner.cost.rates import INDEX_BYTES, MachineTable
from gnnplan.planner.cost.request import Request, held_row_bytes, row_bytes, seeds_per_rank
from gnnplan.planner.cost.stages.all_reduce import (
    algorithm_seconds,
    fabric_of,
    gpu_all_reduce,
)
from gnnplan.planner.cost.stages.gather_gpu import read_seconds
from gnnplan.planner.cost.stages.host import start_seconds
from gnnplan.planner.cost.stages.sample import NEIGHBOUR_BYTES
from gnnplan.planner.cost.step import StepTimes, combine_ranks
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.graph_presets import KnownGraph
from gnnplan.planner.machine.model import MachineModel, make_table
from gnnplan.planner.placement.costs import RowCosts
from gnnplan.planner.placement.order import HeatGroups, place_by_heat, split_rows
from gnnplan.planner.placement.place import Capacity, capacity, gpu_row_costs
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.profile.estimated import COSTED, costed_timing, read_cost, typed_batch
from gnnplan.planner.profile.roofline import rates_of_cores, rooflines
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
from gnnplan.runtime.plan.schema import MemoryUse, TopologyPlacement, Workload

PREFETCH = DEPTHS[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnplacedWay:
    """One way to train on a machine, before its rows are placed."""

    request: Request
    candidate: Candidate
    heat: HeatGroups
    firsts: list[int]
    """For each rank the first rank whose reads take as long."""
    least_seconds: float
    """Lower bound of a step's seconds, wherever rows and lists lie."""

    def place(self, most_bytes: int | None = None) -> "PlacedWay":
        """Place rows and lists by heat in at most `most_bytes` of each GPU; None: in all."""
        request, candidate = self.request, self.candidate
        room = capacity(request, candidate, shared_host=True)
        if most_bytes is not None:
            room = replace(room, own_bytes=min(room.own_bytes, most_bytes))
        rows = _placed(request, candidate, self.heat, room)
        parts = [fixed_parts(request, candidate, 0, rows.code_bytes)] * candidate.num_ranks
        memories = backend_of(candidate).memory_use(request, candidate, rows, parts)
        return PlacedWay(way=self, memories=memories, rows=rows, own_bytes=room.own_bytes)

    @property
    def siblings(self) -> tuple[object, ...]:
        """Return a key that is equal for ways that differ only in where lists lie."""
        candidate = self.candidate
        return candidate.gpus, candidate.cliques, candidate.threads.sample

    @property
    def keeps_lists(self) -> bool:
        """Return whether each GPU has a copy of all lists."""
        return self.candidate.topology.policy == "replicated"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedWay:
    """A way to train with its rows placed."""

    way: UnplacedWay
    memories: dict[str, MemoryUse]
    rows: PlacedRows
    own_bytes: int
    """Bytes of each GPU that may hold rows and lists."""

    @property
    def headroom(self) -> int:
        """Return the bytes left in the fullest memory; negative where one is too small."""
        return min(each.headroom for each in self.memories.values())

    @property
    def keeps_all(self) -> bool:
        """Return whether each GPU has room for every row and list."""
        whole = set(self.rows.ranks[0].shares) == {"own"}
        return self.way.keeps_lists and whole and self.headroom >= 0

    def price_if_it_fits(self) -> "PricedWay | None":
        """Price a step of steady batches; None where a memory is too small."""
        return self.price(varied=False) if self.headroom >= 0 else None

    def price(self, *, varied: bool) -> "PricedWay":
        """Price a step of batches that vary, or of steady ones: a lower bound."""
        way = self.way
        step, half = price_step(way.request, way.candidate, self.rows, way.firsts, varied=varied)
        return PricedWay(placed=self, step=step, half_width=half)


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedWay:
    """A way to train with its price."""

    placed: PlacedWay
    step: StepTimes
    half_width: float
    """Relative half-width of the step's interval."""
    sized: bool = False
    """Whether it is known that no smaller part of a GPU's memory would do better."""

    @property
    def memory_binds(self) -> bool:
        """Return whether work on a GPU, reads of its own memory among it, sets the pace."""
        return self.step.bottleneck == "GPU"

    @property
    def least_seconds(self) -> float:
        """Return a lower bound of the seconds with fewer rows and lists on the GPUs."""
        if self.sized or not self.memory_binds:
            return self.step.seconds
        way, rank = self.placed.way, self.step.slowest
        unread = replace(rank, device=replace(rank.device, memory=0.0))
        ranks = [unread] * way.candidate.num_ranks
        found = combine_ranks(way.candidate, way.request.machine, ranks).seconds
        return min(self.step.seconds, max(found, way.least_seconds))

    def resize(self) -> "PricedWay":
        """Use less of each GPU's memory where rows elsewhere are read sooner beside other work.

        The more rows a GPU keeps, the longer its memory is busy, and the shorter all else; so the
        best number of bytes is where the two meet, whatever the GPU has beyond it (DEC-180).
        """
        way = self.placed.way
        unit = held_row_bytes(way.request.graph, way.candidate)

        @functools.cache
        def price(rows: int) -> PricedWay:
            return way.place(rows * unit).price(varied=False)

        every = range(self.placed.own_bytes // unit)
        first = bisect.bisect_left(every, True, key=lambda rows: price(rows).memory_binds)
        tried = [self, *(price(rows) for rows in (first - 1, first) if rows in every)]
        return replace(min(tried, key=lambda each: each.step.seconds), sized=True)

    def epoch_seconds(self, num_train: int, batch_size: int) -> float:
        """Return the seconds of an epoch in global batches of all hosts."""
        way = self.placed.way
        return epoch_seconds(way.request, way.candidate, self.step, num_train, batch_size)


def best_way(ways: Sequence[UnplacedWay]) -> PricedWay | None:
    """Return the fastest way that fits; None where none does.

    A way is placed and priced by steady batches, with less memory where that may be faster, then
    by batches that vary: each of these as long as its lower bound is below the best price.
    """
    queue: list[tuple[float, int, UnplacedWay | PricedWay]] = [
        (way.least_seconds, place, way) for place, way in enumerate(ways)
    ]
    heapq.heapify(queue)
    keeps_all = functools.cache(functools.partial(_keeps_all, ways))
    best, least = None, math.inf
    while queue and queue[0][0] < least:
        _, place, found = heapq.heappop(queue)
        steady: PricedWay | None = None
        if isinstance(found, UnplacedWay):
            if found.keeps_lists or not keeps_all(found.siblings):
                steady = found.place().price_if_it_fits()
        elif found.memory_binds and not found.sized:
            steady = found.resize()
        else:
            exact = found.placed.price(varied=True)
            if exact.step.seconds < least:
                best, least = exact, exact.step.seconds
        if steady is not None:
            heapq.heappush(queue, (steady.least_seconds, place, steady))
    return best


def _keeps_all(ways: Sequence[UnplacedWay], siblings: tuple[object, ...]) -> bool:
    """Return whether GPUs have every row and list at no cost: no other place of lists is faster."""
    placed = (way.place() for way in ways if way.keeps_lists and way.siblings == siblings)
    return any(each.keeps_all and not each.price(varied=False).memory_binds for each in placed)


def list_ways(
    machine: MachineModel,
    settings: PlanSettings,
    known: KnownGraph,
    *,
    hosts: int = 1,
    model: str = "",
) -> list[UnplacedWay]:
    """List the ways to train on the GPUs, or cores, of one of several hosts that are alike."""
    graph, work = known.graph, settings.workload
    pair = load_preset(f"{machine.name}:2") if hosts > 1 else machine
    candidates = _candidates(machine, settings, known, hosts)
    heats, numbers = _profile(known, settings, machine, candidates, model)
    requests = {
        ranks: Request(
            graph=graph, workload=work, profile=numbers, sampler=known.sampler,
            machine=_of_hosts(machine, pair, ranks, hosts), every_hop=known.every_hop,
            budgets=Budgets(),
        )
        for ranks in {way.num_ranks for way in candidates}
    }  # fmt: skip
    # What is the same wherever lists lie.
    kept = dict[tuple[object, ...], list[UnplacedWay]]()
    found = list[UnplacedWay]()
    for way in sorted(candidates, key=lambda way: way.topology.policy != "replicated"):
        key = (way.gpus, way.cliques, way.threads)
        if key not in kept:
            request, heat = requests[way.num_ranks], heats[_seeds(work, way)]
            kept[key] = list(_alone_and_captured(settings, request, way, heat))
        found += [
            replace(each, candidate=replace(each.candidate, topology=way.topology))
            for each in kept[key]
        ]
    return found


def _seeds(work: Workload, candidate: Candidate) -> int:
    return seeds_per_rank(work.batch_size, candidate.num_ranks)


def _alone_and_captured(
    settings: PlanSettings, request: Request, candidate: Candidate, heat: HeatGroups
) -> Iterator[UnplacedWay]:
    """Yield a way whose kernels are started one by one, and by a graph where that gains."""
    firsts = _first_alike(request, candidate)
    for each in dict.fromkeys((candidate, with_capture(settings, request, candidate))):
        least = _least_seconds(request, each)
        yield UnplacedWay(
            request=request, candidate=each, heat=heat, firsts=firsts, least_seconds=least
        )


NO_ROWS = RankRows(rows={}, working_rows={}, shares={})


def _least_seconds(request: Request, candidate: Candidate) -> float:
    """Return a lower bound of a candidate's seconds, wherever rows and lists lie."""
    if not candidate.gpus:
        return 0.0
    batch, timing = batch_and_timing(request, candidate)
    return least_seconds(
        RankWork(
            candidate=candidate, rank=0, graph=request.graph, batch=batch, timing=timing,
            machine=request.machine, rows=NO_ROWS, row_bytes=0, sampler=request.sampler,
            every_hop=request.every_hop, workload=request.workload,
        )
    )  # fmt: skip


def _candidates(
    machine: MachineModel, settings: PlanSettings, known: KnownGraph, hosts: int
) -> list[Candidate]:
    """List candidates, of those whose prices must be alike one alone."""
    stored, roads = row_bytes(known.graph), dict[tuple[object, ...], tuple[object, ...]]()
    unlike = dict[tuple[object, ...], Candidate]()
    for way in machine_candidates(settings, machine, ("none",)):
        if way.prefetch_depth != PREFETCH or (hosts > 1 and way.num_ranks == 1):
            continue
        place = (way.num_ranks, way.gpus, way.cliques)
        if place not in roads:
            roads[place] = _roads(machine, way, stored)
        unlike[way.num_ranks, way.threads, way.topology.policy, *roads[place]] = way
    ways = list(unlike.values())
    if not ways:
        raise SettingsError(
            f"{machine.name}: expected several GPUs on each of {hosts} hosts, found one; ask for "
            "more --devices, or for one host"
        )
    cached = plans_gpus(machine) and known.typed is None
    return ways + [
        replace(way, topology=TopologyPlacement(policy="cached"))
        for way in ways
        if cached and way.topology.policy == "host"
    ]


def _profile(
    known: KnownGraph,
    settings: PlanSettings,
    machine: MachineModel,
    candidates: Sequence[Candidate],
    model: str,
) -> tuple[dict[int, HeatGroups], WorkloadProfile]:
    """Return the heat of the nodes by the seeds of a rank, and the law's batches with timings."""
    work, batches, heats = settings.workload, dict[int, BatchProfile](), dict[int, HeatGroups]()
    for seeds in {_seeds(work, way) for way in candidates}:
        batches[seeds], heats[seeds] = known.batch(seeds, work)
    numbers = WorkloadProfile(
        graph_fingerprint="",
        sampler_fingerprint="law of the graph's sizes",
        batches=[batches[seeds] for seeds in sorted(batches, reverse=True)],
        process=PROCESS,
    )
    combinations = [
        Combination(ranks=ranks, threads=threads)
        for ranks, threads in sorted({(way.num_ranks, way.threads.compute) for way in candidates})
    ]
    timing = _timing(known, settings, machine, combinations, numbers, model)
    return heats, replace(numbers, timing=timing)


def _roads(machine: MachineModel, way: Candidate, stored: int) -> tuple[object, ...]:
    """Return what a price knows of the links: GPUs that are joined alike are alike."""
    if not way.gpus:
        return ()
    reads = [read_seconds(machine, way, size) for size in (stored, NEIGHBOUR_BYTES)]
    rates = tuple(tuple(sorted(each[place])) for each in reads for place in sorted(each))
    sizes = tuple(sorted(len(clique) for clique in way.cliques))
    return sizes, rates, gpu_all_reduce(machine, way, MESSAGES[5]).seconds


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


def _of_hosts(machine: MachineModel, pair: MachineModel, gpus: int, hosts: int) -> MachineModel:
    """Return one of several hosts, whose GPUs sum gradients with those of all as a pair would."""
    if hosts == 1:
        return machine
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


def _placed(request: Request, candidate: Candidate, heat: HeatGroups, room: Capacity) -> PlacedRows:
    """Place rows, and lists where GPUs keep hot ones, as takes the least seconds."""
    graph = request.graph
    codes = code_bytes(graph.num_nodes)
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
        own_rows=min(graph.num_nodes, (room.own_bytes - size) // held_row_bytes(graph, candidate)),
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
    sizes = [min(int(part * room.own_bytes), entry * graph.num_edges) for part in LIST_SHARES]
    shares = heat.kept_lists(np.array(sizes, np.float64), entry).tolist()

    def tried(size: int, share: float) -> tuple[float, int, float]:
        rows = (room.own_bytes - size) // held_row_bytes(graph, candidate)
        _, seconds = split_rows(heat, costs, members=members, own_rows=rows, host_rows=mapped)
        return seconds + drawn * (share * own + (1.0 - share) * host), size, share

    _, size, share = min(tried(*each) for each in dict(zip(sizes, shares, strict=True)).items())
    return size, share
