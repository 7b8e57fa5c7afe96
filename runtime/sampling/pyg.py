"""View a mini-batch as PyG's NeighborLoader would have given it, for users' own training loops."""

from typing import TYPE_CHECKING, Any

import numpy as np

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.graph.dataset import Graph, GraphTypes, rows_within_types
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch

if TYPE_CHECKING:
    from torch_geometric.data import Data, HeteroData


def to_pyg(batch: MiniBatch, x: Any = None, y: Any = None) -> "Data":
    """View a first_seen batch as `torch_geometric.data.Data`.

    Fields: x, y, edge_index (source, destination), n_id with the seeds first, e_id (places in the
    graph's `indices`) where the sampler kept edge ids, input_id, batch_size, num_sampled_nodes and
    num_sampled_edges (lists); where the sampler weights, edge_weight, and weights_of_sampler is
    True; for links src_index, dst_pos_index and dst_neg_index as LinkLoader gives them for
    triplets, dst_neg_index always [num_links, num_negatives].

    Args:
        batch: In the first_seen dialect.
        x: Feature rows of `batch.n_id`, a tensor or array [num_input, ...], or None.
        y: Labels of `batch.n_id` (all nodes, not only the seeds), likewise.
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


class HeteroView:
    """Turns batches of one typed graph into HeteroData.

    Edge types have to be named `source__relation__destination`, of the graph's node types.
    """

    def __init__(self, graph: Graph, types: GraphTypes) -> None:
        self._keys = [_triple(name, types.node_types) for name in types.edge_types]
        self._types = types
        self._y = graph.y
        node_type = graph.node_type
        if node_type is None or not graph.x_by_type:
            node_type = np.zeros(graph.num_nodes, np.int32)
        self._node_type = np.ascontiguousarray(node_type)
        self._row_of = rows_within_types(self._node_type, len(types.node_types))

    def __call__(self, batch: MiniBatch, x: Any = None) -> "HeteroData":
        """View a first_seen batch of a `TypedSampler`, with seeds of one type.

        Per node type: n_id (rows of the type's own table), x (its own columns of [num_input, widest
        type]), y, and num_sampled_nodes by hop; per edge type: edge_index, num_sampled_edges by
        hop, and e_id (positions in the dataset's `indices`) where the sampler kept edge ids. The
        seeds' type has batch_size and input_id, its seeds first.
        """
        import torch
        from torch_geometric.data import HeteroData

        outer = batch.blocks[0]
        if batch.dialect is not Dialect.FIRST_SEEN or outer.relation_ptr is None:
            raise SamplerError(
                "expected a first_seen batch of a TypedSampler for a HeteroData, found "
                f"{batch.dialect.value}{'' if outer.relation_ptr is not None else ', not typed'}"
            )
        node_type = self._node_type[batch.n_id]
        if len(np.unique(node_type[: batch.num_seeds])) > 1:
            raise SamplerError("expected seeds of one node type for a HeteroData, found several")
        data = HeteroData()
        hop_of_node = np.repeat(np.arange(len(batch.num_sampled_nodes)), batch.num_sampled_nodes)
        local = rows_within_types(node_type, len(self._types.node_types))
        for number, name in enumerate(self._types.node_types):
            own = np.flatnonzero(node_type == number)
            store = data[name]
            store.num_nodes = len(own)
            store.n_id = torch.from_numpy(self._row_of[batch.n_id[own]])
            store.num_sampled_nodes = _counts(hop_of_node[own], len(batch.num_sampled_nodes))
            if x is not None:
                store.x = x[torch.from_numpy(own), : self._types.widths[number]]
            if self._y is not None:
                store.y = torch.from_numpy(np.ascontiguousarray(self._y[batch.n_id[own]]))
        self._add_edges(data, batch, local, hop_of_node)
        if batch.num_seeds:
            seeds = data[self._types.node_types[int(node_type[0])]]
            seeds.batch_size, seeds.input_id = batch.num_seeds, torch.from_numpy(batch.input_id)
        return data

    def _add_edges(self, data: "HeteroData", batch: MiniBatch, local: Any, hop_of: Any) -> None:
        import torch

        outer = batch.blocks[0]
        assert outer.relation_ptr is not None
        sizes = np.diff(outer.relation_ptr)
        relation = np.repeat(np.arange(len(sizes)) % len(self._keys), sizes)
        destination = np.repeat(np.arange(len(sizes)) // len(self._keys), sizes)
        for number, key in enumerate(self._keys):
            own = np.flatnonzero(relation == number)
            to = destination[own]
            store = data[key]
            store.edge_index = torch.from_numpy(np.stack([local[outer.indices[own]], local[to]]))
            store.num_sampled_edges = _counts(hop_of[to], len(batch.blocks))
            if outer.e_id is not None:
                store.e_id = torch.from_numpy(outer.e_id[own])


def _counts(hops: Any, num_hops: int) -> list[int]:
    return np.bincount(hops, minlength=num_hops).tolist()


def _triple(name: str, node_types: list[str]) -> tuple[str, str, str]:
    parts = name.split("__")
    if len(parts) != 3 or parts[0] not in node_types or parts[2] not in node_types:
        raise SamplerError(
            "expected edge types named source__relation__destination, with node types among "
            f"{', '.join(node_types)}, found {name!r}; iterate blocks, or rename it in graph.json"
        )
    return parts[0], parts[1], parts[2]
