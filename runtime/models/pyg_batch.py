"""The blocks behind a batch in PyG's form, as NeighborLoader and PlannedLoader give it."""

from typing import Any

import numpy as np

from runtime.errors import InputError
from runtime.sampling.minibatch import Block, Dialect, MiniBatch


def minibatch_of(data: Any) -> MiniBatch:
    """The nested blocks behind a first_seen PyG batch.

    Args:
        data: x, edge_index, num_sampled_nodes and num_sampled_edges as NeighborLoader gives them:
            vertices and edges by hop, an edge's hop that of its destination.

    Raises:
        InputError: the batch has no sampled counts, or its edges are not ordered by hop.
    """
    if any(
        getattr(data, name, None) is None for name in ("num_sampled_nodes", "num_sampled_edges")
    ):
        raise InputError(
            "planned: expected a batch with num_sampled_nodes and num_sampled_edges, found none; "
            "use PlannedLoader or NeighborLoader"
        )
    if getattr(data, "weights_of_sampler", False):
        raise InputError(
            "planned: expected edges without a sampler's weights, which forward(x, edge_index) "
            "ignores, found some in edge_weight; use a built-in model with this sampler"
        )
    nodes, edges = np.cumsum(data.num_sampled_nodes), np.cumsum(data.num_sampled_edges)
    source, target = data.edge_index.cpu().numpy()
    if np.any(target[1:] < target[:-1]):
        order = np.argsort(target, kind="stable")
        source, target = source[order], target[order]
    starts = np.searchsorted(target, np.arange(nodes[-2] + 1))
    if not np.array_equal(starts[nodes[:-1]], edges):
        raise InputError("planned: expected edges by the hop of their destination (first_seen)")
    indices = source.astype(np.int32)
    blocks = [
        Block(
            num_src=int(nodes[hop + 1]),
            num_dst=int(nodes[hop]),
            indptr=starts[: nodes[hop] + 1],
            indices=indices[: edges[hop]],
        )
        for hop in reversed(range(len(edges)))
    ]
    n_id = getattr(data, "n_id", None)
    n_id = np.arange(nodes[-1]) if n_id is None else n_id.cpu().numpy()
    return MiniBatch(
        blocks=blocks,
        n_id=n_id,
        seeds=n_id[: nodes[0]],
        input_id=np.arange(nodes[0]),
        dialect=Dialect.FIRST_SEEN,
        num_sampled_nodes=list(data.num_sampled_nodes),
        num_sampled_edges=list(data.num_sampled_edges),
        x=data.x,
    )
