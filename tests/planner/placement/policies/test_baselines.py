"""Tests of planner.placement.policies.baselines."""

import numpy as np
import pytest

from planner.placement.policies import baselines
from planner.placement.policies.baselines import (
    count_out_degree,
    degree,
    naive,
    pagraph_score,
    random,
)


def test_naive_keeps_the_hottest_of_each_range_of_ids():
    # ranges of ceil(7/3) = 3 ids: 0-2, 3-5, 6; by hand
    p = np.array([0.1, 0.9, 0.3, 0.2, 0.2, 0.8, 0.5])
    own = naive(p, [2, 2, 2])
    assert [ids.tolist() for ids in own] == [[1, 2], [5, 3], [6]]


def test_naive_uses_each_gpu_its_own_law():
    p = np.array([[0.1, 0.9, 0.0, 0.0], [0.0, 0.0, 0.2, 0.7]])
    assert [ids.tolist() for ids in naive(p, [1, 1])] == [[1], [3]]


def test_random_deals_disjoint_blocks_and_repeats_with_its_seed():
    p = np.linspace(0, 1, 50)
    own = random(p, [10] * 5, seed=3)
    assert sorted(np.concatenate(own).tolist()) == list(range(50))
    assert all((np.diff(p[ids]) <= 0).all() for ids in own)
    again, other = random(p, [10] * 5, seed=3), random(p, [10] * 5, seed=4)
    assert all((a == b).all() for a, b in zip(own, again, strict=True))
    assert any((a != b).any() for a, b in zip(own, other, strict=True))


def test_random_deals_the_same_blocks_to_one_law_and_to_equal_laws():
    p = np.random.default_rng(0).random(101).round(1)
    one, each = random(p, [7, 40, 40], seed=1), random(np.stack([p] * 3), [7, 40, 40], seed=1)
    assert [ids.tolist() for ids in one] == [ids.tolist() for ids in each]
    # by its definition: the shuffled ids in blocks of 34, each from hot to cold, ties by id
    ids = np.arange(101)
    np.random.default_rng(1).shuffle(ids)
    blocks = [sorted(ids[g * 34 : (g + 1) * 34], key=lambda v: (-p[v], v)) for g in range(3)]
    assert [block[:rows] for block, rows in zip(blocks, [7, 40, 40], strict=True)] == [
        ids.tolist() for ids in one
    ]


def test_degree_replicates_the_vertices_that_stand_in_most_lists():
    indices = np.array([3, 3, 3, 1, 1, 2], np.int32)
    counts = count_out_degree(indices, 5)
    assert counts.tolist() == [0, 2, 1, 3, 0]
    assert [ids.tolist() for ids in degree(counts, [2, 3])] == [[3, 1], [3, 1, 2]]


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_lists_counted_in_parts_are_counted_once(monkeypatch: pytest.MonkeyPatch, kind: type):
    indices = np.random.default_rng(0).integers(0, 40, 1001).astype(kind)
    monkeypatch.setattr(baselines, "LONG", 1)
    counts = count_out_degree(indices, 50)
    assert counts.dtype == np.int64
    assert counts.tolist() == np.bincount(indices, minlength=50).tolist()


@pytest.mark.parametrize(
    ("common", "training", "nodes", "score"),
    [(3, 10, 49, 1.8), (1, 5, 19, 2.75)],  # formulas [S7]: 4*22.5/50 and 2*27.5/20
)
def test_pagraph_score(common, training, nodes, score):
    # TV_avg = .65 * N / n with N = 100, n = 2, as the public code has it
    assert pagraph_score(
        common=common, part_training=training, part_nodes=nodes, num_training=65.0, num_parts=2
    ) == pytest.approx(score)
