"""R-GCN on typed blocks equals PyG's own convolution, in value and gradient."""

from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.nn import RGCNConv

from gnnplan.runtime.errors import InputError
from gnnplan.runtime.graph.dataset import GraphTypes
from gnnplan.runtime.models.adjacency import TorchBlock, torch_blocks
from gnnplan.runtime.models.build import apply_rgcn, build_model, relation_blocks
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from gnnplan.runtime.sampling.typed import TypedSampler

NUM_NODES, NUM_RELATIONS = 80, 3
TYPES = GraphTypes(edge_types=["a", "b", "c"], node_types=["p", "q"], widths=[5, 3])


def make_batch(dialect: Dialect = Dialect.FIRST_SEEN) -> tuple[MiniBatch, np.ndarray]:
    rng = np.random.default_rng(0)
    degrees = rng.integers(0, 15, NUM_NODES)
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    indices = rng.integers(0, NUM_NODES, int(indptr[-1])).astype(np.int32)
    edge_type = rng.integers(0, NUM_RELATIONS, len(indices)).astype(np.int32)
    node_type = (np.arange(NUM_NODES) % 2).astype(np.int32)
    sampler = TypedSampler(
        indptr, indices, edge_type, [[3, 2]] * 3, node_type=node_type, dialect=dialect,
        edge_ids=True,
    )  # fmt: skip
    return sampler.sample(np.arange(20), epoch=0, step=0), edge_type


def pyg_layer(conv: RGCNConv, x: torch.Tensor, block: TorchBlock, kinds: Any) -> torch.Tensor:
    return conv((x, x[: block.num_dst]), block.edge_index(), torch.from_numpy(kinds).long())


@pytest.mark.parametrize("dialect", list(Dialect))
def test_a_layer_equals_pygs_convolution(dialect: Dialect) -> None:
    batch, edge_type = make_batch(dialect)
    torch.manual_seed(0)
    for block, raw in zip(torch_blocks(batch), batch.blocks, strict=True):
        conv = RGCNConv(6, 4, NUM_RELATIONS)
        results = []
        for run in (
            lambda x, c=conv, b=block: apply_rgcn(c, x, b),
            lambda x, c=conv, b=block, k=edge_type[raw.e_id]: pyg_layer(c, x, b, k),
        ):
            torch.manual_seed(1)
            x = torch.randn(block.num_src, 6, requires_grad=True)
            conv.zero_grad()
            out = run(x)
            (out * torch.randn(out.shape)).sum().backward()
            grads = [x.grad, *(p.grad.clone() for p in conv.parameters() if p.grad is not None)]
            results.append([out.detach(), *grads])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_model_is_input_maps_by_type_and_then_the_layers() -> None:
    batch, edge_type = make_batch()
    model: Any = build_model(
        Workload(model="rgcn", hidden=8, fanouts=[3, 2]), 5, 4, "multiclass", types=TYPES
    )
    x = torch.randn(len(batch.n_id), 5)
    x[batch.n_id % 2 == 1, 3:] = float("nan")  # columns that type q does not have
    blocks = torch_blocks(batch)
    h = torch.stack(
        [
            model.inputs[v % 2](row[: TYPES.widths[v % 2]])
            for v, row in zip(batch.n_id.tolist(), x, strict=True)
        ]
    ).relu()
    kinds = [edge_type[b.e_id] for b in batch.blocks]
    h = pyg_layer(model.convs[0], h, blocks[0], kinds[0]).relu()
    h = pyg_layer(model.convs[1], h, blocks[1], kinds[1])
    torch.testing.assert_close(model(x, blocks), h, rtol=1e-4, atol=1e-5)


def test_blocks_by_relation_hold_every_edge_once() -> None:
    batch, edge_type = make_batch()
    raw, block = batch.blocks[0], torch_blocks(batch)[0]
    parts = relation_blocks(block, NUM_RELATIONS)
    assert sum(part.num_edges for part in parts) == block.num_edges
    kinds = torch.from_numpy(edge_type[raw.e_id])
    for relation, part in enumerate(parts):
        assert torch.equal(part.edge_index(), block.edge_index()[:, kinds == relation])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="expected the graph's types"):
        build_model(Workload(model="rgcn"), 5, 4, "multiclass")
    batch, _ = make_batch()
    with pytest.raises(InputError, match="edges of 2 types"):
        relation_blocks(torch_blocks(batch)[0], 2)
    indptr = np.array([0, 1, 2], dtype=np.int64)
    plain = NeighborSampler(indptr, np.array([1, 0], dtype=np.int32), [1])
    untyped = torch_blocks(plain.sample(np.array([0]), epoch=0, step=0))
    with pytest.raises(InputError, match="sample with TypedSampler"):
        relation_blocks(untyped[0], 1)
