"""How features are stored: dense, sparse or projected, and in which type."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.csc import array_edges
from gnnplan.runtime.graph.dataset import Graph, SparseFeatures, open_graph
from gnnplan.runtime.graph.format import BFLOAT16, convert_rows, row_dtype
from gnnplan.runtime.graph.imports import features
from gnnplan.runtime.graph.imports.features import projection_matrix, write_features
from gnnplan.runtime.graph.imports.importing import ImportOptions, import_graph
from gnnplan.runtime.graph.imports.source import RawFeatures, RawGraph
from gnnplan.runtime.graph.staging import Staging

DENSE = np.random.default_rng(2).standard_normal((50, 400)).astype(np.float32)
DENSE[np.random.default_rng(3).random(DENSE.shape) < 0.9] = 0


def raw(table: np.ndarray, *, sparse: bool = False) -> RawGraph:
    source = RawFeatures(dim=table.shape[1], dense=table)
    if sparse:
        A = sp.csr_matrix(table)
        csr = SparseFeatures(indptr=A.indptr.astype(np.int64), indices=A.indices, data=A.data)
        source = RawFeatures(dim=table.shape[1], csr=csr)
    edges = array_edges(np.zeros(1, np.int64), np.zeros(1, np.int64))
    return RawGraph(name="t", num_nodes=len(table), edges=edges, features=source)


def stored(folder: Path, graph: RawGraph, ram_bytes: int | None = None, **options):
    with Staging(folder / "t") as staging:
        facts = write_features(graph, staging, ImportOptions(**options), ram_bytes)
        staging.finish_arrays()
        return facts, {p.stem: np.load(p) for p in staging.folder.glob("*.npy")}


@pytest.mark.parametrize("sparse", [False, True])
def test_dense_and_sparse_storage_hold_the_same_values(tmp_path: Path, sparse: bool):
    facts, arrays = stored(tmp_path, raw(DENSE, sparse=sparse), features="dense")
    assert facts["feature_storage"] == "dense"
    np.testing.assert_array_equal(arrays["x"], DENSE)
    facts, arrays = stored(tmp_path, raw(DENSE, sparse=sparse), features="sparse")
    assert facts["feature_storage"] == "sparse"
    triple = (arrays["x_data"], arrays["x_indices"], arrays["x_indptr"])
    np.testing.assert_array_equal(sp.csr_matrix(triple, DENSE.shape).toarray(), DENSE)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_projection_is_the_recorded_matrix_whatever_the_storage(tmp_path: Path, sparse: bool):
    facts, arrays = stored(tmp_path, raw(DENSE, sparse=sparse), features="project:32", seed=4)
    R, record = projection_matrix(400, 32, seed=4)
    assert facts["projection"] == record
    np.testing.assert_allclose(arrays["x"], DENSE @ R.toarray(), rtol=1e-5, atol=1e-5)


def test_projection_keeps_inner_products_on_average():
    # E[x' . y'] = x . y: 40 independent matrices, so the mean's error falls by sqrt(40).
    x, y = DENSE[0], DENSE[1] + DENSE[0]
    products = [float((x @ R.toarray()) @ (y @ R.toarray())) for R in _matrices(40)]
    error = np.std(products) / np.sqrt(len(products))
    assert abs(np.mean(products) - x @ y) < 4 * error
    R, record = projection_matrix(400, 64, seed=0)
    assert R.nnz / (400 * 64) == pytest.approx(record.density, rel=0.1)


def _matrices(count: int):
    return [projection_matrix(400, 64, seed=s)[0] for s in range(count)]


def test_dense_beyond_a_quarter_of_memory_is_projected_and_said_in_one_line(tmp_path: Path):
    table, quarter = DENSE, 4 * DENSE.nbytes
    graph = raw(table)
    facts, _ = stored(tmp_path, graph, ram_bytes=quarter)
    assert (facts["feature_storage"], graph.notes) == ("dense", [])
    facts, arrays = stored(tmp_path, graph, ram_bytes=quarter - 1)
    assert arrays["x"].shape == (50, 256)
    assert len(graph.notes) == 1
    assert "projected to 256 columns" in graph.notes[0]
    facts, _ = stored(tmp_path, raw(table), ram_bytes=quarter - 1, features="dense")
    assert facts["feature_dim"] == 400


def test_few_columns_are_never_projected_onto_more(tmp_path: Path):
    facts, _ = stored(tmp_path, raw(DENSE[:, :100]), ram_bytes=1)
    assert (facts["feature_storage"], facts["feature_dim"]) == ("dense", 100)


def test_float16_is_kept_cast_or_refused(tmp_path: Path):
    exact = np.arange(8, dtype=np.float16).reshape(2, 4)
    assert stored(tmp_path, raw(exact))[1]["x"].dtype == np.float32
    assert stored(tmp_path, raw(exact), feature_dtype="keep")[1]["x"].dtype == np.float16
    wide = exact.astype(np.float64)
    assert stored(tmp_path, raw(wide), feature_dtype="float16")[1]["x"].dtype == np.float16
    for lossy in (wide + 1e-6, wide * 1e6):
        with pytest.raises(DatasetError, match="holds exactly"):
            stored(tmp_path, raw(lossy), feature_dtype="float16")


def test_rows_are_rounded_to_bfloat16_and_it_is_said(tmp_path: Path):
    graph = raw(DENSE)
    facts, arrays = stored(tmp_path, graph, feature_dtype="bfloat16", features="dense")
    assert (facts["feature_dtype"], arrays["x"].dtype) == ("bfloat16", BFLOAT16)
    found = convert_rows(arrays["x"], np.dtype(np.float32))
    assert 0 < np.max(np.abs(found - DENSE) / np.abs(DENSE).clip(1e-30)) <= 2.0**-8
    assert graph.notes == [
        "features: rounded to bfloat16, 2 bytes a value: 8 binary digits, off by 1 part in 256 at "
        "most"
    ]
    for choice in ("sparse", "project:16"):
        with pytest.raises(DatasetError, match="expected dense ones for type bfloat16"):
            stored(tmp_path, raw(DENSE), feature_dtype="bfloat16", features=choice)


def bare() -> RawGraph:
    graph = raw(DENSE)
    graph.features = None
    return graph


def test_drawn_features_are_of_the_type_that_was_asked_for(tmp_path: Path):
    graph = bare()
    noise = stored(tmp_path, graph, feature_dim=8)[1]["x"]
    assert noise.dtype == np.float32
    kept = stored(tmp_path, bare(), feature_dim=8, feature_dtype="keep")[1]["x"]
    assert kept.tobytes() == noise.tobytes()
    assert "(seed 0) stand for them" in graph.notes[0]
    for name in ("bfloat16", "float16"):
        graph = bare()
        facts, arrays = stored(tmp_path, graph, feature_dim=8, feature_dtype=name)
        assert (facts["feature_dtype"], arrays["x"].dtype) == (name, row_dtype(name))
        assert arrays["x"].tobytes() == convert_rows(noise, row_dtype(name)).tobytes()
        assert f"8 columns of normal noise (seed 0, rounded to {name}) stand" in graph.notes[0]
    quarter = 4 * noise.nbytes // 2
    options: dict[str, Any] = {"feature_dim": 8, "feature_dtype": "float16"}
    assert stored(tmp_path, bare(), quarter, **options)[0]["feature_storage"] == "dense"
    assert stored(tmp_path, bare(), quarter - 1, **options)[0]["feature_storage"] == "none"


def test_a_declared_width_has_the_type_that_was_asked_for_or_is_refused(tmp_path: Path):
    declared: dict[str, Any] = {"features": "none", "feature_dim": 8}
    for name, found in (("float16", "float16"), ("float32", "float32"), ("keep", "float32")):
        facts, arrays = stored(tmp_path, bare(), feature_dtype=name, **declared)
        assert (facts["feature_storage"], facts["feature_dtype"], arrays) == ("none", found, {})
    for more, ram_bytes in ((declared, None), ({"feature_dim": 8}, 1)):
        with pytest.raises(DatasetError, match="expected dense ones for type bfloat16, found none"):
            stored(tmp_path, bare(), ram_bytes, feature_dtype="bfloat16", **more)
    facts, _ = stored(tmp_path, raw(DENSE), features="none", feature_dtype="bfloat16")
    assert facts == {"feature_dim": 0, "feature_storage": "none"}


def test_rows_that_do_not_match_the_nodes_are_refused(tmp_path: Path):
    graph = raw(DENSE)
    graph.num_nodes = 51
    with pytest.raises(DatasetError, match=r"one row per node \(51\), found 50"):
        stored(tmp_path, graph)


def test_chunks_do_not_change_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = stored(tmp_path, raw(DENSE, sparse=True), features="sparse")[1]
    monkeypatch.setattr(features, "CHUNK_BYTES", 4 * 400 * 7)
    for sparse in (False, True):
        parts = stored(tmp_path, raw(DENSE, sparse=sparse), features="sparse")[1]
        for name, array in whole.items():
            np.testing.assert_array_equal(parts[name], array)


def test_a_projection_is_recorded_in_the_dataset(data_folder: Path, tmp_path: Path):
    options = ImportOptions(features="project:16", seed=9)
    graph: Graph = import_graph(data_folder / "cora.npz", tmp_path / "g", options=options)
    again = open_graph(tmp_path / "g")
    assert again.meta.projection == graph.meta.projection
    assert graph.meta.projection is not None
    assert (graph.meta.projection.source_dim, graph.meta.projection.seed) == (1433, 9)
    assert graph.feature_dim == 16
