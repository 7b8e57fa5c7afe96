"""Small graphs and batches that the tests of LABOR share."""

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.sampling.labor import LaborSampler
from gnnplan.runtime.sampling.minibatch import MiniBatch

Graph = tuple[NDArray[np.int64], NDArray[np.int32]]
Z = 4.5
"""Standard errors allowed; the seeds are fixed, so nothing is flaky."""


def graph_of(rows: dict[int, list[int]], num_nodes: int) -> Graph:
    lists = [rows.get(v, []) for v in range(num_nodes)]
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in lists])]).astype(np.int64)
    return indptr, np.array([t for row in lists for t in row], dtype=np.int32)


def copies(rows: dict[int, list[int]], size: int, count: int) -> Graph:
    """Many disjoint copies of a graph: one batch gives independent trials."""
    return graph_of(
        {
            v + size * i: [t + size * i for t in row]
            for i in range(count)
            for v, row in rows.items()
        },
        size * count,
    )


def stars(degree: int, count: int) -> tuple[Graph, NDArray[np.int64]]:
    """Copies of one row, and the seeds that own the rows."""
    graph = copies({0: list(range(1, degree + 1))}, degree + 1, count)
    return graph, np.arange(0, (degree + 1) * count, degree + 1, dtype=np.int64)


def skewed_graph(num_nodes: int = 300) -> Graph:
    rng = np.random.default_rng(21)
    degrees = np.minimum(rng.zipf(1.5, num_nodes) + 2, 80)
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    rows = [(num_nodes * rng.random(d) ** 2).astype(np.int32) for d in degrees]
    return indptr, np.concatenate(rows)


def drawn(sampler: LaborSampler, seeds: list[int], steps: int) -> list[MiniBatch]:
    nodes = np.array(seeds, dtype=np.int64)
    return [sampler.sample(nodes, epoch=0, step=step) for step in range(steps)]


def edges_of(batch: MiniBatch) -> NDArray[np.int64]:
    assert batch.blocks[0].e_id is not None
    return batch.blocks[0].e_id
