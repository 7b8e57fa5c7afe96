from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.nn import GATConv, GCNConv, SAGEConv
from torch_geometric.nn.models import GAT, GCN, GraphSAGE

from gnnplan.runtime.errors import InputError
from gnnplan.runtime.models.adjacency import torch_blocks
from gnnplan.runtime.models.build import BlockModel, build_model
from gnnplan.runtime.models.metrics import loss_sum
from gnnplan.runtime.models.weights import fill_weights
from gnnplan.runtime.plan.schema import Workload

PYG = {
    "sage": lambda layers: GraphSAGE(12, 16, layers, 5),
    "gcn": lambda layers: GCN(12, 16, layers, 5),
    "gat": lambda layers: GAT(12, 16, layers, 5, heads=4),
}


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    found = [p.grad for p in model.parameters()]
    assert all(grad is not None for grad in found)
    return [grad for grad in found if grad is not None]


def workload(model: str, fanouts: list[int], **settings) -> Workload:
    return Workload(
        model=model, num_layers=len(fanouts), hidden=16, heads=4, fanouts=fanouts, **settings
    )


@pytest.mark.parametrize("name", ["sage", "gcn", "gat"])
@pytest.mark.parametrize("self_loops", [False, True])
@pytest.mark.parametrize("fanouts", [[4], [5, 3], [4, 3, 2]])
def test_logits_and_gradients_equal_pyg_on_the_sampled_subgraph(
    name, self_loops, fanouts, make_csc, make_batch
):
    settings = workload(name, fanouts, gcn_norm="sampled")
    csc = make_csc(300, 8, 1, self_loops=self_loops)
    batch = make_batch(csc, list(range(0, 80, 2)), fanouts, 2)
    x = torch.randn(len(batch.n_id), 12, requires_grad=True)
    y = torch.arange(40) % 5
    edge_index = torch_blocks(batch)[0].edge_index()
    model = build_model(settings, 12, 5, "multiclass")
    pyg = PYG[name](len(fanouts))
    pyg.load_state_dict(model.state_dict())

    expected = pyg(x, edge_index)[:40]
    loss_sum(expected, y, "multiclass").backward()
    expected_grads = gradients(pyg)
    assert x.grad is not None
    expected_x_grad, x.grad = x.grad.clone(), None
    found = model(x, torch_blocks(fill_weights(batch, settings)))
    loss_sum(found, y, "multiclass").backward()

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for parameter, grad in zip(model.parameters(), expected_grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad, expected_x_grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sage", "gcn", "gat"])
def test_float64_takes_the_torch_path_and_agrees_with_the_kernels(name, make_csc, make_batch):
    settings = workload(name, [4, 3], gcn_norm="sampled")
    batch = make_batch(make_csc(300, 8, 3), list(range(30)), [4, 3], 4)
    blocks = torch_blocks(fill_weights(batch, settings))
    model = build_model(settings, 12, 5, "multiclass")
    x = torch.randn(len(batch.n_id), 12)
    found = model(x, blocks)
    found.square().sum().backward()
    grads = [grad.clone() for grad in gradients(model)]
    model.double().zero_grad()
    expected = model(x.double(), blocks)
    expected.square().sum().backward()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(grad.double(), parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["sage", "gcn", "gat"])
def test_a_batch_without_seeds_gives_zero_gradients_for_all_parameters(name, make_csc, make_batch):
    settings = workload(name, [4, 3])
    batch = make_batch(make_csc(50, 4, 0), [], [4, 3], 0)
    blocks = torch_blocks(fill_weights(batch, settings, np.ones(50, np.int64)))
    model = build_model(settings, 12, 5, "multiclass")
    logits = model(torch.empty(0, 12), blocks)
    assert logits.shape == (0, 5)
    loss_sum(logits, torch.empty(0, dtype=torch.int64), "multiclass").backward()
    for grad in gradients(model):
        assert grad.count_nonzero() == 0


@pytest.mark.parametrize("name", ["sage", "gcn", "gat"])
def test_seeds_without_neighbours_keep_their_own_term(name, make_csc, make_batch):
    settings = workload(name, [4, 3], gcn_norm="sampled")
    csc = make_csc(50, 4, 0)
    batch = make_batch(csc, [0, 7, 14], [4, 3], 0)
    assert batch.num_edges == 0
    model = build_model(settings, 12, 5, "multiclass")
    pyg = PYG[name](2)
    pyg.load_state_dict(model.state_dict())
    x = torch.randn(3, 12)
    found = model(x, torch_blocks(fill_weights(batch, settings)))
    expected = pyg(x, torch.empty(2, 0, dtype=torch.int64))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_wide_layers_on_many_rows_equal_pyg_where_onednn_is_used(make_csc, make_batch):
    # 900 x (2 * 100) x 256 multiply-adds: above the threshold of dense.linear.
    csc = make_csc(3000, 20, 5)
    batch = make_batch(csc, list(range(300)), [10, 5], 6)
    settings = Workload(fanouts=[10, 5])
    model = build_model(settings, 100, 47, "multiclass")
    pyg = GraphSAGE(100, 256, 2, 47)
    pyg.load_state_dict(model.state_dict())
    x = torch.randn(len(batch.n_id), 100)
    blocks = torch_blocks(batch)
    assert blocks[0].num_dst * 200 * 256 > 1 << 24
    expected = pyg(x, blocks[0].edge_index())[:300]
    expected.square().sum().backward()
    found = model(x, blocks)
    found.square().sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients(model), gradients(pyg), strict=True):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * scale)


def test_estimator_weights_are_a_weighted_sum(make_csc, make_batch):
    batch = make_batch(make_csc(100, 6, 1), list(range(20)), [3], 1)
    block = batch.blocks[0]
    rng = np.random.default_rng(0)
    block.weight = rng.random(block.num_edges).astype(np.float32)
    model = build_model(workload("sage", [3]), 12, 5, "multiclass")
    x = torch.randn(block.num_src, 12)
    adjacency = torch.zeros(block.num_dst, block.num_src)
    for i in range(block.num_dst):
        for e in range(block.indptr[i], block.indptr[i + 1]):
            adjacency[i, block.indices[e]] += float(block.weight[e])
    conv: Any = model.get_submodule("convs.0")
    expected = conv.lin_l(adjacency @ x) + conv.lin_r(x[: block.num_dst])
    torch.testing.assert_close(model(x, torch_blocks(batch)), expected, rtol=1e-5, atol=1e-5)


def test_the_same_seed_builds_the_same_parameters_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    models = [build_model(workload("gat", [2, 2]), 12, 5, "multiclass") for _ in range(2)]
    assert torch.equal(before, torch.get_rng_state())
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


def a_model_of_ours(asked: Workload, in_dim: int, num_classes: int, task: str) -> torch.nn.Module:
    return build_model(replace(asked, model="sage"), in_dim, num_classes, task)


def test_a_users_factory_may_build_one_of_our_models():
    found = build_model(workload(f"{__name__}:a_model_of_ours", [2, 2]), 12, 5, "multiclass")
    plain = build_model(workload("sage", [2, 2]), 12, 5, "multiclass")
    for a, b in zip(found.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "conv",
    [
        SAGEConv(4, 2, aggr="max"),
        SAGEConv(4, 2, normalize=True),
        SAGEConv(4, 2, project=True),
        GCNConv(4, 2, improved=True),
        GATConv(4, 2, add_self_loops=False),
        torch.nn.Linear(4, 2),
    ],
)
def test_a_convolution_that_blocks_would_compute_otherwise_is_refused(conv: torch.nn.Module):
    with pytest.raises(InputError, match="layer 1: expected SAGEConv of means"):
        BlockModel([SAGEConv(8, 4), conv])


def test_threads_that_build_at_once_get_the_same_parameters():
    def build(_: int) -> list[torch.Tensor]:
        model = build_model(workload("sage", [2, 2, 2]), 64, 40, "multiclass")
        return [p.detach() for p in model.parameters()]

    with ThreadPoolExecutor(8) as pool:
        first, *others = pool.map(build, range(64))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_dropout_acts_in_training_only(make_csc, make_batch):
    settings = workload("sage", [4, 3], dropout=0.5)
    batch = make_batch(make_csc(100, 6, 1), list(range(20)), [4, 3], 1)
    blocks = torch_blocks(batch)
    model = build_model(settings, 12, 5, "multiclass")
    x = torch.randn(len(batch.n_id), 12)
    assert not torch.equal(model(x, blocks), model(x, blocks))
    model.eval()
    assert torch.equal(model(x, blocks), model(x, blocks))


def test_a_model_can_come_from_an_import_path():
    model = build_model(workload("torch.nn:Identity", [2]), 12, 5, "multiclass")
    assert isinstance(model, torch.nn.Identity)


def two(in_channels: int, out_channels: int) -> torch.nn.Module:
    """Make a layer, but of fewer parameters than a factory has."""
    return torch.nn.Linear(in_channels, out_channels)


@pytest.mark.parametrize(
    ("settings", "task", "text"),
    [
        (workload("sgae", [2]), "multiclass", "expected sage, gcn, gat, rgcn or module:factory"),
        (workload("nowhere:model", [2]), "multiclass", "importable module:factory"),
        (workload("builtins:print", [2]), "multiclass", "to return a torch.nn.Module"),
        (workload(f"{__name__}:two", [2]), "multiclass", r"workload, in_dim.* found two\(in_"),
        (Workload(model="sage", num_layers=3, fanouts=[2, 2]), "multiclass", "2 fan-outs for 3"),
        (Workload(model="gat", hidden=10, heads=4), "multiclass", "divisible by heads"),
    ],
)
def test_settings_that_cannot_be_built_say_what_was_expected(settings, task, text):
    with pytest.raises(InputError, match=text):
        build_model(settings, 12, 5, task)
