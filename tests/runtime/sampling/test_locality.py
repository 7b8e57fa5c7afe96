"""Locality-aware sampling draws more from the local sets, and its corrections undo the bias."""

import numpy as np
import pytest
from numpy.typing import NDArray

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.layerwise import LayerwiseSampler
from gnnplan.runtime.sampling.locality import FAR, Correction, LocalitySampler, rings
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.neighbor import Boost, WeightedSampler
from gnnplan.runtime.sampling.statistics import Draws, Estimator
from tests.reference.weighted import poisson_probabilities

Graph = tuple[NDArray[np.int64], NDArray[np.int32]]
NONE, REPLACEMENT, POISSON, HAJEK = Correction


def random_graph(num_nodes: int, seed: int) -> Graph:
    rng = np.random.default_rng(seed)
    degrees = rng.integers(0, 8, num_nodes)
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    return indptr, rng.integers(0, num_nodes, int(indptr[-1])).astype(np.int32)


def fan(degree: int, rows: int) -> tuple[Graph, NDArray[np.int64]]:
    """`rows` destinations, each with the sources 0 .. degree-1, and their ids."""
    indptr = np.concatenate([np.zeros(degree), np.arange(rows + 1) * degree]).astype(np.int64)
    indices = np.tile(np.arange(degree, dtype=np.int32), rows)
    return (indptr, indices), np.arange(degree, degree + rows, dtype=np.int64)


def estimates(
    values: NDArray[np.float64],
    k: int,
    local: list[int],
    factor: float,
    correction: Correction,
    rows: int = 40_000,
) -> tuple[NDArray[np.float64], float]:
    """Each of many equal rows' estimate of the mean of `values`, and remote edges per row."""
    graph, seeds = fan(len(values), rows)
    sampler = LocalitySampler(
        *graph, [k], local=np.array(local), factor=factor, correction=correction, seed=3
    )
    batch = sampler.sample(seeds, epoch=0, step=0)
    (block,) = batch.blocks
    ids = batch.n_id[block.indices]
    per_row = np.diff(block.indptr)
    rows_of = np.repeat(np.arange(rows), per_row)
    weight = 1 / per_row[rows_of] if block.weight is None else block.weight.astype(np.float64)
    found = np.zeros(rows)
    np.add.at(found, rows_of, weight * values[ids])
    return found, float((~np.isin(ids, local)).sum() / rows)


def z_of(samples: NDArray[np.float64], expected: float) -> float:
    return float(abs(samples.mean() - expected) / (samples.std(ddof=1) / np.sqrt(len(samples))))


# formulas 1.6 [S6]: neighbours (1,2,3,4), f = 4 on the first: biased mean 13/7, corrected 2.5.
FOUR = np.array([1.0, 2.0, 3.0, 4.0])


def test_biased_and_corrected_mean_of_four_neighbours_by_enumeration() -> None:
    q = np.array([4, 1, 1, 1]) / 7
    assert (q * FOUR).sum() == pytest.approx(13 / 7)
    assert (q * FOUR / (4 * q)).sum() == pytest.approx(2.5)


def test_uncorrected_draws_have_the_biased_mean_and_corrected_ones_the_true() -> None:
    biased, _ = estimates(FOUR, 1, [0], 4.0, NONE)
    assert z_of(biased, 13 / 7) < 4
    for correction in (REPLACEMENT, POISSON):
        for k in (1, 2, 3):
            found, _ = estimates(FOUR, k, [0], 4.0, correction)
            assert z_of(found, 2.5) < 4


def test_corrected_variance_with_replacement_is_that_of_the_formula() -> None:
    # [C6]: 4 equal messages, f = 4 on one: uniform 0, LAS .421875 / k.
    for k in (1, 3):
        found, _ = estimates(np.ones(4), k, [0], 4.0, REPLACEMENT)
        assert found.var() == pytest.approx(0.421875 / k, rel=0.05)
        uniform, _ = estimates(np.ones(4), k, [0], 1.0, REPLACEMENT)
        assert uniform.var() < 1e-12


def test_poisson_variance_and_remote_edges_are_those_of_the_formulas() -> None:
    # h = .2, f = 4, d = 20, k = 4: variance factor 1.45 [C6], remote edges x .625 [S6].
    values = np.ones(20)
    near = [0, 1, 2, 3]
    boosted, remote = estimates(values, 4, near, 4.0, POISSON)
    uniform, remote_before = estimates(values, 4, near, 1.0, POISSON)
    assert z_of(boosted, 1) < 4
    assert boosted.var() / uniform.var() == pytest.approx(1.45, rel=0.05)
    assert remote / remote_before == pytest.approx(0.625, rel=0.02)
    _, remote = estimates(values, 4, near, 4.0, REPLACEMENT)
    _, remote_before = estimates(values, 4, near, 1.0, REPLACEMENT)
    assert remote / remote_before == pytest.approx(0.625, rel=0.02)


def test_hajek_weights_sum_to_one_and_are_nearly_unbiased() -> None:
    values = np.arange(20.0)
    found, _ = estimates(values, 8, [0, 1, 2, 3], 3.0, HAJEK)
    assert found.max() <= 19.001
    assert abs(found.mean() - 9.5) < 0.4
    biased, _ = estimates(values, 8, [0, 1, 2, 3], 3.0, NONE)
    assert abs(biased.mean() - 9.5) > 1.2


def test_rows_with_certain_neighbours_stay_unbiased() -> None:
    # k = 3, f = 8 on one of four: its probability is clipped at 1, the others share 2.
    assert poisson_probabilities([8.0, 1.0, 1.0, 1.0], 3) == pytest.approx([1, 2 / 3, 2 / 3, 2 / 3])
    found, _ = estimates(FOUR, 3, [0], 8.0, POISSON)
    assert z_of(found, 2.5) < 4


def neighbourhood(graph: Graph, nodes: set[int]) -> set[int]:
    indptr, indices = graph
    return {int(u) for v in nodes for u in indices[indptr[v] : indptr[v + 1]]}


@pytest.mark.parametrize("number", range(8))
def test_local_sets_grow_by_the_neighbours_of_the_last(number: int) -> None:
    graph = random_graph(60, number)
    local = np.random.default_rng(number).choice(60, 4, replace=False)
    ring = rings(*graph, local, 4)
    expected = {int(v) for v in local}
    for h in range(4):
        assert set(np.flatnonzero(ring <= h).tolist()) == expected
        expected |= neighbourhood(graph, expected)
    assert set(np.unique(ring)) <= {0, 1, 2, 3, FAR}


def test_the_hop_next_to_the_features_prefers_what_is_held_and_inner_hops_what_is_near() -> None:
    # 0 <- 1, 2; 1 <- 3, 4; 2 <- 5, 6; 3 <- 1. Held: 3. N({3}) = {1}.
    rows = [[1, 2], [3, 4], [5, 6], [1], [], [], []]
    indptr = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int64)
    indices = np.array([u for r in rows for u in r], dtype=np.int32)
    sampler = LocalitySampler(
        indptr, indices, [1, 1], local=np.array([3]), factor=1e6, dialect=Dialect.EVERY_HOP
    )
    assert sampler.ring.tolist() == [FAR, 1, FAR, 0, FAR, FAR, FAR]
    for step in range(20):
        batch = sampler.sample(np.array([0]), epoch=0, step=step)
        outer, inner = batch.blocks
        assert batch.n_id[inner.indices].tolist() == [1]
        # Row 1 is vertex 1: at the outer hop only Loc^0 = {3} counts.
        assert batch.n_id[outer.indices[outer.indptr[1] : outer.indptr[2]]].tolist() == [3]
    assert sampler.boost.of(np.array([1, 3, 5]), 1).tolist() == [1e6, 1e6, 1]
    assert sampler.boost.of(np.array([1, 3, 5]), 0).tolist() == [1, 1e6, 1]


def as_bytes(batch: MiniBatch) -> bytes:
    arrays = [batch.n_id]
    for block in batch.blocks:
        weight = np.zeros(0) if block.weight is None else block.weight
        arrays += [block.indptr, block.indices, weight]
    return b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)


@pytest.mark.parametrize("correction", list(Correction))
def test_a_factor_of_one_samples_without_preference(correction: Correction) -> None:
    graph = random_graph(300, 1)
    seeds, local = np.arange(50, dtype=np.int64), np.arange(0, 300, 3)
    draws, estimator = correction.way
    plain = WeightedSampler(*graph, [3, 2], draws=draws, estimator=estimator)
    expected = as_bytes(plain.sample(seeds, epoch=0, step=0))
    for factor, same in ((1.0, True), (6.0, False)):
        sampler = LocalitySampler(*graph, [3, 2], local=local, factor=factor, correction=correction)
        assert (as_bytes(sampler.sample(seeds, epoch=0, step=0)) == expected) is same


def test_local_rows_and_no_local_rows_are_drawn_as_without_preference() -> None:
    # All neighbours local, or none: the factor cancels (formulas 1.6, h in {0, 1}).
    graph = random_graph(100, 3)
    seeds = np.arange(40, dtype=np.int64)
    batches = [
        LocalitySampler(*graph, [3, 2], local=local, factor=f, correction=POISSON).sample(
            seeds, epoch=0, step=0
        )
        for local in (np.arange(100), np.arange(0))
        for f in (1, 4)
    ]
    assert len({as_bytes(batch) for batch in batches}) == 1


@pytest.mark.parametrize(("method", "replace"), [("ladies", True), ("pladies", False)])
def test_over_ladies_local_vertices_come_more_often_and_the_mean_stays(
    method: str, replace: bool
) -> None:
    # Two rows over the same four neighbours: p is uniform but for f = 4 on the first, 4/7. The
    # layer's number of hits or inclusions of it is 2 * 4/7, or min(1, 8/7) = 1.
    (indptr, indices), seeds = fan(4, 2)
    boost = Boost(rings(indptr, indices, np.array([0]), 1), 4.0)
    sampler = LayerwiseSampler(
        indptr, indices, [2], method=method, replace=replace, seed=5, boost=boost
    )
    found, taken = [], 0
    for step in range(4000):
        batch = sampler.sample(seeds, epoch=0, step=step)
        (block,) = batch.blocks
        assert block.weight is not None
        first = slice(0, int(block.indptr[1]))
        ids = batch.n_id[block.indices[first]]
        found.append(float(block.weight[first] @ FOUR[ids]))
        taken += int((ids == 0).any())
    assert z_of(np.array(found), 2.5) < 4
    # With replacement the first is missed by both draws with probability (3/7)^2.
    assert taken / 4000 == pytest.approx(1 - (3 / 7) ** 2 if replace else 1, abs=0.03)


def test_over_ladies_a_factor_of_one_changes_nothing_and_fastgcn_has_none() -> None:
    graph = random_graph(200, 5)
    seeds = np.arange(30, dtype=np.int64)
    boost = Boost(rings(*graph, np.arange(50), 2), 1.0)
    plain = LayerwiseSampler(*graph, [40, 60], seed=1).sample(seeds, epoch=0, step=0)
    found = LayerwiseSampler(*graph, [40, 60], seed=1, boost=boost).sample(seeds, epoch=0, step=0)
    np.testing.assert_array_equal(found.n_id, plain.n_id)
    with pytest.raises(SamplerError, match="found fastgcn"):
        LayerwiseSampler(*graph, [40], method="fastgcn", boost=boost)


@pytest.mark.parametrize("factor", [0.5, 0, -1, float("nan"), float("inf")])
def test_factors_below_one_are_refused(factor: int | float) -> None:
    graph = random_graph(30, 4)
    with pytest.raises(SamplerError, match="factor of at least 1") as caught:
        LocalitySampler(*graph, [3], local=np.array([1]), factor=factor)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("local", [[-1], [3, 30]])
def test_local_vertices_outside_the_graph_are_refused(local: list[int]) -> None:
    with pytest.raises(SamplerError, match="local vertices between 0 and 29"):
        LocalitySampler(*random_graph(30, 4), [3], local=np.array(local))


def test_corrections_name_the_draws_and_the_estimator() -> None:
    assert REPLACEMENT.way == (Draws.REPLACEMENT, Estimator.HORVITZ_THOMPSON)
    assert NONE.way == (Draws.WITHOUT_REPLACEMENT, Estimator.PLAIN)
