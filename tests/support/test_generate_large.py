"""The R-MAT generator in bounded memory: the graph's properties, and that a broken run goes on."""

from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.graph.generate import generate_rmat
from tests.support import generate_large
from tests.support.generate_large import BLOCK_BYTES, generate_rmat_topology


def make(
    folder: Path,
    *,
    num_nodes: int = 3000,
    degree: int = 12,
    seed: int = 7,
    block_bytes: int = BLOCK_BYTES,
) -> Graph:
    return generate_rmat_topology(
        folder,
        num_nodes=num_nodes,
        degree=degree,
        feature_dim=100,
        seed=seed,
        block_bytes=block_bytes,
    )


def matrix(graph: Graph) -> csr_matrix:
    ones = np.ones(graph.num_edges, np.int32)
    return csr_matrix((ones, graph.indices, graph.indptr), (graph.num_nodes, graph.num_nodes))


def test_the_graph_is_symmetric_simple_and_declared_topology_only(tmp_path: Path) -> None:
    graph = open_graph(make(tmp_path / "g").path)  # validated
    stored = matrix(graph)
    assert (stored != stored.T).nnz == 0
    assert stored.diagonal().sum() == 0
    stored.sum_duplicates()
    assert stored.nnz == graph.num_edges
    assert graph.indices.dtype == np.int32
    assert (graph.topology_only, graph.feature_dim) == (True, 100)
    # Repeated edges alone are missing from 3000 x 12.
    assert 0.75 * 36_000 < graph.num_edges <= 36_000
    assert (np.diff(graph.indptr)[graph.train_idx] > 0).all()
    assert not (tmp_path / "g.parts").exists()


def test_degrees_are_skewed_as_the_other_generators(tmp_path: Path) -> None:
    # Chakrabarti et al. 2004, Graph500's parameters: the same law, drawn by other code.
    large = np.sort(np.diff(make(tmp_path / "a", num_nodes=1 << 14).indptr))[::-1]
    known = generate_rmat(tmp_path / "b", num_nodes=1 << 14, degree=12, feature_dim=1, seed=7)
    other = np.sort(np.diff(known.indptr))[::-1]
    share = [float(d[: d.size // 100].sum() / d.sum()) for d in (large, other)]
    assert share[0] == pytest.approx(share[1], rel=0.1)
    isolated = [float((d == 0).mean()) for d in (large, other)]
    assert isolated[0] == pytest.approx(isolated[1], rel=0.1)
    # Hubs are not the lowest ids: those are shuffled.
    assert np.diff(open_graph(tmp_path / "a").indptr)[:160].sum() < 0.1 * large.sum()


def test_ranges_decide_memory_and_never_the_graph(tmp_path: Path) -> None:
    one, many = make(tmp_path / "one"), make(tmp_path / "many", block_bytes=20_000)
    assert np.array_equal(one.indices, many.indices)
    assert np.array_equal(one.indptr, many.indptr)
    assert one.fingerprint == many.fingerprint
    assert make(tmp_path / "other", seed=8).fingerprint != one.fingerprint


@pytest.mark.parametrize("stage", ["_sort_block", "_assemble", "_draw"])
def test_a_run_that_was_broken_off_goes_on(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make(tmp_path / "whole", block_bytes=20_000)
    real, calls = getattr(generate_large, stage), []

    def breaks(*args: object) -> object:
        calls.append(args)
        if len(calls) == (1 if stage == "_assemble" else 3):
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(generate_large, "CHUNK_EDGES", 4000)
    monkeypatch.setattr(generate_large, stage, breaks)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "again", block_bytes=20_000)
    assert (tmp_path / "again.parts").is_dir()
    before = len(calls)
    again = make(tmp_path / "again", block_bytes=20_000)
    assert np.array_equal(again.indices, whole.indices)
    if stage == "_draw":  # 18000 edges in chunks of 4000, two of which were done
        assert len(calls) - before == 3


def test_impossible_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="expected a mean degree above 0"):
        make(tmp_path / "g", num_nodes=10, degree=9)
