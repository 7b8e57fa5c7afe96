"""Profiles written down by hand: round sizes and seconds, so that predictions can be added up."""

import numpy as np

from gnnplan.planner.machine.model import Table
from gnnplan.planner.profile.cache import Profile
from gnnplan.planner.workload import (
    SCALES,
    BatchProfile,
    Hotness,
    ModelTiming,
    ProcessCost,
    Spread,
    WorkloadProfile,
)


def exactly(value: float) -> Spread:
    """A quantity that never varies."""
    return Spread(mean=value, std=0.0, p99=value, largest=value)


def batch_profile(seeds: int, *, std: float = 0.0) -> BatchProfile:
    """Per seed 10 vertices and 20 edges, over two hops."""
    vertices = Spread(mean=10.0 * seeds, std=std, p99=10.0 * seeds, largest=10.0 * seeds)
    return BatchProfile(
        seeds_per_rank=seeds,
        num_batches=32,
        vertices=[exactly(float(seeds)), exactly(4.0 * seeds), vertices],
        edges=[exactly(5.0 * seeds), exactly(15.0 * seeds)],
        block_edges=[exactly(20.0 * seeds), exactly(5.0 * seeds)],
        input_standard_error=0.0,
        half_epoch_error=0.1,
    )


def timing(seeds: int, ranks: int, *, threads: tuple[int, ...] = (1, 2)) -> ModelTiming:
    """20 us per seed on one thread, half of that on two; proportional to the batch."""
    values = [20e-6 * seeds * scale / t for scale in SCALES for t in threads]
    return ModelTiming(
        forward_backward=Table(
            unit="seconds",
            axes=["scale", "ranks", "threads"],
            points=[SCALES, [float(ranks)], [float(t) for t in threads]],
            values=values,
            spread=0.02,
        ),
        optimizer=Table(
            unit="seconds",
            axes=["ranks", "threads"],
            points=[[float(ranks)], [float(t) for t in threads]],
            values=[1e-3 for _ in threads],
            spread=0.02,
        ),
        num_parameters=10_000,
        activation_bytes=1_000_000,
    )


def hotness(seeds: int, p: np.ndarray) -> Hotness:
    """Frequencies of this mean; each half saw every other vertex somewhat more often."""
    more = 0.02 * np.minimum(p, 1 - p) * np.where(np.arange(p.size) % 2, 1.0, -1.0)
    return Hotness(
        seeds_per_rank=seeds,
        first_half=(p + more).astype(np.float32),
        second_half=(p - more).astype(np.float32),
        num_batches=32,
        topology=p.astype(np.float32),
    )


def profile(num_nodes: int, batch_size: int, ranks: tuple[int, ...] = (1, 2)) -> Profile:
    """Profiles of each number of ranks; every vertex is equally hot."""
    seeds = {r: -(-batch_size // r) for r in ranks}
    numbers = WorkloadProfile(
        graph_fingerprint="by hand",
        sampler_fingerprint="by hand",
        batches=[batch_profile(s) for s in seeds.values()],
        timing={str(s): timing(s, r) for r, s in seeds.items()},
        process=ProcessCost(start_seconds=2.0, resident_bytes=200_000_000),
    )
    frequency = {s: min(1.0, 10.0 * s / num_nodes) for s in seeds.values()}
    hot = {s: hotness(s, np.full(num_nodes, p)) for s, p in frequency.items()}
    return Profile(numbers=numbers, hotness=hot)
