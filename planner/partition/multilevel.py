"""Multilevel edge-cut partitioners: KaMinPar (default) and METIS, both optional packages.

Both take an undirected graph and one weight per node. Where several things are to be balanced the
weight is their normalised sum, and `planner.partition.balance` repairs what that leaves.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.errors import SettingsError
from planner.partition.problem import Problem
from planner.partition.undirected import Undirected, to_undirected

WEIGHT_SCALE = 64
"""Weight of an average node per balanced quantity: rounding to integers stays below 1%."""
BLOCK = 1 << 22
NO_EDGE_WEIGHTS, NO_NODE_WEIGHTS, IDS_OF_32_BITS = 1, 2, 8
"""Bits of the ParHIP header's version, as KaMinPar reads them (a set bit says it is not so)."""


def node_weights(problem: Problem) -> NDArray[np.int64] | None:
    """Sum of each node's shares of what is balanced, scaled to integers; None: all are equal."""
    nodes, training, edges = problem.balance.tolerances
    num_training = np.count_nonzero(problem.training)
    by_training = np.isfinite(training) and num_training > 0
    by_edges = np.isfinite(edges) and problem.num_edges > 0
    if not by_training and not by_edges:
        return None
    num_nodes = problem.num_nodes
    weights = np.full(num_nodes, WEIGHT_SCALE if np.isfinite(nodes) else 0, np.int64)
    if by_training:
        weights[problem.training] += round(WEIGHT_SCALE * num_nodes / num_training)
    if by_edges:
        scale = WEIGHT_SCALE * num_nodes / problem.num_edges
        for start in range(0, num_nodes, BLOCK):
            degrees = np.diff(problem.indptr[start : start + BLOCK + 1])
            weights[start : start + BLOCK] += np.round(degrees * scale).astype(np.int64)
    # A node of no weight would still take memory, and METIS wants every part to have weight.
    return np.maximum(weights, 1)


def kaminpar_parts(problem: Problem, *, threads: int = 1) -> NDArray[np.int32]:
    """Partition with KaMinPar (Gottesbueren et al., ESA 2021); int32 [N].

    The Python package only reads files, so the graph goes through a temporary ParHIP file of
    16 (N + 1) + 4 E' bytes, E' the entries of the undirected graph.

    Args:
        problem: what to partition.
        threads: more than one is faster and no longer repeatable.

    Raises:
        SettingsError: the package is missing, or has too few nodes to work on.
    """
    try:
        import kaminpar
    except ImportError:
        raise SettingsError(
            "partitioner kaminpar: expected the package kaminpar, found none; "
            "pip install kaminpar, or choose ldg, fennel, hash or random"
        ) from None
    module: Any = kaminpar
    tolerance = min(problem.balance.tolerances)
    limits = _weight_limits(problem, tolerance)
    with tempfile.TemporaryDirectory(prefix="gnnplan-partition-") as folder:
        path = Path(folder) / "graph.parhip"
        write_parhip(path, to_undirected(problem.indptr, problem.indices), node_weights(problem))
        graph = module.load_graph(str(path), module.GraphFileFormat.PARHIP)
    module.reseed(problem.seed)
    solver = module.KaMinPar(threads, module.default_context())
    found = solver.compute_partition(graph, max_block_weight_factors=limits)
    return np.fromiter(found, np.int32, problem.num_nodes)


def _weight_limits(problem: Problem, tolerance: float) -> list[float]:
    """Most weight of each part as a factor of the whole graph's."""
    allowed = tolerance if np.isfinite(tolerance) else 1.0
    return [float(min(1.0, share * (1 + allowed))) for share in problem.shares]


def write_parhip(path: Path, graph: Undirected, weights: NDArray[np.int64] | None) -> None:
    """Write the binary format KaMinPar reads: header, byte offsets, 32-bit ids, weights.

    Args:
        path: where.
        graph: undirected, with fewer than 2^32 nodes.
        weights: int64 [N], or None for equal ones.
    """
    num_nodes, num_entries = len(graph.indptr) - 1, len(graph.indices)
    version = NO_EDGE_WEIGHTS | IDS_OF_32_BITS | (NO_NODE_WEIGHTS if weights is None else 0)
    first = 24 + 8 * (num_nodes + 1)
    with path.open("wb") as file:
        np.array([version, num_nodes, num_entries], np.uint64).tofile(file)
        for start in range(0, num_nodes + 1, BLOCK):
            (4 * graph.indptr[start : start + BLOCK] + first).astype(np.uint64).tofile(file)
        for start in range(0, num_entries, BLOCK):
            graph.indices[start : start + BLOCK].astype(np.uint32).tofile(file)
        if weights is not None:
            weights.astype(np.int64, copy=False).tofile(file)


def metis_parts(problem: Problem) -> NDArray[np.int32]:
    """Partition with METIS (Karypis and Kumar 1998) through pymetis; int32 [N].

    Raises:
        SettingsError: the package is missing, or the graph has 2^31 entries or more.
    """
    try:
        import pymetis
    except ImportError:
        raise SettingsError(
            "partitioner metis: expected the package pymetis, found none; "
            "pip install gnnplan[metis], or choose kaminpar"
        ) from None
    module: Any = pymetis
    if problem.num_parts == 1:
        return np.zeros(problem.num_nodes, np.int32)
    graph = to_undirected(problem.indptr, problem.indices)
    kind = np.dtype(module.zero_copy_dtype())
    if len(graph.indices) > np.iinfo(kind).max:
        raise SettingsError(
            f"partitioner metis: expected at most {np.iinfo(kind).max} entries (its ids have "
            f"{8 * kind.itemsize} bits), found {len(graph.indices)}; choose kaminpar or ldg"
        )
    weights = node_weights(problem)
    tolerance = min(problem.balance.tolerances)
    options = module.Options(seed=problem.seed)
    if np.isfinite(tolerance):
        options.ufactor = max(1, round(1000 * tolerance))
    found = module.part_graph(
        problem.num_parts,
        module.CSRAdjacency(
            adj_starts=graph.indptr.astype(kind, copy=False),
            adjacent=graph.indices.astype(kind, copy=False),
        ),
        vweights=None if weights is None else weights.astype(kind),
        tpwgts=None if len(set(problem.weights)) == 1 else problem.shares.tolist(),
        recursive=False,
        options=options,
    )
    return np.asarray(found[1], np.int32)
