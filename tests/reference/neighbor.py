"""The definition of neighbour sampling: slow, obvious Python that the fast sampler must equal.

Selection without replacement is Floyd's (Bentley and Floyd, CACM 30(9), 1987): for a node of degree
d and fan-out k < d, the i-th choice (i = 0 .. k-1) is t = bounded(draw(stream, node, i), d-k+i+1),
or d-k+i where t was already chosen. Every k-subset is equally likely and k numbers are drawn. A
fan-out of -1, or of at least d, takes all d in the order of the graph.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.sampling.minibatch import Block, Dialect, MiniBatch
from gnnplan.runtime.sampling.rng import Purpose, bounded, draw, stream


def choose(stream: np.uint64, node: int, degree: int, fanout: int) -> list[int]:
    """Offsets into a node's neighbour list, in the order of selection."""
    if fanout in (-1, degree) or degree < fanout:
        return list(range(degree))
    chosen: list[int] = []
    for i in range(fanout):
        last = degree - fanout + i
        offset = int(bounded(draw(stream, node, i), last + 1))
        chosen.append(last if offset in chosen else offset)
    return chosen


def sample_reference(
    indptr: NDArray[np.int64],
    indices: NDArray[np.integer],
    fanouts: Sequence[int],
    seeds: NDArray[np.int64],
    *,
    dialect: Dialect,
    seed: int,
    epoch: int,
    step: int,
) -> MiniBatch:
    """Sample one batch with edge ids; arguments as in `NeighborSampler`, seeds valid."""
    local = {int(node): i for i, node in enumerate(seeds)}
    nodes = [int(node) for node in seeds]
    ends, first = [len(nodes)], 0
    hops: list[list[list[int]]] = []
    for hop, fanout in enumerate(fanouts):
        source = stream(seed, epoch, step, hop, Purpose.NEIGHBOR)
        rows: list[list[int]] = []
        for node in nodes[first : ends[-1]]:
            start = int(indptr[node])
            degree = int(indptr[node + 1]) - start
            rows.append([start + offset for offset in choose(source, node, degree, fanout)])
        for edge in (edge for row in rows for edge in row):
            neighbor = int(indices[edge])
            if neighbor not in local:
                local[neighbor] = len(nodes)
                nodes.append(neighbor)
        hops.append(rows)
        first = ends[-1] if dialect is Dialect.FIRST_SEEN else 0
        ends.append(len(nodes))
    blocks = []
    for hop in range(len(fanouts)):
        inner = 0 if dialect is Dialect.FIRST_SEEN else hop
        nested = [row for rows in hops[inner : hop + 1] for row in rows]
        blocks.append(_block(nested, indices, local, num_src=ends[hop + 1], num_dst=ends[hop]))
    return MiniBatch(
        blocks=blocks[::-1],
        n_id=np.array(nodes, dtype=np.int64),
        seeds=seeds,
        input_id=np.arange(len(seeds), dtype=np.int64),
        dialect=dialect,
        num_sampled_nodes=[ends[0], *(int(n) for n in np.diff(ends))],
        num_sampled_edges=[sum(map(len, rows)) for rows in hops],
        global_num_seeds=len(seeds),
        epoch=epoch,
        step=step,
    )


def _block(
    rows: list[list[int]],
    indices: NDArray[np.integer],
    local: dict[int, int],
    *,
    num_src: int,
    num_dst: int,
) -> Block:
    """One CSR from a list of edge positions per destination."""
    edges = [edge for row in rows for edge in row]
    indptr = np.zeros(num_dst + 1, dtype=np.int64)
    indptr[1:] = np.cumsum([len(row) for row in rows])
    return Block(
        num_src=num_src,
        num_dst=num_dst,
        indptr=indptr,
        indices=np.array([local[int(indices[edge])] for edge in edges], dtype=np.int32),
        e_id=np.array(edges, dtype=np.int64),
    )
