"""The fast LABOR sampler equals its definition, edge for edge and weight for weight."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gnnplan.runtime.sampling.dependent import Dependence, StreamPolicy
from gnnplan.runtime.sampling.labor import Form, LaborSampler
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.statistics import Estimator
from tests.reference.labor import sample_labor_reference

DIALECTS = list(Dialect)
DENSE, HASHED = 1 << 30, 0


def random_graph(number: int, *, largest: int = 90) -> tuple[NDArray, NDArray]:
    """A small multigraph with self-loops, isolated nodes and some rows of several chunks of 16."""
    rng = np.random.default_rng([20261121, number])
    num_nodes = int(rng.integers(2, 60))
    degrees = rng.integers(0, 14, num_nodes)
    degrees[rng.random(num_nodes) < 0.2] = 0
    degrees[rng.random(num_nodes) < 0.15] += int(rng.integers(20, largest))
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    indices = rng.integers(0, num_nodes, int(indptr[-1]))
    return indptr, indices.astype(np.int32 if number % 2 else np.int64)


def random_weight(number: int, num_edges: int) -> NDArray:
    """Positive weights over two orders of magnitude, a fifth of them zero."""
    rng = np.random.default_rng([5, number])
    weight = np.exp(rng.normal(0, 1.2, num_edges)) * (rng.random(num_edges) > 0.2)
    return weight.astype(np.float32 if number % 3 else np.float64)


def assert_equal_batches(found: MiniBatch, expected: MiniBatch) -> None:
    np.testing.assert_array_equal(found.n_id, expected.n_id)
    assert found.num_sampled_nodes == expected.num_sampled_nodes
    assert found.num_sampled_edges == expected.num_sampled_edges
    for block, other in zip(found.blocks, expected.blocks, strict=True):
        assert (block.num_src, block.num_dst) == (other.num_src, other.num_dst)
        np.testing.assert_array_equal(block.indptr, other.indptr)
        np.testing.assert_array_equal(block.indices, other.indices)
        np.testing.assert_array_equal(block.e_id, other.e_id)
        assert (block.weight is None) == (other.weight is None)
        if block.weight is not None and other.weight is not None:
            assert block.weight.dtype == np.float32
            np.testing.assert_allclose(block.weight, other.weight, rtol=1e-6)


def compare(number: int, *, weighted: bool, budget: int, **settings: Any) -> int:
    """Sample one random graph both ways; return the number of edges drawn."""
    indptr, indices = random_graph(number)
    rng = np.random.default_rng([3, number])
    fanouts = [int(k) for k in rng.choice([-1, 1, 2, 3, 5, 10, 25], int(rng.integers(1, 4)))]
    num_seeds = int(rng.integers(0, 20))
    seeds = rng.permutation(len(indptr) - 1)[:num_seeds].astype(np.int64)
    policy = {key: settings.pop(key) for key in ("kappa", "dependence") if key in settings}
    policy |= {"seed": number, "layer_dependent": number % 4 == 0}
    if weighted:
        settings["edge_weight"] = random_weight(number, len(indices))
    sampler = LaborSampler(
        indptr, indices, fanouts, edge_ids=True, relabel_budget_bytes=budget, **policy, **settings
    )
    found = sampler.sample(seeds, epoch=number % 3, step=number % 5)
    expected = sample_labor_reference(
        indptr,
        indices,
        fanouts,
        seeds,
        streams=StreamPolicy(**policy),
        epoch=number % 3,
        step=number % 5,
        **settings,
    )
    assert_equal_batches(found, expected)
    return found.num_edges


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("variant", [0, 1, 3, "star"])
def test_every_variant_equals_the_reference(
    variant: int | str, form: Form, dialect: Dialect
) -> None:
    edges = 0
    for number in range(30):
        edges += compare(
            number,
            weighted=False,
            budget=HASHED if number % 2 else DENSE,
            variant=variant,
            form=form,
            dialect=dialect,
            estimator=list(Estimator)[number % 3],
        )
    assert edges > 1000


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("variant", [0, 1, "star"])
def test_weighted_rows_equal_the_reference(variant: int | str, form: Form) -> None:
    edges = 0
    for number in range(30):
        edges += compare(
            number,
            weighted=True,
            budget=HASHED if number % 2 else DENSE,
            variant=variant,
            form=form,
            dialect=DIALECTS[number % 2],
            estimator=list(Estimator)[number % 3],
        )
    assert edges > 1000


@pytest.mark.parametrize("dependence", list(Dependence))
@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("variant", [0, 2])
def test_dependent_batches_equal_the_reference(
    variant: int, form: Form, dependence: Dependence
) -> None:
    for number in range(24):
        compare(
            number,
            weighted=False,
            budget=DENSE,
            variant=variant,
            form=form,
            kappa=[2, 4, 64, math.inf][number % 4],
            dependence=dependence,
        )
