"""Every sampler that a plan can name has a form on the device, with the host's batches."""

from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.sampling.build import build_device_sampler, build_sampler
from gnnplan.runtime.sampling.registry import SAMPLERS, SamplerSpec
from tests.runtime.sampling.device_cases import (
    assert_equal_batches,
    random_graph,
    random_weights,
    seeds_of,
    topology_of,
)

pytest.importorskip("triton")

PLANS: list[tuple[str, str, dict[str, Any]]] = [
    ("full", "first_seen", {}),
    ("neighbor", "first_seen", {}),
    ("neighbor", "every_hop", {"draws": "poisson", "estimator": "hajek", "weights": "graph"}),
    ("neighbor", "first_seen", {"draws": "replacement", "estimator": "horvitz-thompson"}),
    ("neighbor", "first_seen", {"estimator": "horvitz-thompson", "weights": "graph"}),
    ("labor", "every_hop", {"variant": 1, "form": "exact_k", "kappa": 4}),
    ("labor", "first_seen", {"variant": "star", "weights": "graph"}),
    ("ladies", "every_hop", {"sizes": "8,5", "kappa": 3}),
    ("pladies", "every_hop", {"sizes": "8,5", "draws": "replacement"}),
    ("fastgcn", "every_hop", {"sizes": "8,5"}),
    ("las", "first_seen", {"factor": 3}),
    ("las", "every_hop", {"factor": 3, "over": "ladies", "sizes": "8,5"}),
]


def both(
    name: str, dialect: Any, parameters: dict[str, Any], device: torch.device
) -> tuple[Any, Any]:
    """The device's sampler and the host's."""
    graph = random_graph(1)
    named = Sampler(name=name, dialect=dialect, parameters=parameters)
    common: dict[str, Any] = {
        "edge_ids": True, "edge_weight": random_weights(graph, 1), "local": np.arange(0, 60, 4),
        "steps_per_epoch": 5,
    }  # fmt: skip
    found = build_device_sampler(
        named, topology_of(graph, device, 2), *graph, [3, 2], 7, device=device, **common
    )
    return found, build_sampler(named, *graph, [3, 2], 7, **common)


@pytest.mark.parametrize(("name", "dialect", "parameters"), PLANS)
def test_a_plans_sampler_draws_the_hosts_batches(
    name: str, dialect: str, parameters: dict[str, Any], kernel_device: torch.device
) -> None:
    sampler, oracle = both(name, dialect, parameters, kernel_device)
    seeds = seeds_of(random_graph(1), 5)
    found = sampler.sample(seeds, epoch=1, step=2)
    assert_equal_batches(found, oracle.sample(seeds, epoch=1, step=2))


def test_a_sampler_without_a_form_on_a_device_is_named(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SAMPLERS, "toy", SamplerSpec(name="toy", cpu="", unequal=False))
    with pytest.raises(SamplerError, match="sampler toy: expected one with a form on a GPU"):
        both("toy", "first_seen", {}, kernel_device)


@pytest.mark.parametrize("name", ["ladies", "las"])
def test_layers_are_refused_the_dialect_that_they_do_not_have(
    name: str, kernel_device: torch.device
) -> None:
    parameters = {"over": "ladies"} if name == "las" else {}
    with pytest.raises(SamplerError, match="expected dialect every_hop"):
        both(name, "first_seen", parameters, kernel_device)
