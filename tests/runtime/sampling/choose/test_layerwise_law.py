"""Laws of the layer-wise samplers: inclusion, unbiased weights, and their variances in order."""

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from gnnplan.runtime.sampling.choose.poisson import water_level
from gnnplan.runtime.sampling.layerwise import LayerwiseSampler
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from gnnplan.runtime.sampling.statistics import Estimator

Graph = tuple[NDArray[np.int64], NDArray[np.int32]]


def test_r5_water_filling() -> None:
    # [R5], formulas 5.4: w = 4,1,1,1,1 and n = 3.
    w = np.array([4.0, 1, 1, 1, 1])
    np.testing.assert_allclose(np.minimum(1, water_level(w, 3) * w), [1, 0.5, 0.5, 0.5, 0.5])


def test_water_level_spends_the_size_exactly_and_takes_all_where_it_suffices() -> None:
    rng = np.random.default_rng(2)
    for _ in range(300):
        w = rng.random(int(rng.integers(1, 40))) ** rng.integers(1, 12)
        w[rng.random(len(w)) < 0.2] = 0
        size, positive = int(rng.integers(1, 40)), int((w > 0).sum())
        level = water_level(w, size)
        if size >= positive:
            assert level == np.inf
        else:
            assert np.minimum(1, level * w).sum() == pytest.approx(size, rel=1e-9)


def test_water_level_ends_where_rounding_leaves_entries_a_hair_from_one() -> None:
    """Counts of edges over their sum, as PLADIES has them, meet 1 exactly; it once ran for ever."""
    w = np.array([6.0, 10, 11, 6]) / 33
    assert np.minimum(1, water_level(w, 3) * w).sum() == pytest.approx(3, rel=1e-12)
    rng = np.random.default_rng(0)
    for _ in range(3000):
        counts = rng.integers(1, 12, int(rng.integers(3, 12))).astype(np.float64)
        w, size = counts / counts.sum(), int(rng.integers(1, len(counts)))
        assert np.minimum(1, water_level(w, size) * w).sum() == pytest.approx(size, rel=1e-12)


def example() -> Graph:
    """Five destinations over eight sources, degrees 1 to 5 and one parallel edge."""
    lists = [[5, 6], [5, 6, 7, 8], [5, 9, 9], [10, 11, 12, 5, 6], [7], *[[]] * 8]
    indptr = np.concatenate([[0], np.cumsum([len(ids) for ids in lists])]).astype(np.int64)
    return indptr, np.array([v for ids in lists for v in ids], dtype=np.int32)


def estimates(batch: MiniBatch, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each seed's aggregate as a layer computes it."""
    (block,) = batch.blocks
    rows = np.repeat(np.arange(block.num_dst), np.diff(block.indptr))
    weight = block.weight
    if weight is None:
        weight = 1 / np.maximum(np.diff(block.indptr), 1)[rows]
    out = np.zeros(block.num_dst)
    np.add.at(out, rows, weight * x[batch.n_id[block.indices]])
    return out


def means(graph: Graph, x: NDArray[np.float64], weight: NDArray | None = None) -> NDArray:
    indptr, indices = graph
    w = np.ones(len(indices)) if weight is None else weight
    pairs = itertools.pairwise(indptr)
    return np.array([np.average(x[indices[a:b]], weights=w[a:b]) if b > a else 0 for a, b in pairs])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("method", "norm", "replace"),
    [
        ("ladies", "fro", False),
        ("ladies", "count2", False),
        ("ladies", "fro", True),
        ("pladies", "fro", False),
        ("pladies", "count2", True),
        ("fastgcn", "fro", False),
        ("fastgcn", "fro", True),
    ],
)
def test_horvitz_thompson_weights_are_unbiased(
    method: str, norm: str, replace: bool, weighted: bool
) -> None:
    graph, trials = example(), 1200
    x = np.arange(13, dtype=np.float64)
    weight = np.linspace(0.5, 2, len(graph[1])).astype(np.float32) if weighted else None
    sampler = LayerwiseSampler(
        *graph, [4], method=method, norm=norm, replace=replace, edge_weight=weight
    )
    seeds = np.arange(5, dtype=np.int64)
    found = np.array([estimates(sampler.sample(seeds, epoch=0, step=i), x) for i in range(trials)])
    z = (found.mean(axis=0) - means(graph, x, weight)[:5]) / (found.std(axis=0) / np.sqrt(trials))
    assert np.abs(z).max() < 4


def test_hajek_weights_of_a_row_sum_to_one() -> None:
    sampler = LayerwiseSampler(*example(), [4], estimator=Estimator.HAJEK)
    for step in range(50):
        block = sampler.sample(np.arange(5, dtype=np.int64), epoch=0, step=step).blocks[0]
        assert block.weight is not None
        rows = np.repeat(np.arange(5), np.diff(block.indptr))
        sums = np.bincount(rows, weights=block.weight, minlength=5)
        np.testing.assert_allclose(sums[np.diff(block.indptr) > 0], 1, rtol=1e-6)


@pytest.mark.parametrize("norm", ["fro", "count2"])
def test_pladies_includes_each_vertex_with_its_probability(norm: str) -> None:
    graph, trials, size = example(), 1500, 4
    sampler = LayerwiseSampler(*graph, [size], method="pladies", norm=norm, edge_ids=True)
    counts = np.bincount(graph[1], minlength=13).astype(float) ** (2 if norm == "count2" else 1)
    pi = np.minimum(1, water_level(counts, size) * counts)
    taken = np.zeros(13)
    for step in range(trials):
        (block,) = sampler.sample(np.arange(5, dtype=np.int64), epoch=0, step=step).blocks
        taken[np.unique(graph[1][block.e_id])] += 1
    sure = (pi == 0) | (pi == 1)
    np.testing.assert_array_equal(taken[sure], trials * pi[sure])
    z = (taken - trials * pi)[~sure] / np.sqrt(trials * pi * (1 - pi))[~sure]
    assert np.abs(z).max() < 4


def variance(sampler: LayerwiseSampler | NeighborSampler, num_seeds: int, x: NDArray) -> float:
    """Summed over seeds, measured over 250 batches."""
    seeds = np.arange(num_seeds, dtype=np.int64)
    found = [estimates(sampler.sample(seeds, epoch=0, step=i), x) for i in range(250)]
    return float(np.var(found, axis=0).sum())


def test_variances_at_equal_sample_size_are_in_the_order_of_the_bounds() -> None:
    # Formulas 3.3 at equal sample size: LADIES has |N|, the batch's neighbourhood, where FastGCN
    # has |V|, the whole graph; and N is a subset of V. Here 20 seeds share 60 neighbours out of
    # 1000 vertices, so FastGCN spends most of its sample elsewhere. The neighbour sampler's D
    # stands apart: with its size spent per seed it draws size / 20 of each seed's 15 neighbours,
    # and beats a layer's sample only where seeds share little.
    rng = np.random.default_rng(3)
    lists = [rng.permutation(60)[:15] + 20 for _ in range(20)]
    lists += [rng.integers(80, 1000, 15) for _ in range(980)]
    indptr = (15 * np.arange(1001)).astype(np.int64)
    graph = indptr, np.concatenate(lists).astype(np.int32)
    x, size = 1 + 0.1 * rng.standard_normal(1000), 40
    ladies = variance(LayerwiseSampler(*graph, [size]), 20, x)
    pladies = variance(LayerwiseSampler(*graph, [size], method="pladies"), 20, x)
    fastgcn = variance(LayerwiseSampler(*graph, [size], method="fastgcn"), 20, x)
    every = Dialect.EVERY_HOP
    neighbor = variance(NeighborSampler(*graph, [size // 20], dialect=every), 20, x - 1)
    centred = variance(LayerwiseSampler(*graph, [size], estimator=Estimator.HAJEK), 20, x - 1)
    assert 3 * ladies < fastgcn
    assert 3 * pladies < fastgcn
    # Shared vertices: a layer of 40 serves each seed with ten of its neighbours, not with two.
    assert 2 * centred < neighbor
