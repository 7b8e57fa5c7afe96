"""Multilevel edge-cut partitioners, both optional packages: KaMinPar (the default) and METIS.

Both take an undirected simple graph, neighbours ascending, and one weight per node. Where several
things are to be balanced the weight is their normalised sum, and `planner.partition.balance`
repairs what that leaves.
"""

import tempfile
import typing
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.partition.problem import PartitionProblem


def undirected_bytes(num_nodes: int, num_edges: int, id_bytes: int = 4) -> int:
    """Count the most bytes that `to_undirected` holds: the transpose, sorted rows and the union."""
    pointers = 3 * 8 * (num_nodes + 1)
    return pointers + id_bytes * num_edges * (1 + 1 + 2)


def to_undirected(
    indptr: NDArray[np.int64], indices: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Unite a graph with its transpose, without self-loops; the same arrays if it is so already."""
    num_nodes = len(indptr) - 1
    back_ptr, back = _transpose(indptr, indices, num_nodes)
    if _same(indptr, indices, back_ptr, back):
        return indptr, indices
    if not _ascending(indptr, indices):
        # The transpose of the transpose is the graph with sorted rows.
        indptr, indices = _transpose(back_ptr, back, num_nodes)
    union_ptr = _count_union(indptr, indices, back_ptr, back)
    union = np.empty(int(union_ptr[-1]), indices.dtype)
    _fill_union(indptr, indices, back_ptr, back, union_ptr, union)
    return union_ptr, union


def sort_rows(
    indptr: NDArray[np.int64], indices: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Sort each list; the arrays themselves are returned where they are sorted already."""
    if _ascending(indptr, indices):
        return indptr, indices
    back_ptr, back = _transpose(indptr, indices, len(indptr) - 1)
    return _transpose(back_ptr, back, len(indptr) - 1)


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _transpose(
    indptr: np.ndarray, indices: np.ndarray, num_nodes: int
) -> tuple[np.ndarray, np.ndarray]:
    """List the opposite direction, ascending because sources are visited in order."""
    pointers = np.zeros(num_nodes + 1, np.int64)
    for e in range(indices.size):
        pointers[indices[e] + 1] += 1
    for v in range(num_nodes):
        pointers[v + 1] += pointers[v]
    back = np.empty(indices.size, indices.dtype)
    for u in range(num_nodes):
        for e in range(indptr[u], indptr[u + 1]):
            v = indices[e]
            back[pointers[v]] = u
            pointers[v] += 1
    for v in range(num_nodes, 0, -1):  # every pointer has moved on to its list's end
        pointers[v] = pointers[v - 1]
    pointers[0] = 0
    return pointers, back


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _same(indptr: np.ndarray, indices: np.ndarray, back_ptr: np.ndarray, back: np.ndarray) -> bool:
    """Whether the graph is its own transpose, without loops and repeated edges."""
    for v in range(indptr.size - 1):
        if indptr[v + 1] != back_ptr[v + 1]:
            return False
        for e in range(indptr[v], indptr[v + 1]):
            if indices[e] != back[e] or indices[e] == v:
                return False
            if e > indptr[v] and indices[e] == indices[e - 1]:
                return False
    return True


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _ascending(indptr: np.ndarray, indices: np.ndarray) -> bool:
    for v in range(indptr.size - 1):
        for e in range(indptr[v] + 1, indptr[v + 1]):
            if indices[e] < indices[e - 1]:
                return False
    return True


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _merge(a: np.ndarray, b: np.ndarray, v: int, out: np.ndarray, write: bool) -> int:
    """Return the length of the union of two ascending lists without v; write it if asked."""
    i = j = count = 0
    last = -1
    while i < a.size or j < b.size:
        if j >= b.size or (i < a.size and a[i] <= b[j]):
            u = a[i]
            i += 1
        else:
            u = b[j]
            j += 1
        if u != v and u != last:
            if write:
                out[count] = u
            count += 1
        last = u
    return count


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _count_union(
    indptr: np.ndarray, indices: np.ndarray, back_ptr: np.ndarray, back: np.ndarray
) -> np.ndarray:
    pointers = np.zeros(indptr.size, np.int64)
    nothing = np.empty(0, back.dtype)
    for v in range(indptr.size - 1):
        a = indices[indptr[v] : indptr[v + 1]]
        b = back[back_ptr[v] : back_ptr[v + 1]]
        pointers[v + 1] = pointers[v] + _merge(a, b, v, nothing, False)
    return pointers


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _fill_union(
    indptr: np.ndarray,
    indices: np.ndarray,
    back_ptr: np.ndarray,
    back: np.ndarray,
    union_ptr: np.ndarray,
    union: np.ndarray,
) -> None:
    for v in range(indptr.size - 1):
        a = indices[indptr[v] : indptr[v + 1]]
        b = back[back_ptr[v] : back_ptr[v + 1]]
        _merge(a, b, v, union[union_ptr[v] : union_ptr[v + 1]], True)


WEIGHT_SCALE = 64
"""Weight of an average node per balanced quantity: rounding to integers stays below 1%."""
BLOCK = 1 << 22
NO_EDGE_WEIGHTS, NO_NODE_WEIGHTS, IDS_OF_32_BITS = 1, 2, 8
"""Bits of the ParHIP header's version, as KaMinPar reads them (a set bit says it is not so)."""


def node_weights(problem: PartitionProblem) -> NDArray[np.int64] | None:
    """Sum each node's shares of what is balanced, scaled to integers; None: all are equal."""
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


def fit_weights(weights: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Scale weights down where their sum is above `most`; each stays at least 1.

    >>> fit_weights(np.array([64, 64, 128]), 10).tolist()
    [1, 1, 3]
    """
    total = int(weights.sum())
    if total <= most:
        return weights
    return np.maximum((weights * ((most - len(weights)) / total)).astype(np.int64), 1)


def kaminpar_parts(problem: PartitionProblem, *, threads: int = 1) -> NDArray[np.int32]:
    """Partition with KaMinPar (Gottesbueren et al., ESA 2021); int32 [N].

    The Python package only reads files, so the graph goes through a temporary ParHIP file of
    16 (N + 1) + 4 E' bytes, E' the undirected entries. More than one thread is not repeatable.

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
        write_parhip(path, *to_undirected(problem.indptr, problem.indices), node_weights(problem))
        graph = module.load_graph(str(path), module.GraphFileFormat.PARHIP)
    module.reseed(problem.seed)
    solver = module.KaMinPar(threads, module.default_context())
    found = solver.compute_partition(graph, max_block_weight_factors=limits)
    return np.fromiter(found, np.int32, problem.num_nodes)


def _weight_limits(problem: PartitionProblem, tolerance: float) -> list[float]:
    allowed = tolerance if np.isfinite(tolerance) else 1.0
    return [float(min(1.0, share * (1 + allowed))) for share in problem.shares]


def write_parhip(
    path: Path,
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    weights: NDArray[np.int64] | None,
) -> None:
    """Write a graph of `to_undirected` as KaMinPar reads it, with ids of 32 bits."""
    num_nodes, num_entries = len(indptr) - 1, len(indices)
    version = NO_EDGE_WEIGHTS | IDS_OF_32_BITS | (NO_NODE_WEIGHTS if weights is None else 0)
    first = 24 + 8 * (num_nodes + 1)
    with path.open("wb") as file:
        np.array([version, num_nodes, num_entries], np.uint64).tofile(file)
        for start in range(0, num_nodes + 1, BLOCK):
            (4 * indptr[start : start + BLOCK] + first).astype(np.uint64).tofile(file)
        for start in range(0, num_entries, BLOCK):
            indices[start : start + BLOCK].astype(np.uint32).tofile(file)
        if weights is not None:
            weights.astype(np.int64, copy=False).tofile(file)


def metis_parts(problem: PartitionProblem) -> NDArray[np.int32]:
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
    indptr, indices = to_undirected(problem.indptr, problem.indices)
    kind = np.dtype(module.zero_copy_dtype())
    if len(indices) > np.iinfo(kind).max:
        raise SettingsError(
            f"partitioner metis: expected at most {np.iinfo(kind).max} entries (its ids have "
            f"{8 * kind.itemsize} bits), found {len(indices)}; choose kaminpar or ldg"
        )
    weights = node_weights(problem)
    if weights is not None:
        weights = fit_weights(weights, np.iinfo(kind).max)
    tolerance = min(problem.balance.tolerances)
    options = module.Options(seed=problem.seed)
    if np.isfinite(tolerance):
        options.ufactor = max(1, round(1000 * tolerance))
    found = module.part_graph(
        problem.num_parts,
        module.CSRAdjacency(
            adj_starts=indptr.astype(kind, copy=False),
            adjacent=indices.astype(kind, copy=False),
        ),
        vweights=None if weights is None else weights.astype(kind),
        tpwgts=None if len(set(problem.weights)) == 1 else problem.shares.tolist(),
        recursive=False,
        options=options,
    )
    return np.asarray(found[1], np.int32)
