"""Stacking batches one after another, and taking the stack apart again, without copying."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.sampling.bulk.memory import Ledger
from runtime.sampling.bulk.product import StackedBlocks
from runtime.sampling.checks import bad_seed
from runtime.sampling.minibatch import Block, Dialect, MiniBatch, Request, make_batch
from runtime.sampling.relabel import Table, find_bad_seed

NOTHING = np.empty(0, dtype=np.int64)


def join_seeds(requests: Sequence[Request]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All seeds, one batch after another, and where each batch ends: [total] and [k + 1]."""
    sizes = [request.seeds.shape[0] for request in requests]
    ends = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=ends[1:])
    nodes = np.concatenate([request.seeds for request in requests]).astype(np.int64, copy=False)
    return nodes, ends


def stack_seeds(
    requests: Sequence[Request], num_nodes: int, table: Table
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`join_seeds`, checked.

    Raises:
        SamplerError: a seed is out of range, or occurs twice in its batch.
    """
    nodes, ends = join_seeds(requests)
    table.reserve(int(np.diff(ends).max()))
    bad = find_bad_seed(table.arrays(), nodes, ends, num_nodes)
    if bad >= 0:
        batch = int(np.searchsorted(ends, bad, side="right")) - 1
        raise bad_seed(requests[batch].seeds, int(bad - ends[batch]), num_nodes)
    return nodes, ends


def forget_nodes(layer: StackedBlocks, ledger: Ledger) -> None:
    """Drop a layer's node ids: the next layer's start with them."""
    ledger.free(layer.nodes)
    layer.nodes = NOTHING


def unstack(layers: Sequence[StackedBlocks], requests: Sequence[Request]) -> list[MiniBatch]:
    """The batches of an every_hop stack, blocks outermost first, as views of its arrays."""
    hops = [
        (layer, layer.dst_ends.tolist(), layer.edge_ends.tolist(), layer.ends.tolist())
        for layer in reversed(layers)
    ]
    nodes, node_ends = layers[-1].nodes, hops[0][3]
    batches = []
    for b, request in enumerate(requests):
        blocks = []
        for layer, dst_ends, edge_ends, ends in hops:
            edges = slice(edge_ends[b], edge_ends[b + 1])
            blocks.append(
                Block(
                    num_src=ends[b + 1] - ends[b],
                    num_dst=dst_ends[b + 1] - dst_ends[b],
                    indptr=layer.row_ptr[dst_ends[b] + b : dst_ends[b + 1] + b + 1],
                    indices=layer.indices[edges],
                    e_id=None if layer.e_id is None else layer.e_id[edges],
                    weight=None if layer.weight is None else layer.weight[edges],
                )
            )
        edges_drawn = [ends[b + 1] - ends[b] for _, _, ends, _ in reversed(hops)]
        n_id = nodes[node_ends[b] : node_ends[b + 1]]
        batches.append(make_batch(request, blocks, n_id, edges_drawn, Dialect.EVERY_HOP))
    return batches
