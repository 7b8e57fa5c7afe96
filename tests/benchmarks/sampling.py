"""Sampled edges per second, relabelling included, over the machine's random-read limit.

`python -m tests.benchmarks.sampling --json [--graphs rmat-18,rmat-21]`. Fan-outs 15,10,5, batch
1024, 8% of the nodes as seeds, first_seen dialect. Sampling and the limit are measured in turns, so
that both see the same machine; a record whose limits before and after differ by over 10% says so.
"""

import argparse
from collections.abc import Callable

import numpy as np

from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.process import keep_freed_memory
from gnnplan.runtime.sampling.minibatch import Dialect
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from gnnplan.runtime.sampling.seeds import SeedSchedule
from tests.benchmarks.common import (
    REPEATS,
    RandomReadLimit,
    Spread,
    bench_graph,
    bench_seeds,
    record,
    run_threads,
    steady,
)

FANOUTS = (15, 10, 5)
BATCH_SIZE = 1024
BATCHES_PER_REPEAT = 40


class Workload:
    """Batches of one graph, sampled by one or more threads that each take every n-th step."""

    def __init__(self, graph: Graph, *, relabel_budget_bytes: int, dialect: Dialect) -> None:
        self.sampler = NeighborSampler(
            np.array(graph.indptr),
            np.array(graph.indices),
            FANOUTS,
            dialect=dialect,
            relabel_budget_bytes=relabel_budget_bytes,
        )
        self.schedule = SeedSchedule(bench_seeds(graph), BATCH_SIZE, seed=0, drop_last=True)
        self.steps = range(min(BATCHES_PER_REPEAT, self.schedule.num_steps))

    def run(self, threads: int, epoch: int) -> tuple[float, int, int]:
        """Seconds, sampled edges and batches of one repetition."""
        shares = [self.schedule.share(epoch, step)[0] for step in self.steps]
        edges = [0] * threads

        def task(index: int) -> None:
            for step in self.steps[index::threads]:
                batch = self.sampler.sample(shares[step], epoch=epoch, step=step)
                edges[index] += batch.num_edges

        return run_threads(task, threads), sum(edges), len(shares)


def measure(
    name: str, threads: int, limit: RandomReadLimit, run: Callable[[int, int], tuple]
) -> dict:
    """Interleave the limit and the sampler, and print the record of their ratio."""
    run(threads, 0)  # compiles, and grows the workspaces
    limits, rates, ratios, batch_ms = [limit.measure(threads)], [], [], []
    for repeat in range(REPEATS):
        seconds, edges, batches = run(threads, 1 + repeat)
        limits.append(limit.measure(threads))
        rates.append(edges / seconds)
        ratios.append(rates[-1] / ((limits[-2] + limits[-1]) / 2))
        batch_ms.append(1e3 * seconds / batches)
    ratio = Spread.of(ratios)
    return record(
        name,
        Spread.of(rates),
        "edges/s",
        baseline=float(np.median(limits)),
        ratio=ratio.median,
        ratio_p10=ratio.p10,
        ratio_p90=ratio.p90,
        ms_per_batch=float(np.median(batch_ms)),
        limit_before=limits[0],
        limit_after=limits[-1],
        steady=steady(limits[0], limits[-1]),
    )


def measure_graph(name: str, *, threads: list[int], variants: bool) -> None:
    graph = bench_graph(name)
    limit = RandomReadLimit(graph.num_edges)
    cases = [("neighbor", 1 << 40, Dialect.FIRST_SEEN)]
    if variants:
        cases += [("neighbor_hashed", 0, Dialect.FIRST_SEEN)]
        cases += [("neighbor_every_hop", 1 << 40, Dialect.EVERY_HOP)]
    for case, budget, dialect in cases:
        workload = Workload(graph, relabel_budget_bytes=budget, dialect=dialect)
        for count in threads:
            suffix = "thread" if count == 1 else "threads"
            measure(f"{case}_{name}_{count}{suffix}", count, limit, workload.run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="accepted; output is always JSON")
    parser.add_argument("--graphs", default="rmat-18", help="comma-separated, e.g. rmat-18,rmat-21")
    parser.add_argument("--threads", default="1,2", help="comma-separated numbers of threads")
    parser.add_argument("--variants", action="store_true", help="also hash table and every_hop")
    options = parser.parse_args()
    keep_freed_memory()  # as every rank does
    for name in options.graphs.split(","):
        threads = [int(count) for count in options.threads.split(",")]
        measure_graph(name, threads=threads, variants=options.variants)


if __name__ == "__main__":
    main()
