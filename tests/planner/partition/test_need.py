"""Tests for planner/partition/partition.py: what is said before a partitioner starts."""

import tracemalloc

import numpy as np
import pytest

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.partition.balance import refine_bytes, refine_volume
from gnnplan.planner.partition.multilevel import to_undirected, undirected_bytes
from gnnplan.planner.partition.partition import (
    PARTITIONERS,
    check_fits,
    hash_parts,
    load_rates,
    partition,
    predict_need,
    random_parts,
    training_edges,
)
from gnnplan.planner.partition.problem import make_problem
from gnnplan.planner.partition.streaming import ldg_parts
from gnnplan.runtime.errors import BudgetExceeded
from tests.planner.partition.graphs import csc, random_csc


def test_every_partitioner_and_the_refinement_have_a_rate():
    rates = load_rates()
    assert set(rates) == {*PARTITIONERS, "volume"}
    for rate in rates.values():
        assert 0 < rate.low < 1 < rate.high
        assert rate.edge_seconds + rate.node_seconds > 0


@pytest.mark.parametrize("name", PARTITIONERS)
def test_needs_grow_with_the_graph_and_name_what_is_measured(name: str):
    small, large = (
        predict_need(
            make_problem(*random_csc(n, 10 * n, 1), parts=4, training=np.arange(0, n, 2)), name
        )
        for n in (1000, 4000)
    )
    assert large.seconds == pytest.approx(4 * small.seconds, rel=0.05)
    assert small.low_seconds < small.seconds < small.high_seconds
    assert large.memory_bytes > small.memory_bytes
    assert small.measured == (("library",) if name in ("kaminpar", "metis") else ())


def peak(task) -> int:
    task()  # compiled before it is measured
    tracemalloc.start()
    task()
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


def test_counted_memory_is_what_numpy_allocates():
    """Beyond the arrays 100 kB are allowed for Python's own objects."""
    indptr, indices = random_csc(200_000, 400_000, 1)
    problem = make_problem(indptr, indices, parts=8, training=np.arange(0, 200_000, 2))
    start = random_parts(problem)
    assert peak(lambda: hash_parts(problem)) <= predict_need(problem, "hash").memory_bytes + 1e5
    assert peak(lambda: random_parts(problem)) <= predict_need(problem, "random").memory_bytes + 1e5
    assert peak(lambda: ldg_parts(problem)) <= predict_need(problem, "ldg").memory_bytes + 1e5
    refined = refine_bytes(200_000, 400_000, 8, ascending=False)
    assert peak(lambda: refine_volume(problem, start)) <= refined + 1e5


def test_making_a_graph_undirected_allocates_what_is_counted():
    """Almost no edge has its opposite, so the union has room for nearly twice the edges."""
    indptr, indices = random_csc(200_000, 400_000, 1)
    found = peak(lambda: to_undirected(indptr, indices))
    assert found == pytest.approx(undirected_bytes(200_000, 400_000), abs=1e5)


def test_memory_by_hand():
    problem = make_problem(*csc(10, [(0, 1)]), parts=2)
    assert predict_need(problem, "hash").memory == {"parts": 40, "block": 200}
    # Cost, ids, order and result of a repair take more than the stream's own 5 bytes a node.
    assert predict_need(problem, "ldg").memory == {"parts": 40, "repair": 280}


def test_one_that_does_not_fit_is_refused_in_one_line_before_it_starts():
    indptr, indices = random_csc(1000, 8000, 2)
    with pytest.raises(BudgetExceeded, match=r"partitioner kaminpar needs about .* > 1\.0 MB"):
        partition(indptr, indices, parts=2, memory_bytes=1_000_000)
    found = partition(indptr, indices, parts=2, name="ldg", memory_bytes=1_000_000)
    assert len(found) == 1000
    need = predict_need(make_problem(indptr, indices, parts=2), "kaminpar")
    check_fits(need, need.memory_bytes)
    assert "\n" not in str(need)
    assert "(measured rate)" in str(need)


def test_a_stream_of_papers100m_fits_where_kaminpar_does_not():
    """111 M nodes and 1.6 G edges (formulas 2.6), without such arrays: strides of zero."""
    indptr = np.broadcast_to(np.zeros(1, np.int64), 111_059_957)
    indices = np.broadcast_to(np.zeros(1, np.int32), 1_615_685_872)
    training = np.broadcast_to(np.ones(1, np.bool_), 111_059_956)
    problem = make_problem(indptr, indices, parts=4, training=training)
    check_fits(predict_need(problem, "ldg"), 4 * 10**9)
    with pytest.raises(BudgetExceeded, match="kaminpar"):
        check_fits(predict_need(problem, "kaminpar"), 16 * 10**9)


def test_edges_of_training_nodes():
    indptr, indices = csc(4, [(0, 1), (1, 2), (2, 3)])
    problem = make_problem(indptr, indices, parts=2, training=np.array([0, 1]))
    assert training_edges(problem, 1) == 3
    assert training_edges(problem, 2) == round(3 * (1 + 6 / 4))


def test_an_unknown_name_is_refused():
    with pytest.raises(SettingsError, match="found 'spectral'"):
        predict_need(make_problem(*csc(2, [(0, 1)]), parts=2), "spectral")
