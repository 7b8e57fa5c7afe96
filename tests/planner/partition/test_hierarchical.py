"""Tests for planner/partition/partition.py: parts over cliques (formulas 2.2)."""

import numpy as np
import pytest

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.partition.partition import hash_shards, hierarchical_parts
from tests.planner.partition.graphs import random_csc, ring_of_cliques
from tests.reference.partition_quality import measure_quality


def test_edges_are_cut_between_cliques_and_hashed_inside():
    """Two planted halves of 48 nodes on two pairs of GPUs with crossed ids."""
    indptr, indices = ring_of_cliques(2, 48)
    devices = hierarchical_parts(
        indptr, indices, cliques=[[0, 2], [1, 3]], training=np.arange(96), name="ldg"
    )
    clique = np.isin(devices, [1, 3]).astype(np.int32)
    between = measure_quality(indptr, indices, clique, num_parts=2)
    within = measure_quality(indptr, indices, devices, num_parts=4)
    assert between.cut_share < 0.05
    assert within.cut_share == pytest.approx(0.5, abs=0.05)
    assert np.bincount(devices).tolist() == [24] * 4


@pytest.mark.parametrize("cliques", [[[0, 1], [2, 3]], [[0, 1, 2, 3]], [[0], [1], [2], [3]]])
def test_shards_of_training_nodes_are_within_three_percent(cliques: list[list[int]]):
    indptr, indices = random_csc(4000, 20_000, 1)
    training = np.arange(0, 4000, 2)  # even ids only: v mod 2 would leave a GPU without
    devices = hierarchical_parts(indptr, indices, cliques=cliques, training=training, name="fennel")
    shards = np.bincount(devices[training], minlength=4)
    assert shards.max() / shards.mean() <= 1.03


def test_one_clique_is_not_cut_at_all():
    """No partitioner runs: one whose package is missing would not be missed."""
    indptr, indices = random_csc(50, 200, 1)
    devices = hierarchical_parts(indptr, indices, cliques=[[0, 1]], training=np.zeros(0, np.int64))
    assert devices.tolist() == [v % 2 for v in range(50)]


def test_cliques_of_unequal_size_get_training_nodes_by_size():
    indptr, indices = random_csc(3000, 9000, 1)
    training = np.arange(3000)
    devices = hierarchical_parts(
        indptr, indices, cliques=[[0, 1, 2], [3]], training=training, name="ldg"
    )
    shards = np.bincount(devices)
    assert shards.max() / shards.mean() <= 1.03


def test_more_cliques_than_training_nodes_leave_empty_shards():
    indptr, indices = random_csc(20, 60, 1)
    training = np.array([3])
    devices = hierarchical_parts(
        indptr, indices, cliques=[[0], [1], [2], [3]], training=training, name="ldg"
    )
    assert np.count_nonzero(np.bincount(devices[training], minlength=4)) == 1


def test_hash_of_consecutive_training_ids_is_the_id_modulo_the_gpus():
    ids = np.arange(10)
    assert hash_shards(ids, np.ones(10, np.bool_), 4).tolist() == [v % 4 for v in range(10)]


@pytest.mark.parametrize("cliques", [[], [[0], [0]], [[1]], [[0], []]])
def test_cliques_that_miss_or_repeat_a_device_are_refused(cliques: list[list[int]]):
    indptr, indices = random_csc(5, 5, 1)
    with pytest.raises(SettingsError, match="each device"):
        hierarchical_parts(indptr, indices, cliques=cliques, training=np.array([0]))
