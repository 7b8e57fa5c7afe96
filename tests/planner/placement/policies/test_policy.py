"""Tests of planner.placement.policies.policy."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.placement.costs import RowCosts
from gnnplan.planner.placement.evaluate import evaluate
from gnnplan.planner.placement.placement import build_locations, check_locations
from gnnplan.planner.placement.policies.policy import choose_host_items
from gnnplan.planner.placement.policies.song_jiang import best_of
from gnnplan.planner.placement.problem import rows_problem
from gnnplan.runtime.errors import InputError
from tests.support.placements import placed_by

POLICIES = ("none", "naive", "random", "degree", "song-jiang")
TRADE = RowCosts(local=0.0, peer=0.3, host=1.0, disk=10.0)


@pytest.fixture
def hotness():
    return np.random.default_rng(0).random(60).astype(np.float32) ** 3


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("host_rows", [None, 20, 0])
def test_every_policy_keeps_its_budget_and_its_locations_cost_what_was_scored(
    policy, host_rows, hotness
):
    capacity = [8, 8, 7, 7]
    placement, reads = placed_by(
        policy,
        hotness,
        TRADE,
        capacity,
        cliques=[[0, 1], [2, 3]],
        host_rows=host_rows,
        out_degree=np.arange(60),
    )
    assert all(len(own) <= rows for own, rows in zip(placement.own, capacity, strict=True))
    if host_rows is not None:
        assert placement.on_host is not None
        assert placement.on_host.sum() == host_rows
    tables = build_locations(
        placement.own, 60, TRADE, cliques=placement.cliques, on_host=placement.on_host
    )
    check_locations(tables, placement.own, 60)
    prices = np.array([TRADE.local] + [TRADE.peer] * 4 + [TRADE.host, TRADE.disk])
    for table, seconds in zip(tables, reads.seconds, strict=True):
        assert float(hotness.astype(float) @ prices[table & 255]) == pytest.approx(seconds)


def test_song_jiang_beats_every_baseline_and_names_what_it_tried(hotness):
    results = {
        policy: placed_by(policy, hotness, TRADE, [9] * 4, out_degree=np.arange(60))
        for policy in POLICIES
    }
    placement, best = results["song-jiang"]
    assert best.max_seconds == min(reads.max_seconds for _, reads in results.values())
    names = [v.name for v in best_of(hotness, TRADE, 4, 9).variants]
    assert placement.variant == names[0]
    assert {"algorithm 1, alpha", "algorithm 1, alpha*"} < set(names)
    assert any(name.startswith("split, k=") for name in names)


def test_cliques_of_one_law_hold_the_same_rows(hotness):
    # formulas 1.5, (2+2): two bridged pairs, n = 2 twice
    placement, _ = placed_by("song-jiang", hotness, TRADE, [9] * 4, cliques=[[0, 2], [1, 3]])
    assert (placement.own[0] == placement.own[1]).all()
    assert (placement.own[2] == placement.own[3]).all()
    assert (placement.own[0] != placement.own[2]).any()


def test_without_host_memory_thresholds_use_the_cost_of_disk():
    p = np.array([1.0, 0.2])
    costs = RowCosts(local=0.0, peer=0.5, host=1.0, disk=10.0)
    # n = 2, one slot: alpha = .5 and alpha* = 1/3 keep row 0 twice; against disk alpha = .05
    assert [own.tolist() for own in placed_by("song-jiang", p, costs, [1, 1])[0].own] == [[0], [0]]
    dealt, _ = placed_by("song-jiang", p, costs, [1, 1], host_rows=0)
    assert [own.tolist() for own in dealt.own] == [[1], [0]]


def test_host_memory_keeps_the_rows_devices_ask_it_for_most(hotness):
    placement, _ = placed_by("song-jiang", hotness, TRADE, [5, 5], host_rows=10)
    held = set(np.concatenate(placement.own).tolist())
    asked = [v for v in np.lexsort((np.arange(60), -hotness)).tolist() if v not in held]
    assert placement.on_host is not None
    assert np.flatnonzero(placement.on_host).tolist() == sorted(asked[:10])


def test_no_other_set_of_host_rows_costs_less_by_enumeration():
    rng = np.random.default_rng(2)
    for _ in range(40):
        p = rng.random((2, 6))
        own = [rng.permutation(6)[:2] for _ in range(2)]
        peer, disk = rng.choice([0.5, 1.0, 3.0, 20.0, np.inf]), rng.choice([5.0, 10.0])
        costs = RowCosts(local=0.1, peer=peer, host=1.0, disk=disk)
        cliques = [[0, 1]] if rng.random() < 0.5 else [[0], [1]]

        def mean(rows, p=p, own=own, costs=costs, cliques=cliques):
            mask = np.isin(np.arange(6), rows)
            return evaluate(p, own, costs, cliques=cliques, on_host=mask).mean_seconds

        problem = rows_problem(p, costs, [2, 2], cliques, 2)
        chosen = choose_host_items(problem, {0: own}, cliques)[0]
        assert chosen is not None
        best = min(mean(rows) for rows in itertools.combinations(range(6), 2))
        assert mean(np.flatnonzero(chosen)) == pytest.approx(best)


def test_where_host_memory_is_short_rows_are_dealt_rather_than_left_on_disk():
    # peers cost more than the host (case 1: replicate), but far less than the disk
    p = np.linspace(1.0, 0.9, 8)
    costs = RowCosts(local=0.0, peer=1.5, host=1.0, disk=100.0)
    short, reads = placed_by("song-jiang", p, costs, [3, 3], host_rows=2)
    assert len(set(np.concatenate(short.own).tolist())) == 6
    assert reads.rows["disk"].sum() == 0
    ample, _ = placed_by("song-jiang", p, costs, [3, 3])
    assert len(set(np.concatenate(ample.own).tolist())) == 3


def test_the_random_policy_repeats_with_its_seed(hotness):
    one, two = (placed_by("random", hotness, TRADE, [5, 5], seed=7)[0] for _ in range(2))
    assert all((a == b).all() for a, b in zip(one.own, two.own, strict=True))


def test_laws_per_device_are_scored_per_device():
    p = np.random.default_rng(1).random((2, 30))
    placement, reads = placed_by("song-jiang", p, TRADE, [4, 4])
    result = evaluate(p, placement.own, TRADE)
    np.testing.assert_allclose(reads.seconds, result.seconds)


def test_bad_requests_are_refused_in_one_line(hotness):
    with pytest.raises(SettingsError, match="found 'nave'"):
        placed_by("nave", hotness, TRADE, [1])
    with pytest.raises(SettingsError, match="out-degrees"):
        placed_by("degree", hotness, TRADE, [1])
    with pytest.raises(InputError, match="1 others"):
        placed_by("none", np.array([0.1, np.nan]), TRADE, [1])


def test_placement_imports_no_torch():
    code = "import sys, planner.placement.policies.policy, planner.placement.placement\n"
    code += "import planner.profile.analytic\nassert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
