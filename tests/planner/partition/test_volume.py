"""Tests for planner/partition/balance.py."""

import itertools

import numpy as np
import pytest

from gnnplan.planner.partition.balance import refine_volume
from gnnplan.planner.partition.problem import Balance, make_problem
from tests.planner.partition.graphs import csc, random_csc
from tests.reference.partition_quality import measure_quality


@pytest.mark.parametrize("seed", range(30))
def test_the_volume_never_rises_and_no_limit_is_passed(seed: int):
    rng = np.random.default_rng(seed)
    parts = int(rng.integers(2, 6))
    indptr, indices = random_csc(60, 240, seed)
    training = rng.random(60) < 0.4
    problem = make_problem(
        indptr, indices, parts=parts, training=training, balance=Balance(edges=0.2), seed=seed
    )
    start = rng.integers(0, parts, 60).astype(np.int32)
    found = refine_volume(problem, start)
    before, after = (
        measure_quality(indptr, indices, p, num_parts=parts, training=training)
        for p in (start, found)
    )
    assert after.volume <= before.volume
    for which, load in enumerate(("nodes", "training", "edges")):
        worst = np.maximum(getattr(before, load), problem.limits[which])
        assert (getattr(after, load) <= worst).all()


def test_it_lowers_the_volume_of_most_random_partitions():
    lowered = 0
    for seed in range(20):
        indptr, indices = random_csc(60, 240, seed)
        problem = make_problem(indptr, indices, parts=3, balance=Balance(nodes=0.2), seed=seed)
        start = np.random.default_rng(seed).integers(0, 3, 60).astype(np.int32)
        before, after = (
            measure_quality(indptr, indices, p, num_parts=3).volume
            for p in (start, refine_volume(problem, start))
        )
        lowered += after < before
    assert lowered == 20


def test_what_it_leaves_no_single_move_improves():
    """The gains are exact: moving any one node by hand, within the limits, saves nothing."""
    indptr, indices = random_csc(25, 90, 3)
    problem = make_problem(indptr, indices, parts=3, balance=Balance(nodes=0.3), seed=1)
    start = np.random.default_rng(1).integers(0, 3, 25).astype(np.int32)
    found = refine_volume(problem, start)
    best = measure_quality(indptr, indices, found, num_parts=3)
    for v, part in itertools.product(range(25), range(3)):
        moved = found.copy()
        moved[v] = part
        quality = measure_quality(indptr, indices, moved, num_parts=3)
        if (quality.nodes <= problem.limits[0]).all():
            assert quality.volume >= best.volume


def test_edge_cut_and_volume_disagree_and_the_volume_is_followed():
    """A hub read by five nodes of another part costs one row, though it cuts five edges."""
    edges = [(0, v) for v in range(1, 6)] + [(0, 6), (0, 7)]
    indptr, indices = csc(8, edges, both=False)
    problem = make_problem(indptr, indices, parts=2, balance=Balance(nodes=0.5), seed=0)
    start = np.array([0, 1, 1, 1, 0, 0, 0, 1], np.int32)
    found = refine_volume(problem, start)
    assert measure_quality(indptr, indices, start, num_parts=2).volume == 1
    assert measure_quality(indptr, indices, found, num_parts=2).volume <= 1
