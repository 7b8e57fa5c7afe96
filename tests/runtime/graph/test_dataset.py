"""Datasets open as they were written, and everything wrong with one is a line that says so."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.dataset import (
    Graph,
    GraphWarning,
    SparseFeatures,
    open_graph,
    write_graph,
)

INDPTR = np.array([0, 2, 3, 3, 5])
INDICES = np.array([1, 3, 0, 0, 2])


def write(folder: Path, **changes) -> Graph:
    fields = {
        "name": "tiny",
        "indptr": INDPTR,
        "indices": INDICES,
        "x": np.arange(12, dtype=np.float32).reshape(4, 3),
        "y": np.array([0, 1, -1, 1]),
        "train_idx": np.array([0, 1]),
        "val_idx": np.array([3]),
        "test_idx": np.array([], np.int64),
        "task": "multiclass",
        "num_classes": 2,
    } | changes
    return write_graph(folder, **fields)


def test_arrays_come_back_as_written_and_read_only(tmp_path: Path):
    graph = write(
        tmp_path / "g", edge_weight=np.linspace(0, 1, 5), node_type=np.array([0, 1, 0, 1])
    )
    assert (graph.name, graph.num_nodes, graph.num_edges) == ("tiny", 4, 5)
    assert (graph.feature_dim, graph.feature_dtype, graph.row_bytes) == (3, "float32", 12)
    assert (graph.num_classes, graph.task, graph.topology_only) == (2, "multiclass", False)
    np.testing.assert_array_equal(graph.indptr, INDPTR)
    np.testing.assert_array_equal(graph.indices, INDICES)
    assert (graph.indptr.dtype, graph.indices.dtype) == (np.int64, np.int32)
    assert graph.x is not None
    assert graph.x[2, 1] == 7
    assert not graph.x.flags.writeable
    assert graph.y is not None
    assert graph.y.tolist() == [0, 1, -1, 1]
    assert graph.edge_weight is not None
    assert graph.edge_weight.dtype == np.float32
    assert graph.path == (tmp_path / "g").resolve()


@pytest.mark.parametrize("wrong", [-1, 2**31, 2**32 + 1])
def test_an_id_that_32_bits_do_not_hold_is_refused_and_nothing_written(tmp_path: Path, wrong: int):
    indices = INDICES.copy()
    indices[2] = wrong  # written as 32 bits, 2 ** 32 + 1 would be node 1
    with pytest.raises(DatasetError, match="expected node ids from 0 to 3 in indices"):
        write(tmp_path / "g", indices=indices)
    assert not (tmp_path / "g").exists()


FRACTIONS = "expected whole numbers, found"
CHANGED: dict[str, Any] = {
    **{
        f"fractions in {name}": (name, values, FRACTIONS)
        for name, values in {
            "y": np.array([0, 1, -1, 0.5]),
            "train_idx": np.array([1.5, 0.7]),
            "indices": INDICES * 0.99,
            "indptr": INDPTR + 0.4,
            "edge_type": np.full(5, 0.5),
            "edge_id": np.full(5, 0.5),
            "node_type": np.full(4, 0.5),
        }.items()
    },
    "unknown label as NaN": ("y", np.array([0, 1, np.nan, 1]), f"{FRACTIONS} 1 others of 4"),
    "infinite type": ("node_type", np.array([0, 1, np.inf, 1]), FRACTIONS),
    "type beyond 32 bits": ("edge_type", np.full(5, 2**32 + 1), "from -2147483648 to 2147483647"),
    "node type beyond 32 bits": ("node_type", np.full(4, 2**32), "found 4294967296"),
    "edge id beyond 63 bits": ("edge_id", np.full(5, 2**63, np.uint64), "found 9223372036854775"),
    "id without its last digit": ("edge_id", np.full(5, 2.0**53), "float64 tells apart"),
    "short floats": ("edge_id", np.full(5, 2.0**24, np.float32), "float32 tells apart"),
    "words": ("y", np.array(["a", "b", "a", "b"]), "an array of numbers, found values of <U1"),
    "words as weights": ("edge_weight", np.array(["a"] * 5), "an array of numbers"),
    "imaginary weights": ("edge_weight", np.full(5, 1j), "found values of complex128"),
    "nothing among labels": ("y", np.array([0, None, 1, 1]), "found values of object"),
    "unequal rows": ("y", [[0, 1], [1]], "an array of numbers"),
    "one number": ("train_idx", 3, "an array of numbers, found one int"),
    "a mask": ("train_idx", np.array([True, True, False, False]), "give np.flatnonzero"),
    "a short mask": ("train_idx", np.array([False, True]), "expected ids, found a flag"),
    "a mask of numbers": ("val_idx", np.array([0, 0, 1, 1]), "expected ids, found a flag"),
    "flags of edges": ("indices", np.array([True] * 5), "expected ids, found a flag"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_numbers_that_would_be_changed_are_refused_and_nothing_written(tmp_path: Path, name: str):
    array, values, words = CHANGED[name]
    with pytest.raises(DatasetError, match=words) as caught:
        write(tmp_path / "g", **{array: values})
    assert str(caught.value).startswith(f"{tmp_path / 'g' / array}.npy: ")
    assert list(tmp_path.iterdir()) == []


def test_lists_and_whole_fractions_are_taken(tmp_path: Path):
    lists = {"indptr": INDPTR.tolist(), "indices": INDICES.tolist(), "test_idx": [], "val_idx": [3]}
    graph = write(tmp_path / "g", **lists, y=[0.0, 1.0, -1.0, 1.0], node_type=[False, True] * 2)
    assert (graph.indices.tolist(), graph.val_idx.tolist()) == (INDICES.tolist(), [3])
    assert graph.y is not None
    assert graph.node_type is not None
    assert (graph.y.tolist(), graph.node_type.tolist()) == ([0, 1, -1, 1], [0, 1, 0, 1])


def test_sparse_features_and_multilabel_come_back(tmp_path: Path):
    sparse = SparseFeatures(
        indptr=np.array([0, 1, 1, 2, 3]),
        indices=np.array([4, 0, 2], np.int32),
        data=np.array([1, 2, 3], np.float16),
    )
    graph = write(
        tmp_path / "g",
        x=None,
        x_csr=sparse,
        feature_dim=5,
        y=np.eye(4, 3, dtype=np.int8),
        task="multilabel",
        num_classes=3,
    )
    assert graph.x is None
    assert graph.x_csr is not None
    assert graph.x_csr.data.tolist() == [1, 2, 3]
    assert (graph.feature_dim, graph.feature_dtype, graph.row_bytes) == (5, "float16", 10)
    assert graph.y is not None
    assert graph.y.shape == (4, 3)


def test_a_topology_may_declare_a_width_without_features(tmp_path: Path):
    graph = write(tmp_path / "g", x=None, y=None, feature_dim=128, num_classes=0)
    assert graph.topology_only
    assert graph.x is None
    assert graph.feature_dim == 128
    assert graph.row_bytes == 512


def test_link_splits_hold_pairs(tmp_path: Path):
    pairs = np.array([[0, 1], [3, 0]])
    graph = write(
        tmp_path / "g",
        task="link",
        train_idx=pairs,
        val_idx=np.array([[1, 2]]),
        test_idx=pairs[:0],
    )
    assert graph.train_idx.tolist() == pairs.tolist()
    with pytest.raises(DatasetError, match=r"int64 of shape \[any, 2\]"):
        write(tmp_path / "h", task="link")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "g")
    return tmp_path / "g"


DAMAGE = {
    "falls": ("indptr", np.array([0, 3, 2, 3, 5]), "never fall, found 3 at 1 and then 2"),
    "starts late": ("indptr", np.array([1, 2, 3, 3, 5]), "run from 0"),
    "ends early": ("indptr", np.array([0, 2, 3, 3, 4]), "entries 5, found 0 to 4"),
    "short pointers": ("indptr", INDPTR[:-1], r"shape \[5\], found int64 of shape \[4\]"),
    "no pointers": ("indptr", INDPTR[:0], r"shape \[0\]"),
    "short indices": ("indices", INDICES[:-1].astype(np.int32), r"shape \[5\]"),
    "float indices": ("indices", INDICES.astype(float), "int32 or int64"),
    "index too high": ("indices", np.array([1, 3, 0, 0, 4], np.int32), "from 0 to 3, found 4"),
    "index negative": ("indices", np.array([1, 3, 0, 0, -1], np.int32), "from 0 to 3, found -1"),
    "short features": ("x", np.zeros((3, 3), np.float32), r"shape \[4, 3\]"),
    "narrow features": ("x", np.zeros((4, 2), np.float32), r"shape \[4, 3\]"),
    "float64 features": ("x", np.zeros((4, 3)), "float32"),
    "short labels": ("y", np.zeros(3, np.int64), r"shape \[4\]"),
    "label too high": ("y", np.array([0, 1, 2, 1]), "labels from -1 to 1, found 2"),
    "unlabelled training": ("y", np.array([0, -1, 1, 1]), "1 without"),
    "empty training": ("train_idx", np.array([], np.int64), "at least one training node"),
    "training too high": ("train_idx", np.array([0, 4]), "from 0 to 3, found 4"),
    "training negative": ("train_idx", np.array([-1]), "from 0 to 3, found -1"),
    "test too high": ("test_idx", np.array([9]), "from 0 to 3, found 9"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_line_that_names_the_file(folder: Path, name: str):
    array, value, words = DAMAGE[name]
    np.save(folder / f"{array}.npy", value)
    with pytest.raises(DatasetError, match=words) as caught:
        open_graph(folder)
    assert f"{array}.npy" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
@pytest.mark.parametrize("array", ["indptr", "indices", "x", "train_idx"])
def test_truncated_files_are_refused(folder: Path, array: str, keep: int):
    path = folder / f"{array}.npy"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DatasetError, match=r"found a file that cannot be read"):
        open_graph(folder)


def test_object_arrays_are_refused_without_unpickling(folder: Path):
    np.save(folder / "y.npy", np.array([{}, 1, 2, 3], dtype=object), allow_pickle=True)
    with pytest.raises(DatasetError):
        open_graph(folder)


def test_a_folder_that_is_no_dataset_is_refused(tmp_path: Path):
    with pytest.raises(DatasetError, match="no such folder"):
        open_graph(tmp_path / "nowhere")
    with pytest.raises(DatasetError, match=r"found no graph\.json"):
        open_graph(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_nodes": 0}, "empty graph"),
        ({"num_edges": 0}, "empty graph"),
        ({"num_nodes": "4"}, "num_nodes"),
        ({"task": "guess"}, "multiclass"),
        ({"format_version": 99}, "format_version"),
        ({"surprise": 1}, "surprise"),
        ({"feature_dim": -1}, "0 or more"),
        ({"node_types": ["../../etc"]}, "node types"),
    ],
)
def test_a_wrong_description_is_refused(folder: Path, change, words):
    document = json.loads((folder / "graph.json").read_text())
    (folder / "graph.json").write_text(json.dumps(document | change))
    with pytest.raises(DatasetError, match=words):
        open_graph(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"name": "\ud800"}'])
def test_a_damaged_description_is_refused(folder: Path, text: str):
    (folder / "graph.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(DatasetError, match=r"graph\.json"):
        open_graph(folder)


def test_nan_features_are_counted_and_warned_of_once(folder: Path):
    x = np.load(folder / "x.npy")
    x[1, 0] = x[1, 1] = x[3, 2] = np.nan
    np.save(folder / "x.npy", x)
    with pytest.warns(GraphWarning, match="3 feature values are NaN in 2 of 4 rows") as caught:
        open_graph(folder)
    assert len(caught) == 1
    open_graph(folder, validate=False)


def test_reopening_skips_what_reads_the_arrays(folder: Path):
    np.save(folder / "indices.npy", np.array([1, 3, 0, 0, 99], np.int32))
    open_graph(folder, validate=False)
    np.save(folder / "indices.npy", np.array([1], np.int32))
    with pytest.raises(DatasetError):
        open_graph(folder, validate=False)


def test_the_fingerprint_is_of_the_content_not_of_name_or_place(tmp_path: Path):
    one = write(tmp_path / "a")
    two = write(tmp_path / "b", name="other")
    assert one.fingerprint == two.fingerprint == one.meta.fingerprint
    changed = {
        "x": np.zeros((4, 3), np.float32),
        "y": np.array([1, 1, -1, 1]),
        "train_idx": np.array([1]),
        "indices": np.array([1, 3, 0, 0, 3]),
        "num_classes": 3,
    }
    prints = [write(tmp_path / k, **{k: v}).fingerprint for k, v in changed.items()]
    assert len({one.fingerprint, *prints}) == 1 + len(changed)
    shutil.move(tmp_path / "a", tmp_path / "moved")
    assert open_graph(tmp_path / "moved").fingerprint == one.fingerprint
    np.save(tmp_path / "b" / "y.npy", np.array([1, 0, -1, 1]))
    assert open_graph(tmp_path / "b").fingerprint != two.fingerprint


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"indptr": np.array([0, 3, 2, 3, 5])}, "never fall"),
        ({"indices": np.array([1, 3, 0, 0, 4])}, "found 4"),
        ({"indices": np.array([1, 3, 0, 0, 2**40])}, "node ids"),
        ({"x": np.zeros((3, 3), np.float32)}, "shape"),
        ({"train_idx": np.array([], np.int64)}, "training"),
        ({"indptr": np.array([0]), "indices": np.array([], np.int64)}, "empty graph"),
    ],
)
def test_what_does_not_fit_together_is_never_written(tmp_path: Path, change, words):
    with pytest.raises(DatasetError, match=words) as caught:
        write(tmp_path / "g", **change)
    assert str(tmp_path / "g") in str(caught.value)
    assert list(tmp_path.iterdir()) == []
