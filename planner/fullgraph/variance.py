"""What dropping boundary nodes adds to the variance, estimated on the input features.

    V = mean_u sum_{v in N(u) outside} a_uv^2 |x_v|^2,   eps^2 = 0.1 mean_u |sum_v a_uv x_v|^2

Only the first layer's inputs are known before training; hidden layers are taken to be alike.

Source: docs/formulas.md 3.3 and 3.6.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse  # pyright: ignore[reportMissingTypeStubs]

from planner.cost.full_graph_rate import p_variance
from runtime.errors import DatasetError
from runtime.graph.dataset import Graph
from runtime.train.evaluate import reader_of

SAMPLED_NODES = 2000
MOST_EDGES = 200_000
"""Edges of sampled nodes that are looked at: their rows are read."""
TOLERATED = 0.1
"""eps^2 over |z|^2: the added variance that is tolerated."""
DEFAULT_KEEP = 0.1
"""Published as safe (docs/formulas.md 3.6), where there are no features to estimate from."""

LEAST_KEEP = 0.01
"""Published as safe with a good partition; nothing is estimated to allow less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variance:
    """The estimate."""

    boundary: float
    """V."""
    signal: float
    """Mean of |z|^2."""
    nodes: int
    """Sampled nodes; 0 without features."""

    @property
    def least_keep(self) -> float:
        """p_var: the smallest p whose added variance is tolerated."""
        if self.nodes == 0:
            return DEFAULT_KEEP
        if self.signal == 0:
            return DEFAULT_KEEP
        return max(LEAST_KEEP, float(p_variance(self.boundary, TOLERATED * self.signal)))


def measure_variance(graph: Graph, found: NDArray[np.int32], model: str) -> Variance:
    """Estimate V and |z|^2 over a sample of nodes, always the same.

    Args:
        graph: the dataset; without features nothing is estimated.
        found: part of each node.
        model: gcn weighs by both degrees, the others by 1 / d.
    """
    try:
        read = reader_of(graph, None)
    except DatasetError:
        return Variance(boundary=0.0, signal=0.0, nodes=0)
    rng = np.random.default_rng(0)
    nodes = rng.permutation(graph.num_nodes)[:SAMPLED_NODES]
    degree = graph.indptr[nodes + 1] - graph.indptr[nodes]
    nodes = nodes[: max(1, int(np.searchsorted(np.cumsum(degree), MOST_EDGES)))]
    degree = graph.indptr[nodes + 1] - graph.indptr[nodes]
    row = np.repeat(np.arange(len(nodes)), degree)
    inside = np.arange(len(row)) - np.repeat(np.cumsum(degree) - degree, degree)
    sources = np.asarray(graph.indices[graph.indptr[nodes][row] + inside], np.int64)
    unique, where = np.unique(sources, return_inverse=True)
    x = np.empty((len(unique), graph.feature_dim), np.float32)
    read(unique, x)
    if model == "gcn":
        theirs = graph.indptr[unique + 1] - graph.indptr[unique]
        weight = 1 / np.sqrt((degree[row] + 1.0) * (theirs[where] + 1.0))
    else:
        weight = 1 / np.maximum(degree[row], 1.0)
    squares = (x.astype(np.float64) ** 2).sum(1)
    outside = found[sources] != found[nodes[row]]
    boundary = float((weight**2 * squares[where] * outside).sum()) / len(nodes)
    shape = (len(nodes), len(unique))
    entries = (weight.astype(np.float32), (row, where))
    weights: Any = sparse.csr_array(entries, shape=shape)
    z: NDArray[np.float32] = np.asarray(weights @ x)
    return Variance(boundary=boundary, signal=float((z**2).sum() / len(nodes)), nodes=len(nodes))
