"""Seconds per sampled edge and per vertex, from the real sampler on generated calibration graphs.

At each size an R-MAT graph (skewed: many repeated vertices) and a block model (even: few) are
sampled with several fan-outs and batch sizes, by one and by several processes at once; the cost of
a batch, E edges and V distinct vertices, is fitted as

    T = E * sample_edge + V * sample_vertex,      both >= 0, least squares of relative errors

per size and number of readers. The two costs are uncertain together: a batch's edges and vertices
grow alike, so that one cost may rise eightfold while the other falls and all batches take as long.
So both tables have the spread of the seconds that they give for those batches, after they were
made monotone. The graphs are the probe's own: no constant is ever fitted on the graph being planned
for.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.machine.model import Table
from planner.probe.context import ProbeContext
from planner.probe.fit import fit_non_negative
from planner.probe.timing import Measurement, wait_until
from planner.probe.worker import State

MODULE = "planner.probe.sampling"
RELABEL_BYTES = 8
"""The sampler's dense relabelling table: a stamp and a local id per vertex."""
LEAST_SECONDS = 1e-10
"""Tables hold positive values: a cost fitted as zero is written as this."""
RESIDUAL_LIMIT = 0.4
"""Fits worse than this are uncertain."""
SAMPLING_LIMIT = 0.2
WARM_BATCHES = 3
"""Batches that grow the sampler's workspace before the clock runs."""
KINDS = ("rmat", "sbm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Calibration batches of both graphs, one row per (graph, case)."""

    counts: NDArray[np.float64]
    """Edges and distinct vertices, shape (n, 2)."""
    seconds: NDArray[np.float64]
    """Shape (n,)."""
    spread: float
    noisy: bool


def measure(context: ProbeContext) -> dict[str, Table]:
    """Tables `sample_edge` and `sample_vertex`."""
    sizes, readers = context.sizes, context.readers()
    drawn: list[Drawn] = []
    topology_bytes: list[float] = []
    for num_nodes in sizes.graph_nodes:
        folders = [context.scratch / f"{kind}-{num_nodes}" for kind in KINDS]
        made = context.team.run(
            f"{MODULE}:generate_task",
            ranks=1,
            folders=folders,
            num_nodes=num_nodes,
            degree=sizes.graph_degree,
        )
        context.team.run(f"{MODULE}:open_task", ranks=1, folders=folders)  # compiles
        context.team.run(f"{MODULE}:open_task", ranks=max(readers), folders=folders)
        topology_bytes.append(float(made[0]))
        drawn += [_draw(context, n) for n in readers]
        context.team.run(f"{MODULE}:close_task", ranks=max(readers))
    axes = {"topology_bytes": topology_bytes, "readers": readers}
    edges, vertices = zip(*(_fit(each) for each in drawn), strict=True)
    tables = context.table("sample_edge", "seconds_per_edge", axes, edges, rising=list(axes))
    table_bytes = [RELABEL_BYTES * n for n in sizes.graph_nodes]
    tables |= context.table(
        "sample_vertex",
        "seconds_per_vertex",
        {"table_bytes": table_bytes, "readers": readers},
        vertices,
        rising=["table_bytes", "readers"],
    )
    spread = spread_of_seconds(drawn, tables["sample_edge"].values, tables["sample_vertex"].values)
    return {name: replace(table, spread=spread) for name, table in tables.items()}


def spread_of_seconds(
    drawn: Sequence[Drawn], per_edge: Sequence[float], per_vertex: Sequence[float]
) -> float:
    """Relative error of the seconds that two tables give together for the batches they came from.

    Root mean square over a point's batches, with their repeats' spread; the upper quartile over
    points, as other tables have it.

    Args:
        drawn: batches of each point of the tables.
        per_edge: seconds per edge, by point.
        per_vertex: seconds per distinct vertex, by point.
    """
    errors = [
        np.hypot(_error(each, np.array([edge, vertex])), each.spread)
        for each, edge, vertex in zip(drawn, per_edge, per_vertex, strict=True)
    ]
    return float(np.percentile(errors, 75))


def _error(drawn: Drawn, costs: NDArray[np.float64]) -> float:
    relative = drawn.counts @ costs / drawn.seconds - 1.0
    return float(np.sqrt(np.mean(relative**2)))


def _draw(context: ProbeContext, num_readers: int) -> Drawn:
    """Batches of the opened graphs, drawn by so many processes at once."""
    rows: list[tuple[float, float]] = []
    seconds: list[float] = []
    spreads: list[float] = []
    noisy = False
    for graph, (num_seeds, fanouts) in itertools.product(
        range(len(KINDS)), context.sizes.sample_cases
    ):
        counts: list[tuple[float, float]] = []

        def samples(
            graph: int = graph,
            num_seeds: int = num_seeds,
            fanouts: tuple[int, ...] = fanouts,
            counts: list[tuple[float, float]] = counts,
        ) -> list[float]:
            found = context.team.run_together(
                f"{MODULE}:sample_task",
                ranks=num_readers,
                graph=graph,
                num_seeds=num_seeds,
                fanouts=fanouts,
                seconds=context.sizes.sample_seconds,
                least=context.sizes.least_repeats,
            )
            counts[:] = [pair for _, pairs in found for pair in pairs]
            return [s for times, _ in found for s in times]

        case = context.settle(samples, limit=SAMPLING_LIMIT)
        mean_edges, mean_vertices = np.mean(counts, axis=0)
        rows.append((float(mean_edges), float(mean_vertices)))
        seconds.append(case.value)
        spreads.append(case.spread)
        noisy = noisy or case.uncertain
    return Drawn(
        counts=np.array(rows),
        seconds=np.array(seconds),
        spread=float(np.median(spreads)),
        noisy=noisy,
    )


def _fit(drawn: Drawn) -> tuple[Measurement, Measurement]:
    """Turn fitted costs, per edge and per vertex, into measurements that carry the residual."""
    fit = fit_non_negative(drawn.counts, drawn.seconds)
    spread = float(np.hypot(fit.residual, drawn.spread))
    edge, vertex = (
        Measurement(
            value=max(LEAST_SECONDS, cost),
            p90=cost,
            spread=spread,
            num_samples=len(drawn.seconds),
            attempts=1,
            uncertain=drawn.noisy or fit.residual > RESIDUAL_LIMIT,
        )
        for cost in fit.costs
    )
    return edge, vertex


def generate_task(state: State, *, folders: list[Path], num_nodes: int, degree: int) -> int:
    """Task: write the calibration graphs; returns the bytes of their topology."""
    del state
    from runtime.graph.generate import generate_rmat, generate_sbm

    num_bytes = 0
    for folder, generate in zip(folders, (generate_rmat, generate_sbm), strict=True):
        graph = generate(
            folder, num_nodes=num_nodes, degree=degree, feature_dim=1, num_classes=2, seed=20
        )
        num_bytes = max(num_bytes, graph.indptr.nbytes + graph.indices.nbytes)
    return num_bytes


def open_task(state: State, *, folders: list[Path]) -> None:
    """Task: map the graphs, touch their pages, and sample once (compiles, or loads from cache)."""
    from planner.probe.interlude import Interlude
    from runtime.graph.dataset import open_graph
    from runtime.sampling.neighbor import NeighborSampler

    graphs: list[Any] = [open_graph(folder, validate=False) for folder in folders]
    for graph in graphs:
        np.asarray(graph.indices).max(initial=0)  # reads every page
        np.asarray(graph.indptr).max()
        NeighborSampler(graph.indptr, graph.indices, (2, 2)).sample(
            graph.train_idx[:2], epoch=0, step=0
        )
    state.kept["graphs"] = graphs
    state.kept["interlude"] = Interlude()
    state.kept["step"] = 0


def close_task(state: State) -> None:
    """Task: unmap the graphs."""
    state.kept.pop("graphs")
    state.kept.pop("interlude")


def sample_task(
    state: State,
    *,
    graph: int,
    num_seeds: int,
    fanouts: tuple[int, ...],
    seconds: float,
    least: int,
    start_at: float,
) -> tuple[list[float], list[tuple[int, int]]]:
    """Task: seconds, and (edges, vertices), of each batch; no batch is drawn twice.

    After a stretch of compute.
    """
    from runtime.sampling.neighbor import NeighborSampler

    data: Any = state.kept["graphs"][graph]
    sampler = NeighborSampler(data.indptr, data.indices, fanouts, seed=state.rank)
    draws = np.random.default_rng([state.rank, num_seeds, state.kept["step"]])
    pool: Any = np.asarray(data.train_idx)
    times: list[float] = []
    counts: list[tuple[int, int]] = []

    def one_batch() -> float:
        seeds = draws.choice(pool, size=min(num_seeds, len(pool)), replace=False)
        state.kept["step"] += 1
        state.kept["interlude"]()  # the model ran since the last batch
        start = time.perf_counter()
        batch = sampler.sample(seeds, epoch=0, step=state.kept["step"])
        took = time.perf_counter() - start
        counts.append((batch.num_edges, int(batch.n_id.shape[0])))
        return took

    for _ in range(WARM_BATCHES):
        one_batch()
    del counts[:]
    wait_until(start_at)
    end = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        times.append(one_batch())
    return times, counts
