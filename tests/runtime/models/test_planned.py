import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric.nn import GATv2Conv, GCNConv, GraphConv, SAGEConv
from torch_geometric.nn.models import GAT, GCN, GraphSAGE

from runtime.errors import InputError
from runtime.models.adjacency import torch_blocks
from runtime.models.planned import planned
from runtime.sampling.cooperative_exchange import RowExchange
from runtime.sampling.minibatch import Dialect, MiniBatch
from runtime.sampling.pyg import to_pyg


class ByHand(nn.Module):
    """Two convolutions with something between them."""

    def __init__(self, conv: type[nn.Module], between: nn.Module | None = None):
        super().__init__()
        self.first, self.second = conv(12, 16), conv(16, 5)
        self.between = between or nn.ReLU()

    def forward(self, x, edge_index):
        return self.second(self.between(self.first(x, edge_index)), edge_index)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = SAGEConv(12, 12), SAGEConv(12, 5)

    def forward(self, x, edge_index):
        return self.second(x + self.first(x, edge_index).relu(), edge_index)


class Rewires(ByHand):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index.flip(0).flip(0))


class OneConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = SAGEConv(12, 5)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


@pytest.fixture
def batch(make_csc, make_batch) -> MiniBatch:
    batch = make_batch(make_csc(300, 8, 1), list(range(0, 80, 2)), [5, 3], 2)
    batch.x = torch.randn(len(batch.n_id), 12)
    return batch


MODELS = {
    "GraphSAGE": lambda: GraphSAGE(12, 16, 2, 5),
    "GCN": lambda: GCN(12, 16, 2, 5),
    "GAT": lambda: GAT(12, 16, 2, 5, heads=4),
    "GraphSAGE max": lambda: GraphSAGE(12, 16, 2, 5, aggr="max"),
    "GraphSAGE with dropout": lambda: GraphSAGE(12, 16, 2, 5, dropout=0.5),
    "LayerNorm": lambda: GraphSAGE(12, 16, 2, 5, norm="LayerNorm", norm_kwargs={"mode": "node"}),
    "SAGEConv by hand": lambda: ByHand(SAGEConv),
    "GCNConv by hand": lambda: ByHand(GCNConv),
    "GATv2Conv by hand": lambda: ByHand(GATv2Conv),
    "GraphConv by hand": lambda: ByHand(GraphConv),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("as_pyg", [False, True])
def test_outputs_and_gradients_equal_those_of_the_unwrapped_model(name, as_pyg, batch):
    model = MODELS[name]()
    wrapped = planned(model)
    given = to_pyg(batch, batch.x) if as_pyg else batch
    wrapped(given)
    assert wrapped.uses_blocks
    model.eval()
    expected = model(batch.x, torch_blocks(batch)[0].edge_index())[:40]
    expected.square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    found = wrapped(given)
    found.square().sum().backward()
    assert found.shape == (40, 5)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert len(grads) == len(list(model.parameters()))
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (ByHand(SAGEConv, nn.BatchNorm1d(16)), "training mode"),
        (Residual(), "size of tensor"),
        (Rewires(SAGEConv), "another edge_index"),
        (OneConv(), "1 convolutions ran over 2"),
        (GraphSAGE(12, 16, 3, 5), "other rows|more convolutions"),
        (GraphSAGE(12, 16, 2, 5, jk="cat"), "sizes of tensors|Sizes of tensors"),
    ],
)
def test_a_model_that_blocks_would_change_runs_unchanged_with_one_warning(model, why, batch):
    wrapped = planned(model)
    with pytest.warns(UserWarning, match=why):
        found = wrapped(batch)
    assert wrapped.uses_blocks is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped(batch)
    model.eval()
    expected = model(batch.x, torch_blocks(batch)[0].edge_index())[:40]
    assert found.shape == expected.shape
    torch.testing.assert_close(wrapped(batch), expected)


def test_batch_norm_in_evaluation_mode_can_use_blocks(batch):
    wrapped = planned(ByHand(SAGEConv, nn.BatchNorm1d(16)).eval())
    wrapped(batch)
    assert wrapped.uses_blocks


def test_the_check_leaves_statistics_random_state_and_modes_alone(batch):
    model = ByHand(SAGEConv, nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.5)))
    wrapped = planned(model)
    wrapped.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match="training mode"):
        found = wrapped(batch)
    assert model.training
    model.load_state_dict(before)
    torch.manual_seed(3)
    expected = model(batch.x, torch_blocks(batch)[0].edge_index())[:40]
    torch.testing.assert_close(found, expected)


def test_an_empty_batch_leaves_the_decision_to_the_next_one(batch, make_csc, make_batch):
    wrapped = planned(MODELS["GraphSAGE"]())
    empty = make_batch(make_csc(300, 8, 1), [], [5, 3], 2)
    empty.x = torch.empty(0, 12)
    assert wrapped(empty).shape == (0, 5)
    assert wrapped.uses_blocks is None
    wrapped(batch)
    assert wrapped.uses_blocks


def test_the_model_works_unwrapped_afterwards_and_checkpoints_move_either_way(batch):
    model = MODELS["GraphSAGE"]()
    wrapped = planned(model)
    wrapped(batch)
    assert "forward" not in vars(model.convs[0])
    other = MODELS["GraphSAGE"]()
    other.load_state_dict(wrapped.state_dict())
    edge_index = torch_blocks(batch)[0].edge_index()
    assert torch.equal(other(batch.x, edge_index), model(batch.x, edge_index))


def test_every_hop_batches_run_on_blocks_or_are_refused(batch):
    batch.dialect = Dialect.EVERY_HOP
    assert planned(MODELS["GraphSAGE"]())(batch).shape == (40, 5)
    with pytest.raises(InputError, match="every_hop"):
        planned(OneConv())(batch)


def test_edges_in_any_order_within_their_hop_give_the_same_outputs(batch):
    data = to_pyg(batch, batch.x)
    assert data.edge_index is not None
    wrapped = planned(MODELS["GraphSAGE"]())
    expected = wrapped(data)
    first = batch.num_sampled_edges[0]
    order = torch.cat([torch.randperm(first), first + torch.randperm(batch.num_sampled_edges[1])])
    data.edge_index = data.edge_index[:, order]
    torch.testing.assert_close(wrapped(data), expected, rtol=1e-5, atol=1e-5)


def test_input_that_cannot_be_planned_says_why(batch):
    with pytest.raises(InputError, match="convolutions"):
        planned(nn.Linear(2, 2))
    data = to_pyg(batch, batch.x)
    data.num_sampled_nodes = None
    with pytest.raises(InputError, match="num_sampled_nodes"):
        planned(MODELS["GCN"]())(data)
    batch.blocks[0].weight = torch.ones(batch.blocks[0].num_edges).numpy()
    with pytest.raises(InputError, match="without weights"):
        planned(MODELS["GCN"]())(batch)


def test_a_batch_that_ranks_share_is_refused(batch: MiniBatch):
    rows = np.arange(batch.blocks[0].num_src)
    alone = RowExchange(
        ids=rows, num_own=len(rows), send_rows=rows[:0], send_counts=[0], receive_counts=[0],
        num_touched=len(rows),
    )  # fmt: skip
    shared = replace(batch, exchanges=[alone] * len(batch.blocks))
    with pytest.raises(InputError, match="--batching independent"):
        planned(GraphSAGE(12, 16, 2, 5))(shared)
