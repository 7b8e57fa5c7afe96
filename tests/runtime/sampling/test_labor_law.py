"""What LABOR draws and how it weighs it: enumerations, and z-tests with fixed seeds."""

import itertools
import math

import numpy as np
import pytest

from gnnplan.runtime.sampling.choose.poisson import offer
from gnnplan.runtime.sampling.labor import Form, LaborSampler
from gnnplan.runtime.sampling.statistics import Estimator
from tests.reference.labor import Row, draw_row, weigh
from tests.support.labor import Z, copies, drawn, edges_of, skewed_graph, stars

PLAIN, HT, HAJEK = Estimator


def row_of(weights: list[float], scale: float = 1.0) -> Row:
    places = list(range(len(weights)))
    return Row(node=9, edges=places, targets=places, weights=weights, scale=scale)


def test_weighted_estimates_are_unbiased_by_enumeration() -> None:
    # [R2] M = 1, -1, 2, -2 with pi = .5, .5, .25, .25: mean 0, variance (1/d^2) sum M^2 (1/pi - 1).
    values, pi = np.array([1.0, -1, 2, -2]), np.array([0.5, 0.5, 0.25, 0.25])
    mean = second = empty = hajek = 0.0
    for kept in itertools.product((False, True), repeat=4):
        probability = float(np.prod(np.where(kept, pi, 1 - pi)))
        places = [i for i in range(4) if kept[i]]
        chances = pi[places].tolist()
        total = np.dot(weigh(row_of([1.0] * 4), places, chances, HT), values[places])
        mean, second = mean + probability * total, second + probability * total**2
        weights = weigh(row_of([1.0] * 4), places, chances, HAJEK)
        hajek += probability * sum(weights)
        empty += probability * (not places)
    assert mean == pytest.approx(0)
    assert second == pytest.approx((values**2 * (1 / pi - 1)).sum() / 16)
    # Hajek weights sum to 1, or to 0 where nothing was drawn.
    assert hajek == pytest.approx(1 - empty)


def test_order_sampling_keeps_the_smallest_ratios() -> None:
    # [R4] r = .7, .2, .4, .9 and k = 2 give {b, c}; with pi = .9, .1, .4, .9 the order is a c d b.
    words = dict(enumerate(int(r * 2**64) for r in (0.7, 0.2, 0.4, 0.9)))
    assert draw_row(row_of([1.0] * 4), words, None, 2, "exact_k")[0] == [1, 2]
    pi = {0: 0.9, 1: 0.1, 2: 0.4, 3: 0.9}
    kept = [set(draw_row(row_of([1.0] * 4), words, pi, k, "exact_k")[0]) for k in (1, 2, 3)]
    assert kept == [{0}, {0, 2}, {0, 2, 3}]


def test_the_heap_keeps_the_smallest_keys_and_the_first_among_equals() -> None:
    rng = np.random.default_rng(4)
    for _ in range(200):
        keys = rng.integers(0, 12, int(rng.integers(1, 60))).astype(np.uint64)
        size = int(rng.integers(1, len(keys) + 1))
        heap, places = np.zeros(size, dtype=np.uint64), np.zeros(size, dtype=np.int64)
        count = 0
        for place, key in enumerate(keys):
            count = offer(heap, places, count, key, place)
        assert count == size
        order = sorted(range(len(keys)), key=lambda i: (keys[i], i))[:size]
        assert sorted(places.tolist()) == sorted(order)
        assert (heap[0], places[0]) == (keys[order[-1]], order[-1])


def test_an_empty_row_is_as_likely_as_the_formula_says() -> None:
    # 5.2: (1 - k/d)^d = .316 for four neighbours and k = 1.
    graph, seeds = stars(4, 20_000)
    block = LaborSampler(*graph, [1], seed=1).sample(seeds, epoch=0, step=0).blocks[0]
    empty, p = float((np.diff(block.indptr) == 0).mean()), 0.75**4
    assert p == pytest.approx(0.316, abs=5e-4)
    assert empty == pytest.approx(p, abs=Z * math.sqrt(p * (1 - p) / 20_000))


@pytest.mark.parametrize(("degree", "fanout"), [(7, 3), (16, 5), (37, 10), (200, 3)])
@pytest.mark.parametrize("form", list(Form))
def test_every_edge_is_drawn_with_probability_k_over_d(
    form: Form, degree: int, fanout: int
) -> None:
    trials, pi = 3000, fanout / degree
    graph, seeds = stars(degree, trials)
    sampler = LaborSampler(*graph, [fanout], form=form, seed=2, edge_ids=True)
    batch = sampler.sample(seeds, epoch=0, step=0)
    counts = np.bincount(edges_of(batch) % degree, minlength=degree)
    sizes = np.diff(batch.blocks[0].indptr)
    assert np.abs(counts - trials * pi).max() < Z * math.sqrt(trials * pi * (1 - pi))
    if form is Form.EXACT_K:
        assert (sizes == fanout).all()
    else:
        # A sum of independent indicators: variance d pi (1 - pi).
        variance = degree * pi * (1 - pi)
        assert sizes.mean() == pytest.approx(fanout, abs=Z * math.sqrt(variance / trials))
        assert sizes.var() == pytest.approx(variance, rel=0.15)


def test_uniform_exact_k_draws_every_subset_equally_often() -> None:
    # [R3] then the mean of k of d has variance 1/k - 1/d = .3 for unit variances, k = 2, d = 5.
    graph, seeds = stars(5, 4000)
    sampler = LaborSampler(*graph, [2], form=Form.EXACT_K, seed=5, edge_ids=True)
    pairs = (edges_of(sampler.sample(seeds, epoch=0, step=0)) % 5).reshape(-1, 2)
    subsets = list(itertools.combinations(range(5), 2))
    counts = [(pairs == subset).all(axis=1).sum() for subset in subsets]
    assert sum(counts) == 4000
    assert max(abs(count - 400) for count in counts) < Z * math.sqrt(4000 * 0.1 * 0.9)
    means = np.array([[0.5 if t in subset else 0.0 for t in range(5)] for subset in subsets])
    assert ((means - 0.2) ** 2).sum(axis=1).mean() == pytest.approx(1 / 2 - 1 / 5)


@pytest.mark.parametrize(("seeds", "hit"), [([0], 0.25), ([1], 0.5), ([0, 1], 0.5)])
def test_a_shared_vertex_is_hit_as_often_as_its_likeliest_row_says(
    seeds: list[int], hit: float
) -> None:
    # [S5] degrees 4 and 2, k = 1: given both seeds u is hit with max(1/4, 1/2), not 5/8.
    graph = copies({0: [2, 3, 4, 5], 1: [2, 6]}, 7, 10_000)
    nodes = (np.array(seeds)[:, None] + 7 * np.arange(10_000)).ravel()
    batch = LaborSampler(*graph, [1]).sample(nodes, epoch=0, step=0)
    found = float((batch.n_id % 7 == 2).mean() * len(batch.n_id) / 10_000)
    assert found == pytest.approx(hit, abs=Z * math.sqrt(hit * (1 - hit) / 10_000))


@pytest.mark.parametrize(("form", "hit"), [(Form.POISSON, 1 / 2), (Form.EXACT_K, 2 / 3)])
def test_rows_of_exactly_k_hit_a_shared_vertex_more_often(form: Form, hit: float) -> None:
    # [C5] s1 lists {u, a}, s2 {u, b}, k = 1: exact-k misses u only where r_u is the largest of 3.
    graph = copies({0: [2, 3], 1: [2, 4]}, 5, 20_000)
    nodes = (np.arange(2)[:, None] + 5 * np.arange(20_000)).ravel()
    batch = LaborSampler(*graph, [1], form=form).sample(nodes, epoch=0, step=0)
    found = float((batch.n_id % 5 == 2).sum() / 20_000)
    assert found == pytest.approx(hit, abs=Z * math.sqrt(hit * (1 - hit) / 20_000))


def test_hit_probability_of_independent_seeds() -> None:
    # [S5] seeds with P = (.5, .25): LABOR-0 .21875, neighbour sampling .234375.
    hits = {(0,): 0.25, (1,): 0.5, (0, 1): 0.5}
    law = {(0,): 0.5 * 0.75, (1,): 0.5 * 0.25, (0, 1): 0.5 * 0.25}
    assert sum(law[seeds] * hits[seeds] for seeds in law) == pytest.approx(0.21875)
    apart = law[0, 1] * (1 - 0.75 * 0.5) + law[0,] * 0.25 + law[1,] * 0.5
    assert apart == pytest.approx(0.234375)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("variant", [0, 1, "star"])
def test_horvitz_thompson_weights_are_unbiased_with_the_variance_of_the_formula(
    variant: int | str, weighted: bool
) -> None:
    indptr, indices = skewed_graph()
    rng = np.random.default_rng(22)
    x = rng.normal(size=300)
    weight = rng.uniform(0.1, 2, len(indices)) if weighted else np.ones(len(indices))
    sampler = LaborSampler(
        indptr,
        indices,
        [4],
        variant=variant,
        estimator=HT,
        seed=6,
        edge_weight=weight if weighted else None,
    )
    steps, seeds = 250, list(range(60))
    estimates = np.zeros((steps, 60))
    for step, batch in enumerate(drawn(sampler, seeds, steps)):
        block = batch.blocks[0]
        assert block.weight is not None
        terms = block.weight * x[batch.n_id[block.indices]]
        rows = np.repeat(np.arange(60), np.diff(block.indptr))
        estimates[step] = np.bincount(rows, terms, minlength=60)
    spans = [slice(indptr[s], indptr[s + 1]) for s in seeds]
    exact = np.array([np.average(x[indices[s]], weights=weight[s]) for s in spans])
    error = estimates.std(axis=0, ddof=1) / math.sqrt(steps)
    assert (np.abs(estimates.mean(axis=0) - exact) <= Z * error + 1e-6).all()
    # With messages of unit variance: sum A^2 / pi / a^2 - sum A^2 / a^2 = 1/k - 1/d [R1], [R12].
    d = np.diff(indptr)[:60]
    found = (estimates.var(axis=0).sum()) / (1 / np.minimum(4, d) - 1 / d).sum()
    assert 0.5 < found < 2


@pytest.mark.parametrize("form", list(Form))
def test_hajek_weights_of_a_row_sum_to_one(form: Form) -> None:
    weight = np.random.default_rng(3).uniform(0, 2, len(skewed_graph()[1]))
    for variant, given in itertools.product((0, 2), (None, weight)):
        sampler = LaborSampler(
            *skewed_graph(), [3, 2], variant=variant, form=form, edge_weight=given
        )
        for block in drawn(sampler, list(range(40)), 1)[0].blocks:
            assert block.weight is not None
            rows = np.repeat(np.arange(block.num_dst), np.diff(block.indptr))
            sums = np.bincount(rows, block.weight, minlength=block.num_dst)
            np.testing.assert_allclose(sums[np.diff(block.indptr) > 0], 1, rtol=1e-5)


def test_uniform_labor_0_weights_are_the_plain_mean_of_what_was_drawn() -> None:
    plain, hajek = (
        drawn(LaborSampler(*skewed_graph(), [5], estimator=e), list(range(50)), 1)[0].blocks[0]
        for e in (PLAIN, HAJEK)
    )
    assert plain.weight is None
    assert hajek.weight is not None
    counts = np.diff(hajek.indptr)
    np.testing.assert_allclose(hajek.weight, 1 / np.repeat(counts, counts), rtol=1e-6)


def test_zero_weights_are_never_drawn() -> None:
    indptr, indices = skewed_graph()
    weight = np.random.default_rng(1).integers(0, 2, len(indices)).astype(np.float32)
    for variant, form in itertools.product((0, 1, "star"), Form):
        sampler = LaborSampler(
            indptr, indices, [4, 3], variant=variant, form=form, edge_weight=weight, edge_ids=True
        )
        for block in drawn(sampler, list(range(60)), 1)[0].blocks:
            assert block.num_edges > 50
            assert (weight[block.e_id] == 1).all()
