"""P = QA, NORM and EXTRACT against worked examples and scipy.

[M1], [M3], [M4], [M5]: formulas section 4; edges 01,02,12,14,23,34,45,35 (undirected).
"""

import tracemalloc

import numpy as np
import pytest
from numpy.typing import NDArray

from gnnplan.runtime.sampling.bulk.product import (
    SparseRows,
    extract,
    sum_product,
)
from gnnplan.runtime.sampling.choose.layerwise import LayerGraph, one_row
from gnnplan.runtime.sampling.layerwise import make_law
from gnnplan.runtime.sampling.memory import Ledger
from gnnplan.runtime.sampling.relabel import Table
from gnnplan.runtime.sampling.statistics import Estimator
from tests.reference.matrix import (
    adjacency,
    extract_layer,
    layer_probabilities,
    rows_of_ones,
)

PAIRS = [(0, 1), (0, 2), (1, 2), (1, 4), (2, 3), (3, 4), (4, 5), (3, 5)]
ONES = np.empty(0, dtype=np.float32)


def example() -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    dense = np.zeros((6, 6), dtype=int)
    for a, b in PAIRS:
        dense[a, b] = dense[b, a] = 1
    indptr = np.concatenate([[0], np.cumsum(dense.sum(1))]).astype(np.int64)
    return indptr, np.nonzero(dense)[1].astype(np.int32)


def random_graph(number: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    rng = np.random.default_rng([5, number])
    n = int(rng.integers(2, 60))
    degrees = rng.integers(0, 9, n)
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    return indptr, rng.integers(0, n, int(indptr[-1])).astype(np.int32)


def dense(rows: SparseRows, n: int) -> NDArray[np.float64]:
    out = np.zeros((len(rows.ptr) - 1, n))
    for b in range(len(rows.ptr) - 1):
        part = slice(rows.ptr[b], rows.ptr[b + 1])
        np.add.at(out[b], rows.cols[part], rows.values[part])
    return out


def stacked(batches: list[list[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    ends = np.concatenate([[0], np.cumsum([len(ids) for ids in batches])]).astype(np.int64)
    return np.concatenate([np.array(ids, dtype=np.int64) for ids in batches]), ends


@pytest.mark.parametrize(
    ("norm", "expected"),
    [("fro", np.array([1, 0, 1, 1, 2, 0]) / 5), ("count2", np.array([1, 0, 1, 1, 4, 0]) / 7)],
)
def test_m3_ladies_squares_entries_or_their_sum(norm: str, expected: NDArray) -> None:
    law = make_law("ladies", norm, replace=False, estimator=Estimator.PLAIN)
    graph = LayerGraph(*example(), None, law)
    rows = graph.probabilities(*stacked([[1, 5]]), Table(6, dense=True), Ledger())
    np.testing.assert_allclose(dense(rows, 6)[0], expected)


def test_m5_fastgcn_takes_column_sums_of_the_whole_graph() -> None:
    law = make_law("fastgcn", "fro", replace=False, estimator=Estimator.PLAIN)
    graph = LayerGraph(*example(), None, law)
    rows = graph.probabilities(*stacked([[1, 5]]), Table(6, dense=True), Ledger())
    np.testing.assert_allclose(dense(rows, 6)[0], np.array([2, 3, 3, 3, 3, 2]) / 16)


@pytest.mark.parametrize("weighted", [False, True])
def test_fastgcn_adds_up_the_whole_graph_without_a_copy_of_its_edges(weighted: bool) -> None:
    law = make_law("fastgcn", "fro", replace=False, estimator=Estimator.PLAIN)
    rng, n, edges = np.random.default_rng(8), 100, 1 << 21
    indptr = np.linspace(0, edges, n + 1).astype(np.int64)
    indices = rng.integers(0, n, edges).astype(np.int32)
    weight = rng.random(edges, np.float32) if weighted else None
    LayerGraph(np.minimum(indptr, 9), indices[:9], None, law)  # compiled before it is measured
    tracemalloc.start()
    try:
        graph = LayerGraph(indptr, indices, weight, law)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < indices.nbytes
    squares = None if weight is None else weight.astype(np.float64) ** 2
    row, _ = one_row(np.bincount(indices, weights=squares, minlength=n), indices.dtype)
    assert graph.fixed is not None
    np.testing.assert_array_equal(graph.fixed[0].values, row.values)


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("norm", ["fro", "count2"])
def test_stacked_products_equal_scipy(norm: str, is_dense: bool) -> None:
    for number in range(40):
        indptr, indices = random_graph(number)
        n = len(indptr) - 1
        # Without parallel edges: scipy adds them up before it squares.
        indices = np.concatenate(
            [np.unique(indices[indptr[v] : indptr[v + 1]]) for v in range(n)]
        ).astype(np.int32)
        counts = [
            len(np.unique(random_graph(number)[1][indptr[v] : indptr[v + 1]])) for v in range(n)
        ]
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        rng = np.random.default_rng([6, number])
        batches = [rng.permutation(n)[: rng.integers(0, n)].tolist() for _ in range(5)]
        law = make_law("ladies", norm, replace=False, estimator=Estimator.PLAIN)
        graph = LayerGraph(indptr, indices, None, law)
        found = graph.probabilities(*stacked(batches), Table(n, dense=is_dense), Ledger())
        q = rows_of_ones([np.array(ids, dtype=np.int64) for ids in batches], n)
        expected = layer_probabilities(adjacency(indptr, indices), q, "ladies", norm)
        np.testing.assert_allclose(dense(found, n), expected.toarray(), atol=1e-12)


def test_weights_are_squared_entry_by_entry() -> None:
    indptr, indices = np.array([0, 2, 3, 3], dtype=np.int64), np.array([1, 2, 2], dtype=np.int32)
    weight = np.array([1, 2, 3], dtype=np.float32)
    rows = sum_product(
        indptr, indices, weight, 2, *stacked([[0, 1]]), Table(3, dense=True), Ledger()
    )
    assert dense(rows, 3).tolist() == [[0, 1, 13]]


def test_m4_extraction_keeps_the_edges_between_batch_and_sample() -> None:
    nodes, ends = stacked([[1, 5]])
    drawn = (np.array([0, 2]), np.array([3, 4]), np.ones(2))
    layer = extract(
        *example(), ONES, Estimator.PLAIN, (nodes, ends), drawn, Table(6, dense=True), Ledger()
    )
    assert layer.nodes.tolist() == [1, 5, 3, 4]
    matrix = np.zeros((2, 4), dtype=int)
    for row in range(2):
        matrix[row, layer.indices[layer.row_ptr[row] : layer.row_ptr[row + 1]]] = 1
    assert matrix[:, 2:].tolist() == [[0, 1], [1, 1]]
    assert matrix[:, :2].sum() == 0


@pytest.mark.parametrize("is_dense", [True, False])
def test_stacked_extraction_equals_scipy(is_dense: bool) -> None:
    for number in range(30):
        indptr, indices = random_graph(number)
        n = len(indptr) - 1
        rng = np.random.default_rng([8, number])
        dst = [rng.permutation(n)[: rng.integers(1, n)].astype(np.int64) for _ in range(4)]
        picks = [np.sort(rng.permutation(n)[: rng.integers(0, n)]).astype(np.int64) for _ in dst]
        nodes, ends = stacked([ids.tolist() for ids in dst])
        drawn, drawn_ends = stacked([ids.tolist() for ids in picks])
        layer = extract(
            indptr, indices, ONES, Estimator.PLAIN, (nodes, ends),
            (drawn_ends, drawn, np.ones(len(drawn))), Table(n, dense=is_dense), Ledger(),
        )  # fmt: skip
        expected = extract_layer(adjacency(indptr, indices), dst, picks).toarray()
        for b, ids in enumerate(dst):
            local = layer.nodes[layer.ends[b] : layer.ends[b + 1]]
            assert local[: len(ids)].tolist() == ids.tolist()
            assert sorted(local[len(ids) :]) == sorted(set(picks[b]) - set(ids))
            edges = layer.indices[layer.edge_ends[b] : layer.edge_ends[b + 1]]
            row_ptr = layer.row_ptr[ends[b] + b : ends[b + 1] + b + 1]
            found = np.zeros((len(ids), n))
            for row in range(len(ids)):
                np.add.at(found[row], local[edges[row_ptr[row] : row_ptr[row + 1]]], 1)
            own = expected[ends[b] : ends[b + 1], drawn_ends[b] : drawn_ends[b + 1]]
            np.testing.assert_array_equal(found[:, picks[b]], own)
            assert found.sum() == own.sum()
