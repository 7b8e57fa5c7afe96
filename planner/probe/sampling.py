"""Seconds per sampled edge and per vertex, from the real sampler on generated calibration graphs.

At each size an R-MAT graph (skewed: many repeated vertices) and a block model (even: few) are
sampled with several fan-outs and batch sizes, by one and by several processes at once; the cost of
a batch, E edges and V distinct vertices, is fitted as

    T = E * sample_edge + V * sample_vertex,      both >= 0, least squares of relative errors

per size and number of readers. The residual is part of the tables' spread. The graphs are the
probe's own: no constant is ever fitted on the graph being planned for.

A loader thread draws a batch beside its process's training thread, after it slept until there was
room for one: its core has lost what it held of the lists, and the other thread takes memory
bandwidth and the interpreter lock. That is measured apart (`sample_beside`) where every thread has
a core: one mixed point per size (modelling rule 7).
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.machine import Table
from planner.probe.burst import make_burst
from planner.probe.context import ProbeContext
from planner.probe.fit import fit_non_negative
from planner.probe.timing import Measurement, summarize, wait_until
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
BESIDE_ROWS = 3072
"""Of the compute burst beside which a batch is drawn: longer than the batch takes."""


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
    """Tables `sample_edge`, `sample_vertex` and `sample_beside`."""
    sizes, readers = context.sizes, context.readers()
    paired = [n for n in readers if 2 * n <= context.cores]
    costs: list[tuple[Measurement, Measurement]] = []
    longer: list[Measurement] = []
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
        alone = {n: _draw(context, n, sizes.sample_cases) for n in readers}
        costs += [_fit(drawn) for drawn in alone.values()]
        few = sizes.sample_cases[: sizes.beside_cases]
        for n in paired:
            longer.append(longer_beside(alone[n], _draw(context, n, few, beside=True)))
        context.team.run(f"{MODULE}:close_task", ranks=max(readers))
    axes = {"topology_bytes": topology_bytes, "readers": readers}
    edges, vertices = zip(*costs, strict=True)
    tables = context.table("sample_edge", "seconds_per_edge", axes, edges, rising=list(axes))
    if paired:
        axes = {"topology_bytes": topology_bytes, "readers": paired}
        unit = "seconds_per_vertex"
        tables |= context.table("sample_beside", unit, axes, longer, rising=list(axes))
    else:
        context.notes.append(
            "sample_beside: not measured: one core has no room for a loader thread"
        )
    table_bytes = [RELABEL_BYTES * n for n in sizes.graph_nodes]
    return tables | context.table(
        "sample_vertex",
        "seconds_per_vertex",
        {"table_bytes": table_bytes, "readers": readers},
        vertices,
        rising=["table_bytes", "readers"],
    )


def _draw(
    context: ProbeContext,
    num_readers: int,
    cases: Sequence[tuple[int, tuple[int, ...]]],
    *,
    beside: bool = False,
) -> Drawn:
    """Batches of the opened graphs, drawn by so many processes at once."""
    rows: list[tuple[float, float]] = []
    seconds: list[float] = []
    spreads: list[float] = []
    noisy = False
    for graph, (num_seeds, fanouts) in itertools.product(range(len(KINDS)), cases):
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
                beside=beside,
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


def longer_beside(alone: Drawn, beside: Drawn) -> Measurement:
    """Seconds per distinct vertex that a batch takes longer beside compute: the cases' median.

    What a loader's core has lost meanwhile, entries of the lists and of the relabelling table, it
    fetches once per vertex; fitted to edges and vertices alike the two could not be told apart.

    Args:
        alone: of each graph at least the cases of `beside`, which come first.
        beside: the same batches beside compute.
    """
    each = len(beside.seconds) // len(KINDS)
    same = alone.seconds.reshape(len(KINDS), -1)[:, :each].ravel()
    per_vertex = (beside.seconds - same) / beside.counts[:, 1]
    found = summarize([max(LEAST_SECONDS, float(cost)) for cost in per_vertex])
    return replace(found, spread=min(1.0, found.spread), uncertain=beside.noisy)


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
    state.kept.pop("beside", None)


def sample_task(
    state: State,
    *,
    graph: int,
    num_seeds: int,
    fanouts: tuple[int, ...],
    seconds: float,
    least: int,
    beside: bool,
    start_at: float,
) -> tuple[list[float], list[tuple[int, int]]]:
    """Task: seconds, and (edges, vertices), of each batch; no batch is drawn twice.

    After a stretch of compute, or beside it on another thread.
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
        if not beside:
            state.kept["interlude"]()  # the model ran since the last batch
        start = time.perf_counter()
        batch = sampler.sample(seeds, epoch=0, step=state.kept["step"])
        took = time.perf_counter() - start
        counts.append((batch.num_edges, int(batch.n_id.shape[0])))
        return took

    with _beside(state, one_batch) if beside else contextlib.nullcontext(one_batch) as turn:
        for _ in range(WARM_BATCHES):
            turn()
        del counts[:]
        wait_until(start_at)
        end = time.perf_counter() + seconds
        while len(times) < least or time.perf_counter() < end:
            times.append(turn())
    return times, counts


@contextlib.contextmanager
def _beside(state: State, one_batch: Callable[[], float]) -> Generator[Callable[[], float]]:
    """A function that draws a batch on a thread of its own while this one computes.

    The thread sleeps from the end of its batch to the next call, as a loader does whose batches
    are ready.
    """
    if "beside" not in state.kept:
        state.kept["beside"] = make_burst(BESIDE_ROWS)
        state.kept["beside"]()

    def turn() -> float:
        drawn = loader.submit(one_batch)
        state.kept["beside"]()
        return drawn.result()

    with ThreadPoolExecutor(1) as loader:
        yield turn
