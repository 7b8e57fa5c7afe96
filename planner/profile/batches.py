"""Batches for every number of ranks: drawn, or interpolated between drawn ones."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from planner.cost.request import interpolate_inclusion
from planner.profile.draw import drawer
from planner.profile.presample import MIN_BATCHES, presample, shared_batch, stack_profile
from planner.progress import Progress
from planner.settings import PlanSettings
from planner.workload import BatchProfile, Combination, Hotness, SharedBatch, StackProfile
from runtime.graph.dataset import Graph
from runtime.plan.schema import Sampler

MOST_SAMPLED = 3
"""Numbers of ranks that are pre-sampled; those between are interpolated [A5]."""


def sampler_of(settings: PlanSettings) -> Sampler:
    """The user's own sampler, as a plan names it."""
    return Sampler(
        name=settings.sampler, dialect=settings.dialect, parameters=settings.sampler_parameters
    )


def draw_all(
    graph: Graph,
    settings: PlanSettings,
    combinations: Sequence[Combination],
    progress: Progress | None,
    *,
    keep: Callable[[Hotness], Hotness] = lambda hotness: hotness,
) -> tuple[dict[int, BatchProfile], dict[int, Hotness]]:
    """Batch sizes and hotness for each number of ranks, by seeds per rank.

    Args:
        graph: the dataset.
        settings: sampler and global batch.
        combinations: whose numbers of ranks.
        progress: told how far it is.
        keep: puts a number's hotness away, where several at once are too much for memory.
    """
    ranks = sorted({c.num_ranks for c in combinations} | {1 for c in combinations if c.shared})
    sampler = sampler_of(settings)
    batches: dict[int, BatchProfile] = {}
    hotness: dict[int, Hotness] = {}

    def draw(count: int) -> None:
        batch, hot = presample(graph, settings.workload, sampler, count, progress=progress)
        batches[batch.seeds_per_rank], hotness[batch.seeds_per_rank] = batch, keep(hot)

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
            batches[seeds], between_them = interpolated(seeds, batches, hotness)
            hotness[seeds] = keep(between_them)
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
        interpolate_inclusion(seeds, (low, getattr(a, half)), (high, getattr(b, half)))
        for half in ("first_half", "second_half")
    ]
    vertices = float((halves[0] + halves[1]).sum(dtype=np.float64)) / 2
    factor = vertices / near.vertices[-1].mean if near.vertices[-1].mean > 0 else 1.0
    scaled = replace(
        near,
        seeds_per_rank=seeds,
        vertices=[s.scaled(factor) for s in near.vertices],
        edges=[s.scaled(factor) for s in near.edges],
        block_edges=[s.scaled(factor) for s in near.block_edges],
        last_vertices=[round(n * factor) for n in near.last_vertices],
        last_edges=[round(n * factor) for n in near.last_edges],
    )
    hot = Hotness(
        seeds_per_rank=seeds,
        first_half=halves[0],
        second_half=halves[1],
        num_batches=near.num_batches,
        topology=(a.topology * (1 - weight) + b.topology * weight).astype(np.float32),
    )
    return scaled, hot


def draw_sharing(
    graph: Graph, settings: PlanSettings, combinations: Sequence[Combination]
) -> tuple[SharedBatch | None, dict[str, StackProfile]]:
    """What ranks that share a batch, or the topology, ask each other for; nothing where none do."""
    work, sampler = settings.workload, sampler_of(settings)
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
