"""The definition of typed neighbour sampling: slow, obvious Python that `TypedSampler` must equal.

Vertex v chooses among its edges of type r, in the graph's order, as `reference.choose` does for the
id v * R + r. Everything else is as for one edge type.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.sampling.minibatch import Dialect
from gnnplan.runtime.sampling.rng import Purpose, stream
from tests.reference.neighbor import choose

Row = list[int]
"""Positions in the graph's `indices` of the edges that a vertex draws, type after type."""


def sample_typed_reference(
    indptr: NDArray[np.int64],
    indices: NDArray[np.integer],
    edge_type: NDArray[np.integer],
    fanouts: Sequence[Sequence[int]],
    seeds: NDArray[np.int64],
    *,
    dialect: Dialect,
    seed: int,
    epoch: int,
    step: int,
) -> tuple[list[int], list[list[list[Row]]]]:
    """The batch's vertices in order of appearance, and per hop, row and type the edges drawn."""
    num_types = len(fanouts)
    nodes, first = [int(v) for v in seeds], 0
    hops: list[list[list[Row]]] = []
    for hop in range(len(fanouts[0])):
        source = stream(seed, epoch, step, hop, Purpose.NEIGHBOR)
        rows: list[list[Row]] = []
        for v in nodes[first:]:
            places = range(int(indptr[v]), int(indptr[v + 1]))
            by_type = [[e for e in places if edge_type[e] == r] for r in range(num_types)]
            rows.append(
                [
                    [own[i] for i in choose(source, v * num_types + r, len(own), fanouts[r][hop])]
                    for r, own in enumerate(by_type)
                ]
            )
        first = len(nodes) if dialect is Dialect.FIRST_SEEN else 0
        for edge in (edge for row in rows for part in row for edge in part):
            if int(indices[edge]) not in nodes:
                nodes.append(int(indices[edge]))
        hops.append(rows)
    return nodes, hops
