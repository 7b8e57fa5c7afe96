"""Tests of planner.placement.costs."""

import math

import pytest
from hypothesis import given, strategies as st

from gnnplan.planner.placement.costs import CostCase, RowCosts, alpha, alpha_star


def test_thresholds_with_a_local_cost():
    # formulas [C4]: C_cpu, C_gpu, C_loc = 1, .4, .1 and n = 4 give 1/3 and 1/9
    costs = RowCosts(local=0.1, peer=0.4, host=1.0)
    assert alpha(costs) == pytest.approx(1 / 3)
    assert alpha_star(costs, 4) == pytest.approx(1 / 9)


def test_thresholds_without_a_local_cost():
    # formulas [S2]: alpha = .5, n = 4 give alpha* = .2
    assert alpha_star(RowCosts(local=0.0, peer=0.5, host=1.0), 4) == pytest.approx(0.2)


@pytest.mark.parametrize("peer", [1.0, 4 / 3, 2.0])
def test_no_threshold_exists_where_a_peer_is_no_faster_than_the_host(peer):
    # formulas [C3]: at n = 4 the formula divides by zero at alpha = 4/3 and gives -1 at alpha = 2
    costs = RowCosts(local=0.0, peer=peer, host=1.0)
    assert costs.case is CostCase.REPLICATE
    with pytest.raises(ValueError, match="C_gpu < C_cpu"):
        alpha_star(costs, 4)
    with pytest.raises(ValueError, match="C_gpu < C_cpu"):
        alpha(costs)


@pytest.mark.parametrize(
    ("local", "peer", "host", "case"),
    [
        (1.0, 0.5, 1.0, CostCase.NOTHING),
        (1.0, 2.0, 0.5, CostCase.NOTHING),
        (0.1, 1.0, 1.0, CostCase.REPLICATE),
        (0.1, math.inf, 1.0, CostCase.REPLICATE),
        (0.1, 0.2, 1.0, CostCase.TRADE),
        (0.2, 0.2, 1.0, CostCase.DEAL),
        (0.2, 0.1, 1.0, CostCase.DEAL),
    ],
)
def test_the_costs_decide_the_case(local, peer, host, case):
    assert RowCosts(local=local, peer=peer, host=host).case is case


def test_a_peer_as_fast_as_own_memory_makes_both_thresholds_zero():
    costs = RowCosts(local=0.2, peer=0.1, host=1.0)
    assert (alpha(costs), alpha_star(costs, 8)) == (0.0, 0.0)


@given(st.floats(0, 1), st.floats(0.001, 1), st.floats(0.001, 1), st.integers(1, 16))
def test_alpha_star_is_between_zero_and_alpha_and_equals_the_net_formula(local, gap, rest, n):
    costs = RowCosts(local=local, peer=local + gap, host=local + gap + rest)
    a, star = alpha(costs), alpha_star(costs, n)
    assert 0 <= star <= a * (1 + 1e-9) < 1 + 1e-9
    assert star == pytest.approx(a / (n - (n - 1) * a))  # formulas 1.3, second form


@pytest.mark.parametrize("local", [-1.0, math.inf, math.nan])
def test_negative_or_missing_costs_are_refused(local):
    with pytest.raises(ValueError, match="expected costs"):
        RowCosts(local=local)
