"""What nobody can have meant is refused or said with its count, when written and when looked at."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gnnplan.planner.cli.main import main
from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph import findings as module
from gnnplan.runtime.graph.dataset import (
    Graph,
    GraphWarning,
    SparseFeatures,
    inspect_graph,
    open_graph,
    write_graph,
)
from gnnplan.runtime.graph.findings import Finding, count_stored_links
from gnnplan.runtime.graph.imports.importing import ImportOptions, import_graph
from tests.support.fuzzing import fuzzed

N = 12
INDPTR, INDICES = np.arange(N + 1), (np.arange(N) + 1) % N
"""Node v has the one in-neighbour v + 1."""
WHOLE: dict[str, Any] = {
    "name": "ring",
    "indptr": INDPTR,
    "indices": INDICES,
    "x": np.ones((N, 2), np.float32),
    "y": np.arange(N) % 2,
    "train_idx": np.arange(4),
    "val_idx": np.arange(4, 8),
    "test_idx": np.arange(8, N),
    "task": "multiclass",
    "num_classes": 2,
}
PAIRS = np.array([[0, 2], [1, 5], [3, 7], [4, 9]])
LINK = WHOLE | {
    "task": "link",
    "num_classes": 0,
    "y": None,
    "train_idx": PAIRS[:2],
    "val_idx": PAIRS[2:3],
    "test_idx": PAIRS[3:],
}


def write(folder: Path, fields: dict[str, Any]) -> Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphWarning)
        return write_graph(folder, **fields)


def damaged(folder: Path, array: str, value: np.ndarray, fields: dict[str, Any]) -> Path:
    """A dataset written without its fault, which is put in behind its back."""
    write(folder, fields)
    np.save(folder / f"{array}.npy", value)
    return folder


FAULTS: dict[str, Any] = {
    "repeated training": (WHOLE, "train_idx", np.array([1, 1, 2]), "repeated", "1 repetitions"),
    "repeated validation": (WHOLE, "val_idx", np.array([5, 5, 5]), "repeated", "2 repetitions"),
    "repeated test": (WHOLE, "test_idx", np.array([9, 8, 9]), "repeated", "1 repetitions"),
    **{
        f"weight {value}": (
            WHOLE | {"edge_weight": np.ones(N, np.float32)},
            "edge_weight",
            np.where(np.arange(N) % 4 == 0, value, 1).astype(np.float32),
            "edge_weight",
            f"3 of 12 that are negative, infinite or NaN (the first: {value}",
        )
        for value in (np.nan, np.inf, -np.inf, -3.0)
    },
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_never_written_and_never_opened_to_be_planned(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    fields, array, value, kind, words = FAULTS[name]
    with pytest.raises(DatasetError) as caught:
        write_graph(tmp_path / "g", **(fields | {array: value}))
    assert words in str(caught.value)
    assert f"{tmp_path / 'g' / array}.npy" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    folder = damaged(tmp_path / "old", array, value, fields)
    with pytest.raises(DatasetError) as again:
        open_graph(folder)
    assert words in str(again.value)
    _, found = inspect_graph(folder)
    assert [(f.kind, f.array, f.fault) for f in found] == [(kind, array, True)]
    assert main(["graph", "info", str(folder), "--json"]) == 2
    shown = capsys.readouterr()
    assert json.loads(shown.out)["findings"] == [
        {"kind": kind, "array": array, "fault": True, "text": found[0].text}
        | {"count": found[0].count, "of": found[0].of}
    ]
    assert words in shown.err


SAID: dict[str, Any] = {
    "train in test": (WHOLE, {"test_idx": np.arange(2, 8)}, ["overlap", "overlap"], "2 of 6 test"),
    "val in train": (WHOLE, {"val_idx": np.arange(1, 5)}, ["overlap"], "3 of 4 validation nodes"),
    "NaN": (WHOLE, {"x": np.full((N, 2), np.nan, np.float32)}, ["features"], "24 feature values"),
    "inf": (
        WHOLE,
        {"x": np.diag(np.full(N, -np.inf)).astype(np.float16)},
        ["features"],
        "12 feature values are infinite in 12 of 12 rows",
    ),
    "unlabelled": (
        WHOLE,
        {"y": np.where(np.arange(N) > 9, -1, 0)},
        ["unlabelled"],
        "2 of 4 test nodes have no known label",
    ),
    "link as stored": (LINK, {"val_idx": np.array([[6, 5], [0, 3]])}, ["held_out_links"], "(1 as"),
    "link reversed": (
        LINK,
        {"test_idx": np.array([[5, 6], [10, 11]])},
        ["held_out_links"],
        "2 of 2 test links are stored edges (0 as they stand, 2 in the other direction only)",
    ),
    "link of training": (LINK, {"test_idx": PAIRS[:1, ::-1].copy()}, ["overlap"], "1 of 1 test"),
    "link twice": (
        LINK,
        {"train_idx": np.concatenate([PAIRS[:2], PAIRS[:1]])},
        ["repeated"],
        "1 of 3 training links repeat",
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_what_may_be_meant_is_said_when_written_when_opened_and_by_info(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    fields, change, kinds, words = SAID[name]
    with pytest.warns(GraphWarning) as caught:
        graph = write_graph(tmp_path / "g", **(fields | change))
    assert any(words in str(w.message) for w in caught)
    assert any(words in note for note in graph.meta.notes)
    with pytest.warns(GraphWarning) as again:
        open_graph(tmp_path / "g")
    assert [str(w.message) for w in again] == [str(w.message) for w in caught]
    assert main(["graph", "info", str(tmp_path / "g"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [f["kind"] for f in shown["findings"]] == kinds
    assert main(["graph", "info", str(tmp_path / "g")]) == 0
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_sound_dataset_has_no_findings(tmp_path: Path):
    weighted: dict[str, Any] = WHOLE | {"edge_weight": np.zeros(N)}
    for number, fields in enumerate((WHOLE, LINK, weighted)):
        graph = write_graph(tmp_path / str(number), **fields)
        assert inspect_graph(graph.path)[1] == []
        assert graph.meta.notes == []


def test_sparse_and_typed_features_are_looked_at_too(tmp_path: Path):
    sparse = SparseFeatures(
        indptr=np.minimum(np.arange(N + 1), 2),
        indices=np.array([0, 1], np.int32),
        data=np.array([np.inf, np.nan], np.float32),
    )
    write(tmp_path / "g", WHOLE | {"x": None, "x_csr": sparse, "feature_dim": 2})
    (found,) = inspect_graph(tmp_path / "g")[1]
    assert (found.array, found.count, found.of) == ("x_data", 2, 2)
    assert "1 feature values are NaN and 1 feature values are infinite" in found.text


def test_blocks_do_not_change_what_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    x = np.random.default_rng(0).choice([0, np.nan, np.inf], (N, 2)).astype(np.float32)
    write(tmp_path / "g", LINK | {"x": x, "val_idx": np.array([[6, 5], [0, 3], [2, 3]])})
    whole = inspect_graph(tmp_path / "g")[1]
    monkeypatch.setattr(module, "CHUNK_EDGES", 1)
    monkeypatch.setattr("gnnplan.runtime.graph.format.CHUNK_BYTES", 16)
    assert len(whole) == 2
    assert inspect_graph(tmp_path / "g")[1] == whole


@fuzzed(80)
@given(data=st.data())
def test_links_are_counted_as_by_looking_each_up(data: st.DataObject):
    nodes = data.draw(st.integers(1, 8))
    ids = st.integers(0, nodes - 1)
    edges = data.draw(st.lists(st.tuples(ids, ids), max_size=30))
    pairs = np.array(data.draw(st.lists(st.tuples(ids, ids), max_size=12)), int).reshape(-1, 2)
    lists = [[u for u, w in edges if w == v] for v in range(nodes)]  # in no order
    indptr = np.cumsum([0, *map(len, lists)])
    indices = np.array([u for own in lists for u in own], np.int32)
    size = data.draw(st.integers(1, 9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_EDGES", size)
        found = count_stored_links(indptr, indices, pairs)
    forward = [(u, v) in edges for u, v in pairs.tolist()]
    reverse = [(v, u) in edges for u, v in pairs.tolist()]
    assert found.forward == sum(forward)
    assert found.only_reversed == sum(r and not f for f, r in zip(forward, reverse, strict=True))


def test_findings_of_a_dataset_come_with_faults_first():
    assert Finding(kind="k", array="y", count=1, of=2, fault=True, text="t").note == "warning: y: t"


# Imports: what the source holds is refused before anything is written.


def pack(folder: Path, **changes: Any) -> Path:
    arrays: dict[str, Any] = {
        "indptr": INDPTR,
        "indices": INDICES,
        "x": WHOLE["x"],
        "y": WHOLE["y"],
    }
    masks: dict[str, Any] = {"train_mask": np.arange(N) < 6, "test_mask": np.arange(N) >= 6}
    np.savez(folder / "pack.npz", **(arrays | masks | changes))
    return folder / "pack.npz"


@pytest.mark.parametrize("features", ["dense", "sparse", "project:1"])
@pytest.mark.parametrize("dtype", [np.float64, np.longdouble])
def test_finite_features_beyond_float32_are_refused_with_their_count(
    features: str, dtype: type, tmp_path: Path
):
    x = np.ones((N, 2), dtype)
    x[3], x[5, 0] = 1e39, -1e200
    options = ImportOptions(features=features)
    with pytest.raises(DatasetError, match=r"found 3 of 24 beyond 3\.4e\+38"):
        import_graph(pack(tmp_path, x=x), tmp_path / "g", options=options)
    assert [p.name for p in tmp_path.iterdir()] == ["pack.npz"]


def test_sparse_features_beyond_float32_are_refused_as_dense_ones_are(tmp_path: Path):
    (tmp_path / "in").mkdir()
    fields: dict[str, Any] = {
        "x_indptr": np.arange(N + 1),
        "x_indices": np.zeros(N, np.int32),
        "x_data": np.full(N, 1e300),
        "x_shape": np.array([N, 2]),
    }
    source = pack(tmp_path / "in", **fields)
    with np.load(source) as arrays:
        np.savez(source, **{k: v for k, v in arrays.items() if k != "x"})
    for features in ("dense", "sparse", "project:1"):
        with pytest.raises(DatasetError, match="found 12 of 12 beyond"):
            import_graph(source, tmp_path / "g", options=ImportOptions(features=features))


def test_a_projection_beyond_float32_is_refused_and_infinite_features_are_said(tmp_path: Path):
    x = np.full((N, 8), 3e38, np.float32)
    options = ImportOptions(features="project:1", seed=2)
    with pytest.raises(DatasetError, match="12 rows with sums beyond it"):
        import_graph(pack(tmp_path, x=x), tmp_path / "g", options=options)
    x = np.ones((N, 8), np.float32)
    x[0] = np.inf
    with pytest.warns(GraphWarning, match="in 1 of 12 rows"), np.errstate(invalid="ignore"):
        import_graph(pack(tmp_path, x=x), tmp_path / "g", options=options)


@pytest.mark.parametrize("value", ["nan", "-3", "inf", "1e39", "1e-60", ""])
def test_weights_of_a_table_are_refused_by_the_source_name(value: str, tmp_path: Path):
    (tmp_path / "e.csv").write_text(f"src,dst,weight\n0,1,{value}\n1,2,1\n2,0,1\n")
    with pytest.raises(DatasetError, match="found 1 of 3") as caught:
        import_graph(tmp_path / "e.csv", tmp_path / "g")
    assert str(caught.value).startswith(str(tmp_path / "e.csv"))
    assert [p.name for p in tmp_path.iterdir()] == ["e.csv"]


@pytest.mark.parametrize("value", [float("nan"), -1.0, float("inf"), 1e39, 1e-60])
def test_weights_of_a_pyg_file_are_refused(value: float, tmp_path: Path):
    import torch
    from torch_geometric.data import Data

    weight = torch.ones(N, dtype=torch.float64)
    weight[2] = value
    data = Data(edge_index=torch.arange(2 * N).reshape(2, N) % N, edge_weight=weight, num_nodes=N)
    torch.save(data, tmp_path / "d.pt")
    with pytest.raises(DatasetError, match="found 1 of 12"):
        import_graph(tmp_path / "d.pt", tmp_path / "g")


def test_rows_of_different_lengths_are_named_with_all_of_them(tmp_path: Path):
    source = pack(tmp_path, x=np.ones((N - 2, 2), np.float32))
    with pytest.raises(DatasetError, match="12 rows of labels, 10 rows of features"):
        import_graph(source, tmp_path / "g")


def test_a_dataset_of_before_with_overlapping_splits_opens_quickly_without_a_word(tmp_path: Path):
    write(tmp_path / "g", WHOLE | {"test_idx": np.arange(4)})
    open_graph(tmp_path / "g", validate=False)
