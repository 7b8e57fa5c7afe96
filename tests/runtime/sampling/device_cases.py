"""Small graphs, seeds and comparisons that the tests of the device's samplers share."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.runtime.sampling.minibatch import MiniBatch

Graph = tuple[NDArray[np.int64], NDArray[np.integer]]


def random_graph(number: int, num_nodes: int = 60) -> Graph:
    """A small multigraph with self-loops, isolated nodes and hubs whose rows pass a short tile."""
    rng = np.random.default_rng([20261121, number])
    degrees = rng.integers(0, 12, num_nodes)
    degrees[rng.random(num_nodes) < 0.3] = 0
    degrees[rng.random(num_nodes) < 0.05] += int(rng.integers(60, 120))
    degrees[[0, num_nodes - 1]] = [5, 7]
    if number % 3 == 0:
        degrees[0] = 300
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    indices = rng.integers(0, num_nodes, int(indptr[-1]))
    indices[:2] = [0, num_nodes - 1]
    return indptr, indices.astype(np.int32 if number % 2 else np.int64)


def random_weights(graph: Graph, number: int) -> NDArray[np.float32]:
    """One weight per edge, a tenth of them 0."""
    rng = np.random.default_rng([7, number])
    weights = rng.uniform(0.1, 3.0, len(graph[1])).astype(np.float32)
    weights[rng.random(len(weights)) < 0.1] = 0
    return weights


def seeds_of(graph: Graph, count: int, number: int | None = None) -> NDArray[np.int64]:
    """The last node, the first, and others: anew in every run, or those of a number.

    What holds for any seeds is held for new ones; what is counted of a batch depends on them.
    """
    num_nodes = len(graph[0]) - 1
    middle = np.random.default_rng(number).permutation(np.arange(1, num_nodes - 1))
    return np.concatenate([[num_nodes - 1, 0], middle])[:count].astype(np.int64)


def topology_of(graph: Graph, device: torch.device, tier: int = 0) -> Any:
    """The graph in the device's memory (0), the host's (1), or with hot rows of both (2)."""
    from gnnplan.runtime.sampling.gpu.topology import DeviceTopology

    if tier == 0:
        return DeviceTopology.load(*graph, device)
    hot = None
    if tier == 2:
        hot = np.random.default_rng(tier).permutation(len(graph[0]) - 1)[::3]
    return DeviceTopology.load(*graph, device, pinned=True, hot=hot, pinned_offsets=True)


def assert_equal_batches(drawn: Any, expected: MiniBatch) -> None:
    """Equal nodes, edges and positions; weights to float32's last place."""
    found = drawn.to_host()
    np.testing.assert_array_equal(found.n_id, expected.n_id)
    assert found.num_sampled_nodes == expected.num_sampled_nodes
    assert found.num_sampled_edges == expected.num_sampled_edges
    assert found.global_num_seeds == expected.global_num_seeds
    np.testing.assert_array_equal(found.input_id, expected.input_id)
    assert len(found.blocks) == len(expected.blocks)
    for block, other in zip(found.blocks, expected.blocks, strict=True):
        assert (block.num_src, block.num_dst) == (other.num_src, other.num_dst)
        for name in ("indptr", "indices", "e_id"):
            mine, theirs = getattr(block, name), getattr(other, name)
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)
        if other.weight is None:
            assert block.weight is None
        else:
            assert block.weight.dtype == np.float32
            np.testing.assert_allclose(block.weight, other.weight, rtol=3e-7)
