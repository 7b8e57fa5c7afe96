"""Seconds per sampled edge and per vertex, from the real sampler on generated calibration graphs.

At each size an R-MAT graph (skewed: many repeated vertices) and a block model (even: few) are
sampled with several fan-outs and batch sizes, by one and by several processes at once; the cost of
a batch, E edges and V distinct vertices, is fitted as

    T = E * sample_edge + V * sample_vertex,      both >= 0, least squares of relative errors

per size and number of readers. Both tables have the spread of the seconds that they give together:
a batch's edges and vertices grow alike, so one cost may rise while the other falls. No constant is
ever fitted on the graph being planned for.
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.machine.model import Table
from gnnplan.planner.probe.context import AGAIN, ProbeContext
from gnnplan.planner.probe.grid import Point, fit_non_negative
from gnnplan.planner.probe.team import State
from gnnplan.planner.probe.timing import Measurement, is_wanting, wait_until

MODULE = "gnnplan.planner.probe.sampling"
RELABEL_BYTES = 8
"""Bytes per vertex of the sampler's relabelling table: a stamp and a local id."""
LEAST_SECONDS = 1e-10
"""Least cost, since tables hold positive values."""
RESIDUAL_LIMIT = 0.4
"""Residual from which a fit is uncertain."""
SAMPLING_LIMIT = 0.2
WARM_BATCHES = 3
"""Batches that grow the sampler's workspace before the clock runs."""
KINDS = ("rmat", "sbm")
LEAST_CASES = 2
"""Batches of a point that are drawn however late it is: two costs are fitted to them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Calibration batches of both graphs, one row per (graph, case)."""

    counts: NDArray[np.float64]
    """Edges and distinct vertices, shape (n, 2)."""
    seconds: NDArray[np.float64]
    spread: float
    noisy: bool


def measure(context: ProbeContext) -> dict[str, Table]:
    """Measure the tables `sample_edge` and `sample_vertex`."""
    readers, topology_bytes = context.readers(), dict[int, int]()

    def of_graphs(at: Point) -> dict[Point, Drawn]:
        (num_nodes,) = at
        topology_bytes[num_nodes], drawn = _on_graphs(context, num_nodes)
        return drawn

    drawn = context.walk(
        {"nodes": context.sizes.graph_nodes},
        of_graphs,
        is_affordable=lambda at: context.has_time_for("a graph", *at),
    )
    sizes = sorted(topology_bytes)
    found = {(n, r): each for (n,), by_reader in drawn.items() for (r,), each in by_reader.items()}
    fits = {point: _fit(each) for point, each in found.items()}
    left = [n for n in context.sizes.graph_nodes if n not in topology_bytes]
    if left:
        words = ", ".join(map(str, left))
        context.notes.append(
            f"time: sampling: graphs of {words} nodes not reached in time; {AGAIN}"
        )
    edges = {(topology_bytes[n], r): edge for (n, r), (edge, _) in fits.items()}
    axes = {"topology_bytes": [topology_bytes[n] for n in sizes], "readers": readers}
    tables = context.table("sample_edge", "seconds_per_edge", axes, edges, rising=list(axes))
    vertices = {(RELABEL_BYTES * n, r): vertex for (n, r), (_, vertex) in fits.items()}
    axes = {"table_bytes": [RELABEL_BYTES * n for n in sizes], "readers": readers}
    tables |= context.table(
        "sample_vertex", "seconds_per_vertex", axes, vertices, rising=list(axes)
    )
    costs = [
        [tables["sample_edge"].at(topology_bytes=topology_bytes[n], readers=r) for n, r in found],
        [tables["sample_vertex"].at(table_bytes=RELABEL_BYTES * n, readers=r) for n, r in found],
    ]
    spread = spread_of_seconds(list(found.values()), *costs)
    return {
        name: replace(table, spread=spread, uncertain=table.uncertain or bool(left))
        for name, table in tables.items()
    }


def _on_graphs(context: ProbeContext, num_nodes: int) -> tuple[int, dict[Point, Drawn]]:
    """Draw batches of both graphs of a size; return topology bytes, and batches by readers."""
    folders = [context.scratch / f"{kind}-{num_nodes}" for kind in KINDS]
    most, makers = max(context.readers()), min(len(KINDS), context.team.size)
    with context.preparing("a graph", num_nodes):
        made = context.team.run(
            f"{MODULE}:generate_task",
            ranks=makers,
            makers=makers,
            folders=folders,
            num_nodes=num_nodes,
            degree=context.sizes.graph_degree,
        )
    context.team.run(f"{MODULE}:open_task", ranks=1, folders=folders)  # compiles
    context.team.run(f"{MODULE}:open_task", ranks=most, folders=folders)
    drawn = context.walk({"readers": context.readers()}, lambda at: _draw(context, *at))
    context.team.run(f"{MODULE}:close_task", ranks=most)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return max(made), drawn


def spread_of_seconds(
    drawn: Sequence[Drawn], per_edge: Sequence[float], per_vertex: Sequence[float]
) -> float:
    """Return the relative error of the seconds that two tables give for their batches.

    Root mean square over a point's batches, with their repeats' spread; the upper quartile over
    points. `per_edge` and `per_vertex` are seconds by point.
    """

    def error(each: Drawn, costs: tuple[float, float]) -> float:
        relative = each.counts @ np.array(costs) / each.seconds - 1.0
        return float(np.hypot(np.sqrt(np.mean(relative**2)), each.spread))

    errors = map(error, drawn, zip(per_edge, per_vertex, strict=True))
    return float(np.percentile(list(errors), 75))


def _draw(context: ProbeContext, num_readers: int) -> Drawn:
    cases: list[Point] = [
        (g, c) for c in range(len(context.sizes.sample_cases)) for g in range(len(KINDS))
    ]
    counts = dict[Point, list[tuple[float, float]]]()

    def measured(at: Point) -> Measurement:
        graph, case = at
        num_seeds, fanouts = context.sizes.sample_cases[case]

        def samples() -> list[float]:
            found = context.team.run_together(
                f"{MODULE}:sample_task",
                ranks=num_readers,
                graph=graph,
                num_seeds=num_seeds,
                fanouts=fanouts,
                seconds=context.sizes.sample_seconds,
                least=context.sizes.least_repeats,
                most=context.budget.left,
            )
            counts[at] = [pair for _, pairs in found for pair in pairs]
            return [s for times, _ in found for s in times]

        return context.settle(samples, limit=SAMPLING_LIMIT)

    found = context.budget.walk(cases, measured, least=LEAST_CASES)
    rows = [np.mean(counts[at], axis=0) for at in found]
    return Drawn(
        counts=np.array(rows, dtype=np.float64),
        seconds=np.array([each.value for each in found.values()]),
        spread=float(np.median([each.spread for each in found.values()])),
        noisy=len(found) < len(cases) or any(each.uncertain for each in found.values()),
    )


def _fit(drawn: Drawn) -> tuple[Measurement, Measurement]:
    """Turn fitted costs, per edge and per vertex, into measurements that carry the residual."""
    costs, residual = fit_non_negative(drawn.counts, drawn.seconds)
    spread = float(np.hypot(residual, drawn.spread))
    edge, vertex = (
        Measurement(
            value=max(LEAST_SECONDS, cost),
            p90=cost,
            spread=spread,
            uncertain=drawn.noisy or residual > RESIDUAL_LIMIT,
        )
        for cost in costs
    )
    return edge, vertex


def generate_task(
    state: State, *, folders: list[Path], num_nodes: int, degree: int, makers: int
) -> int:
    """Task: write a calibration graph, or both where one worker does; return topology bytes."""
    from gnnplan.runtime.graph.generate import generate_rmat, generate_sbm

    num_bytes = 0
    mine = list(zip(folders, (generate_rmat, generate_sbm), strict=True))
    for folder, generate in mine[state.rank :: makers]:
        graph = generate(
            folder, num_nodes=num_nodes, degree=degree, feature_dim=1, num_classes=2, seed=20
        )
        num_bytes = max(num_bytes, graph.indptr.nbytes + graph.indices.nbytes)
    return num_bytes


def open_task(state: State, *, folders: list[Path]) -> None:
    """Task: map the graphs, touch their pages, and sample once (compiles, or loads from cache)."""
    from gnnplan.runtime.graph.dataset import open_graph
    from gnnplan.runtime.sampling.neighbor import NeighborSampler

    graphs: list[Any] = [open_graph(folder, validate=False) for folder in folders]
    for graph in graphs:
        np.asarray(graph.indices).max(initial=0)  # reads every page
        np.asarray(graph.indptr).max()
        NeighborSampler(graph.indptr, graph.indices, (2, 2)).sample(
            graph.train_idx[:2], epoch=0, step=0
        )
    state.kept["graphs"] = graphs
    state.kept["step"] = 0


def close_task(state: State) -> None:
    """Task: unmap the graphs."""
    state.kept.pop("graphs")


def sample_task(
    state: State,
    *,
    graph: int,
    num_seeds: int,
    fanouts: tuple[int, ...],
    seconds: float,
    least: int,
    most: float,
    start_at: float,
) -> tuple[list[float], list[tuple[int, int]]]:
    """Task: seconds, and (edges, vertices), of each batch; compute precedes each."""
    from gnnplan.runtime.sampling.neighbor import NeighborSampler

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
    begun = time.perf_counter()
    while is_wanting(
        len(times), time.perf_counter() - begun, seconds=seconds, least=least, most=most
    ):
        times.append(one_batch())
    return times, counts
