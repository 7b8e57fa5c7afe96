import numpy as np
import pytest
import torch
from torch_geometric.nn import GCNConv

from gnnplan.runtime.errors import InputError
from gnnplan.runtime.models.adjacency import torch_blocks
from gnnplan.runtime.models.build import build_model
from gnnplan.runtime.models.weights import (
    _sampled_degrees,
    count_self_loops,
    fill_weights,
    sampled_degrees,
)
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.sampling.minibatch import Block, Dialect, MiniBatch


def gcn(fanouts: list[int], **settings) -> Workload:
    return Workload(model="gcn", num_layers=len(fanouts), hidden=8, fanouts=fanouts, **settings)


def edge_index_of(csc) -> torch.Tensor:
    indptr, indices = csc
    target = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    return torch.from_numpy(np.stack([indices.astype(np.int64), target]))


@pytest.mark.parametrize("self_loops", [False, True])
def test_full_weights_with_all_neighbours_equal_gcnconv_on_the_full_graph(
    self_loops, make_csc, make_batch
):
    csc = make_csc(200, 6, 3, self_loops=self_loops)
    degree, loops = np.diff(csc[0]), count_self_loops(*csc)
    assert (loops is not None) == self_loops
    batch = make_batch(csc, list(range(0, 60, 3)), [-1, -1], 0)
    model = build_model(gcn([-1, -1]), 10, 4, "multiclass")
    x = torch.randn(200, 10)
    edge_index = edge_index_of(csc)
    first, second = model.get_submodule("convs.0"), model.get_submodule("convs.1")
    expected = second(first(x, edge_index).relu(), edge_index)
    fill_weights(batch, gcn([-1, -1]), degree, self_loops=loops)
    found = model(x[torch.from_numpy(batch.n_id)], torch_blocks(batch))
    torch.testing.assert_close(found, expected[batch.seeds], rtol=1e-5, atol=1e-5)


def test_full_weights_are_unbiased_over_draws(make_csc, make_batch):
    csc = make_csc(60, 12, 3, self_loops=True)
    degree, loops = np.diff(csc[0]), count_self_loops(*csc)
    conv = GCNConv(5, 4)
    x = torch.randn(60, 5)
    expected = conv(x, edge_index_of(csc)).detach()
    draws = 600
    model = build_model(gcn([3]), 5, 4, "multiclass")
    model.get_submodule("convs.0").load_state_dict(conv.state_dict())
    samples = torch.zeros(draws, 60, 4)
    with torch.no_grad():
        for seed in range(draws):
            batch = make_batch(csc, list(range(60)), [3], seed)
            fill_weights(batch, gcn([3]), degree, self_loops=loops)
            samples[seed] = model(x[torch.from_numpy(batch.n_id)], torch_blocks(batch))
    standard_error = samples.std(0) / draws**0.5
    # 240 numbers: the largest of as many normal deviates passes 4.5 with probability 0.2%.
    assert float(((samples.mean(0) - expected).abs() / (standard_error + 1e-6)).max()) < 4.5


def test_estimator_weights_scale_gcn_as_means():
    # Destination 0 of degree 4 drew neighbours 1 and 2 (degree 1 each) with mean weights 0.3, 0.2:
    # by hand 4 * 0.3 / sqrt(5 * 2), 4 * 0.2 / sqrt(5 * 2), and 1 / 5 for itself.
    block = Block(
        num_src=3,
        num_dst=1,
        indptr=np.array([0, 2]),
        indices=np.array([1, 2], np.int32),
        weight=np.array([0.3, 0.2], np.float32),
        e_id=np.array([7, 8]),
    )
    batch = MiniBatch(
        blocks=[block],
        n_id=np.array([0, 1, 2]),
        seeds=np.array([0]),
        input_id=np.array([0]),
        dialect=Dialect.FIRST_SEEN,
        num_sampled_nodes=[1, 2],
        num_sampled_edges=[2],
    )
    found = fill_weights(batch, gcn([2]), np.array([4, 1, 1])).blocks[0]
    assert found.indices.tolist() == [1, 2, 0]
    assert found.e_id is not None
    assert found.weight is not None
    assert found.e_id.tolist() == [7, 8, -1]
    np.testing.assert_allclose(found.weight, [1.2 / 10**0.5, 0.8 / 10**0.5, 0.2], rtol=1e-6)


def test_more_neighbours_are_counted_than_float32_adds_one_by_one():
    count = 5 << 22  # 2^24 and a quarter
    block = Block(
        num_src=2,
        num_dst=1,
        indptr=np.array([0, count]),
        indices=np.ones(count, np.int32),
    )
    batch = MiniBatch(
        blocks=[block],
        n_id=np.array([0, 1]),
        seeds=np.array([0]),
        input_id=np.array([0]),
        dialect=Dialect.FIRST_SEEN,
        num_sampled_nodes=[1, 1],
        num_sampled_edges=[count],
    )
    expected = [(count + 1) ** -0.5, 1.0]
    np.testing.assert_allclose(_sampled_degrees(batch, block)[1], expected, rtol=1e-6)
    found = sampled_degrees(torch_blocks(batch)[0], None)[1]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_sage_blocks_are_left_as_they_are(make_csc, make_batch):
    batch = make_batch(make_csc(60, 5, 3), [1, 2, 3], [3], 0)
    block = batch.blocks[0]
    assert fill_weights(batch, Workload(num_layers=1, fanouts=[3])).blocks[0] is block


def test_gcn_on_full_degrees_asks_for_them(make_csc, make_batch):
    batch = make_batch(make_csc(60, 5, 3), [1, 2, 3], [3], 0)
    with pytest.raises(InputError, match="full graph's degrees"):
        fill_weights(batch, gcn([3]))


def test_gat_refuses_estimator_weights(make_csc, make_batch):
    batch = make_batch(make_csc(60, 5, 3), [1, 2, 3], [3], 0)
    batch.blocks[0].weight = np.ones(batch.blocks[0].num_edges, np.float32)
    with pytest.raises(InputError, match="gat"):
        fill_weights(batch, Workload(model="gat", num_layers=1, fanouts=[3]))
