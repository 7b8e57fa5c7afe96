"""LABOR on the device equals the CPU's, edge for edge: on CUDA where it is, else interpreted."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.runtime.sampling.dependent import Dependence
from gnnplan.runtime.sampling.labor import LaborSampler
from gnnplan.runtime.sampling.minibatch import Dialect
from gnnplan.runtime.sampling.statistics import Estimator
from tests.runtime.sampling.device_cases import (
    assert_equal_batches,
    random_graph,
    random_weights,
    seeds_of,
    topology_of,
)

pytest.importorskip("triton")

ESTIMATORS = list(Estimator)


def compare(
    number: int, fanouts: list[int], device: torch.device, count: int, **settings: Any
) -> None:
    """Steps of one sampler beside the CPU's."""
    from gnnplan.runtime.sampling.gpu.labor import DeviceLaborSampler

    graph = random_graph(number)
    settings = {
        "dialect": list(Dialect)[number % 2], "estimator": ESTIMATORS[number % 3],
        "seed": number, "edge_ids": True, **settings,
    }  # fmt: skip
    sampler = DeviceLaborSampler(
        topology_of(graph, device, number % 3), fanouts, device=device, **settings
    )
    oracle = LaborSampler(*graph, fanouts, **settings)
    for step in (0, 3):
        seeds = seeds_of(graph, count)
        found = sampler.sample(seeds, epoch=1, step=step)
        assert_equal_batches(found, oracle.sample(seeds, epoch=1, step=step))


def cases(variants: list[Any]) -> list[tuple[int, Any, str]]:
    """Every variant in both forms, on the three graphs in turn."""
    pairs = itertools.product(variants, ["poisson", "exact_k"])
    return [(i % 3, variant, form) for i, (variant, form) in enumerate(pairs)]


@pytest.mark.parametrize("form", ["poisson", "exact_k"])
@pytest.mark.parametrize("number", range(3))
def test_labor_0_equals_the_cpu_sampler(
    number: int, form: str, kernel_device: torch.device
) -> None:
    fanouts = [[3, 2], [-1, 4], [100]][number]
    compare(number, fanouts, kernel_device, 9, form=form)


@pytest.mark.parametrize(("number", "variant", "form"), cases([1, 3, "star"]))
def test_the_fixed_point_equals_the_cpu_samplers(
    number: int, variant: int | str, form: str, kernel_device: torch.device
) -> None:
    compare(number, [[3, 2], [4, -1], [7]][number], kernel_device, 9, variant=variant, form=form)


@pytest.mark.parametrize(("number", "variant", "form"), cases([0, 2, "star"]))
def test_weighted_edges_equal_the_cpu_samplers(
    number: int, variant: int | str, form: str, kernel_device: torch.device
) -> None:
    weights = random_weights(random_graph(number), number)
    settings = {"variant": variant, "form": form, "edge_weight": weights}
    compare(number, [[3, 2], [4, -1], [7]][number], kernel_device, 9, **settings)


@pytest.mark.parametrize(("variant", "form"), [(0, "poisson"), (0, "exact_k"), (1, "poisson")])
@pytest.mark.parametrize(
    ("kappa", "dependence"),
    [(4, Dependence.SMOOTH), (4, Dependence.FROZEN), (math.inf, Dependence.SMOOTH)],
)
def test_dependent_batches_equal_the_cpu_samplers(
    dependence: Dependence, variant: int, form: str, kappa: float, kernel_device: torch.device
) -> None:
    settings = {"variant": variant, "form": form, "kappa": kappa, "dependence": dependence}
    compare(4, [3, 2], kernel_device, 9, **settings, layer_dependent=True, steps_per_epoch=5)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("variant", [0, 1, "star"])
def test_few_seeds_are_sampled_as_on_the_cpu(
    count: int, variant: int | str, kernel_device: torch.device
) -> None:
    compare(1, [3, 2], kernel_device, count, variant=variant, form="exact_k")


def test_smooth_words_have_the_cpus_bits(kernel_device: torch.device) -> None:
    from gnnplan.runtime.sampling.dependent import StreamPolicy
    from gnnplan.runtime.sampling.gpu.rng import StackStreams, hop_words

    policy = StreamPolicy(seed=3, kappa=7)
    steps = [policy.streams(0, step, 2) for step in range(7)]
    ids = np.random.default_rng().integers(0, 2**40, 600)
    ids[:2] = [0, 2**40]
    held = torch.from_numpy(ids).to(kernel_device)
    for step in steps:
        bits = hop_words(step, 1, held).cpu().numpy().view(np.uint64)
        np.testing.assert_array_equal(bits, step.words(1, ids))
    owners = torch.arange(600, device=kernel_device) % 7
    found = StackStreams.of(steps, 0, kernel_device).words(owners, held, owners)
    expected = [steps[i % 7].words(0, int(v), i % 7) for i, v in enumerate(ids)]
    np.testing.assert_array_equal(found.cpu().numpy().view(np.uint64), expected)
