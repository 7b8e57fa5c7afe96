"""Tiny graphs, and partitions counted edge by edge, to check the fast counts against."""

import numpy as np
from numpy.typing import NDArray

Csc = tuple[NDArray[np.int64], NDArray[np.int32]]


def csc(num_nodes: int, edges: list[tuple[int, int]], *, both: bool = True) -> Csc:
    """In-neighbour lists of (source, destination) pairs; `both` stores each edge both ways."""
    pairs = edges + [(v, u) for u, v in edges] if both else edges
    pairs = sorted(pairs, key=lambda pair: (pair[1], pair[0]))
    counts = np.bincount([v for _, v in pairs], minlength=num_nodes) if pairs else [0] * num_nodes
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return indptr, np.array([u for u, _ in pairs], np.int32)


def random_csc(num_nodes: int, num_edges: int, seed: int) -> Csc:
    """Directed, rows in random order, with loops and repeated edges."""
    rng = np.random.default_rng(seed)
    destination = np.sort(rng.integers(0, num_nodes, num_edges))
    counts = np.bincount(destination, minlength=num_nodes)
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return indptr, rng.integers(0, num_nodes, num_edges).astype(np.int32)


def ring_of_cliques(cliques: int, size: int) -> Csc:
    """Complete graphs, each joined to the next by one edge: the best cut is known."""
    edges = [
        (c * size + i, c * size + j) for c in range(cliques) for i in range(size) for j in range(i)
    ]
    edges += [(c * size, (c + 1) % cliques * size + 1) for c in range(cliques)]
    return csc(cliques * size, edges)


def stored_edges(indptr: NDArray[np.int64], indices: NDArray[np.int32]) -> list[tuple[int, int]]:
    """(source, destination) of every stored edge."""
    return [(int(u), v) for v in range(len(indptr) - 1) for u in indices[indptr[v] : indptr[v + 1]]]


def brute_boundaries(
    indptr: NDArray[np.int64], indices: NDArray[np.int32], parts: NDArray[np.int32], num: int
) -> list[set[int]]:
    """U_i of formulas 3.1, by its definition."""
    found: list[set[int]] = [set() for _ in range(num)]
    for u, v in stored_edges(indptr, indices):
        if parts[u] != parts[v]:
            found[parts[v]].add(u)
    return found
