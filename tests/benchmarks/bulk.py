"""Bulk sampling: ratio over sampling batch by batch, and over section 4 in scipy.sparse.

`python -m tests.benchmarks.bulk --json [--graphs rmat-18]`. Fan-outs 15,10,5; LADIES with one layer
of 512 and batch 512, the published setting. Both sides of a ratio take turns
in the same number of threads.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.process import keep_freed_memory
from gnnplan.runtime.sampling.bulk.bulk import BulkSampler
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from tests.benchmarks.common import REPEATS, Spread, bench_graph, bench_seeds, record, run_threads
from tests.reference.matrix import adjacency, sample_layers_reference

FANOUTS = (15, 10, 5)
LADIES_BATCH, LADIES_SIZE = 512, 512


def seconds(task: Callable[[], object]) -> float:
    start = time.perf_counter()
    task()
    return time.perf_counter() - start


def compare(
    name: str, num_batches: int, bulk: Callable[[int], object], other: Callable[[int], object]
) -> None:
    """Print batches per second of `bulk` and its ratio over `other`, run in turns by epoch."""
    bulk(0)
    other(0)
    rates, baselines, ratios = [], [], []
    for epoch in range(1, REPEATS + 1):
        mine, theirs = seconds(lambda e=epoch: bulk(e)), seconds(lambda e=epoch: other(e))
        rates.append(num_batches / mine)
        baselines.append(num_batches / theirs)
        ratios.append(theirs / mine)
    ratio = Spread.of(ratios)
    record(
        name,
        Spread.of(rates),
        "batches/s",
        baseline=float(np.median(baselines)),
        ratio=ratio.median,
        ratio_p10=ratio.p10,
        ratio_p90=ratio.p90,
        stack=num_batches,
    )


def split(seeds: NDArray[np.int64], size: int, most: int) -> list[NDArray[np.int64]]:
    count = min(most, len(seeds) // size)
    return [seeds[size * i : size * (i + 1)] for i in range(count)]


def measure_sage(graph: Graph, name: str, batch_size: int, stack: int, threads: int) -> None:
    """Each thread takes every n-th batch one by one, or its share of them as one stack."""
    arrays = np.array(graph.indptr), np.array(graph.indices)
    seeds = split(bench_seeds(graph), batch_size, stack * threads)
    bounds = [len(seeds) * i // threads for i in range(threads + 1)]
    for dialect in Dialect:
        single = NeighborSampler(*arrays, FANOUTS, dialect=dialect)
        bulk = BulkSampler(*arrays, FANOUTS, dialect=dialect)

        def one_by_one(epoch: int, single: NeighborSampler = single) -> None:
            def task(index: int) -> None:
                # Kept, as a loader's queue keeps them, and as the bulk does.
                steps = range(index, len(seeds), threads)
                kept[index] = [single.sample(seeds[i], epoch=epoch, step=i) for i in steps]

            kept: list[list[MiniBatch]] = [[]] * threads
            run_threads(task, threads)

        def stacked(epoch: int, bulk: BulkSampler = bulk) -> None:
            def task(index: int) -> None:
                first, last = bounds[index], bounds[index + 1]
                bulk.sample_many(seeds[first:last], epoch=epoch, first_step=first)

            run_threads(task, threads)

        suffix = "" if dialect is Dialect.EVERY_HOP else "_first_seen"
        suffix += "" if threads == 1 else f"_{threads}threads"
        compare(f"bulk_sage_{name}_batch{batch_size}{suffix}", len(seeds), stacked, one_by_one)


def measure_ladies(graph: Graph, name: str, stack: int) -> None:
    arrays = np.array(graph.indptr), np.array(graph.indices)
    seeds = split(bench_seeds(graph), LADIES_BATCH, stack)
    adj = adjacency(*arrays)
    bulk = BulkSampler(*arrays, [LADIES_SIZE], method="ladies")
    compare(
        f"bulk_ladies_{name}_batch{LADIES_BATCH}",
        len(seeds),
        lambda epoch: bulk.sample_many(seeds, epoch=epoch),
        lambda epoch: sample_layers_reference(
            adj, [LADIES_SIZE], seeds, rng=np.random.default_rng(epoch)
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="accepted; output is always JSON")
    parser.add_argument("--graphs", default="rmat-18", help="comma-separated, e.g. rmat-18,rmat-21")
    parser.add_argument("--stack", type=int, default=16, help="batches per bulk, at most")
    options = parser.parse_args()
    keep_freed_memory()  # as every rank does
    for name in options.graphs.split(","):
        graph = bench_graph(name)
        for threads in (1, 2):
            measure_sage(graph, name, 1024, options.stack, threads)
            measure_sage(graph, name, 64, options.stack, threads)
        measure_ladies(graph, name, options.stack)


if __name__ == "__main__":
    main()
