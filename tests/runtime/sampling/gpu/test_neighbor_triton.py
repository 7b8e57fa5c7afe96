"""Samplers on the device equal the CPU's, edge for edge: on CUDA where it is, else interpreted."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.labor import LaborSampler
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from gnnplan.runtime.sampling.statistics import Estimator

pytest.importorskip("triton")

Graph = tuple[NDArray[np.int64], NDArray[np.integer]]
FANOUTS = [[3], [1, 2], [5, 3, 2], [-1], [4, -1], [3, 65], [150]]


def random_graph(number: int, num_nodes: int = 150) -> Graph:
    """A small multigraph with self-loops, isolated nodes and a few hubs."""
    rng = np.random.default_rng([20261121, number])
    degrees = rng.integers(0, 12, num_nodes)
    degrees[rng.random(num_nodes) < 0.3] = 0
    degrees[rng.random(num_nodes) < 0.05] += int(rng.integers(60, 400))
    degrees[[0, num_nodes - 1]] = [5, 7]
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    indices = rng.integers(0, num_nodes, int(indptr[-1]))
    indices[:2] = [0, num_nodes - 1]
    return indptr, indices.astype(np.int32 if number % 2 else np.int64)


def seeds_of(graph: Graph, count: int) -> NDArray[np.int64]:
    num_nodes = len(graph[0]) - 1
    middle = np.random.default_rng().permutation(np.arange(1, num_nodes - 1))
    return np.concatenate([[num_nodes - 1, 0], middle])[:count].astype(np.int64)


def device_sampler(graph: Graph, fanouts: list[int], device: torch.device, **settings: Any) -> Any:
    from gnnplan.runtime.sampling.gpu.neighbor import DeviceNeighborSampler
    from gnnplan.runtime.sampling.gpu.topology import DeviceTopology

    pinned = device.type == "cuda" and settings.get("seed", 0) % 2 == 1
    topology = DeviceTopology.load(*graph, device, pinned=pinned)
    return DeviceNeighborSampler(topology, fanouts, device=device, edge_ids=True, **settings)


def assert_equal_batches(drawn: Any, expected: MiniBatch) -> None:
    found = drawn.to_host()
    np.testing.assert_array_equal(found.n_id, expected.n_id)
    assert found.num_sampled_nodes == expected.num_sampled_nodes
    assert found.num_sampled_edges == expected.num_sampled_edges
    assert len(found.blocks) == len(expected.blocks)
    for block, other in zip(found.blocks, expected.blocks, strict=True):
        assert (block.num_src, block.num_dst) == (other.num_src, other.num_dst)
        for name in ("indptr", "indices", "e_id"):
            mine, theirs = getattr(block, name), getattr(other, name)
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("number", range(len(FANOUTS)))
def test_neighbours_equal_the_cpu_samplers(
    number: int, dialect: Dialect, kernel_device: torch.device
) -> None:
    graph, settings = random_graph(number), {"dialect": dialect, "seed": number}
    sampler = device_sampler(graph, FANOUTS[number], kernel_device, **settings)
    oracle = NeighborSampler(*graph, FANOUTS[number], edge_ids=True, **settings)
    for step, count in enumerate((0, 1, 17)):
        seeds = seeds_of(graph, count)
        found = sampler.sample(seeds, epoch=2, step=step)
        assert_equal_batches(found, oracle.sample(seeds, epoch=2, step=step))


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("number", range(len(FANOUTS)))
def test_labor_equals_the_cpu_sampler(
    number: int, dialect: Dialect, kernel_device: torch.device
) -> None:
    graph, settings = random_graph(number), {"dialect": dialect, "seed": number}
    sampler = device_sampler(graph, FANOUTS[number], kernel_device, method="labor", **settings)
    oracle = LaborSampler(
        *graph, FANOUTS[number], estimator=Estimator.PLAIN, edge_ids=True, **settings
    )
    for step, count in enumerate((0, 1, 17)):
        seeds = seeds_of(graph, count)
        found = sampler.sample(seeds, epoch=2, step=step)
        assert_equal_batches(found, oracle.sample(seeds, epoch=2, step=step))


@pytest.mark.usefixtures("poisoned", "shuffled")
def test_the_order_of_programs_does_not_change_a_batch(kernel_device: torch.device) -> None:
    graph = random_graph(1, num_nodes=400)
    seeds = seeds_of(graph, 300)
    sampler = device_sampler(graph, [4, 3], kernel_device, seed=3)
    oracle = NeighborSampler(*graph, [4, 3], edge_ids=True, seed=3)
    found = sampler.sample(seeds, epoch=0, step=1)
    assert_equal_batches(found, oracle.sample(seeds, epoch=0, step=1))


@pytest.mark.parametrize("fanout", [1, 2, 31, 256, pytest.param(1024, marks=pytest.mark.slow)])
def test_a_row_gives_one_to_a_thousand_edges(fanout: int, kernel_device: torch.device) -> None:
    degrees = np.array([3000, 0, 1, fanout, fanout + 1])
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    graph = (indptr, np.random.default_rng().integers(0, 5, int(indptr[-1])))
    seeds = np.random.default_rng().permutation(5)
    for method, oracle in (
        ("neighbor", NeighborSampler(*graph, [fanout], edge_ids=True)),
        ("labor", LaborSampler(*graph, [fanout], estimator=Estimator.PLAIN, edge_ids=True)),
    ):
        dialect = oracle.dialect
        sampler = device_sampler(graph, [fanout], kernel_device, method=method, dialect=dialect)
        found = sampler.sample(seeds, epoch=1, step=0)
        assert_equal_batches(found, oracle.sample(seeds, epoch=1, step=0))


@pytest.mark.parametrize(
    ("seeds", "words"),
    [([3, 4, 3], "node 3 twice"), ([0, 150], "found 150 at position 1"), ([-1], "found -1")],
)
def test_bad_seeds_are_refused_in_the_cpu_samplers_words(
    seeds: list[int], words: str, kernel_device: torch.device
) -> None:
    sampler = device_sampler(random_graph(0), [2], kernel_device)
    with pytest.raises(SamplerError, match=words):
        sampler.sample(np.array(seeds), epoch=0, step=0)


@pytest.mark.usefixtures("poisoned", "shuffled")
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 3000])
def test_relabelling_depends_on_no_order_of_programs(
    count: int, kernel_device: torch.device
) -> None:
    from gnnplan.runtime.sampling.gpu.relabel import DeviceRelabel

    rng = np.random.default_rng()
    # Many repetitions, so that programs race for a node's first place.
    values = rng.integers(0, max(count // 4, 1), count) * 2**40
    local, nodes, sums = DeviceRelabel(kernel_device).add(
        torch.from_numpy(values).to(kernel_device),
        torch.tensor([count], device=kernel_device),
        [],
    )
    distinct, firsts, inverse = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    number = np.empty_like(order)
    number[order] = np.arange(order.size)
    np.testing.assert_array_equal(local.cpu().numpy(), number[inverse])
    np.testing.assert_array_equal(nodes[: order.size].cpu().numpy(), distinct[order])
    assert count == 0 or int(sums[-1]) == order.size


def test_relabelling_numbers_by_first_appearance(kernel_device: torch.device) -> None:
    from gnnplan.runtime.sampling.gpu.relabel import DeviceRelabel

    values = torch.tensor([7, 2**40, 7, 0, 2**40, 5, 0, 99], device=kernel_device)
    relabel = DeviceRelabel(kernel_device)
    total = torch.tensor([7], device=kernel_device)
    local, nodes, sums = relabel.add(values, total, [])
    assert local[:7].tolist() == [0, 1, 0, 2, 1, 3, 2]
    assert int(sums[-1]) == 4
    assert nodes[:4].tolist() == [7, 2**40, 0, 5]
    # Enough new values that the table grows: the known nodes keep their numbers.
    relabel.num_known = 4
    more = torch.cat([torch.arange(100, 600, device=kernel_device), nodes[:4]])
    local, _, sums = relabel.add(more, torch.tensor([504], device=kernel_device), [nodes[:4]])
    assert local.tolist() == [*range(4, 504), 0, 1, 2, 3]
    assert int(sums[-1]) == 500
