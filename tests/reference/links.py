"""The definition of what links add to sampling: slow, obvious Python that the fast code must equal.

Taking edges out of a graph is done before sampling: what is drawn is what the reduced graph gives.
"""

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.sampling.exclusion import TRIES
from gnnplan.runtime.sampling.rng import bounded, draw


def without_edges(
    indptr: NDArray[np.int64],
    indices: NDArray[np.integer],
    pairs: list[tuple[int, int]],
) -> tuple[NDArray[np.int64], NDArray[np.integer], NDArray[np.int64]]:
    """The graph without every stored edge (source, destination) of the pairs.

    Returns:
        indptr and indices of the reduced graph, and each of its edges' position in the full one.
    """
    out = set(pairs)
    kept = [
        [e for e in range(indptr[v], indptr[v + 1]) if (int(indices[e]), v) not in out]
        for v in range(len(indptr) - 1)
    ]
    places = np.array([e for row in kept for e in row], dtype=np.int64)
    ends = np.cumsum([0, *(len(row) for row in kept)]).astype(np.int64)
    return ends, indices[places], places


def negatives_of_link(
    stream: np.uint64,
    link: int,
    source: int,
    destination: int,
    candidates: NDArray[np.int64],
    edges: set[tuple[int, int]],
    num_negatives: int,
) -> list[int]:
    """Negative destinations of one link; `edges` are those to avoid, if any."""
    negatives = []
    for j in range(num_negatives):
        node = -1
        for t in range(TRIES):
            place = int(bounded(draw(stream, link, j * TRIES + t), len(candidates)))
            node = int(candidates[place])
            if node != destination and (source, node) not in edges:
                break
        negatives.append(node)
    return negatives
