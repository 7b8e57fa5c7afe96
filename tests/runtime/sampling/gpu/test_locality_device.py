"""Weighted and locality-aware neighbours on the device equal the CPU's, edge for edge."""

import numpy as np
import pytest
import torch

from gnnplan.runtime.sampling.dependent import Dependence
from gnnplan.runtime.sampling.locality import Correction, LocalitySampler, rings
from gnnplan.runtime.sampling.minibatch import Dialect
from gnnplan.runtime.sampling.neighbor import WeightedSampler
from tests.reference.dependent_neighbor import DependentNeighborSampler
from tests.runtime.sampling.device_cases import (
    assert_equal_batches,
    random_graph,
    random_weights,
    seeds_of,
    topology_of,
)

pytest.importorskip("triton")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("correction", list(Correction))
@pytest.mark.parametrize(("number", "factor"), [(0, 4), (1, 1.3), (2, 1)])
def test_local_neighbours_equal_the_cpu_samplers(
    number: int, factor: float, correction: Correction, weighted: bool, kernel_device: torch.device
) -> None:
    from gnnplan.runtime.sampling.gpu.locality import DeviceLocalitySampler

    graph, fanouts = random_graph(number), [[3, 2], [4, -1], [7]][number]
    local = np.random.default_rng().permutation(len(graph[0]) - 1)[:12]
    settings = {
        "factor": factor, "correction": correction, "dialect": list(Dialect)[number % 2],
        "seed": number, "edge_ids": True,
        "edge_weight": random_weights(graph, number) if weighted else None,
    }  # fmt: skip
    oracle = LocalitySampler(*graph, fanouts, local=local, **settings)
    ring = rings(*graph, local, len(fanouts))
    sampler = DeviceLocalitySampler(
        topology_of(graph, kernel_device, number), fanouts, device=kernel_device, ring=ring,
        **settings,
    )  # fmt: skip
    for step, count in enumerate((0, 1, 9)):
        seeds = seeds_of(graph, count)
        found = sampler.sample(seeds, epoch=1, step=step)
        assert_equal_batches(found, oracle.sample(seeds, epoch=1, step=step))


@pytest.mark.parametrize("correction", list(Correction))
def test_without_local_vertices_neighbours_are_weighted_ones(
    correction: Correction, kernel_device: torch.device
) -> None:
    from gnnplan.runtime.sampling.gpu.locality import DeviceLocalitySampler

    graph, seeds = random_graph(3), seeds_of(random_graph(3), 5)
    draws, estimator = correction.way
    oracle = WeightedSampler(*graph, [4], draws=draws, estimator=estimator, edge_ids=True)
    sampler = DeviceLocalitySampler(
        topology_of(graph, kernel_device), [4], device=kernel_device, correction=correction,
        edge_ids=True,
    )  # fmt: skip
    found = sampler.sample(seeds, epoch=0, step=0)
    assert_equal_batches(found, oracle.sample(seeds, epoch=0, step=0))


@pytest.mark.parametrize("dependence", list(Dependence))
@pytest.mark.parametrize("dialect", list(Dialect))
def test_dependent_neighbours_equal_the_cpu_samplers(
    dialect: Dialect, dependence: Dependence, kernel_device: torch.device
) -> None:
    from gnnplan.runtime.sampling.gpu.neighbor import DeviceNeighborSampler

    graph, settings = random_graph(4), {"dialect": dialect, "seed": 4, "edge_ids": True}
    settings |= {"kappa": 3, "dependence": dependence}
    sampler = DeviceNeighborSampler(
        topology_of(graph, kernel_device, 2), [3, -1, 2], device=kernel_device, **settings
    )
    oracle = DependentNeighborSampler(*graph, [3, -1, 2], **settings)
    for step in (0, 1, 5):
        seeds = seeds_of(graph, 9)
        found = sampler.sample(seeds, epoch=1, step=step)
        assert_equal_batches(found, oracle.sample(seeds, epoch=1, step=step))
