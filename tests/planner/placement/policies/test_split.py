"""Tests of planner.placement.policies.song_jiang."""

import numpy as np
import pytest

from gnnplan.planner.placement.costs import RowCosts
from gnnplan.planner.placement.evaluate import evaluate
from gnnplan.planner.placement.policies.song_jiang import best_split, split_ranks, whole_rounds


def scores(q, n, b, k, costs):
    return evaluate(q, list(split_ranks(q.size, n, b, k)), costs)


def random_cases(seed, count):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        n, num_nodes = int(rng.integers(2, 7)), int(rng.integers(2, 60))
        b = int(rng.integers(1, num_nodes))
        q = np.sort(rng.pareto(rng.choice([0.7, 1.2, 3]), num_nodes))[::-1].copy()
        q[q < rng.choice([0, 0.3])] = 0
        local, gap, rest = rng.random(3)
        yield q, n, b, RowCosts(local=local, peer=local + gap, host=local + gap + rest)


def test_the_split_reaches_the_optimum_of_the_slide_example():
    # formulas [S1]: split_k reaches .62, the true optimum of the maximum
    q = np.array([1, 0.9, 0.5, 0.4, 0.2, 0.0])
    costs = RowCosts(local=0.0, peer=0.3, host=1.0)
    k = best_split(q, 2, 2, costs)
    assert scores(q, 2, 2, k, costs).max_seconds == pytest.approx(0.62)


def test_the_split_is_a_restriction():
    # formulas [C2]: n = 4, BSIZE = 1, alpha = .5: every k has mean .4 at best, the optimum is .275
    q, costs = np.array([1, 0.4, 0, 0]), RowCosts(local=0.0, peer=0.5, host=1.0)
    means = [scores(q, 4, 1, k, costs).mean_seconds for k in (0, 1)]
    assert min(means) == pytest.approx(0.4)


def test_the_best_split_has_the_least_maximum_over_every_k():
    for q, n, b, costs in random_cases(3, 200):
        last = whole_rounds(q.size, n, b)
        by_evaluator = [scores(q, n, b, k, costs).max_seconds for k in range(last + 1)]
        k = best_split(q, n, b, costs)
        assert by_evaluator[k] == pytest.approx(min(by_evaluator), rel=1e-9)


def test_every_split_fills_every_slot_once_and_covers_a_prefix():
    for q, n, b, _ in random_cases(4, 200):
        last = whole_rounds(q.size, n, b)
        partial = last < b and b + (n - 1) * last < q.size
        for k in range(last + 1 + partial):
            ranks = split_ranks(q.size, n, b, k)
            assert ranks.shape == (n, b)
            assert all(len(set(row)) == b for row in ranks.tolist())
            assert set(ranks.ravel().tolist()) == set(range(min(q.size, b + (n - 1) * k)))


def test_the_mean_of_a_split_is_convex_in_k_and_equals_its_formula():
    for q, n, b, costs in random_cases(5, 100):
        c_gpu, c_cpu = costs.net_peer, costs.net_host
        ks = np.arange(whole_rounds(q.size, n, b) + 1)
        means = np.array([scores(q, n, b, int(k), costs).mean_seconds for k in ks])
        formula = [
            costs.local * q.sum()
            + c_gpu * (n - 1) / n * q[b - k : b + (n - 1) * k].sum()
            + c_cpu * q[b + (n - 1) * k :].sum()
            for k in ks
        ]
        np.testing.assert_allclose(means, formula)
        assert (np.diff(means, 2) >= -1e-9 * means.max()).all()


def test_serpentine_dealing_keeps_local_masses_within_the_first_dealt_row():
    for q, n, b, costs in random_cases(6, 100):
        for k in range(1, whole_rounds(q.size, n, b) + 1):
            result = scores(q, n, b, k, costs)
            spread = result.max_seconds - result.mean_seconds
            assert spread <= costs.net_peer * q[b - k] + 1e-9  # formulas 1.3


def test_a_gpu_the_last_round_misses_takes_the_hottest_row_it_lacks():
    # 4 GPUs, 2 slots each, 7 rows: both slots dealt, 7 of 8 places used, by hand:
    # round 0: 0,1,2,3 to GPUs 0..3; round 1 backwards: 4,5,6 to GPUs 3,2,1; GPU 0 takes rank 1
    assert split_ranks(7, 4, 2, 2).tolist() == [[0, 1], [1, 6], [2, 5], [3, 4]]
