"""Layer-wise samplers: equal to their definition, and refusing what cannot be used."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.dependent import Dependence, StreamPolicy
from gnnplan.runtime.sampling.layerwise import LayerwiseSampler, make_law
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.statistics import Estimator
from tests.reference.layerwise import sample_layerwise_reference

Graph = tuple[NDArray[np.int64], NDArray[np.integer]]


def test_fastgcn_begins_in_little_more_than_it_keeps() -> None:
    nodes, degree = 1 << 17, 8
    indptr = np.arange(0, nodes * degree + 1, degree)
    indices = np.arange(nodes * degree, dtype=np.int32) % nodes
    settings: dict[str, Any] = {"method": "fastgcn", "replace": True}
    LayerwiseSampler(indptr[:9], indices[:64] % 8, [4], **settings)  # compiles
    tracemalloc.start()
    try:
        sampler = LayerwiseSampler(indptr, indices, [4], **settings)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sampler.graph.fixed is not None
    assert kept < 24 * nodes
    assert peak < 29 * nodes


WAYS = [
    ("ladies", "fro", False),
    ("ladies", "count2", False),
    ("ladies", "fro", True),
    ("ladies", "count2", True),
    ("pladies", "fro", False),
    ("pladies", "count2", False),
    ("pladies", "fro", True),
    ("fastgcn", "fro", False),
    ("fastgcn", "fro", True),
]


def random_graph(number: int) -> Graph:
    """A small multigraph with self-loops, isolated nodes and hubs."""
    rng = np.random.default_rng([20261121, number])
    num_nodes = int(rng.integers(2, 70))
    degrees = rng.integers(0, 8, num_nodes)
    degrees[rng.random(num_nodes) < 0.3] = 0
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    indices = (num_nodes * rng.random(int(indptr[-1])) ** 2).astype(np.int64)
    return indptr, indices.astype(np.int32 if number % 2 else np.int64)


def assert_equal_batches(found: MiniBatch, expected: MiniBatch) -> None:
    np.testing.assert_array_equal(found.n_id, expected.n_id)
    assert found.num_sampled_nodes == expected.num_sampled_nodes
    assert found.num_sampled_edges == expected.num_sampled_edges
    assert len(found.blocks) == len(expected.blocks)
    for block, other in zip(found.blocks, expected.blocks, strict=True):
        assert (block.num_src, block.num_dst) == (other.num_src, other.num_dst)
        np.testing.assert_array_equal(block.indptr, other.indptr)
        np.testing.assert_array_equal(block.indices, other.indices)
        np.testing.assert_array_equal(block.e_id, other.e_id)
        assert (block.weight is None) == (other.weight is None)
        if block.weight is not None and other.weight is not None:
            np.testing.assert_allclose(block.weight, other.weight, rtol=1e-5)


@pytest.mark.parametrize("budget", [1 << 30, 0])
@pytest.mark.parametrize(("method", "norm", "replace"), WAYS)
def test_sampler_equals_the_reference_on_random_graphs(
    method: str, norm: str, replace: bool, budget: int
) -> None:
    for number in range(25):
        indptr, indices = random_graph(number)
        rng = np.random.default_rng([3, number])
        num_nodes = len(indptr) - 1
        sizes = [int(n) for n in rng.integers(1, num_nodes + 1, int(rng.integers(1, 4)))]
        seeds = rng.permutation(num_nodes)[: int(rng.integers(0, 20))].astype(np.int64)
        weight = rng.integers(0, 4, len(indices)).astype(np.float32) if number % 3 == 0 else None
        estimator = list(Estimator)[number % 3]
        sampler = LayerwiseSampler(
            indptr, indices, sizes, method=method, norm=norm, replace=replace,
            estimator=estimator, edge_weight=weight, seed=number, edge_ids=True,
            relabel_budget_bytes=budget,
        )  # fmt: skip
        found = sampler.sample(seeds, epoch=number % 5, step=number % 4)
        expected = sample_layerwise_reference(
            indptr, indices, sizes, seeds, edge_weight=weight, seed=number, epoch=number % 5,
            step=number % 4, law=make_law(method, norm, replace=replace, estimator=estimator),
        )  # fmt: skip
        assert found.dialect is Dialect.EVERY_HOP
        assert_equal_batches(found, expected)


def test_skewed_rows_go_on_from_darts_to_the_race_as_the_reference_does() -> None:
    # FastGCN without replacement draws darts; one vertex with nearly all the mass outlasts them.
    num_nodes = 12
    indptr = np.array([0, 11, *range(12, 23)], dtype=np.int64)
    indices = np.concatenate([np.arange(1, 12), np.arange(11)]).astype(np.int32)
    weight = np.full(22, 1e-4, dtype=np.float32)
    weight[0] = 10.0
    seeds = np.arange(num_nodes, dtype=np.int64)
    settings: dict[str, Any] = {"edge_weight": weight, "seed": 4}
    sampler = LayerwiseSampler(indptr, indices, [6], method="fastgcn", edge_ids=True, **settings)
    law = make_law("fastgcn", "fro", replace=False, estimator=Estimator.HORVITZ_THOMPSON)
    for step in range(20):
        found = sampler.sample(seeds, epoch=0, step=step)
        expected = sample_layerwise_reference(
            indptr, indices, [6], seeds, law=law, step=step, **settings
        )
        assert_equal_batches(found, expected)
        drawn = np.unique(indices[found.blocks[0].e_id])
        assert 1 <= len(drawn) <= 6


def test_as_many_vertices_as_asked_for_are_drawn_and_all_where_there_are_no_more() -> None:
    indptr, indices = random_graph(8)
    seeds = np.arange(len(indptr) - 1, dtype=np.int64)
    candidates = len(np.unique(indices))
    for size in (1, 5, candidates, len(indptr) - 1):
        batch = LayerwiseSampler(indptr, indices, [size], edge_ids=True).sample(
            seeds, epoch=0, step=0
        )
        drawn = np.unique(indices[batch.blocks[0].e_id])
        assert len(drawn) == min(size, candidates)
    assert batch.num_edges == len(indices)


def as_bytes(batch: MiniBatch) -> bytes:
    arrays = [batch.n_id, *(a for b in batch.blocks for a in (b.indptr, b.indices, b.weight))]
    return b"".join(np.ascontiguousarray(array).tobytes() for array in arrays if array is not None)


@pytest.mark.parametrize("method", ["ladies", "pladies", "fastgcn"])
def test_batches_are_byte_identical_for_1_2_and_4_threads(method: str) -> None:
    indptr, indices = random_graph(14)
    num_nodes = len(indptr) - 1
    found: list[list[bytes]] = []
    for threads in (1, 2, 4):
        sampler = LayerwiseSampler(indptr, indices, [6, 9], method=method)

        def one(step: int, sampler: LayerwiseSampler = sampler) -> bytes:
            seeds = np.random.default_rng(step).permutation(num_nodes)[:8].astype(np.int64)
            return as_bytes(sampler.sample(seeds, epoch=0, step=step))

        with ThreadPoolExecutor(threads) as pool:
            found.append(list(pool.map(one, range(60))))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("method", ["ladies", "pladies"])
def test_frozen_policy_draws_the_same_vertices_within_a_segment(method: str) -> None:
    indptr, indices = random_graph(14)
    seeds = np.arange(len(indptr) - 1, dtype=np.int64)
    policy = StreamPolicy(seed=1, kappa=4.0, dependence=Dependence.FROZEN)
    sampler = LayerwiseSampler(indptr, indices, [6, 6], method=method, policy=policy)
    found = [as_bytes(sampler.sample(seeds, epoch=0, step=step)) for step in range(8)]
    assert len(set(found[:4])) == len(set(found[4:])) == 1
    assert found[0] != found[4]


def test_an_empty_seed_list_gives_an_empty_batch_with_all_blocks() -> None:
    for method in ("ladies", "pladies", "fastgcn"):
        sampler = LayerwiseSampler(*random_graph(8), [3, 2], method=method, edge_ids=True)
        batch = sampler.sample(np.zeros(0, dtype=np.int64), epoch=0, step=0, global_num_seeds=8)
        assert [b.num_edges for b in batch.blocks] == [0, 0]
        assert [b.num_dst for b in batch.blocks][1] == 0
        assert (batch.num_seeds, batch.global_num_seeds) == (0, 8)


@pytest.mark.parametrize("sizes", [[], [0], [5, -1], [71]])
def test_unusable_layer_sizes_are_refused(sizes: list[int]) -> None:
    with pytest.raises(SamplerError, match="size") as caught:
        LayerwiseSampler(*random_graph(8), sizes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_weights_that_are_negative_nan_or_infinite_are_refused(value: float) -> None:
    indptr, indices = random_graph(8)
    weight = np.ones(len(indices), dtype=np.float32)
    weight[3] = value
    with pytest.raises(SamplerError, match=r"found .* at edge 3"):
        LayerwiseSampler(indptr, indices, [3], edge_weight=weight)
    with pytest.raises(SamplerError, match="one edge weight per stored edge"):
        LayerwiseSampler(indptr, indices, [3], edge_weight=weight[:-1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "lady"}, "found 'lady'"),
        ({"norm": "l2"}, "found 'l2'"),
        ({"method": "fastgcn", "norm": "count2"}, "norm fro with fastgcn"),
        ({"method": "fastgcn", "policy": StreamPolicy(kappa=4.0)}, "one number per vertex"),
        ({"replace": True, "policy": StreamPolicy(kappa=4.0)}, "one number per vertex"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(SamplerError, match=message):
        LayerwiseSampler(*random_graph(8), [3], **settings)


@pytest.mark.parametrize(
    ("seeds", "message"), [([0, 999], "found 999"), ([-1], "found -1"), ([1, 0, 1], "node 1 twice")]
)
def test_bad_seeds_are_refused_and_leave_the_sampler_usable(seeds: list[int], message: str) -> None:
    sampler = LayerwiseSampler(*random_graph(8), [3])
    good = np.arange(2, dtype=np.int64)
    before = as_bytes(sampler.sample(good, epoch=0, step=0))
    with pytest.raises(SamplerError, match=message):
        sampler.sample(np.array(seeds, dtype=np.int64), epoch=0, step=0)
    assert as_bytes(sampler.sample(good, epoch=0, step=0)) == before
