"""A mini-batch as PyG's NeighborLoader would have given it, for users' own training loops."""

from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.errors import SamplerError
from runtime.sampling.minibatch import Dialect, MiniBatch

if TYPE_CHECKING:
    from torch_geometric.data import Data


def to_pyg(batch: MiniBatch, x: Any = None, y: Any = None) -> "Data":
    """View a first_seen batch as `torch_geometric.data.Data`.

    Fields: x, y, edge_index (source, destination), n_id with the seeds first, e_id (places in the
    graph's `indices`) where the sampler kept edge ids, input_id, batch_size, num_sampled_nodes and
    num_sampled_edges (lists); where the sampler weights, edge_weight, and weights_of_sampler is
    True; for links src_index, dst_pos_index and dst_neg_index as
    LinkLoader gives them for triplets, dst_neg_index always [num_links, num_negatives].

    Args:
        batch: In the first_seen dialect.
        x: Feature rows of `batch.n_id`, a tensor or array [num_input, ...], or None.
        y: Labels of `batch.n_id` (all nodes, not only the seeds), likewise.

    Raises:
        SamplerError: the batch is in the every_hop dialect, or x or y have another length.
    """
    import torch
    from torch_geometric.data import Data

    if batch.dialect is not Dialect.FIRST_SEEN:
        raise SamplerError(
            f"expected a first_seen batch for a PyG Data, found {batch.dialect.value}: a vertex "
            "draws anew at each hop; wrap the model with runtime.models.planned instead"
        )
    outer = batch.blocks[0]
    destinations = np.repeat(np.arange(outer.num_dst), np.diff(outer.indptr))
    data = Data(
        edge_index=torch.stack(
            [torch.from_numpy(outer.indices.astype(np.int64)), torch.from_numpy(destinations)]
        ),
        n_id=torch.from_numpy(batch.n_id),
        input_id=torch.from_numpy(batch.input_id),
        batch_size=batch.num_seeds,
        num_sampled_nodes=list(batch.num_sampled_nodes),
        num_sampled_edges=list(batch.num_sampled_edges),
    )
    data.num_nodes = len(batch.n_id)
    for name, rows in (("x", x), ("y", y)):
        if rows is not None:
            data[name] = torch.as_tensor(_one_row_per_node(name, rows, len(batch.n_id)))
    if batch.links is not None:
        links = torch.from_numpy(batch.links)
        data.src_index, data.dst_pos_index = links[:, 0], links[:, 1]
        data.dst_neg_index = links[:, 2:]
    if outer.e_id is not None:
        data.e_id = torch.from_numpy(outer.e_id)
    if outer.weight is not None:
        data.edge_weight, data.weights_of_sampler = torch.from_numpy(outer.weight), True
    return data


def _one_row_per_node(name: str, rows: Any, num_nodes: int) -> Any:
    if len(rows) != num_nodes:
        raise SamplerError(
            f"expected {name} with one row per node of the batch ({num_nodes}), found {len(rows)}; "
            f"pass {name}[batch.n_id]"
        )
    return rows
