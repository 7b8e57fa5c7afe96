"""Weighted neighbour sampling equals its definition, follows its law and estimates the mean."""

import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.neighbor import Boost, NeighborSampler, WeightedSampler
from gnnplan.runtime.sampling.statistics import Draws, Estimator
from tests.reference.weighted import poisson_probabilities, sample_weighted_reference

Graph = tuple[NDArray[np.int64], NDArray[np.integer]]
WITHOUT, REPLACEMENT, POISSON = Draws
PLAIN, HT, HAJEK = Estimator
DENSE, HASHED = 1 << 30, 0


def random_graph(number: int) -> tuple[Graph, NDArray[np.float32]]:
    """A small multigraph with isolated nodes and long rows, and weights, a fifth of them 0."""
    rng = np.random.default_rng([20261121, number])
    num_nodes = int(rng.integers(2, 100))
    degrees = rng.integers(0, 12, num_nodes)
    degrees[rng.random(num_nodes) < 0.1] += int(rng.integers(40, 120))
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    indices = rng.integers(0, num_nodes, int(indptr[-1]))
    weight = rng.exponential(1.0, len(indices)) * (rng.random(len(indices)) > 0.2)
    return (indptr, indices.astype(np.int32 if number % 2 else np.int64)), weight.astype(np.float32)


def edges_of(batch: MiniBatch) -> list[list[tuple[int, int, float]]]:
    """For each hop (next to the seeds first): destination, position and weight of each edge."""
    hops: list[list[tuple[int, int, float]]] = []
    rows_before = 0
    for block in reversed(batch.blocks):
        assert block.e_id is not None
        first = 0 if batch.dialect is Dialect.EVERY_HOP else rows_before
        rows_before = block.num_dst
        span = slice(int(block.indptr[first]), int(block.indptr[block.num_dst]))
        rows = np.repeat(np.arange(block.num_dst), np.diff(block.indptr))[span]
        weight = np.zeros(block.num_edges) if block.weight is None else block.weight
        hops.append(
            list(
                zip(
                    batch.n_id[rows].tolist(),
                    block.e_id[span].tolist(),
                    weight[span].tolist(),
                    strict=True,
                )
            )
        )
    return hops


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("draws", list(Draws))
def test_sampler_equals_the_reference_on_30_random_graphs(draws: Draws, dialect: Dialect) -> None:
    for number in range(30):
        (indptr, indices), weight = random_graph(number)
        rng = np.random.default_rng([3, number])
        fanouts = [int(k) for k in rng.choice([-1, 1, 2, 3, 5, 10, 40], int(rng.integers(1, 4)))]
        num_nodes = len(indptr) - 1
        seeds = rng.permutation(num_nodes)[: int(rng.integers(0, 30))].astype(np.int64)
        boost, ring = None, rng.integers(0, 4, num_nodes).astype(np.uint8)
        factor = float(rng.choice([1.0, 2.5, 8.0]))
        weighted = bool(number % 3)
        if number % 2:
            boost = Boost(ring, factor)

        def law(hop: int, edge: int, source: int, number: int = number) -> float:
            base = float(weight[edge]) if number % 3 else 1.0  # noqa: B023
            near = number % 2 and ring[source] <= len(fanouts) - 1 - hop  # noqa: B023
            return base * (factor if near else 1.0)  # noqa: B023

        uniform = not weighted and (boost is None or factor == 1.0)
        estimator = HAJEK if number % 5 == 0 else HT
        sampler = WeightedSampler(
            indptr,
            indices,
            fanouts,
            edge_weight=weight if weighted else None,
            draws=draws,
            estimator=estimator,
            boost=boost,
            dialect=dialect,
            seed=number,
            edge_ids=True,
            relabel_budget_bytes=DENSE if number % 4 else HASHED,
        )
        batch = sampler.sample(seeds, epoch=number % 5, step=number % 3)
        nodes, hops = sample_weighted_reference(
            indptr,
            indices,
            fanouts,
            seeds,
            law=None if uniform else law,
            draws=draws,
            estimator=estimator,
            dialect=dialect,
            seed=number,
            epoch=number % 5,
            step=number % 3,
        )
        assert batch.n_id.tolist() == nodes
        assert batch.num_sampled_edges == [len(hop) for hop in hops]
        for found, expected in zip(edges_of(batch), hops, strict=True):
            assert [edge[:2] for edge in found] == [edge[:2] for edge in expected]
            np.testing.assert_allclose(
                [edge[2] for edge in found], [edge[2] for edge in expected], rtol=1e-5
            )
        for block in batch.blocks:
            assert block.e_id is not None
            sources = batch.n_id[block.indices]
            np.testing.assert_array_equal(sources, indices[block.e_id])


def fan(degree: int, rows: int) -> tuple[Graph, NDArray[np.int64]]:
    """`rows` destinations, each with the sources 0 .. degree-1, and their ids."""
    indptr = np.concatenate([np.zeros(degree), np.arange(rows + 1) * degree]).astype(np.int64)
    indices = np.tile(np.arange(degree, dtype=np.int32), rows)
    return (indptr, indices), np.arange(degree, degree + rows, dtype=np.int64)


def drawn(
    weights: list[float], fanout: int, draws: Draws, estimator: Estimator = HT, rows: int = 40_000
) -> tuple[list[tuple[int, ...]], NDArray[np.float64]]:
    """Offsets drawn by each of many equal rows, and their sums of weights by offset [rows, d]."""
    (indptr, indices), seeds = fan(len(weights), rows)
    batch = WeightedSampler(
        indptr,
        indices,
        [fanout],
        edge_weight=np.tile(np.array(weights, dtype=np.float32), rows),
        draws=draws,
        estimator=estimator,
        edge_ids=True,
        seed=5,
    ).sample(seeds, epoch=0, step=0)
    (block,) = batch.blocks
    assert block.e_id is not None
    offsets = block.e_id % len(weights)
    sums = np.zeros((rows, len(weights)))
    row = np.repeat(np.arange(rows), np.diff(block.indptr))
    if block.weight is not None:
        np.add.at(sums, (row, offsets), block.weight)
    ends = block.indptr.tolist()
    taken = [tuple(offsets[a:b].tolist()) for a, b in itertools.pairwise(ends)]
    return taken, sums


def z_of(samples: NDArray[np.float64], expected: float) -> float:
    # The stored weights are float32: without spread they are right to that precision.
    error = samples.std(ddof=1) / np.sqrt(len(samples)) + 1e-7
    return float(abs(samples.mean() - expected) / error)


WEIGHTS = [4.0, 1.0, 0.5, 2.0, 0.0, 3.0]
VALUES = np.array([1.0, -2.0, 5.0, 0.5, 99.0, 2.0])
MEAN = VALUES[[0, 1, 2, 3, 5]].mean()


def test_replacement_draws_follow_the_weights_independently() -> None:
    taken, _ = drawn(WEIGHTS, 2, REPLACEMENT)
    q = np.array(WEIGHTS) / sum(WEIGHTS)
    pairs = [(a, b) for a in range(6) for b in range(6) if q[a] * q[b] > 0]
    counts = Counter(taken)
    assert set(counts) <= set(pairs)
    expected = [len(taken) * q[a] * q[b] for a, b in pairs]
    assert stats.chisquare([counts[pair] for pair in pairs], expected).pvalue > 1e-3


def successive_law(weights: list[float], k: int) -> dict[tuple[int, ...], float]:
    """Probability of each k-subset, by enumeration of all orders of successive sampling."""
    law: dict[tuple[int, ...], float] = {}
    able = [j for j, w in enumerate(weights) if w > 0]
    for order in itertools.permutations(able, k):
        probability, left = 1.0, sum(weights)
        for j in order:
            probability *= weights[j] / left
            left -= weights[j]
        subset = tuple(sorted(order))
        law[subset] = law.get(subset, 0.0) + probability
    return law


@pytest.mark.parametrize("k", [1, 2, 3])
def test_race_without_replacement_is_successive_sampling(k: int) -> None:
    taken, _ = drawn(WEIGHTS, k, WITHOUT)
    law = successive_law(WEIGHTS, k)
    assert sum(law.values()) == pytest.approx(1)
    counts = Counter(taken)
    assert set(counts) <= set(law)
    expected = [len(taken) * p for p in law.values()]
    assert stats.chisquare([counts[s] for s in law], expected).pvalue > 1e-3


def test_poisson_draws_each_edge_by_itself() -> None:
    taken, _ = drawn(WEIGHTS, 3, POISSON)
    pi = poisson_probabilities(WEIGHTS, 3)
    law = {
        subset: float(np.prod([pi[j] if j in subset else 1 - pi[j] for j in range(6)]))
        for size in range(7)
        for subset in itertools.combinations(range(6), size)
    }
    law = {subset: p for subset, p in law.items() if p > 0}
    assert sum(law.values()) == pytest.approx(1)
    counts = Counter(taken)
    assert set(counts) <= set(law)
    expected = [len(taken) * p for p in law.values()]
    assert stats.chisquare([counts[s] for s in law], expected).pvalue > 1e-3


def test_poisson_probabilities_are_those_of_the_water_filling() -> None:
    # formulas 5.4 [R5]: w = 4,1,1,1,1, n = 3 -> 1, .5, .5, .5, .5.
    assert poisson_probabilities([4.0, 1.0, 1.0, 1.0, 1.0], 3) == [1.0, 0.5, 0.5, 0.5, 0.5]
    taken, _ = drawn([4.0, 1.0, 1.0, 1.0, 1.0], 3, POISSON)
    assert all(0 in row for row in taken)
    shares = np.array([[j in row for j in range(1, 5)] for row in taken]).mean(axis=0)
    assert np.abs(shares - 0.5).max() < 4 * np.sqrt(0.25 / len(taken))


@pytest.mark.parametrize("draws", list(Draws))
@pytest.mark.parametrize("k", [1, 2, 4])
def test_horvitz_thompson_weights_are_unbiased_for_the_mean(draws: Draws, k: int) -> None:
    _, sums = drawn(WEIGHTS, k, draws)
    assert z_of(sums @ VALUES, MEAN) < 4
    for j in (0, 1, 2, 3, 5):
        assert z_of(sums[:, j], 1 / 5) < 4
    assert (sums[:, 4] == 0).all()


@pytest.mark.parametrize("draws", list(Draws))
def test_the_plain_mean_of_weighted_draws_is_biased_and_hajek_nearly_not(draws: Draws) -> None:
    # 40 edges, half of weight 4, whose messages are 4 times as large: biased mean 3.4, mean 2.5.
    weights = [4.0, 1.0] * 20
    values = np.array(weights)
    taken, _ = drawn(weights, 10, draws, rows=10_000)
    plain = np.array([values[list(row)].mean() for row in taken if row])
    _, sums = drawn(weights, 10, draws, HAJEK, rows=10_000)
    some = sums.sum(axis=1) > 0
    np.testing.assert_allclose(sums[some].sum(axis=1), 1, rtol=1e-5)
    hajek = sums[some] @ values
    assert plain.mean() - 2.5 > 0.7
    assert abs(hajek.mean() - 2.5) < 0.2
    # Bounded by the messages, unlike Horvitz-Thompson.
    assert hajek.min() >= 1 - 1e-5
    assert hajek.max() <= 4 + 1e-5


def test_uniform_replacement_has_the_variance_of_independent_draws() -> None:
    # Population 0..7, k = 4: variance of the mean sigma^2 / k; without replacement it is
    # sigma^2 / k (d - k) / (d - 1) (formulas 5.1, [R3]).
    (indptr, indices), seeds = fan(8, 40_000)
    expected = {REPLACEMENT: 5.25 / 4, WITHOUT: 5.25 / 4 * 4 / 7}
    for draws, variance in expected.items():
        sampler = WeightedSampler(indptr, indices, [4], draws=draws, edge_ids=True, seed=1)
        (block,) = sampler.sample(seeds, epoch=0, step=0).blocks
        assert block.weight is None
        assert block.e_id is not None
        means = (block.e_id % 8).reshape(-1, 4).mean(axis=1)
        assert z_of(means, 3.5) < 4
        assert means.var() == pytest.approx(variance, rel=0.03)


def test_small_rows_are_taken_whole_except_with_replacement() -> None:
    for draws in (WITHOUT, POISSON):
        taken, sums = drawn(WEIGHTS, 5, draws, rows=10)
        assert set(taken) == {(0, 1, 2, 3, 5)}
        assert sums[0] @ VALUES == pytest.approx(MEAN, rel=1e-6)
    taken, _ = drawn(WEIGHTS, 5, REPLACEMENT, rows=100)
    assert {len(row) for row in taken} == {5}
    assert any(len(set(row)) < 5 for row in taken)


@pytest.mark.parametrize("draws", list(Draws))
def test_rows_of_zero_weight_give_no_edges(draws: Draws) -> None:
    for fanout in (-1, 2):
        taken, sums = drawn([0.0, 0.0, 0.0], fanout, draws, rows=5)
        assert set(taken) == {()}
        assert (sums == 0).all()


@pytest.mark.parametrize("draws", list(Draws))
def test_fanout_of_all_is_the_full_neighbourhood(draws: Draws) -> None:
    (indptr, indices), _ = random_graph(5)
    seeds = np.arange(min(10, len(indptr) - 1), dtype=np.int64)
    expected = NeighborSampler(indptr, indices, [-1, -1]).sample(seeds, epoch=0, step=0)
    sampler = WeightedSampler(indptr, indices, [-1, -1], draws=draws, estimator=HT)
    found = sampler.sample(seeds, epoch=0, step=0)
    np.testing.assert_array_equal(found.n_id, expected.n_id)
    for block, other in zip(found.blocks, expected.blocks, strict=True):
        np.testing.assert_array_equal(block.indices, other.indices)
        assert block.weight is not None
        degree = np.diff(block.indptr)
        np.testing.assert_allclose(
            block.weight, np.repeat(1 / degree[degree > 0], degree[degree > 0]), rtol=1e-6
        )


def as_bytes(batch: MiniBatch) -> bytes:
    arrays = [batch.n_id]
    for block in batch.blocks:
        assert block.weight is not None
        arrays += [block.indptr, block.indices, block.weight]
    return b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)


@pytest.mark.parametrize("draws", list(Draws))
def test_batches_are_byte_identical_for_1_2_and_4_threads(draws: Draws) -> None:
    rng = np.random.default_rng(11)
    degrees = np.minimum(rng.zipf(1.6, 2000), 300)
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    indices = (2000 * rng.random(int(indptr[-1])) ** 3).astype(np.int32)
    weight = rng.random(len(indices))
    seeds = rng.permutation(2000).astype(np.int64)
    found: list[list[bytes]] = []
    for threads in (1, 2, 4):
        sampler = WeightedSampler(
            indptr, indices, [6, 4], edge_weight=weight, draws=draws, estimator=HT
        )

        def one(step: int, sampler: WeightedSampler = sampler) -> bytes:
            return as_bytes(sampler.sample(seeds[40 * step : 40 * step + 40], epoch=0, step=step))

        with ThreadPoolExecutor(threads) as pool:
            found.append(list(pool.map(one, range(30))))
    assert found[0] == found[1] == found[2]


def test_an_empty_seed_list_gives_empty_blocks() -> None:
    (indptr, indices), weight = random_graph(3)
    sampler = WeightedSampler(indptr, indices, [3, 2], edge_weight=weight, estimator=HT)
    batch = sampler.sample(np.zeros(0, dtype=np.int64), epoch=0, step=0, global_num_seeds=8)
    assert [(b.num_src, b.num_dst, b.num_edges) for b in batch.blocks] == [(0, 0, 0)] * 2
    assert batch.global_num_seeds == 8


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), 1e300])
def test_weights_that_are_no_weights_are_refused(bad: float) -> None:
    (indptr, indices), _ = fan(4, 3)
    weight = np.ones(12)
    weight[7] = bad
    with pytest.raises(SamplerError, match="at edge 7") as caught:
        WeightedSampler(indptr, indices, [2], edge_weight=weight)
    assert "\n" not in str(caught.value)
    with pytest.raises(SamplerError, match="one edge weight per stored edge"):
        WeightedSampler(indptr, indices, [2], edge_weight=weight[:5])


@pytest.mark.parametrize("fanouts", [[], [0], [5, -2]])
def test_unusable_fanouts_are_refused(fanouts: list[int]) -> None:
    (indptr, indices), _ = fan(4, 3)
    with pytest.raises(SamplerError, match="fan-out"):
        WeightedSampler(indptr, indices, fanouts)


@pytest.mark.parametrize(
    ("seeds", "message"), [([0, 100], "found 100"), ([4, 5, 4], "node 4 twice")]
)
def test_bad_seeds_are_refused_and_leave_the_sampler_usable(seeds: list[int], message: str) -> None:
    (indptr, indices), good = fan(4, 20)
    sampler = WeightedSampler(indptr, indices, [2], estimator=HT)
    before = as_bytes(sampler.sample(good, epoch=0, step=0))
    with pytest.raises(SamplerError, match=message):
        sampler.sample(np.array(seeds, dtype=np.int64), epoch=0, step=0)
    assert as_bytes(sampler.sample(good, epoch=0, step=0)) == before
