"""A batch without some edges is the batch of the graph without them, bit for bit."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.exclusion import Exclude, ExcludingSampler, find_excluded
from gnnplan.runtime.sampling.minibatch import Dialect
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from tests.reference.links import without_edges

NUM_NODES = 120


def make_graph(seed: int, dtype: Any = np.int32) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Random rows with parallel edges, empty rows, and a hub of 400 edges."""
    rng = np.random.default_rng(seed)
    degrees = rng.integers(0, 14, NUM_NODES)
    degrees[3] = 400
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    return indptr, rng.integers(0, NUM_NODES, int(indptr[-1])).astype(dtype)


def some_pairs(indptr: NDArray[np.int64], indices: NDArray[Any], seed: int) -> NDArray[np.int64]:
    """Edges of the graph, repeated ones among them, and pairs it does not store."""
    rng = np.random.default_rng([seed, 1])
    edges = rng.integers(0, len(indices), 25)
    edges[:8] = rng.integers(indptr[3], indptr[4], 8)
    destinations = np.searchsorted(indptr, edges, side="right") - 1
    stored = np.stack([indices[edges].astype(np.int64), destinations], axis=1)
    return np.concatenate([stored, stored[:3], rng.integers(0, NUM_NODES, (5, 2))])


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("exclude", list(Exclude))
@pytest.mark.parametrize(("fanouts", "dtype"), [([4, 3], np.int32), ([70, -1, 2], np.int64)])
def test_batches_are_those_of_the_graph_without_the_edges(
    dialect: Dialect, exclude: Exclude, fanouts: list[int], dtype: Any
) -> None:
    for trial in range(4):
        indptr, indices = make_graph(trial, dtype)
        pairs = some_pairs(indptr, indices, trial)
        out = [(int(a), int(b)) for a, b in pairs if exclude is not Exclude.NONE]
        out += [(b, a) for a, b in out if exclude is Exclude.BOTH]
        reduced_ptr, reduced, places = without_edges(indptr, indices, out)
        assert (len(reduced) < len(indices)) == (exclude is not Exclude.NONE)
        settings: dict[str, Any] = {"dialect": dialect, "seed": 5, "edge_ids": True}
        expected = NeighborSampler(reduced_ptr, reduced, fanouts, **settings)
        budget = 0 if trial % 2 else 1 << 30  # both relabelling tables
        found = ExcludingSampler(indptr, indices, fanouts, relabel_budget_bytes=budget, **settings)
        seeds = np.unique(pairs[:12])
        a = expected.sample(seeds, epoch=1, step=trial)
        b = found.sample_without(pairs, exclude, seeds, epoch=1, step=trial)
        np.testing.assert_array_equal(a.n_id, b.n_id)
        assert a.num_sampled_nodes == b.num_sampled_nodes
        assert a.num_sampled_edges == b.num_sampled_edges
        for p, q in zip(a.blocks, b.blocks, strict=True):
            assert (p.num_src, p.num_dst) == (q.num_src, q.num_dst)
            np.testing.assert_array_equal(p.indptr, q.indptr)
            np.testing.assert_array_equal(p.indices, q.indices)
            assert p.e_id is not None
            np.testing.assert_array_equal(places[p.e_id], q.e_id)


def test_the_next_batch_has_all_edges_again() -> None:
    indptr, indices = make_graph(0)
    sampler = ExcludingSampler(indptr, indices, [-1])
    pairs = some_pairs(indptr, indices, 0)
    seeds = np.unique(pairs[:, 1])
    before = sampler.sample(seeds, epoch=0, step=0)
    sampler.sample_without(pairs, Exclude.FORWARD, seeds, epoch=0, step=0)
    after = sampler.sample(seeds, epoch=0, step=0)
    np.testing.assert_array_equal(before.blocks[0].indices, after.blocks[0].indices)


def test_every_parallel_copy_is_found_once() -> None:
    indptr = np.array([0, 4, 5], dtype=np.int64)
    indices = np.array([1, 1, 0, 1, 0], dtype=np.int32)
    pairs = np.array([[1, 0], [1, 0]])
    found = find_excluded(indptr, indices, pairs, Exclude.BOTH)
    assert found.rows.tolist() == [0, 1]
    assert found.ends.tolist() == [0, 3, 4]
    assert found.places.tolist() == [0, 1, 3, 4]
    assert find_excluded(indptr, indices, pairs, Exclude.NONE).places.tolist() == []


def test_pairs_out_of_range_are_refused() -> None:
    sampler = ExcludingSampler(*make_graph(0), [3])
    for bad in (np.array([[0, NUM_NODES]]), np.array([[-1, 0]])):
        with pytest.raises(SamplerError, match=r"expected links between nodes 0 and 119"):
            sampler.sample_without(bad, Exclude.BOTH, np.array([0]), epoch=0, step=0)
    with pytest.raises(SamplerError, match=r"\[n, 2\] pairs"):
        sampler.sample_without(np.array([0, 1]), Exclude.BOTH, np.array([0]), epoch=0, step=0)
