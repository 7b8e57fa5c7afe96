"""The PyG view has NeighborLoader's fields, and layers compute on it what blocks say."""

from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import trim_to_layer

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.minibatch import Block, Dialect
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from gnnplan.runtime.sampling.pyg import to_pyg

NUM_NODES = 300


def make_batch(dialect: Dialect = Dialect.FIRST_SEEN, *, edge_ids: bool = True) -> tuple:
    rng = np.random.default_rng(0)
    degrees = rng.integers(0, 12, NUM_NODES)
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    indices = rng.integers(0, NUM_NODES, int(indptr[-1])).astype(np.int32)
    sampler = NeighborSampler(indptr, indices, [4, 3], dialect=dialect, edge_ids=edge_ids)
    seeds = rng.permutation(NUM_NODES)[:20].astype(np.int64)
    return indptr, indices, sampler.sample(seeds, epoch=0, step=0, input_id=np.arange(20) + 5)


def test_edges_are_those_of_the_graph() -> None:
    indptr, indices, batch = make_batch()
    data: Any = to_pyg(batch)
    source, target = data.n_id[data.edge_index].numpy()
    e_id = data.e_id.numpy()
    np.testing.assert_array_equal(source, indices[e_id])
    np.testing.assert_array_equal(target, np.searchsorted(indptr, e_id, side="right") - 1)


def test_fields_are_those_of_neighbor_loader() -> None:
    _, _, batch = make_batch()
    x = torch.randn(NUM_NODES, 8)
    y = torch.arange(NUM_NODES)
    data: Any = to_pyg(batch, x[batch.n_id], y[batch.n_id])
    assert (data.batch_size, data.num_nodes) == (20, len(batch.n_id))
    assert data.input_id.tolist() == list(range(5, 25))
    assert data.n_id[:20].tolist() == batch.seeds.tolist()
    assert torch.equal(data.x, x[data.n_id])
    assert torch.equal(data.y, data.n_id)
    assert sum(data.num_sampled_nodes) == data.num_nodes
    assert sum(data.num_sampled_edges) == data.edge_index.shape[1]
    assert data.edge_index.dtype == torch.int64


def test_labels_are_handed_out_where_the_rows_lie() -> None:
    """A GPU's rows come with labels that a loss beside the model's outputs takes."""
    _, _, batch = make_batch()
    x = torch.empty(len(batch.n_id), 8, device="meta")
    data: Any = to_pyg(batch, x, torch.arange(len(batch.n_id)))
    assert data.y.device == data.x.device == x.device


def test_trimmed_pyg_layers_agree_with_plain_means_over_the_blocks() -> None:
    _, _, batch = make_batch()
    data: Any = to_pyg(batch, torch.randn(len(batch.n_id), 6))
    torch.manual_seed(0)
    layers = [SAGEConv(6, 6), SAGEConv(6, 6)]
    x, edge_index = data.x, data.edge_index
    for depth, layer in enumerate(layers):
        x, edge_index, _ = trim_to_layer(
            depth, data.num_sampled_nodes, data.num_sampled_edges, x, edge_index
        )
        x = layer(x, edge_index)
    h: torch.Tensor = data.x
    for layer, block in zip(layers, batch.blocks, strict=True):
        h = layer.lin_l(block_mean(block, h)) + layer.lin_r(h[: block.num_dst])
    torch.testing.assert_close(x[:20], h)


def block_mean(block: Block, h: torch.Tensor) -> torch.Tensor:
    """Mean over each row's sources; rows without sources are zero."""
    rows = [h[block.indices[a:b]] for a, b in zip(block.indptr, block.indptr[1:], strict=False)]
    return torch.stack([row.sum(0) / max(1, len(row)) for row in rows])


def test_every_hop_batches_are_refused_with_the_wrapper_to_use() -> None:
    _, _, batch = make_batch(Dialect.EVERY_HOP)
    with pytest.raises(SamplerError, match=r"runtime\.models\.planned"):
        to_pyg(batch)


def test_rows_of_another_length_are_refused() -> None:
    _, _, batch = make_batch(edge_ids=False)
    assert "e_id" not in to_pyg(batch)
    with pytest.raises(SamplerError, match=r"pass y\[batch\.n_id\]"):
        to_pyg(batch, y=torch.zeros(NUM_NODES))
