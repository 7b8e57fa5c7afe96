"""Sampling on the device: batch by batch, as one graph, in bulk; in its memory and the host's."""

from collections.abc import Callable
from typing import Any

import numpy as np

from gnnplan.runtime.graph.dataset import Graph
from tests.benchmarks.common import Spread, bench_seeds, record
from tests.benchmarks.gpu_memory import random_reads
from tests.benchmarks.gpu_setup import Bench, rates, with_bar

BULK_EDGES, BULK_OVER_BATCH, PINNED_OVER_READS, SCANNED_EDGES = 1.0, 2.0, 0.5, 20.0
"""Bars: 10^9 edges/s in bulk, over one batch at a time, over random reads; LABOR-0's scan."""
CALLS = 3


def measure_sampling(bench: Bench) -> Spread:
    """Neighbours and LABOR-0; returns the random reads of host memory per second (10^9)."""
    graph = bench.graph()
    reads = random_reads(bench, graph.num_edges, host=True)
    random_reads(bench, graph.num_edges, host=False)
    seeds = bench_seeds(graph, fraction=1.0)
    one, many = seeds[: bench.sizes.batch], seeds[: bench.sizes.bulk * bench.sizes.batch]
    for place in ("hbm", "pinned"):
        if not bench.allows(f"sample_{place}", 30):
            return reads
        topology = _topology(graph, bench, pinned=place == "pinned")
        _neighbours(bench, graph, topology, place, (one, many), reads)
        stacked = seeds[: bench.sizes.labor_bulk * bench.sizes.batch]
        _labor(bench, graph, topology, place, (one, stacked))
    if bench.allows("sample_layers", 20):
        _layers(bench, graph, seeds)
    return reads


def _topology(graph: Graph, bench: Bench, *, pinned: bool) -> Any:
    from gnnplan.runtime.sampling.gpu.topology import DeviceTopology

    return DeviceTopology.load(graph.indptr, graph.indices, bench.device, pinned=pinned)


def _neighbours(
    bench: Bench,
    graph: Graph,
    topology: Any,
    place: str,
    chosen: tuple[np.ndarray, np.ndarray],
    reads: Spread,
) -> None:
    from gnnplan.runtime.sampling.gpu.neighbor import CapturedNeighborSampler, DeviceNeighborSampler
    from gnnplan.runtime.sampling.gpu.stack import stack_of
    from gnnplan.runtime.sampling.minibatch import Dialect, Request
    from gnnplan.runtime.sampling.neighbor import NeighborSampler

    device, fanouts, dialect = bench.device, bench.sizes.fanouts, Dialect.EVERY_HOP
    plain = DeviceNeighborSampler(topology, fanouts, device=device, dialect=dialect)
    captured = CapturedNeighborSampler(
        topology, fanouts, device=device, dialect=dialect, batch_size=bench.sizes.batch
    )
    oracle = NeighborSampler(graph.indptr, graph.indices, fanouts, dialect=dialect)
    expected = oracle.sample(chosen[0], epoch=0, step=0)
    for sampler in (plain, captured):
        found = sampler.sample(chosen[0], epoch=0, step=0).to_host()
        if not np.array_equal(found.blocks[0].indices, expected.blocks[0].indices):
            raise AssertionError("the device's blocks differ from the CPU sampler's")
    modes: dict[str, tuple[Any, np.ndarray]] = {
        "batch": (plain, chosen[0]), "graph": (captured, chosen[0]), "bulk": (plain, chosen[1]),
    }  # fmt: skip
    edges = {
        mode: sum(sampler.sample(ids, epoch=0, step=0).num_sampled_edges)
        for mode, (sampler, ids) in modes.items()
    }
    tasks: dict[str, Callable[[], object]] = {
        mode: (lambda s=sampler, i=ids: s.sample(i, epoch=0, step=0))
        for mode, (sampler, ids) in modes.items()
    }
    # As many batches as bulk has seeds for, each with vertices of its own.
    stack, size = stack_of(plain), bench.sizes.batch
    requests = [
        Request(seeds=chosen[1][first : first + size], epoch=0, step=first // size)
        for first in range(0, len(chosen[1]), size)
    ]
    edges["stack"] = sum(sum(b.num_sampled_edges) for b in stack.sample_stack(requests))
    tasks["stack"] = lambda: stack.sample_stack(requests)
    taken = bench.in_turns(tasks, CALLS)
    found = {mode: rates(edges[mode], times) for mode, times in taken.items()}
    for mode, rate in found.items():
        extra: dict[str, Any] = {"edges": edges[mode]}
        if place == "pinned":
            ratio, baseline = rate.median / reads.median, "random_uva_4_byte_reads"
            extra |= with_bar(ratio, PINNED_OVER_READS) if mode == "bulk" else {}
        else:
            ratio, baseline = rate.median / found["batch"].median, "per-batch mode"
            if mode == "bulk":
                extra |= with_bar(ratio, BULK_OVER_BATCH)
                extra["fast_enough"] = rate.median >= BULK_EDGES
        name = f"sample_neighbor_{mode}_{place}"
        record(name, rate, "G edges/s", baseline=baseline, ratio=ratio, **extra)


def _labor(
    bench: Bench, graph: Graph, topology: Any, place: str, chosen: tuple[np.ndarray, np.ndarray]
) -> None:
    """LABOR-0 by edges scanned, and LABOR-1 beside it."""
    from gnnplan.runtime.sampling.gpu.labor import DeviceLaborSampler
    from gnnplan.runtime.sampling.statistics import Estimator

    degrees = np.diff(graph.indptr)
    for variant in (0, 1):
        sampler = DeviceLaborSampler(
            topology, bench.sizes.fanouts, device=bench.device, variant=variant,
            estimator=Estimator.PLAIN,
        )  # fmt: skip
        for mode, ids in (("batch", chosen[0]), ("bulk", chosen[1])):
            if variant and (mode, place) != ("batch", "hbm"):
                continue
            drawn = sampler.sample(ids, epoch=0, step=0)
            rows = [drawn.n_id[: block.num_dst].cpu().numpy() for block in drawn.blocks]
            scanned = sum(int(degrees[part].sum()) for part in rows)
            taken = bench.in_turns(
                {"sample": lambda s=sampler, i=ids: s.sample(i, epoch=0, step=0)}, CALLS
            )
            rate = rates(scanned, taken["sample"])
            extra: dict[str, Any] = {"edges": scanned, "vertices": drawn.n_id.numel()}
            if (variant, mode, place) == (0, "bulk", "hbm"):
                extra |= {"bar": SCANNED_EDGES, "met": rate.median >= SCANNED_EDGES}
            record(f"sample_labor{variant}_{mode}_{place}", rate, "G edges scanned/s", **extra)


def _layers(bench: Bench, graph: Graph, seeds: np.ndarray) -> None:
    """LADIES, a batch at a time and stacked, one launch of each step per layer."""
    from gnnplan.runtime.sampling.gpu.layerwise import DeviceLayerwiseSampler
    from gnnplan.runtime.sampling.minibatch import Request

    sizes = bench.sizes
    topology = _topology(graph, bench, pinned=False)
    sampler = DeviceLayerwiseSampler(topology, sizes.layer_sizes, device=bench.device)
    count = min(sizes.bulk, 8)
    requests = [
        Request(seeds=seeds[i * sizes.batch : (i + 1) * sizes.batch], epoch=0, step=i)
        for i in range(count)
    ]
    tasks: dict[str, Callable[[], object]] = {
        "batch": lambda: sampler.sample_stack(requests[:1]),
        "bulk": lambda: sampler.sample_stack(requests),
    }
    taken = bench.in_turns(tasks, 1)
    alone = Spread.of(taken["batch"])
    stacked = Spread.of([seconds / count for seconds in taken["bulk"]])
    record("sample_ladies_batch_hbm", alone, "s/batch")
    ratio = alone.median / stacked.median
    record("sample_ladies_bulk_hbm", stacked, "s/batch", baseline="batch", ratio=ratio, k=count)
