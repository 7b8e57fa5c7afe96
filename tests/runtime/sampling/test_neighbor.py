"""The fast sampler equals its definition, edge for edge, and does not depend on who samples."""

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.sampling.minibatch import Block, Dialect, MiniBatch
from runtime.sampling.neighbor import NeighborSampler
from runtime.sampling.reference import sample_reference

Graph = tuple[NDArray[np.int64], NDArray[np.integer]]
DIALECTS = list(Dialect)
DENSE, HASHED = 1 << 30, 0


def random_graph(number: int) -> Graph:
    """A small multigraph with self-loops, isolated nodes, and degrees on both sides of 64."""
    rng = np.random.default_rng([20261121, number])
    num_nodes = int(rng.integers(2, 120))
    degrees = rng.integers(0, 12, num_nodes)
    degrees[rng.random(num_nodes) < 0.3] = 0
    degrees[rng.random(num_nodes) < 0.1] += int(rng.integers(40, 200))
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    indices = rng.integers(0, num_nodes, int(indptr[-1]))
    return indptr, indices.astype(np.int32 if number % 2 else np.int64)


def random_settings(number: int) -> tuple[list[int], int]:
    rng = np.random.default_rng([7, number])
    choices = [-1, 1, 2, 3, 5, 10, 15, 63, 64, 65, 150]
    fanouts = [int(k) for k in rng.choice(choices, int(rng.integers(1, 4)))]
    return fanouts, int(rng.integers(0, 40))


def assert_equal_blocks(found: Block, expected: Block) -> None:
    assert (found.num_src, found.num_dst) == (expected.num_src, expected.num_dst)
    assert found.indptr.dtype == np.int64
    assert found.indices.dtype == np.int32
    np.testing.assert_array_equal(found.indptr, expected.indptr)
    np.testing.assert_array_equal(found.indices, expected.indices)
    if found.e_id is not None:
        np.testing.assert_array_equal(found.e_id, expected.e_id)


def assert_equal_batches(found: MiniBatch, expected: MiniBatch) -> None:
    np.testing.assert_array_equal(found.n_id, expected.n_id)
    np.testing.assert_array_equal(found.seeds, expected.seeds)
    assert found.num_sampled_nodes == expected.num_sampled_nodes
    assert found.num_sampled_edges == expected.num_sampled_edges
    assert len(found.blocks) == len(expected.blocks)
    for block, other in zip(found.blocks, expected.blocks, strict=True):
        assert_equal_blocks(block, other)


@pytest.mark.parametrize("budget", [DENSE, HASHED])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_sampler_equals_the_reference_on_200_random_graphs(dialect: Dialect, budget: int) -> None:
    for number in range(200):
        indptr, indices = random_graph(number)
        fanouts, num_seeds = random_settings(number)
        num_nodes = len(indptr) - 1
        rng = np.random.default_rng([3, number])
        seeds = rng.permutation(num_nodes)[:num_seeds].astype(np.int64)
        settings = {"dialect": dialect, "seed": number}
        sampler = NeighborSampler(
            indptr, indices, fanouts, edge_ids=True, relabel_budget_bytes=budget, **settings
        )
        found = sampler.sample(seeds, epoch=number % 5, step=number % 3)
        expected = sample_reference(
            indptr, indices, fanouts, seeds, epoch=number % 5, step=number % 3, **settings
        )
        assert all(block.e_id is not None for block in found.blocks)
        assert_equal_batches(found, expected)
