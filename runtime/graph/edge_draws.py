"""Random undirected edges, vectorised: R-MAT and block-model draws, and making them distinct."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from runtime.errors import DatasetError

Ends = tuple[NDArray[np.int64], NDArray[np.int64]]
Drawer = Callable[[int], Ends]
"""Draws up to that many edges: two equally long arrays of node ids."""

DRAW_EDGES = 1 << 21
GRAPH500 = (0.57, 0.19, 0.19)
"""Probabilities a, b, c of the quadrants; d is the rest (0.05)."""


def rmat_drawer(num_nodes: int, rng: np.random.Generator) -> Drawer:
    """R-MAT edges: each bit level of (u, v) falls into one of four quadrants."""
    levels = max(1, (num_nodes - 1).bit_length())
    a, b, c = (np.float32(p) for p in GRAPH500)

    def draw(count: int) -> Ends:
        u = np.zeros(count, np.int64)
        v = np.zeros(count, np.int64)
        for _ in range(levels):
            r = rng.random(count, dtype=np.float32)
            lower = r >= a + b
            u <<= 1
            u |= lower
            v <<= 1
            v |= np.where(lower, r >= a + b + c, r >= a)
        inside = (u < num_nodes) & (v < num_nodes)
        return u[inside], v[inside]

    return draw


def block_model_drawer(
    weights: NDArray[np.float64],
    communities: NDArray[np.int64],
    homophily: float,
    rng: np.random.Generator,
) -> Drawer:
    """Degree-corrected block-model edges.

    Args:
        weights: [num_nodes] positive; a node is drawn in proportion to it.
        communities: [num_nodes] rising community of each node.
        homophily: probability that the second end is drawn from the first's community.
        rng: source of randomness.
    """
    ends = np.cumsum(weights)
    first = np.searchsorted(communities, communities, side="left")
    last = np.searchsorted(communities, communities, side="right") - 1
    low, high = (ends - weights)[first], ends[last]

    def draw(count: int) -> Ends:
        u = np.searchsorted(ends, rng.random(count) * ends[-1], side="right")
        inside = rng.random(count) < homophily
        start, stop = np.where(inside, low[u], 0.0), np.where(inside, high[u], ends[-1])
        v = np.searchsorted(ends, start + rng.random(count) * (stop - start), side="right")
        most = len(ends) - 1  # rounding may land on the total itself
        return np.minimum(u, most), np.minimum(v, most)

    return draw


def distinct_pairs(
    draw: Drawer, num_nodes: int, wanted: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Exactly `wanted` distinct undirected edges u < v as sorted keys `u * num_nodes + v`.

    Raises:
        DatasetError: so many edges that new ones are hardly found any more.
    """
    keys = np.empty(0, np.int64)
    while len(keys) < wanted:
        have = len(keys)
        missing = wanted - have
        fresh: list[NDArray[np.int64]] = [keys]
        for start in range(0, int(missing * 1.1) + 1024, DRAW_EDGES):
            u, v = draw(min(DRAW_EDGES, int(missing * 1.1) + 1024 - start))
            key = np.minimum(u, v) * num_nodes + np.maximum(u, v)
            fresh.append(key[u != v])
        keys = np.concatenate(fresh)
        keys.sort()
        keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])]
        if len(keys) - have < min(missing, max(64, missing // 100)):
            raise DatasetError(
                f"found only {len(keys)} distinct edges of {wanted} among {num_nodes} nodes; "
                "lower the degree or raise the number of nodes"
            )
    if len(keys) > wanted:
        surplus = rng.choice(len(keys), len(keys) - wanted, replace=False, shuffle=False)
        keys = np.delete(keys, surplus)
    return keys
