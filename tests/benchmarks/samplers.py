"""What the samplers cost and keep: LABOR's speed, vertices and edges by method, overlap by kappa.

`python -m tests.benchmarks.samplers --json [--graphs rmat-18]`.

- `labor0_<graph>_1thread`: scanned edges per second; `ratio` is sampled edges per second over the
  random-read limit, as for the other samplers. Batch 1024, fan-outs 15,10,5, first_seen.
- `labor_star_<graph>_1thread`: batches per second at tolerance 1e-3.
- `vertices_<method>_dense`: input vertices of a batch on an R-MAT graph as dense as Reddit, with
  the edges of all hops; `ratio` is over neighbour sampling. LADIES and PLADIES run twice, with the
  adjacency of the mean, A = 1/d, and with A = 1 (`..._plain`); their layer sizes are fitted until
  they reach LABOR-*'s vertices. The published order, LABOR-* < LADIES in edges, is that of A = 1/d;
  with A = 1 the skewed graph gives LADIES fewer edges.
- `overlap_kappa_<k>`: share of the edges of a LABOR-0 batch drawn again by the next batch of the
  same seeds, q = k/d = .1, over the bivariate normal law's value.
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.graph.generate import generate_rmat
from gnnplan.runtime.process import keep_freed_memory
from gnnplan.runtime.sampling.labor import LaborSampler
from gnnplan.runtime.sampling.layerwise import LayerwiseSampler
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from gnnplan.runtime.sampling.seeds import SeedSchedule
from gnnplan.runtime.sampling.statistics import Estimator
from tests.benchmarks.common import (
    REPEATS,
    RandomReadLimit,
    Spread,
    bench_graph,
    bench_seeds,
    cache_folder,
    record,
    run_threads,
    steady,
)

BATCH_SIZE = 1024
BATCHES = 20
DENSE_NODES, DENSE_DEGREE = 1 << 15, 400
DENSE_FANOUTS, DENSE_BATCH, DENSE_BATCHES = (10, 10, 10), 128, 4
FITS = 3
KAPPAS = (1, 2, 4, 16, 64, 256)


def scanned(batch: MiniBatch, degree: NDArray[np.int64]) -> int:
    """Edges of all rows that a first_seen batch expanded: what LABOR reads."""
    return int(degree[batch.n_id[: batch.blocks[0].num_dst]].sum())


def measure_labor(name: str) -> None:
    graph = bench_graph(name)
    indptr, indices = np.array(graph.indptr), np.array(graph.indices)
    schedule = SeedSchedule(bench_seeds(graph), BATCH_SIZE, seed=0, drop_last=True)
    seeds = [schedule.share(0, step)[0] for step in range(BATCHES)]
    settings: dict[str, Any] = {"dialect": Dialect.FIRST_SEEN, "estimator": Estimator.HAJEK}
    plain = LaborSampler(indptr, indices, (15, 10, 5), **settings)
    star = LaborSampler(indptr, indices, (15, 10, 5), variant="star", tolerance=1e-3, **settings)
    limit = RandomReadLimit(graph.num_edges)
    degree = np.diff(indptr)
    measure_labor_0(f"labor0_{name}_1thread", plain, seeds, degree, limit)
    rates = [1 / one_thread(star, seeds[:1], 0)[0] for _ in range(4)][1:]
    record(f"labor_star_{name}_1thread", Spread.of(rates), "batches/s", baseline=1.0, ratio=None)


def one_thread(
    sampler: LaborSampler, seeds: list[NDArray[np.int64]], epoch: int
) -> tuple[float, float, list[MiniBatch]]:
    """Seconds and core seconds of sampling the batches, and the batches."""
    batches: list[MiniBatch] = []
    core = [0.0]

    def task(index: int) -> None:
        before = time.thread_time()
        for step, part in enumerate(seeds):
            batches.append(sampler.sample(part, epoch=epoch, step=step))
        core[index] = time.thread_time() - before

    return run_threads(task, 1), core[0], batches


def measure_labor_0(
    name: str,
    sampler: LaborSampler,
    seeds: list[NDArray[np.int64]],
    degree: NDArray[np.int64],
    limit: RandomReadLimit,
) -> None:
    """Interleave the limit and the sampler, and print both rates."""
    one_thread(sampler, seeds, 0)  # compiles, and grows the workspace
    limits, rates, ratios, per_core = [limit.measure()], [], [], []
    per_sampled = 0.0
    for repeat in range(REPEATS):
        seconds, core_seconds, batches = one_thread(sampler, seeds, 1 + repeat)
        limits.append(limit.measure())
        reads = sum(scanned(batch, degree) for batch in batches)
        edges = sum(batch.num_edges for batch in batches)
        rates.append(reads / seconds)
        per_core.append(reads / core_seconds)
        ratios.append(edges / seconds / ((limits[-2] + limits[-1]) / 2))
        per_sampled = reads / edges
    record(
        name,
        Spread.of(rates),
        "scanned edges/s",
        baseline=float(np.median(limits)),
        ratio=float(np.median(ratios)),
        scanned_over_limit=float(np.median(rates) / np.median(limits)),
        scanned_per_sampled=per_sampled,
        scanned_per_core_second=float(np.median(per_core)),
        steady=steady(limits[0], limits[-1]),
    )


def dense_graph() -> Graph:
    """R-MAT with hundreds of edges per vertex, as Reddit has; generated once."""
    folder = cache_folder() / f"rmat-dense-{DENSE_NODES}-{DENSE_DEGREE}"
    if not (folder / "graph.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        generate_rmat(
            folder,
            num_nodes=DENSE_NODES,
            degree=DENSE_DEGREE,
            feature_dim=1,
            num_classes=2,
            seed=0,
        )
    return open_graph(folder)


Sample = Callable[[NDArray[np.int64], int], MiniBatch]


def counts_of(sample: Sample, seeds: list[NDArray[np.int64]]) -> tuple[dict[str, Any], list[int]]:
    """Mean vertices and edges over the batches, and mean vertices drawn by hop."""
    batches = [sample(part, step) for step, part in enumerate(seeds)]
    hops = [list(reversed(batch.blocks)) for batch in batches]
    sizes = [[len(np.unique(block.indices)) for block in blocks] for blocks in hops]
    edges = [[block.num_edges for block in blocks] for blocks in hops]
    found = {
        "vertices": float(np.mean([len(batch.n_id) for batch in batches])),
        "edges": float(np.mean(np.sum(edges, axis=1))),
        "vertices_by_hop": np.mean(
            [[block.num_src for block in blocks] for blocks in hops], axis=0
        ).tolist(),
        "edges_by_hop": np.mean(edges, axis=0).tolist(),
    }
    return found, np.mean(sizes, axis=0).round().astype(int).tolist()


def measure_shape() -> None:
    """Vertices and edges of every method on the dense graph."""
    graph = dense_graph()
    indptr, indices = np.array(graph.indptr), np.array(graph.indices)
    order = bench_seeds(graph, fraction=1.0)
    seeds = [order[DENSE_BATCH * i : DENSE_BATCH * (i + 1)] for i in range(DENSE_BATCHES)]
    neighbor = NeighborSampler(indptr, indices, DENSE_FANOUTS, dialect=Dialect.EVERY_HOP)
    variants: dict[str, int | str] = {"labor0": 0, "labor1": 1, "labor_star": "star"}
    methods: dict[str, Any] = {"neighbor": neighbor} | {
        name: LaborSampler(indptr, indices, DENSE_FANOUTS, variant=variant)
        for name, variant in variants.items()
    }
    baseline, drawn, found = 0.0, [0], {}
    for name, sampler in methods.items():
        found, drawn = counts_of(sampler_call(sampler), seeds)
        baseline = baseline or found["vertices"]
        report_shape(name, found, baseline)
    target = found["vertices_by_hop"]
    degree = np.diff(indptr)
    mean = (1 / np.repeat(degree, degree)).astype(np.float32)
    for name, (suffix, weight) in itertools.product(
        ("ladies", "pladies"), (("", mean), ("_plain", None))
    ):

        def sample(
            sizes: list[int], name: str = name, weight: NDArray[np.float32] | None = weight
        ) -> Sample:
            return sampler_call(
                LayerwiseSampler(indptr, indices, sizes, method=name, edge_weight=weight)
            )

        report_shape(name + suffix, matched(sample, drawn, target, seeds), baseline)


def matched(
    make: Callable[[list[int]], Sample],
    sizes: list[int],
    target: list[float],
    seeds: list[NDArray[np.int64]],
) -> dict[str, Any]:
    """Counts of a layer-wise sampler whose sizes are fitted to vertices by hop."""
    found, _ = counts_of(make(sizes), seeds)
    for _ in range(FITS):
        # Twice as many draws give less than twice the vertices.
        shares = np.array(target) / np.array(found["vertices_by_hop"])
        sizes = np.maximum(1, np.round(sizes * shares**1.5)).astype(int).tolist()
        found, _ = counts_of(make(sizes), seeds)
    return found | {"sizes": sizes}


def sampler_call(sampler: Any) -> Sample:
    return lambda part, step: sampler.sample(part, epoch=0, step=step)


def report_shape(name: str, found: dict[str, Any], baseline: float) -> None:
    vertices = found["vertices"]
    record(
        f"vertices_{name}_dense",
        vertices,
        "vertices/batch",
        baseline=baseline,
        ratio=vertices / baseline,
        **{key: value for key, value in found.items() if key != "vertices"},
    )


def expected_overlap(q: float, kappa: int) -> float:
    """P(r <= q, r' <= q) / q for consecutive batches."""
    rho, z = math.cos(math.pi / (2 * kappa)), special.ndtri(q)
    covariance: Any = np.array([[1, rho], [rho, 1]])
    law = stats.multivariate_normal(cov=covariance, allow_singular=True)
    return float(law.cdf(np.array([z, z]))) / q


def measure_overlap(num_nodes: int = 20_000, degree: int = 60, fanout: int = 6) -> None:
    """The overlap table, counted on a regular graph whose rows are disjoint."""
    indptr = np.minimum(np.arange(num_nodes * (degree + 1) + 1), num_nodes) * degree
    indices = np.arange(num_nodes, num_nodes * (degree + 1), dtype=np.int32)
    seeds = np.arange(num_nodes, dtype=np.int64)
    for kappa in KAPPAS:
        sampler = LaborSampler(indptr, indices, [fanout], kappa=kappa, edge_ids=True, seed=1)
        chosen = [sampler.sample(seeds, epoch=0, step=step).blocks[0].e_id for step in range(4)]
        shares = [len(np.intersect1d(a, b)) / len(b) for a, b in itertools.pairwise(chosen)]  # pyright: ignore[reportArgumentType, reportCallIssue]
        expected = expected_overlap(fanout / degree, kappa)
        found = float(np.mean(shares))
        name = f"overlap_kappa_{kappa}"
        record(name, found, "share", baseline=expected, ratio=found / expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="accepted; output is always JSON")
    parser.add_argument("--graphs", default="rmat-18", help="comma-separated, e.g. rmat-18,rmat-21")
    options = parser.parse_args()
    keep_freed_memory()  # as every rank does
    for name in options.graphs.split(","):
        measure_labor(name)
    measure_shape()
    measure_overlap()


if __name__ == "__main__":
    main()
