"""Negative destinations for links: what a model must score below the true destination.

The j-th negative of a link is found in at most `TRIES` tries. Try t takes candidate number

    bounded(draw(stream(seed, epoch, step, 0, NEGATIVE), link, j * TRIES + t), num_candidates)

and is kept unless it is the link's own destination or, on request, the graph stores the edge from
the link's source to it; the last try is kept in any case. `link` is the link's global id, so its
negatives are the same on any number of ranks.
"""

from enum import StrEnum
from typing import no_type_check

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.checks import check_graph
from gnnplan.runtime.sampling.compiled import kernel
from gnnplan.runtime.sampling.rng import Purpose, bounded_kernel, key_kernel, stream, value_kernel

TRIES = 16
"""Most candidates looked at for one negative."""


class Candidates(StrEnum):
    """What negative destinations are drawn from."""

    UNIFORM = "uniform"
    IN_BATCH = "in-batch"
    """Destinations of the step's global batch, as often as they are true ones."""


@kernel
@no_type_check
def _has_edge(indptr, indices, source, destination):
    e, end = indptr[destination], indptr[destination + 1]
    while e < end and indices[e] != source:
        e += 1
    return e < end


@kernel
@no_type_check
def _draw_negatives(stream, pairs, links, candidates, num_candidates, indptr, indices, avoid, out):
    for i in range(pairs.shape[0]):
        source, destination = pairs[i, 0], pairs[i, 1]
        key = key_kernel(stream, links[i])
        for j in range(out.shape[1]):
            node = np.int64(0)
            for t in range(TRIES):
                place = bounded_kernel(value_kernel(key, j * TRIES + t), num_candidates)
                node = candidates[place] if candidates.shape[0] else place
                if node != destination and not (avoid and _has_edge(indptr, indices, source, node)):
                    break
            out[i, j] = node


class NegativeSampler:
    """Draws negative destinations; any thread may call it.

    `indices` are read only to avoid edges: then a candidate is drawn again where the graph stores
    the edge, by a scan of the candidate's row.
    """

    def __init__(
        self,
        indptr: NDArray[np.integer],
        indices: NDArray[np.integer],
        num_negatives: int,
        *,
        candidates: Candidates = Candidates.UNIFORM,
        avoid_edges: bool = True,
        seed: int = 0,
    ) -> None:
        if num_negatives < 1:
            raise SamplerError(f"expected at least one negative per link, found {num_negatives}")
        self.indptr, self.indices = check_graph(indptr, indices)
        self.num_negatives = num_negatives
        self.candidates = Candidates(candidates)
        self.avoid_edges = avoid_edges
        self.seed = seed

    def draw(
        self,
        pairs: NDArray[np.int64],
        links: NDArray[np.int64],
        *,
        epoch: int,
        step: int,
        batch_destinations: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64]:
        """Draw negative destinations of some of a step's links, int64 [n, num_negatives].

        `pairs` are source and destination of each link, int64 [n, 2], `links` its global id;
        `batch_destinations` those of the global batch, for in-batch negatives, which are refused
        without.
        """
        num_nodes = self.indptr.shape[0] - 1
        check_pairs(pairs, num_nodes)
        pool = np.zeros(0, np.int64)
        if self.candidates is Candidates.IN_BATCH:
            if batch_destinations is None or len(batch_destinations) == 0:
                raise SamplerError(
                    "expected the global batch's destinations to draw in-batch negatives from, "
                    "found none; pass batch_destinations"
                )
            pool = np.ascontiguousarray(batch_destinations, dtype=np.int64)
        out = np.empty((pairs.shape[0], self.num_negatives), np.int64)
        _draw_negatives(
            stream(self.seed, epoch, step, 0, Purpose.NEGATIVE),
            np.ascontiguousarray(pairs, dtype=np.int64),
            np.ascontiguousarray(links, dtype=np.int64),
            pool,
            len(pool) or num_nodes,
            self.indptr,
            self.indices,
            self.avoid_edges,
            out,
        )
        return out


def check_pairs(pairs: NDArray[np.int64], num_nodes: int | None = None) -> None:
    """Refuse node pairs that are not [n, 2], or out of range where the number of nodes is given."""
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise SamplerError(
            f"expected links as [n, 2] pairs (source, destination), found {list(pairs.shape)}"
        )
    if num_nodes is None:
        return
    bad = (pairs < 0) | (pairs >= num_nodes)
    if bad.any():
        raise SamplerError(
            f"expected links between nodes 0 and {num_nodes - 1}, found node "
            f"{int(pairs[bad][0])}; check the links against the graph"
        )
