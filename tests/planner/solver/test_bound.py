"""Tests of planner.solver.formulation and planner.solver.bound."""

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import linprog

from planner.placement.costs import RowCosts, alpha, alpha_star
from planner.placement.evaluate import evaluate
from planner.placement.order import hotness_order
from planner.placement.song_jiang import algorithm1, best_of
from planner.placement.split import split_ranks, whole_rounds
from planner.solver.bound import certificate, lower_bound, relaxed_optimum
from planner.solver.formulation import Items, feature_items


def linear_program(items, capacity):
    """The relaxation as written in planner.solver.formulation, solved by HiGHS."""
    num, n = items.size.size, items.num_devices
    result = linprog(
        np.concatenate([items.replicated, items.dealt, items.host]),
        A_ub=np.concatenate([items.size, items.size / n, np.zeros(num)])[None],
        b_ub=[capacity],
        A_eq=np.hstack([np.eye(num)] * 3),
        b_eq=np.ones(num),
        bounds=(0, 1),
        method="highs",
    )
    return result.fun, -result.ineqlin.marginals[0]


def mean_of(p, own, costs):
    return evaluate(p, list(own), costs).mean_seconds


class TestWorkedExample:
    """Formulas [U2]: N = 60 Pareto, n = 4, BSIZE = 8, alpha = .4."""

    q = np.sort(np.random.default_rng(5).pareto(1.1, 60))[::-1]
    q = q / q.max()
    costs = RowCosts(local=0.0, peer=0.4, host=1.0)

    def test_the_sort_gives_the_lp_value(self):
        assert lower_bound(self.q, self.costs, 8, 4) == pytest.approx(3.5694, abs=5e-5)

    def test_alpha_star_reaches_the_bound_and_the_others_do_not(self):
        order = hotness_order(self.q)
        star, published = (
            mean_of(self.q, algorithm1(order, self.q, 4, 8, threshold), self.costs)
            for threshold in (alpha_star(self.costs, 4), alpha(self.costs))
        )
        splits = [
            mean_of(self.q, order[split_ranks(60, 4, 8, k)], self.costs)
            for k in range(whole_rounds(60, 4, 8) + 1)
        ]
        assert star == pytest.approx(3.5694, abs=5e-5)
        assert min(splits) == pytest.approx(3.5703, abs=5e-5)
        assert published == pytest.approx(4.042, abs=5e-4)

    def test_maxima(self):
        order = hotness_order(self.q)
        maxima = [
            evaluate(self.q, list(algorithm1(order, self.q, 4, 8, t)), self.costs).max_seconds
            for t in (alpha_star(self.costs, 4), alpha(self.costs))
        ]
        assert maxima == pytest.approx([3.606, 4.123], abs=5e-4)

    def test_the_price_of_memory_sets_both_thresholds(self):
        # R iff p > price / C_gpu, H iff p < price / (n*C_cpu - (n-1)*C_gpu): ratio alpha*
        price = relaxed_optimum(feature_items(self.q, self.costs, 4), 8.0).seconds_per_unit
        assert price == pytest.approx(linear_program(feature_items(self.q, self.costs, 4), 8)[1])


def random_items(rng):
    """Two types with prices of their own, as in formulas [C22]."""
    num, n = 12, int(rng.choice([1, 2, 4, 8]))
    size, kind = rng.uniform(1, 5, num), rng.integers(0, 2, num)
    traffic = rng.pareto(1.2, num) * size
    host = traffic * np.where(kind, 1, rng.uniform(0.3, 3))
    peer = traffic * np.where(kind, rng.uniform(0.05, 1.5), rng.uniform(0.05, 1.5))
    local = traffic * 0.02
    dealt = peer * (n - 1) / n + local / n
    items = Items(size=size, replicated=local, dealt=dealt, host=host, num_devices=n)
    return items, rng.uniform(0.05, 0.6) * size.sum()


def test_one_sort_equals_the_linear_program_for_any_mixture_of_types():
    # formulas [C22]; includes items whose dealt state is off the hull, and single GPUs
    rng = np.random.default_rng(2)
    for _ in range(100):
        items, capacity = random_items(rng)
        found = relaxed_optimum(items, float(capacity))
        value, price = linear_program(items, capacity)
        assert found.seconds == pytest.approx(value, rel=1e-8)
        assert found.seconds_per_unit == pytest.approx(price, rel=1e-6, abs=1e-9)


def test_the_bound_holds_for_every_placement_of_small_instances():
    rng = np.random.default_rng(3)
    for _ in range(60):
        n, num, b = int(rng.integers(1, 4)), int(rng.integers(1, 5)), int(rng.integers(0, 3))
        local, peer, host = rng.random(3)
        costs = RowCosts(local=local, peer=peer, host=host)
        p = rng.random(num) ** 2
        sets = [np.array(s, np.int64) for s in itertools.combinations(range(num), min(b, num))]
        scored = [evaluate(p, list(own), costs) for own in itertools.product(sets, repeat=n)]
        bound = lower_bound(p, costs, b, n)
        assert bound <= min(s.mean_seconds for s in scored) + 1e-12
        assert bound <= min(s.max_seconds for s in scored) + 1e-12


def test_song_jiang_for_the_mean_is_within_one_row_of_the_bound():
    rng = np.random.default_rng(4)
    for _ in range(100):
        n, num = int(rng.integers(2, 9)), int(rng.integers(10, 300))
        p, b = rng.pareto(1.2, num), int(rng.integers(1, num))
        local, gap, rest = rng.random(3)
        costs = RowCosts(local=local, peer=local + gap, host=local + gap + rest)
        reached = mean_of(p, best_of(p, costs, n, b, objective="mean").own, costs)
        bound = lower_bound(p, costs, b, n)
        # integer copies: n*b slots are all used, and the relaxation cuts at most one row
        assert bound - 1e-9 <= reached <= bound + costs.net_host * p.max() + 1e-9


def test_unequal_laws_have_no_such_bound():
    # formulas [C23]: n = 2, BSIZE = 1, p_0 = (1,0), p_1 = (0,1): optimum 0, LP .5*C_gpu
    costs = RowCosts(local=0.0, peer=0.4, host=1.0)
    p = np.eye(2)
    assert mean_of(p, [np.array([0]), np.array([1])], costs) == 0
    # the mean law (.5, .5) deals both rows: 1 row, half of it from the peer at .4
    assert lower_bound(p.mean(axis=0), costs, 1, 2) == pytest.approx(0.5 * 0.4)


def test_capacity_for_everything_leaves_local_reads_and_a_price_of_zero():
    p = np.array([0.5, 0.25, 0.0])
    found = relaxed_optimum(feature_items(p, RowCosts(local=0.1, peer=0.4, host=1.0), 4), 3.0)
    assert found.seconds == pytest.approx(0.075)  # .75 rows at .1
    assert found.seconds_per_unit == 0


def test_caching_that_saves_no_time_leaves_everything_on_the_host():
    assert lower_bound(np.array([0.5]), RowCosts(local=2.0, peer=3.0, host=1.0), 1, 2) == 0.5


@pytest.mark.parametrize(
    ("objective", "bound", "gap", "status"),
    [(1.1, 1.0, 0.1, "feasible"), (1.0, 1.0, 0.0, "optimal"), (0.0, 0.0, 0.0, "optimal"),
     (1.0, 0.0, math.inf, "feasible")],
)  # fmt: skip
def test_a_certificate_says_how_far_the_bound_is(objective, bound, gap, status):
    found = certificate(objective, bound)
    assert found.gap == pytest.approx(gap)
    assert (found.objective, found.lower_bound, found.status) == (objective, bound, status)
