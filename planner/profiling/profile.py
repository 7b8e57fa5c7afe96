"""Graph -> profile: pre-sample for every number of ranks, then time the model on those shapes."""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planner.cost.cooperative import part_of, part_profile
from planner.cost.frontier import between
from planner.errors import SettingsError
from planner.machine import MachineModel, Table
from planner.profiling import cache
from planner.profiling.cache import Profile
from planner.profiling.draw import Draw, drawer
from planner.profiling.layers import TimingAnswer, TimingRequest
from planner.profiling.presample import MIN_BATCHES, Progress, presample
from planner.profiling.sharing import shared_batch, stack_profile
from planner.profiling.synthetic import BatchShape
from planner.profiling.team import Team
from planner.settings import PlanSettings
from planner.workload import (
    BatchProfile,
    Combination as Combination,
    Hotness,
    ModelTiming,
    SharedBatch,
    Spread,
    StackProfile,
    WorkloadProfile,
)
from runtime import codec
from runtime.graph.dataset import Graph
from runtime.graph.types import GraphTypes, types_of
from runtime.loader_typed import is_typed
from runtime.plan import Sampler

VERSION = 3
"""Rises when a profile means something else than before."""
SCALES = [0.6, 1.0, 1.6]
"""Batch sizes over the mean batch at which the model is timed."""
STEPS = 20
"""Measured steps of each scale."""
TIMED_BATCHES = 16
"""Batches sampled to time the sampler, after as many that warm it up."""
MOST_SAMPLED = 3
"""Numbers of ranks that are pre-sampled; those between are interpolated [A5]."""


def profile_key(
    graph: Graph,
    settings: PlanSettings,
    machine: MachineModel,
    combinations: Sequence[Combination],
) -> str:
    """Hash of everything that decides a profile."""
    work = settings.workload
    decided = [
        VERSION,
        [graph.fingerprint, machine.fingerprint, settings.sampler, settings.dialect],
        settings.sampler_parameters,
        replace(work, learning_rate=0.0, weight_decay=0.0, allow="exact"),
        list(combinations),
        [SCALES, STEPS, MOST_SAMPLED],
    ]
    return codec.content_hash(decided)[:32]


def profile(
    graph: Graph,
    settings: PlanSettings,
    machine: MachineModel,
    combinations: Sequence[Combination],
    *,
    progress: Progress | None = None,
    measure: bool = True,
) -> Profile:
    """The profile of a workload, from the cache where it was made before.

    Args:
        graph: the dataset.
        settings: sampler, model and global batch.
        machine: its fingerprint enters the key, since layer times are the machine's.
        combinations: (ranks, threads) that candidates may use.
        progress: told what is going on.
        measure: False takes a cached profile or raises; nothing is drawn or timed.

    Raises:
        SettingsError: nothing may be measured and no such profile is cached.
        WorkerFailed: the model could not be timed; the text is its own error.
    """
    key = profile_key(graph, settings, machine, combinations)
    found = cached(key, graph, measure=measure)
    if found is not None:
        return found
    made = make_profile(graph, settings, combinations, fingerprint=key, progress=progress)
    cache.save(key, made)
    # Read back: the first plan and a repeated one then see the very same numbers.
    return cache.load(key) or made


def cached(key: str, graph: Graph, *, measure: bool) -> Profile | None:
    """The cached profile of that key, or None where it may be made.

    Raises:
        SettingsError: there is none and nothing may be measured.
    """
    found = cache.load(key)
    if found is None and not measure:
        raise SettingsError(
            f"expected the profile of {graph.name} in {cache.cache_folder()}, found none for these "
            "settings and this machine; plan again"
        )
    return found


def make_profile(
    graph: Graph,
    settings: PlanSettings,
    combinations: Sequence[Combination],
    *,
    fingerprint: str = "",
    progress: Progress | None = None,
) -> Profile:
    """Pre-sample and time, without looking at the cache."""
    work = settings.workload
    batches, hotness = draw_all(graph, settings, combinations, progress)
    shared, stacks = draw_sharing(graph, settings, combinations)
    by_key: dict[str, list[Combination]] = {}
    for combination in combinations:
        by_key.setdefault(combination.key(work.batch_size), []).append(combination)

    def batch_of(found: Combination) -> BatchProfile:
        if shared is None or not found.shared:
            return batches[-(-work.batch_size // found.num_ranks)]
        every_hop, whole = settings.dialect == "every_hop", batches[work.batch_size]
        part = part_of(whole, shared, found.num_ranks, every_hop=every_hop)
        return part_profile(whole, part)

    def sampled(ranks: int) -> float:
        return sampling_seconds(drawer(graph, work, _sampler(settings), ranks))

    with Team(max(c.ranks for c in combinations)) as team:
        timing = {
            key: replace(
                _timing(graph, settings, batch_of(mine[0]), mine, team, progress),
                sample_seconds=0.0 if mine[0].shared else sampled(mine[0].num_ranks),
            )
            for key, mine in by_key.items()
        }
        process = team.process
    numbers = WorkloadProfile(
        graph_fingerprint=graph.fingerprint,
        sampler_fingerprint=fingerprint or codec.content_hash(_sampler(settings))[:32],
        batches=[batches[seeds] for seeds in sorted(batches, reverse=True)],
        timing=timing,
        process=process,
        shared=shared,
        stacks=stacks,
    )
    return Profile(numbers=numbers, hotness=hotness)


def sampling_seconds(draw: Draw) -> float:
    """Median elapsed seconds of sampling a batch of one rank, by one thread with nothing beside.

    Between two batches lies a stretch of a model's work, which leaves the caches as training does.
    """
    from planner.probe.interlude import Interlude  # imports torch, which other profiles do without

    taken: list[float] = []
    interlude = Interlude()
    for step in range(2 * TIMED_BATCHES):
        interlude()
        start = time.perf_counter()
        draw(0, step)
        taken.append(time.perf_counter() - start)
    return float(np.median(taken[TIMED_BATCHES:]))


def draw_sharing(
    graph: Graph, settings: PlanSettings, combinations: Sequence[Combination]
) -> tuple[SharedBatch | None, dict[str, StackProfile]]:
    """What ranks that share a batch, or the topology, ask each other for; nothing where none do."""
    work, sampler = settings.workload, _sampler(settings)
    steps = max(1, graph.num_train // work.batch_size)
    shared = None
    if any(c.shared for c in combinations):
        shared = shared_batch(drawer(graph, work, sampler, 1), steps=steps)
    stacks: dict[str, StackProfile] = {}
    degrees = np.diff(graph.indptr) if any(c.parts for c in combinations) else np.zeros(0, np.int64)
    for ranks in sorted({c.num_ranks for c in combinations if c.parts}):
        seeds = -(-work.batch_size // ranks)
        draw = drawer(graph, work, sampler, ranks)
        stacks[str(seeds)] = stack_profile(
            draw, degrees, seeds_per_rank=seeds, num_ranks=ranks, steps=steps
        )
    return shared, stacks


def _sampler(settings: PlanSettings) -> Sampler:
    return Sampler(
        name=settings.sampler, dialect=settings.dialect, parameters=settings.sampler_parameters
    )


def draw_all(
    graph: Graph,
    settings: PlanSettings,
    combinations: Sequence[Combination],
    progress: Progress | None,
) -> tuple[dict[int, BatchProfile], dict[int, Hotness]]:
    """Batch sizes and hotness for each number of ranks, by seeds per rank."""
    ranks = sorted({c.num_ranks for c in combinations} | {1 for c in combinations if c.shared})
    sampler = _sampler(settings)
    batches: dict[int, BatchProfile] = {}
    hotness: dict[int, Hotness] = {}

    def draw(count: int) -> None:
        batch, hot = presample(graph, settings.workload, sampler, count, progress=progress)
        batches[batch.seeds_per_rank], hotness[batch.seeds_per_rank] = batch, hot

    for count in {ranks[0], ranks[len(ranks) // 2], ranks[-1]}:
        draw(count)
    # The power forms bend noise too: from few batches they are off, and few are soon drawn.
    rough = min(b.num_batches for b in batches.values()) < MIN_BATCHES
    for count in ranks:
        seeds = -(-settings.workload.batch_size // count)
        if seeds in batches:
            continue
        if rough or len(ranks) <= MOST_SAMPLED:
            draw(count)
        else:
            batches[seeds], hotness[seeds] = interpolated(seeds, batches, hotness)
    return batches, hotness


def interpolated(
    seeds: int, batches: dict[int, BatchProfile], hotness: dict[int, Hotness]
) -> tuple[BatchProfile, Hotness]:
    """A batch size between two profiled ones, by both power forms [A5].

    Sizes per hop are scaled by the ratio that the input vertices get.
    """
    low = max(s for s in hotness if s <= seeds)
    high = min(s for s in hotness if s >= seeds)
    weight = float(np.log(seeds / low) / np.log(high / low)) if high > low else 0.0
    near = batches[low] if weight < 0.5 else batches[high]
    a, b = hotness[low], hotness[high]
    halves = [
        between(seeds, (low, getattr(a, half)), (high, getattr(b, half)))
        for half in ("first_half", "second_half")
    ]
    vertices = float((halves[0] + halves[1]).sum(dtype=np.float64)) / 2
    factor = vertices / near.vertices[-1].mean if near.vertices[-1].mean > 0 else 1.0
    scaled = replace(
        near,
        seeds_per_rank=seeds,
        vertices=[_scaled(s, factor) for s in near.vertices],
        edges=[_scaled(s, factor) for s in near.edges],
        block_edges=[_scaled(s, factor) for s in near.block_edges],
    )
    hot = Hotness(
        seeds_per_rank=seeds,
        first_half=halves[0],
        second_half=halves[1],
        num_batches=near.num_batches,
        topology=(a.topology * (1 - weight) + b.topology * weight).astype(np.float32),
    )
    return scaled, hot


def _scaled(spread: Spread, factor: float) -> Spread:
    return replace(
        spread,
        mean=spread.mean * factor,
        std=spread.std * factor,
        p99=spread.p99 * factor,
        largest=spread.largest * factor,
    )


def batch_shape(batch: BatchProfile, dialect: str, *, links: bool = False) -> BatchShape:
    """The mean batch as the timing processes build it; with `links`, its seeds are their ends."""
    return BatchShape(
        vertices=[round(v.mean) for v in batch.vertices],
        edges=[round(e.mean) for e in batch.edges],
        dialect=dialect,
        num_links=batch.seeds_per_rank if links else 0,
        edge_types=batch.edge_types,
        node_types=batch.node_types,
    )


def _types(graph: Graph, settings: PlanSettings) -> GraphTypes | None:
    """The graph's types where the model reads them."""
    return types_of(graph) if is_typed(settings.workload) else None


def _timing(
    graph: Graph,
    settings: PlanSettings,
    batch: BatchProfile,
    combinations: Sequence[Combination],
    team: Team,
    progress: Progress | None,
) -> ModelTiming:
    """Time one batch size at every number of threads; all its combinations have the same ranks."""
    answers: list[tuple[Combination, list[TimingAnswer]]] = []
    ordered = sorted(combinations, key=lambda c: (c.ranks, c.threads))
    for i, combination in enumerate(ordered):
        if progress is not None:
            words = f"timing {combination.ranks} ranks x {combination.threads} threads"
            progress(words, i / len(ordered))
        request = TimingRequest(
            workload=settings.workload,
            in_dim=graph.feature_dim,
            num_classes=graph.num_classes,
            task=str(graph.task),
            shape=batch_shape(batch, settings.dialect, links=str(graph.task) == "link"),
            types=_types(graph, settings),
            scales=SCALES,
            threads=combination.threads,
            steps=STEPS,
        )
        answers.append((combination, team.time(request, combination.ranks)))
    return model_timing(answers)


def model_timing(answers: Sequence[tuple[Combination, Sequence[TimingAnswer]]]) -> ModelTiming:
    """One table out of the processes' answers, averaged over ranks that computed at once.

    Args:
        answers: per combination, each rank's answer; all combinations have the same ranks.
    """
    threads = [c.threads for c, _ in answers]
    ranks = {c.ranks for c, _ in answers}
    if len(ranks) != 1:
        raise ValueError(f"expected one number of ranks per batch size, found {sorted(ranks)}")
    values = [
        float(np.mean([a.forward_backward[s] for a in found]))
        for s in range(len(SCALES))
        for _, found in answers
    ]
    every = [a for _, found in answers for a in found]
    shared = [[float(ranks.pop())], [float(t) for t in threads]]
    return ModelTiming(
        forward_backward=Table(
            unit="seconds",
            axes=["scale", "ranks", "threads"],
            points=[SCALES, *shared],
            values=values,
            spread=max(a.spread for a in every),
        ),
        optimizer=Table(
            unit="seconds",
            axes=["ranks", "threads"],
            points=shared,
            values=[float(np.mean([a.optimizer_seconds for a in found])) for _, found in answers],
            spread=max(a.spread for a in every),
        ),
        num_parameters=every[0].num_parameters,
        activation_bytes=max(a.activation_bytes for a in every),
        batch_seconds=float(np.median([a.batch_seconds for a in every])),
        warmup_seconds=max(a.warmup_seconds for a in every),
    )
