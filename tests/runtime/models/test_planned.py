import copy
import random
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric.nn import (
    BatchNorm,
    GATv2Conv,
    GCNConv,
    GraphConv,
    GraphNorm,
    InstanceNorm,
    LayerNorm,
    PairNorm,
    SAGEConv,
)
from torch_geometric.nn.models import GAT, GCN, GraphSAGE

from gnnplan.runtime.errors import InputError
from gnnplan.runtime.models.adjacency import torch_blocks
from gnnplan.runtime.models.planned import _as_it_was, planned
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch, RowExchange
from gnnplan.runtime.sampling.pyg import to_pyg


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


class Refuses(nn.Module):
    """As batch norm does, one row alone in training."""

    def forward(self, x):
        if self.training and len(x) < 3:
            raise ValueError("expected more than one row")
        return x


class NoisyInPlace(nn.Module):
    """Draws of two generators, and a count of its runs in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))
        self.runs: torch.Tensor

    def forward(self, x):
        if self.training:
            self.runs.add_(1)
        noise = float(np.random.random())  # noqa: NPY002
        return x + x.mean(0) + noise + torch.rand(1)


class NoisyInput(ByHand):
    def __init__(self):
        super().__init__(SAGEConv)

    def forward(self, x, edge_index):
        return super().forward(x + torch.randn(12) if self.training else x, edge_index)


class ByHandLazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = SAGEConv((-1, -1), 16), SAGEConv((-1, -1), 5)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


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


class UsersNorm(nn.Module):
    """Batch norm by hand: a running mean that is a plain attribute, put in place anew each time."""

    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(16)

    def forward(self, x):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
            return x - x.mean(0)
        return x - self.mean


class Standardised(nn.Module):
    """Sums of squares added into a buffer, in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("squares", torch.ones(16))

    def forward(self, x):
        if self.training:
            self.squares += x.detach().square().mean(0)
        return x / self.squares.sqrt()


NORMS = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(16),
    "BatchNorm1d without statistics": lambda: nn.BatchNorm1d(16, track_running_stats=False),
    "PyG BatchNorm": lambda: BatchNorm(16),
    "GraphNorm": lambda: GraphNorm(16),
    "PairNorm": PairNorm,
    "InstanceNorm": lambda: InstanceNorm(16),
    "LayerNorm over the graph": lambda: LayerNorm(16, mode="graph"),
    "by hand": UsersNorm,
    "nested": lambda: nn.Sequential(nn.ReLU(), nn.Sequential(nn.Dropout(0.3), nn.BatchNorm1d(16))),
}
"""What depends on all rows, in one mode at least."""


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_over_rows_falls_back_whatever_mode_the_first_batch_is_in(name, mode, batch):
    model = ByHand(SAGEConv, NORMS[name]())
    wrapped = planned(model).train(mode)
    with pytest.warns(UserWarning, match="runs unchanged") as warned:
        wrapped(batch)
    assert len(warned) == 1
    assert wrapped.uses_blocks is False
    edge_index = torch_blocks(batch)[0].edge_index()
    for training in (True, False):
        wrapped.train(training)
        torch.manual_seed(1)
        found = wrapped(batch)
        torch.manual_seed(1)
        torch.testing.assert_close(found, model(batch.x, edge_index)[:40])


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize(
    "between",
    [nn.LayerNorm(16), LayerNorm(16, mode="node"), nn.Dropout(0.9), nn.PReLU(16)],
)
def test_what_is_done_row_by_row_uses_blocks(between, mode, batch):
    wrapped = planned(ByHand(SAGEConv, between)).train(mode)
    wrapped(batch)
    assert wrapped.uses_blocks


@pytest.mark.parametrize("mode", [True, False])
def test_batch_norm_is_seen_where_the_first_batch_has_no_row_to_leave_out(
    mode, make_csc, make_batch
):
    """All nodes are seeds: blocks and the whole batch have the same rows."""
    batch = make_batch(make_csc(60, 8, 1), list(range(60)), [5, 3], 2)
    batch.x = torch.randn(60, 12)
    wrapped = planned(ByHand(SAGEConv, nn.BatchNorm1d(16))).train(mode)
    with pytest.warns(UserWarning, match="training mode"):
        wrapped(batch)


def test_one_row_that_batch_norm_refuses_in_training_leaves_the_decision_to_the_next_batch(
    batch, make_batch
):
    loop = make_batch((np.array([0, 1]), np.zeros(1, np.int32)), [0], [1, 1], 2)
    loop.x = torch.randn(1, 12)
    narrow = nn.Sequential(Refuses(), nn.BatchNorm1d(16))
    wrapped = planned(ByHand(SAGEConv, narrow)).eval()
    wrapped(loop)
    assert wrapped.uses_blocks is None
    with pytest.warns(UserWarning, match="training mode"):
        wrapped(batch)


def test_statistics_over_ranks_fall_back_without_a_try(batch):
    """A try would wait for ranks whose first batch is empty."""
    wrapped = planned(ByHand(SAGEConv, nn.SyncBatchNorm(16))).eval()
    with pytest.warns(UserWarning, match="all ranks"):
        wrapped(batch)


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.5)),
        UsersNorm,
        Standardised,
        NoisyInPlace,
    ],
)
def test_the_check_leaves_statistics_random_states_and_modes_alone(make, mode, batch):
    between = make()
    model = ByHand(SAGEConv, between)
    model.add_module("frozen", nn.BatchNorm1d(3))  # in a mode of its own
    frozen = model.get_submodule("frozen")
    model.train(mode)
    frozen.train(not mode)
    twin = copy.deepcopy(model)
    wrapped = planned(model)

    def seeded(run):
        torch.manual_seed(3)
        np.random.seed(3)  # noqa: NPY002
        return run(), torch.rand(1), np.random.random()  # noqa: NPY002

    with pytest.warns(UserWarning, match="runs unchanged"):
        found = seeded(lambda: wrapped(batch))
    edge_index = torch_blocks(batch)[0].edge_index()
    torch.testing.assert_close(found, seeded(lambda: twin(batch.x, edge_index)[:40]))
    assert (model.training, frozen.training) == (mode, not mode)
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    if isinstance(between, UsersNorm):
        torch.testing.assert_close(between.mean, twin.between.mean)


def test_the_check_leaves_the_draws_of_pythons_own_generator_alone():
    before = random.getstate()
    with _as_it_was(nn.ReLU(), torch.device("cpu")):
        random.random()
    assert random.getstate() == before


def test_layers_without_sizes_are_made_by_the_first_batch_and_checked_with_the_second(batch):
    torch.manual_seed(5)
    model = ByHandLazy()
    twin = copy.deepcopy(model)
    wrapped = planned(model)
    torch.manual_seed(6)
    found = wrapped(batch)
    torch.manual_seed(6)
    expected = twin(batch.x, torch_blocks(batch)[0].edge_index())[:40]
    torch.testing.assert_close(found, expected)
    assert wrapped.uses_blocks is None
    torch.testing.assert_close(wrapped(batch), expected, rtol=1e-5, atol=1e-5)
    assert wrapped.uses_blocks


def test_noise_drawn_by_the_model_is_the_same_both_ways(batch):
    """It is added to all rows before the first layer: blocks change nothing."""
    wrapped = planned(NoisyInput())
    wrapped(batch)
    assert wrapped.uses_blocks


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


def test_a_convolution_with_a_forward_of_its_own_keeps_it(batch):
    model = ByHand(SAGEConv).eval()
    plain = model.first.forward
    model.first.forward = lambda x, edge_index: 2 * plain(x, edge_index)
    edge_index = torch_blocks(batch)[0].edge_index()
    expected = model(batch.x, edge_index)[:40]
    wrapped = planned(model)
    with pytest.warns(UserWarning, match="runs unchanged"):
        torch.testing.assert_close(wrapped(batch), expected)
    torch.testing.assert_close(wrapped(batch), expected)


class Shared(nn.Module):
    """Two parts with one convolution between them."""

    def __init__(self):
        super().__init__()
        conv = SAGEConv(12, 12)
        self.first, self.second = nn.ModuleList([conv]), nn.ModuleList([conv])

    def forward(self, x, edge_index):
        return self.second[0](self.first[0](x, edge_index).relu(), edge_index)


def test_a_convolution_of_two_layers_runs_on_the_block_of_each(batch):
    model = Shared()
    wrapped = planned(model)
    found = wrapped(batch)
    assert wrapped.uses_blocks
    expected = model(batch.x, torch_blocks(batch)[0].edge_index())[:40]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


class Around(nn.Module):
    """As DistributedDataParallel and Lightning have it: the wrapped model is a part."""

    def __init__(self, model: nn.Module, name: str):
        super().__init__()
        self.add_module(name, planned(model))


class WithModel(nn.Module):
    """A model whose own part is named as the wrapper's is."""

    def __init__(self):
        super().__init__()
        self.model = GraphSAGE(12, 16, 2, 5)


@pytest.mark.parametrize("make", [MODELS["GraphSAGE"], WithModel])
@pytest.mark.parametrize("name", ["module", "model"])
def test_a_module_around_it_loads_what_it_saved(make, name):
    """Names are those of the same module around the model itself, so either takes the other's."""
    saved, plain = Around(make(), name), nn.Module()
    plain.add_module(name, make())
    state = saved.state_dict()
    assert list(state) == list(plain.state_dict())
    for other in (Around(make(), name), plain):
        other.load_state_dict(state)
        torch.testing.assert_close(dict(other.state_dict()), dict(state), rtol=0, atol=0)


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
