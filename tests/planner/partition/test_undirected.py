"""Tests for planner/partition/multilevel.py."""

import numpy as np
import pytest

from gnnplan.planner.partition.multilevel import sort_rows, to_undirected
from tests.planner.partition.graphs import csc, random_csc, stored_edges


@pytest.mark.parametrize("seed", range(10))
def test_it_is_the_union_of_both_directions_without_loops(seed: int):
    indptr, indices = random_csc(20, 60, seed)
    found_ptr, found_ids = to_undirected(indptr, indices)
    expected = {(u, v) for u, v in stored_edges(indptr, indices) if u != v}
    expected |= {(v, u) for u, v in expected}
    found = stored_edges(found_ptr, found_ids)
    assert len(found) == len(set(found))
    assert set(found) == expected
    for v in range(20):
        row = found_ids[found_ptr[v] : found_ptr[v + 1]]
        assert (np.diff(row) > 0).all()


def test_an_undirected_simple_graph_is_handed_through_without_a_copy():
    indptr, indices = csc(4, [(0, 1), (1, 2), (0, 3)])
    assert to_undirected(indptr, indices)[1] is indices


@pytest.mark.parametrize(
    "edges",
    [[(0, 0), (0, 1), (1, 0)], [(0, 1), (0, 1), (1, 0), (1, 0)], [(0, 1), (1, 2)]],
    ids=["loop", "repeated", "one-way"],
)
def test_a_graph_with_anything_else_is_copied(edges: list[tuple[int, int]]):
    indptr, indices = csc(3, edges, both=False)
    assert to_undirected(indptr, indices)[1] is not indices


def test_sorted_rows_keep_repeated_edges():
    indptr = np.array([0, 4, 5], np.int64)
    found_ptr, found = sort_rows(indptr, np.array([1, 0, 1, 0, 1], np.int32))
    assert found_ptr.tolist() == [0, 4, 5]
    assert found.tolist() == [0, 0, 1, 1, 1]
