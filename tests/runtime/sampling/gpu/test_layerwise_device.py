"""LADIES, PLADIES and FastGCN on the device equal the CPU's, one by one and in stacks."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.bulk.bulk import BulkSampler
from gnnplan.runtime.sampling.dependent import StreamPolicy
from gnnplan.runtime.sampling.layerwise import LayerwiseSampler
from gnnplan.runtime.sampling.locality import rings
from gnnplan.runtime.sampling.minibatch import Request
from gnnplan.runtime.sampling.neighbor import Boost
from gnnplan.runtime.sampling.statistics import Estimator
from tests.runtime.sampling.device_cases import (
    assert_equal_batches,
    random_graph,
    random_weights,
    seeds_of,
    topology_of,
)

pytest.importorskip("triton")

WAYS = list(itertools.product(["ladies", "pladies", "fastgcn"], [False, True]))


def requests_of(graph: Any) -> list[Request]:
    """Four batches of one stack, one of them empty."""
    return [
        Request(seeds=seeds_of(graph, count), epoch=1, step=step)
        for step, count in enumerate((6, 0, 1, 9))
    ]


def sampler_of(number: int, sizes: list[int], device: torch.device, **settings: Any) -> Any:
    from gnnplan.runtime.sampling.gpu.layerwise import DeviceLayerwiseSampler

    topology = topology_of(random_graph(number), device, number % 3)
    return DeviceLayerwiseSampler(topology, sizes, device=device, edge_ids=True, **settings)


@pytest.mark.parametrize(
    ("number", "method", "replace"),
    [((i + shift) % 4, *way) for i, way in enumerate(WAYS) for shift in (0, 1)],
)
def test_stacks_equal_the_cpu_samplers_batches(
    number: int, method: str, replace: bool, kernel_device: torch.device
) -> None:
    graph, sizes = random_graph(number), [[6, 9], [1, 40], [60], [5, 3]][number]
    settings: dict[str, Any] = {
        "method": method, "replace": replace, "seed": number,
        "estimator": list(Estimator)[number % 3],
        "norm": "count2" if number == 2 and method != "fastgcn" else "fro",
        "edge_weight": random_weights(graph, number) if number % 2 else None,
    }  # fmt: skip
    oracle = LayerwiseSampler(*graph, sizes, edge_ids=True, **settings)
    requests = requests_of(graph)
    found = sampler_of(number, sizes, kernel_device, **settings).sample_stack(requests)
    for batch, request in zip(found, requests, strict=True):
        expected = oracle.sample(request.seeds, epoch=request.epoch, step=request.step)
        assert_equal_batches(batch, expected)


def test_ladies_by_darts_equals_the_bulk_sampler(kernel_device: torch.device) -> None:
    graph, sizes = random_graph(1), [6, 9]
    oracle = BulkSampler(*graph, sizes, method="ladies", edge_ids=True, seed=5)
    requests = requests_of(graph)
    sampler = sampler_of(1, sizes, kernel_device, method="ladies", by_vertex=False, seed=5)
    expected = oracle.sample_many([r.seeds for r in requests], epoch=1)
    for batch, other in zip(sampler.sample_stack(requests), expected, strict=True):
        assert_equal_batches(batch, other)


@pytest.mark.parametrize("raced", [1 << 18, 7])
def test_darts_without_patience_race_on_as_on_the_cpu(
    raced: int, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gnnplan.runtime.sampling.gpu import layerwise

    # One weight outweighs the others by so much that the darts hardly ever hit another column.
    graph = random_graph(2)
    weights = np.full(len(graph[1]), 1e-3, dtype=np.float32)
    weights[graph[1] == graph[1][0]] = 1e3
    settings: dict[str, Any] = {"method": "fastgcn", "edge_weight": weights, "seed": 2}
    oracle = LayerwiseSampler(*graph, [6], edge_ids=True, **settings)
    sampler = sampler_of(2, [6], kernel_device, **settings)
    monkeypatch.setattr(layerwise, "RACED", raced)
    requests = requests_of(graph)
    for batch, request in zip(sampler.sample_stack(requests), requests, strict=True):
        expected = oracle.sample(request.seeds, epoch=request.epoch, step=request.step)
        assert_equal_batches(batch, expected)


@pytest.mark.parametrize(("method", "replace"), [("ladies", False), ("pladies", True)])
def test_dependent_and_local_layers_equal_the_cpu_samplers(
    method: str, replace: bool, kernel_device: torch.device
) -> None:
    graph = random_graph(0)
    local = np.random.default_rng().permutation(60)[:15]
    settings: dict[str, Any] = {
        "method": method, "replace": replace, "boost": Boost(rings(*graph, local, 2), 3.0),
        "policy": StreamPolicy(seed=9, kappa=4),
    }  # fmt: skip
    oracle = LayerwiseSampler(*graph, [6, 9], edge_ids=True, **settings)
    requests = requests_of(graph)
    found = sampler_of(0, [6, 9], kernel_device, **settings).sample_stack(requests)
    for batch, request in zip(found, requests, strict=True):
        expected = oracle.sample(request.seeds, epoch=request.epoch, step=request.step)
        assert_equal_batches(batch, expected)


def test_bad_settings_are_refused_in_one_line(kernel_device: torch.device) -> None:
    boost = Boost(np.zeros(60, np.uint8), 2.0)
    with pytest.raises(SamplerError, match="found fastgcn"):
        sampler_of(0, [3], kernel_device, method="fastgcn", boost=boost)
    with pytest.raises(SamplerError, match="found node 3 twice"):
        sampler_of(0, [3], kernel_device).sample(np.array([3, 1, 3]), epoch=0, step=0)
