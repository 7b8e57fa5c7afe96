"""PyG's own loaders over our samplers, without pyg-lib: fields, edges, and equal draws."""

from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import LinkLoader, NodeLoader
from torch_geometric.sampler import NegativeSampling

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.exclusion import Exclude
from gnnplan.runtime.sampling.minibatch import Block, Dialect, MiniBatch
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from gnnplan.runtime.sampling.pyg_sampler import PygSampler

NUM_NODES = 400


@pytest.fixture(scope="module")
def data() -> Data:
    """A symmetric graph whose edges are listed in random order, with a number on each edge."""
    rng = np.random.default_rng(0)
    one_way = rng.integers(0, NUM_NODES, (2, 1500))
    both = np.concatenate([one_way, one_way[::-1]], axis=1)[:, rng.permutation(3000)]
    return Data(
        x=torch.randn(NUM_NODES, 6),
        y=torch.arange(NUM_NODES),
        edge_index=torch.from_numpy(both),
        edge_attr=torch.arange(3000),
    )


def node_batches(data: Data, workers: int = 0, epoch: int = 0, **settings: Any) -> list[Any]:
    sampler = PygSampler.from_data(data, [4, 3], seed=2)
    sampler.set_epoch(epoch)
    loader: Any = NodeLoader(
        data,
        sampler,
        input_nodes=torch.arange(100, 300),
        batch_size=64,
        num_workers=workers,
        **settings,
    )
    return list(loader)


def test_a_node_loader_gives_neighbor_loaders_fields(data: Data) -> None:
    batches = node_batches(data)
    assert [b.batch_size for b in batches] == [64, 64, 64, 8]
    for b in batches:
        assert b.n_id[: b.batch_size].tolist() == (b.input_id + 100).tolist()
        assert torch.equal(b.x, data.x[b.n_id])  # type: ignore[index]
        assert torch.equal(b.y, b.n_id)
        assert sum(b.num_sampled_nodes) == b.num_nodes
        assert sum(b.num_sampled_edges) == b.num_edges
        # Edges, their ids and their attributes are those of the data's own edge list.
        assert data.edge_index is not None
        assert torch.equal(data.edge_index[:, b.e_id], b.n_id[b.edge_index])
        assert torch.equal(b.edge_attr, b.e_id)
        degree = torch.bincount(b.edge_index[1, : b.num_sampled_edges[0]], minlength=1)
        assert int(degree.max()) <= 4


def test_batches_are_those_of_the_sampler_itself(data: Data) -> None:
    sampler = PygSampler.from_data(data, [-1, -1])
    loader: Any = NodeLoader(data, sampler, input_nodes=torch.arange(30), batch_size=30)
    (batch,) = list(loader)
    inner: Any = sampler.sampler
    expected: MiniBatch = inner.sample(np.arange(30), epoch=0, step=0)  # all neighbours: no draws
    assert batch.n_id.tolist() == expected.n_id.tolist()
    assert batch.num_sampled_edges == expected.num_sampled_edges


def same(a: Any, b: Any) -> bool:
    return torch.equal(a.n_id, b.n_id) and torch.equal(a.edge_index, b.edge_index)


@pytest.mark.parametrize("workers", [1, 2])
def test_worker_processes_change_nothing(data: Data, workers: int) -> None:
    here, there = node_batches(data), node_batches(data, workers)
    assert len(here) == len(there)
    assert all(same(a, b) for a, b in zip(here, there, strict=True))


def test_an_epoch_draws_anew_also_in_workers_that_live_on(data: Data) -> None:
    first, second = node_batches(data), node_batches(data, epoch=1)
    assert all(same(a, b) for a, b in zip(first, node_batches(data), strict=True))
    assert not any(same(a, b) for a, b in zip(first[:3], second[:3], strict=True))
    sampler = PygSampler.from_data(data, [4, 3], seed=2)
    loader: Any = NodeLoader(
        data,
        sampler,
        input_nodes=torch.arange(100, 300),
        batch_size=64,
        num_workers=1,
        persistent_workers=True,
    )
    assert all(same(a, b) for a, b in zip(first, list(loader), strict=True))
    sampler.set_epoch(1)
    assert all(same(a, b) for a, b in zip(second, list(loader), strict=True))


LINKS = 90


def link_batches(data: Data, workers: int = 0, **settings: Any) -> list[Any]:
    assert data.edge_index is not None
    exclude = settings.pop("exclude", Exclude.NONE)
    fanouts = settings.pop("fanouts", [4, 3])
    sampler = PygSampler.from_data(data, fanouts, seed=2, exclude=exclude)
    loader: Any = LinkLoader(
        data,
        sampler,
        edge_label_index=data.edge_index[:, :LINKS],
        batch_size=40,
        num_workers=workers,
        **settings,
    )
    return list(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_link_loader_without_negatives_gives_the_links(data: Data, workers: int) -> None:
    batches = link_batches(data, workers)
    assert data.edge_index is not None
    links = torch.cat([b.n_id[b.edge_label_index] for b in batches], dim=1)
    assert torch.equal(links, data.edge_index[:, :LINKS])
    assert torch.cat([b.input_id for b in batches]).tolist() == list(range(LINKS))


@pytest.mark.parametrize("workers", [0, 1])
def test_binary_negatives_follow_the_links_with_label_zero(data: Data, workers: int) -> None:
    batches = link_batches(data, workers, neg_sampling=NegativeSampling("binary", 1.5))
    assert data.edge_index is not None
    for b in batches:
        positives = b.input_id.numel()
        assert b.edge_label.tolist() == [1.0] * positives + [0.0] * (positives * 3 // 2)
        ends = b.n_id[b.edge_label_index]
        assert torch.equal(ends[:, :positives], data.edge_index[:, b.input_id])
    negatives = torch.cat([b.n_id[b.edge_label_index][:, b.edge_label == 0] for b in batches], 1)
    assert len(negatives.unique()) > 100  # of 400 nodes; 270 ends drawn
    # Class labels are kept and shifted by PyG, negatives become class 0.
    labelled = link_batches(
        data, workers, neg_sampling="binary", edge_label=torch.arange(LINKS) % 3
    )[0]
    assert labelled.edge_label.tolist()[:4] == [1, 2, 3, 1]
    assert labelled.edge_label.tolist()[40:] == [0] * 40


@pytest.mark.parametrize("amount", [1, 3])
def test_triplet_negatives_belong_to_their_link(data: Data, amount: int) -> None:
    batches = link_batches(data, neg_sampling=NegativeSampling("triplet", amount))
    assert data.edge_index is not None
    for b in batches:
        count = b.input_id.numel()
        assert b.dst_neg_index.shape == ((count,) if amount == 1 else (count, amount))
        links = torch.stack([b.n_id[b.src_index], b.n_id[b.dst_pos_index]])
        assert torch.equal(links, data.edge_index[:, b.input_id])


def test_negatives_follow_their_weights(data: Data) -> None:
    weight = torch.zeros(NUM_NODES)
    weight[[7, 11]] = torch.tensor([1.0, 3.0])
    negatives = NegativeSampling("triplet", 40, dst_weight=weight)
    batches = link_batches(data, neg_sampling=negatives)
    drawn = torch.cat([b.n_id[b.dst_neg_index].flatten() for b in batches])
    assert set(drawn.tolist()) == {7, 11}
    count = drawn.numel()  # 3600
    assert abs(int((drawn == 11).sum()) - 0.75 * count) < 4 * (count * 0.1875) ** 0.5


def test_a_worker_process_draws_the_same_negatives_and_neighbours(data: Data) -> None:
    here = link_batches(data, neg_sampling="binary")
    there = link_batches(data, 1, neg_sampling="binary")
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a.edge_label_index, b.edge_label_index)
        assert same(a, b)


@pytest.mark.parametrize("exclude", list(Exclude))
def test_seed_links_are_left_out_on_request(data: Data, exclude: Exclude) -> None:
    for b in link_batches(data, exclude=exclude, fanouts=[-1, -1]):
        links = {tuple(p) for p in b.n_id[b.edge_label_index].t().tolist()}
        edges = {tuple(p) for p in b.n_id[b.edge_index].t().tolist()}
        turned = {(v, u) for u, v in links}
        assert (not links & edges) == (exclude is not Exclude.NONE)
        assert (not turned & edges) == (exclude is Exclude.BOTH)


class Weighted:
    """A sampler whose batches a PyG loader cannot carry."""

    def __init__(self, inner: NeighborSampler) -> None:
        self.inner = inner

    def sample(self, seeds: Any, **settings: Any) -> MiniBatch:
        batch = self.inner.sample(seeds, **settings)
        outer = batch.blocks[0]
        batch.blocks[0] = Block(
            num_src=outer.num_src,
            num_dst=outer.num_dst,
            indptr=outer.indptr,
            indices=outer.indices,
            weight=np.ones(outer.num_edges, np.float32),
        )
        return batch


def test_what_would_be_lost_is_refused(data: Data) -> None:
    def every_hop(*graph: Any, **settings: Any) -> NeighborSampler:
        return NeighborSampler(*graph, dialect=Dialect.EVERY_HOP, **settings)

    def weighted(*graph: Any, **settings: Any) -> Weighted:
        return Weighted(NeighborSampler(*graph, **settings))

    for make, found in ((every_hop, "every_hop"), (weighted, "weighted")):
        loader: Any = NodeLoader(
            data, PygSampler.from_data(data, [3], make=make), input_nodes=torch.arange(5)
        )
        with pytest.raises(SamplerError, match=f"found {found}: .*PlannedLoader"):
            next(iter(loader))
    with pytest.raises(SamplerError, match="expected an ExcludingSampler"):
        PygSampler.from_data(data, [3], make=every_hop, exclude=Exclude.BOTH)
    timed: Any = NodeLoader(
        data,
        PygSampler.from_data(data, [3]),
        input_nodes=torch.arange(5),
        input_time=torch.arange(5),
    )
    with pytest.raises(SamplerError, match="without times"):
        next(iter(timed))
