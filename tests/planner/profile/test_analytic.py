"""Tests of planner.profile.analytic."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest

from gnnplan.planner.profile.analytic import neighbor_hotness, seed_probability, smooth


def csc(lists):
    indptr = np.cumsum([0] + [len(x) for x in lists])
    return indptr, np.array([u for x in lists for u in x], np.int64)


def one_hop(lists, seeds, k):
    return neighbor_hotness(*csc(lists), np.array(seeds, float), [k])


# two seeds, 0 and 1, with lists of 4 and 2 that share vertex 2
SHARED = [[2, 3, 4, 5], [2, 6], [], [], [], [], []]


def test_one_hop_from_independent_seeds():
    # formulas [S5]: P = (.5, .25), degrees (4, 2), k = 1; exact by enumeration
    assert one_hop(SHARED, [0.5, 0.25, 0, 0, 0, 0, 0], 1)[2] == pytest.approx(0.234375)


def test_neighbor_hotness_is_exact_for_one_hop_by_enumeration():
    rng = np.random.default_rng(0)
    for _ in range(20):
        lists = [rng.integers(0, 5, rng.integers(0, 4)).tolist() for _ in range(5)]
        seeds, k = rng.random(5), int(rng.integers(1, 4))
        exact = np.zeros(5)
        for present in itertools.product([0, 1], repeat=5):
            weight = np.prod(np.where(present, seeds, 1 - seeds))
            miss = 1.0 - np.array(present)
            for s in np.flatnonzero(present):
                draws = list(itertools.combinations(lists[s], min(k, len(lists[s]))))
                for u in range(5):
                    miss[u] *= np.mean([u not in draw for draw in draws])
            exact += weight * (1 - miss)
        np.testing.assert_allclose(one_hop(lists, seeds, k), exact, atol=1e-12)


def test_a_self_loop_is_no_second_chance():
    # formulas 1.4, [C5]: P stays .5; the term would give .625 at k/d = .5... with d = 2, k = 1
    assert one_hop([[0, 1], []], [0.5, 0.0], 1)[0] == 0.5


def test_parallel_edges_are_one_term():
    # formulas [C5]: d = 4, m = 2, k = 1: .5, where two terms would give .4375
    lists = [[1, 1, 2, 3], [], [], []]
    assert one_hop(lists, [1.0, 0, 0, 0], 1)[1] == pytest.approx(0.5)


def test_fixed_size_batches_hit_more_often_than_the_formula_says():
    # formulas [C5], a limit: batch 1 of two training vertices that both list u: true 1, formula .75
    lists = [[2], [2], []]
    p0 = seed_probability(2, 1)
    assert p0 == 0.5
    assert one_hop(lists, [p0, p0, 0], 1)[2] == pytest.approx(0.75)


def test_every_seed_has_one_place_in_an_epoch():
    # formulas [C5]: T = 1000, b = 512: .5 with the last partial batch kept, .512 dropped
    assert seed_probability(1000, 512) == 0.5
    assert seed_probability(1000, 512, drop_last=True) == 0.512
    assert seed_probability(1000, 512, num_ranks=4) == 0.125
    assert seed_probability(10, 512, drop_last=True) == 1.0


def test_taking_all_neighbors_reaches_exactly_the_l_hop_neighborhood():
    lists = [[1], [2], [3], [4], []]
    seeds = [1.0, 0, 0, 0, 0]
    for dialect in ("first_seen", "every_hop"):
        p = neighbor_hotness(*csc(lists), np.array(seeds), [-1, 9], dialect=dialect)
        assert p.tolist() == [1, 1, 1, 0, 0]


def test_a_vertex_seen_at_an_earlier_hop_is_expanded_again_only_by_every_hop():
    # seed 0 draws one of {1, 2} per hop: after two hops .5 if expanded once, 1 - .5^2 if twice
    lists = [[1, 2], [], []]
    seeds = np.array([1.0, 0, 0])
    once = neighbor_hotness(*csc(lists), seeds, [1, 1], dialect="first_seen")
    twice = neighbor_hotness(*csc(lists), seeds, [1, 1], dialect="every_hop")
    assert (once[1], twice[1]) == pytest.approx((0.5, 0.75))


def test_smoothing_orders_the_vertices_never_sampled_and_leaves_the_others():
    measured = np.array([0.5, 0.0, 0.0], np.float32)
    smooth(measured, np.array([0.1, 0.2, 0.4]), 10)
    assert measured == pytest.approx([0.5, 0.01, 0.02])  # .2 * .5/10 and .4 * .5/10


def test_deeper_hops_of_neighbor_sampling_are_estimated_high():
    # [C26] 300 nodes, d = 8, k = 2, seeds with P = .05: hop 1 exact, hop 2 +4%, hop 3 +7%.
    rng = np.random.default_rng(1)
    lists = [rng.choice(300, 8, replace=False).tolist() for _ in range(300)]
    indptr, indices = csc(lists)
    seeds = np.full(300, 0.05)
    predicted = [neighbor_hotness(indptr, indices, seeds, [2] * hops).sum() for hops in (1, 2, 3)]
    measured, batches = np.zeros(3), 800
    for _ in range(batches):
        found = set(np.flatnonzero(rng.random(300) < 0.05).tolist())
        for hop in range(3):
            found |= {u for s in list(found) for u in rng.choice(lists[s], 2, replace=False)}
            measured[hop] += len(found) / batches
    over = predicted / measured - 1
    assert abs(over[0]) < 0.02
    assert 0.02 < over[1] < 0.07
    assert 0.04 < over[2] < 0.10


def former_hotness(indptr, indices, seeds, fanouts, dialect):
    """The chances of being missed, multiplied up in float64: what this module once did."""
    before, p = np.zeros_like(seeds), seeds.copy()
    for k in fanouts:
        expanded = p - before if dialect == "first_seen" else p
        miss = np.ones_like(p)
        for s in np.flatnonzero(expanded > 0):
            degree = indptr[s + 1] - indptr[s]
            found, times = np.unique(indices[indptr[s] : indptr[s + 1]], return_counts=True)
            for u, m in zip(found, times, strict=True):
                if u != s:
                    drawn = 1.0 if k >= degree else 1 - miss_chance(degree, m, k)
                    miss[u] *= 1 - expanded[s] * drawn
        before, p = p, 1 - (1 - p) * miss
    return p


def miss_chance(degree, multiplicity, k):
    """C(d-m, k) / C(d, k)."""
    return math.comb(degree - multiplicity, k) / math.comb(degree, k)


@pytest.mark.parametrize("dialect", ["first_seen", "every_hop"])
def test_float32_hotness_is_that_of_float64(dialect):
    rng = np.random.default_rng(3)
    indptr, indices = csc([rng.integers(0, 400, rng.integers(0, 30)).tolist() for _ in range(400)])
    seeds = np.where(rng.random(400) < 0.1, 0.02, 0.0)
    former = former_hotness(indptr, indices, seeds, [5, 3], dialect)
    double = neighbor_hotness(indptr, indices, seeds, [5, 3], dialect=dialect)
    single = neighbor_hotness(indptr, indices, seeds.astype(np.float32), [5, 3], dialect=dialect)
    np.testing.assert_allclose(double, former, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(single, former, rtol=1e-6)
    assert single.dtype == np.float32


def test_smoothing_takes_24_bytes_a_node_beside_what_is_measured():
    # 2 M nodes in one ring: N-sized arrays are all there is. Formerly 60 bytes a node.
    num = 2_000_000
    indptr, indices = np.arange(num + 1), np.roll(np.arange(num, dtype=np.int32), 1)
    seeds, measured = np.full(num, 1e-6, np.float32), np.zeros(num, np.float32)
    pair = np.array([1, 0], np.int32)  # compiled on a ring of two
    neighbor_hotness(indptr[:3], pair, seeds[:2], [1], dialect="first_seen")
    smooth(measured[:2].copy(), seeds[:2], 32)
    tracemalloc.start()
    try:
        smooth(measured, neighbor_hotness(indptr, indices, seeds, [1], dialect="first_seen"), 32)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 24 * num
    np.testing.assert_allclose(measured, 2e-6 * 0.5 / 32, rtol=1e-4)
