"""Tests for tests/reference/partition_quality.py."""

import numpy as np
import pytest

from gnnplan.planner.errors import SettingsError
from tests.planner.partition.graphs import brute_boundaries, csc, random_csc, stored_edges
from tests.reference.partition_quality import measure_quality


def test_volume_and_boundaries_of_the_example_of_formulas_b1():
    indptr, indices = csc(5, [(0, 1), (1, 2), (2, 3), (3, 4), (1, 3), (0, 4)])
    parts = np.array([0, 0, 0, 1, 1], np.int32)
    quality = measure_quality(indptr, indices, parts, num_parts=2)
    assert quality.nodes.tolist() == [3, 2]
    assert quality.boundary.tolist() == [2, 3]  # U = {3, 4}, {0, 1, 2}
    assert quality.volume == 5
    assert (3 * quality.nodes + quality.boundary).tolist() == [11, 9]


@pytest.mark.parametrize("seed", range(20))
def test_counts_equal_those_by_definition_on_random_directed_graphs(seed: int):
    rng = np.random.default_rng(seed)
    num_nodes, num_parts = int(rng.integers(1, 30)), int(rng.integers(1, 6))
    indptr, indices = random_csc(num_nodes, int(rng.integers(0, 120)), seed)
    parts = rng.integers(0, num_parts, num_nodes).astype(np.int32)
    training = rng.random(num_nodes) < 0.3
    quality = measure_quality(indptr, indices, parts, num_parts=num_parts, training=training)
    boundaries = brute_boundaries(indptr, indices, parts, num_parts)
    edges = stored_edges(indptr, indices)
    assert quality.boundary.tolist() == [len(b) for b in boundaries]
    assert quality.edge_cut == sum(parts[u] != parts[v] for u, v in edges)
    assert quality.sent.tolist() == [
        sum(parts[v] == p for b in boundaries for v in b) for p in range(num_parts)
    ]
    assert quality.edges.tolist() == [
        sum(parts[v] == p for _, v in edges) for p in range(num_parts)
    ]
    assert quality.training.tolist() == [
        int((training & (parts == p)).sum()) for p in range(num_parts)
    ]
    assert quality.replication == pytest.approx(1 + sum(map(len, boundaries)) / num_nodes)


def test_imbalance_is_the_largest_load_over_its_share():
    indptr, indices = csc(4, [(0, 1), (0, 2), (0, 3)])
    parts = np.array([0, 0, 0, 1], np.int32)
    quality = measure_quality(indptr, indices, parts, num_parts=2)
    assert quality.imbalance()["nodes"] == pytest.approx(0.5)  # 3 of 2
    assert quality.imbalance(np.array([0.75, 0.25]))["nodes"] == pytest.approx(0.0)
    assert quality.imbalance()["training"] == 0.0  # there are none
    assert quality.imbalance()["edges"] == pytest.approx(5 / 3 - 1)  # 5 of the 6 stored


def test_a_partition_of_another_graph_is_refused():
    indptr, indices = csc(3, [(0, 1)])
    with pytest.raises(SettingsError, match=r"parts of shape \(3,\), found \(2,\)"):
        measure_quality(indptr, indices, np.zeros(2, np.int32), num_parts=1)
    with pytest.raises(SettingsError, match=r"parts below 2, found 0\.\.2"):
        measure_quality(indptr, indices, np.array([0, 1, 2], np.int32), num_parts=2)
