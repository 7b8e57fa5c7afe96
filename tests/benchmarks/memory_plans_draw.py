"""The random plans of the benchmark `memory_plans`: graphs, requests, and a candidate of each.

A plan is drawn by its number. Plans of one group share a request's workload, so that its profile is
made once; what they differ in is the placement, the limit of a device's memory and the candidate,
which is any that fits, not the best. A draw whose ranks would take less than `LEAST_BYTES` above
their baseline, or that takes too long to reach its peak, is drawn again.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gnnplan.planner.assemble import assemble
from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.memory import Budgets
from gnnplan.planner.errors import PlanDoesNotFit, SettingsError
from gnnplan.planner.fullgraph import plan as full_graph
from gnnplan.planner.fullgraph.candidate import (
    Cut,
    describe_whole_graph,
    exact_candidates,
    sampled_candidates,
    with_keep,
)
from gnnplan.planner.fullgraph.choose import FullGraphChoice
from gnnplan.planner.fullgraph.price import FullRequest, price
from gnnplan.planner.fullgraph.profile import profile_cuts
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.pipeline import graph_ref, search_for
from gnnplan.planner.search.choose import PlacedCandidate
from gnnplan.planner.search.search import Search, SearchResult
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.graph.generate import generate_rmat, generate_sbm
from gnnplan.runtime.plan.io import save_plan
from gnnplan.runtime.plan.schema import MemoryUse, Plan, Sampler, Workload
from gnnplan.runtime.sampling.statistics import StatisticsClass, is_weighted

LEAST_BYTES = 10**9
PER_GROUP = 5
GROUPS = ("caches", "caches", "batches", "caches", "whole")
"""What most memory goes to: copies of rows, large batches, or the whole graph's activations."""
TRIES = 16
LEAST_STEPS, MOST_SECONDS = 6, 30.0
"""Steps of a run, and most predicted seconds of those that it needs."""
CACHE_FULL, MOST_STEPS_OF_CACHE = 1.1, 4000
"""Rows met over its slots at which a cache is taken to be full."""
MIB = 2**20
GRAPHS: dict[str, tuple[Any, dict[str, Any]]] = {
    "wide": (
        generate_rmat,
        {"num_nodes": 300_000, "degree": 10.0, "feature_dim": 1536, "train_fraction": 0.5},
    ),
    "long": (
        generate_sbm,
        {"num_nodes": 1_000_000, "degree": 8.0, "feature_dim": 256, "train_fraction": 0.05},
    ),
    "tall": (
        generate_sbm,
        {"num_nodes": 500_000, "degree": 6.0, "feature_dim": 128, "train_fraction": 0.05},
    ),
}
"""Features of 1840, 1020 and 260 MB in float32; the last is for training on the whole graph."""
SAMPLERS: tuple[tuple[str, dict[str, float | str]], ...] = (
    ("neighbor", {}),
    ("neighbor", {}),
    ("neighbor", {"draws": "replacement"}),
    ("labor", {}),
    ("labor", {"kappa": 8}),
    ("ladies", {"sizes": "8192,16384"}),
    ("pladies", {"sizes": "8192,16384"}),
    ("las", {"factor": 4}),
)
FANOUTS = ([10, 5], [15, 10], [5, 5, 5], [25, 10], [4, 4])
WIDE_FANOUTS = ([10, 10], [15, 10], [10, 5, 5], [25, 10], [15, 10, 5])
"""For large batches: a rank then gathers 50,000 vertices and more."""
LARGE_SIZES = "32768,65536"
"""Vertices of a hop of layer-wise samplers in large batches."""
POLICIES = ("naive", "random", "degree", "song-jiang", "joint", "lru", "clock", "auto")


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """A plan, written to its folder."""

    plan: Plan
    words: str
    """Graph, model, sampler and candidate."""
    step_seconds: float
    least_steps: int
    """Steps after which its memory is at its peak."""

    @property
    def ranks(self) -> list[MemoryUse]:
        """The predicted memory of every rank."""
        return rank_uses(self.plan.prediction.memory_bytes)


def rank_uses(uses: dict[str, MemoryUse]) -> list[MemoryUse]:
    """Those of ranks, without the host's."""
    return [use for name, use in uses.items() if name.startswith("rank")]


def above_baseline(uses: Sequence[MemoryUse]) -> int:
    """Bytes of all ranks beside what importing the libraries costs."""
    return sum(use.total - use.parts["context"] for use in uses)


def opened(name: str, folder: Path) -> Graph:
    """The graph of that name, made where it is missing."""
    place = folder / name
    make, sizes = GRAPHS[name]
    if not (place / "graph.json").is_file():
        print(f"making {name} in {place}", file=sys.stderr)
        place.parent.mkdir(parents=True, exist_ok=True)
        make(place, num_classes=16, seed=1, **sizes)
    return open_graph(place)


def draw(number: int, seed: int, machine: MachineModel, folder: Path, out: Path) -> Drawn:
    """Draw the plan of that number and write it to `out`."""
    group, place = divmod(number, PER_GROUP)
    kind = GROUPS[group % len(GROUPS)]
    for attempt in range(TRIES):
        # Plans with caches share a profile; large batches differ in little but the workload.
        part = {"caches": 0, "batches": place, "whole": place % 2}[kind]
        shared = np.random.default_rng([seed, group, part, attempt // 4])
        own = np.random.default_rng([seed, group, place, attempt, 1])
        try:
            if kind == "whole":
                found = _whole(shared, own, machine, folder, out)
            else:
                found = _batches(shared, own, machine, folder, out, large=kind == "batches")
        except (PlanDoesNotFit, SettingsError) as error:
            print(f"plan {number}, drawn again: {error}", file=sys.stderr)
            continue
        if found is not None:
            return found
    raise SystemExit(f"plan {number}: none of {TRIES} draws has ranks of {LEAST_BYTES} bytes")


def _batches(
    shared: np.random.Generator,
    own: np.random.Generator,
    machine: MachineModel,
    folder: Path,
    out: Path,
    *,
    large: bool,
) -> Drawn | None:
    graph = opened("wide" if large else ["wide", "long"][shared.integers(2)], folder)
    sampler, parameters = SAMPLERS[shared.integers(len(SAMPLERS))]
    layered = "sizes" in parameters
    if layered and large:
        parameters = dict[str, float | str](sizes=LARGE_SIZES)
    fanouts = (WIDE_FANOUTS if large else FANOUTS)[shared.integers(5)]
    fanouts = [10, 5] if layered else fanouts
    model = ["sage", "sage", "gcn", "gat"][shared.integers(4)]
    if model == "gat" and is_weighted(Sampler(name=sampler, parameters=dict(parameters))):
        model = "sage"  # attention takes no edge weights
    work = Workload(
        model=model,
        num_layers=len(fanouts),
        fanouts=fanouts,
        hidden=int(2 ** shared.integers(5, 9)),
        dropout=[0.0, 0.5][shared.integers(2)],
        batch_size=int(2 ** shared.integers(15, 17) if large else 2 ** shared.integers(8, 12)),
        precision="bfloat16" if shared.random() < 0.1 else "float32",
        allow="approximate",
    )
    ranks = int(shared.integers(1, 3))
    # Above the ranks' own needs, so that copies of rows take what is left of it.
    limit = None if large else int(own.integers(1200, 2200) / ranks) * MIB
    settings = PlanSettings(
        workload=work,
        devices=ranks,
        sampler=sampler,
        sampler_parameters=parameters,
        dialect="every_hop" if layered else "first_seen",
        device_memory_bytes=limit,
        policy="none" if large else POLICIES[own.integers(len(POLICIES))],
        shared_host=large or bool(own.random() < 0.6),
    )
    search = search_for(graph, settings, machine)
    chosen = _any(list(_fitting(search, search.explore().priced)), own)
    if chosen is None:
        return None
    alone = SearchResult(priced=[chosen], left_out=[])
    where = "" if settings.shared_host else ", no shared host"
    return Drawn(
        plan=save_plan(*assemble(search, alone, chosen), out),
        words=f"{graph.name} {work.model} {work.hidden} {fanouts} batch {work.batch_size} "
        f"{sampler} {parameters} {work.precision} dropout {work.dropout}{where}: {chosen.name}",
        step_seconds=chosen.seconds,
        least_steps=_steps_to_peak(search, chosen),
    )


def _fitting(search: Search, priced: Sequence[PlacedCandidate]) -> Iterator[PlacedCandidate]:
    """Candidates that fit, are large, and reach their peak soon enough."""
    for each in priced:
        large = above_baseline(rank_uses(each.prediction.memory_bytes)) >= LEAST_BYTES
        soon = _steps_to_peak(search, each) * each.seconds <= MOST_SECONDS
        if large and soon and each.eligible:
            yield each


def _steps_to_peak(search: Search, priced: PlacedCandidate) -> int:
    """Two stacks, and a cache full: it takes new rows batch after batch.

    Of rows met with probability p by a batch, T batches meet sum (1 - (1 - p)^T).
    """
    candidate, least = priced.candidate, LEAST_STEPS
    if candidate.bulk_batches > 1:
        least = 2 * candidate.bulk_batches
    slots = max(rank.cache_rows for rank in priced.placed.rows.ranks)
    if slots == 0:
        return least
    seeds = -(-search.request.workload.batch_size // candidate.num_ranks)
    misses = np.log1p(-np.minimum(search.hotness[seeds].features.astype(np.float64), 1 - 1e-9))
    while least < MOST_STEPS_OF_CACHE and -np.expm1(least * misses).sum() < CACHE_FULL * slots:
        least = round(1.3 * least)
    return least


def _any(priced: Sequence[PlacedCandidate], rng: np.random.Generator) -> PlacedCandidate | None:
    """One of them: first its kind, so that the many of one kind do not crowd out the few."""
    kinds: dict[Any, list[PlacedCandidate]] = {}
    for each in priced:
        c = each.candidate
        key = (c.policy, c.batching, c.topology.policy, c.bulk_batches, c.kappa, c.las)
        kinds.setdefault(key, []).append(each)
    if not kinds:
        return None
    mine = list(kinds.values())[rng.integers(len(kinds))]
    return mine[rng.integers(len(mine))]


def _whole(
    shared: np.random.Generator,
    own: np.random.Generator,
    machine: MachineModel,
    folder: Path,
    out: Path,
) -> Drawn | None:
    graph = opened("tall", folder)
    layers = int(shared.integers(2, 4))
    work = Workload(
        model=["sage", "gcn", "gat"][shared.integers(3)],
        num_layers=layers,
        fanouts=[-1] * layers,
        hidden=int(2 ** shared.integers(5, 8)),
        dropout=[0.0, 0.5][shared.integers(2)],
        allow="approximate",
    )
    ranks = int(shared.integers(1, 3))
    settings = PlanSettings(workload=work, devices=ranks, mode="full-graph")
    threads = max(1, machine.num_cores // ranks)
    cut = Cut(ranks=ranks, threads=threads, partitioner="none" if ranks == 1 else "kaminpar")
    (found,) = profile_cuts(graph, settings, machine, [cut], ("layer",) if ranks > 1 else ())
    request = FullRequest(graph=graph_ref(graph), workload=work, machine=machine, budgets=Budgets())
    allowed = StatisticsClass.APPROXIMATE
    tried: list[Candidate] = [
        *exact_candidates([cut]),
        *(
            with_keep(c, float(own.choice([0.05, 0.1, 0.3, 0.7])))
            for c in sampled_candidates([cut], work, allowed)
            if c.full_graph.draws == "layer"
        ),
    ]
    candidate = tried[own.integers(len(tried))]
    chosen = price(request, found.numbers, candidate)
    if above_baseline(rank_uses(chosen.prediction.memory_bytes)) < LEAST_BYTES:
        return None
    choice = FullGraphChoice(chosen=chosen, why_keep="drawn at random", exact=[chosen])
    made = full_graph.assemble(request, {cut: found.numbers}, choice)
    plan = save_plan(made, {"partition": found.partition}, out)
    return Drawn(
        plan=plan,
        words=f"{graph.name} {work.model} {work.hidden} x {layers} dropout {work.dropout}: "
        f"{describe_whole_graph(candidate)}",
        step_seconds=chosen.seconds,
        least_steps=4,
    )
