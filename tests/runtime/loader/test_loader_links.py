"""Link batches: each link once per epoch, negatives the same on any number of ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.generate import generate_links
from gnnplan.runtime.loader.loader import PlannedLoader
from gnnplan.runtime.sampling.minibatch import MiniBatch
from tests.support.plans import make_plan


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return generate_links(
        tmp_path_factory.mktemp("links") / "g",
        num_nodes=1500,
        degree=10.0,
        feature_dim=8,
        num_communities=5,
        train_fraction=0.1,
        seed=3,
    )


def load(graph: Graph, folder: Path, ranks: int = 1, **settings: Any) -> list[list[MiniBatch]]:
    make_plan(graph, folder, ranks=ranks, batch_size=200, **settings)
    found = []
    for rank in range(ranks):
        loader = PlannedLoader(folder, graph, rank=rank, size=ranks)
        found.append(list(loader))
        loader.close()
    return found


def scored(batch: MiniBatch) -> np.ndarray:
    """Global ids of the pairs that a batch scores."""
    assert batch.links is not None
    return batch.seeds[batch.links]


@pytest.mark.parametrize("ranks", [1, 3])
def test_each_link_comes_once_per_epoch_with_its_negatives(
    graph: Graph, tmp_path: Path, ranks: int
) -> None:
    shares = load(graph, tmp_path / "plan", ranks, links={"num_negatives": 3})
    ids = np.concatenate([b.input_id for batches in shares for b in batches])
    pairs = np.concatenate([scored(b) for batches in shares for b in batches])
    assert sorted(ids.tolist()) == list(range(len(graph.train_idx)))
    np.testing.assert_array_equal(pairs[:, :2], graph.train_idx[ids])
    assert pairs.shape[1] == 5
    for batches in shares:
        for batch in batches:
            assert np.array_equal(batch.seeds, np.unique(scored(batch)))
            assert batch.y.dtype == torch.int64
            assert batch.links is not None
            assert np.array_equal(batch.y.numpy(), batch.links)
            assert graph.x is not None
            assert np.array_equal(batch.x.numpy(), graph.x[batch.n_id])
    totals = [b.global_num_seeds for b in shares[0]]
    assert sum(totals) == len(graph.train_idx)


@pytest.mark.parametrize("negatives", ["uniform", "in-batch"])
def test_ranks_score_together_what_one_process_scores(
    graph: Graph, tmp_path: Path, negatives: str
) -> None:
    links = {"negatives": negatives, "num_negatives": 2}
    (alone,) = load(graph, tmp_path / "one", links=links)
    shares = load(graph, tmp_path / "two", 2, links=links)
    for step, batch in enumerate(alone):
        together = np.concatenate([scored(batches[step]) for batches in shares])
        np.testing.assert_array_equal(scored(batch), together)
        if negatives == "in-batch":
            destinations = set(scored(batch)[:, 1].tolist())
            assert set(scored(batch)[:, 2:].ravel().tolist()) <= destinations


def edges_of(batch: MiniBatch) -> set[tuple[int, int]]:
    found = set()
    for block in batch.blocks:
        rows = np.repeat(np.arange(block.num_dst), np.diff(block.indptr))
        found |= set(
            zip(batch.n_id[block.indices].tolist(), batch.n_id[rows].tolist(), strict=True)
        )
    return found


@pytest.mark.parametrize("exclude", ["none", "forward", "both"])
def test_the_steps_links_are_left_out_of_every_ranks_graph(
    graph: Graph, tmp_path: Path, exclude: str
) -> None:
    shares = load(graph, tmp_path / "plan", 2, fanouts=[-1, 4], links={"exclude": exclude})
    for first, second in zip(*shares, strict=True):
        pairs = np.concatenate([scored(first), scored(second)])[:, :2].tolist()
        there = {(u, v) for u, v in pairs}
        back = {(v, u) for u, v in pairs}
        for batch in (first, second):
            edges = edges_of(batch)
            assert bool(edges & there) == (exclude == "none")
            assert bool(edges & back) == (exclude != "both")


def test_prefetched_link_batches_equal_serial_ones(graph: Graph, tmp_path: Path) -> None:
    (serial,) = load(graph, tmp_path / "serial")
    (ahead,) = load(graph, tmp_path / "ahead", sample_threads=3, prefetch_depth=3)
    for a, b in zip(serial, ahead, strict=True):
        assert np.array_equal(a.n_id, b.n_id)
        assert np.array_equal(scored(a), scored(b))
        assert torch.equal(a.x, b.x)


def test_a_pyg_batch_has_link_loaders_triplet_fields(graph: Graph, tmp_path: Path) -> None:
    make_plan(graph, tmp_path / "plan", batch_size=200, links={"num_negatives": 2})
    data = next(iter(PlannedLoader(tmp_path / "plan", graph, blocks=False)))
    links = torch.stack([data.n_id[data.src_index], data.n_id[data.dst_pos_index]], dim=1)
    assert torch.equal(links, torch.from_numpy(graph.train_idx)[data.input_id])
    assert data.dst_neg_index.shape == (len(links), 2)


@pytest.mark.parametrize(("ranks", "links", "padded"), [(1, 9, False), (1, 9, True), (3, 1, False)])
def test_one_negative_per_link_has_the_shape_of_its_link_as_pyg_has_it(
    graph: Graph, tmp_path: Path, ranks: int, links: int, padded: bool
) -> None:
    """A column of negatives would be spread over all links, in a script that scores pairs."""
    make_plan(graph, tmp_path / "plan", ranks=ranks, batch_size=links, links={"num_negatives": 1})
    for rank in range(ranks):
        settings: dict[str, Any] = {"rank": rank, "size": ranks, "padded": padded}
        data = next(iter(PlannedLoader(tmp_path / "plan", graph, blocks=False, **settings)))
        assert data.dst_neg_index.shape == data.src_index.shape == data.dst_pos_index.shape


def test_a_share_without_links_is_empty(graph: Graph, tmp_path: Path) -> None:
    make_plan(graph, tmp_path / "plan", ranks=3, batch_size=1)
    batches = [
        next(iter(PlannedLoader(tmp_path / "plan", graph, rank=r, size=3).batches(1)))
        for r in range(3)
    ]
    assert sorted(b.num_seeds > 0 for b in batches) == [False, False, True]
    empty = next(b for b in batches if b.num_seeds == 0)
    assert empty.links is not None
    assert empty.links.shape == (0, 3)
    assert empty.global_num_seeds == 1
