"""Plans with mode full-graph for tests, and small partitions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.fullgraph.formulas import drawn_epoch_bytes
from gnnplan.planner.fullgraph.parts import Parts
from gnnplan.runtime.fullgraph.draws import kept_nodes
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.io import save_plan
from gnnplan.runtime.plan.schema import FullGraph, Plan
from gnnplan.runtime.sampling.rng import Purpose, stream
from tests.support.plans import make_plan


def make_full_graph_plan(
    graph: Graph,
    folder: Path,
    partition: NDArray[np.int32],
    *,
    ranks: int = 1,
    layers: int = 2,
    comm_threads: int = 0,
    settings: FullGraph | None = None,
    **workload: Any,
) -> Plan:
    """Write a plan folder that trains the whole graph over `ranks` parts."""
    made = make_plan(graph, folder, ranks=ranks, fanouts=[-1] * layers, **workload)
    threads = replace(made.strategy.threads, comm=comm_threads)
    strategy = replace(
        made.strategy,
        mode="full-graph",
        partition="test",
        full_graph=settings or FullGraph(),
        threads=threads,
    )
    return save_plan(replace(made, strategy=strategy), {"partition": partition}, folder)


def grown_parts(
    indptr: NDArray[np.int64], indices: NDArray[Any], num_parts: int
) -> NDArray[np.int32]:
    """Parts of equal size, each grown breadth-first from the smallest free node."""
    num_nodes = indptr.shape[0] - 1
    partition = np.full(num_nodes, -1, np.int32)
    bound = -(-num_nodes // num_parts)
    part, size = 0, 0
    queue: list[int] = []
    free = 0
    while True:
        if not queue:
            while free < num_nodes and partition[free] >= 0:
                free += 1
            if free == num_nodes:
                return partition
            queue = [free]
        following: list[int] = []
        for v in queue:
            if partition[v] >= 0:
                continue
            if size == bound:
                part, size, following = part + 1, 0, []
                queue = []
                break
            partition[v] = part
            size += 1
            following += [int(u) for u in indices[indptr[v] : indptr[v + 1]]]
        queue = [u for u in following if partition[u] < 0]


def sent_bytes(
    parts: Parts, settings: FullGraph, widths: list[int], *, seed: int, epoch: int
) -> list[int]:
    """Count the bytes that each rank sends in one epoch, exactly: the draws are the runtime's."""
    layers, size = len(widths) - 1, len(parts.parts)
    first = 1 if settings.precompute_first_layer else 0
    received = np.zeros((size, layers), np.int64)
    sent = np.zeros((size, layers), np.int64)
    for layer in range(first, layers):
        drawn = first if settings.draws == "shared" else layer
        for part in parts.parts:
            for owner, ids in enumerate(np.split(part.halo, np.cumsum(part.halo_counts)[:-1])):
                kept = _kept(settings, seed, epoch, drawn, ids, owner, part.rank, size)
                received[part.rank, layer] += kept
                sent[owner, layer] += kept
    return [drawn_epoch_bytes(sent[r].tolist(), received[r].tolist(), widths) for r in range(size)]


def _kept(
    settings: FullGraph, seed: int, epoch: int, layer: int, ids: NDArray[np.int64],
    owner: int, receiver: int, size: int,
) -> int:  # fmt: skip
    numbers = stream(seed, epoch, 0, layer, Purpose.BOUNDARY)
    kept = kept_nodes(
        numbers, ids, owner=owner, receiver=receiver, size=size, keep=settings.keep,
        rounding=settings.rounding,
    )  # fmt: skip
    return int(kept.sum())
