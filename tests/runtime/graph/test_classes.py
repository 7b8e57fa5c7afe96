"""Class numbers become outputs of a model: never a million of them for a handful of classes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.dataset import GraphWarning, open_graph, write_graph
from gnnplan.runtime.graph.findings import is_sparse
from gnnplan.runtime.graph.imports.importing import ImportOptions, import_graph
from gnnplan.runtime.graph.imports.labels import make_whole_numbers, number_classes
from tests.support.fuzzing import fuzzed

N = 20


def pack(folder: Path, y: np.ndarray, **more: Any) -> Path:
    ring: dict[str, Any] = {"indptr": np.arange(N + 1), "indices": np.arange(N)}
    np.savez(folder / "p.npz", **ring, y=y, train_mask=np.arange(N) < 15, **more)
    return folder / "p.npz"


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64, np.float64])
@pytest.mark.parametrize("high", [1_001, 2_000_000_000])
def test_coded_classes_are_renumbered_and_their_numbers_kept(
    dtype: type, high: int, tmp_path: Path
):
    y = np.where(np.arange(N) < 10, 7, high).astype(dtype)
    lines: list[str] = []
    graph = import_graph(pack(tmp_path, y), tmp_path / "g", report=lines.append)
    assert graph.num_classes == 2
    assert graph.y is not None
    numbers = np.load(tmp_path / "g" / "class_id.npy")
    assert np.array_equal(numbers[graph.y], y)
    assert any(f"2 classes with numbers from 7 to {high}" in line for line in lines)
    assert any("class_id.npy" in note for note in open_graph(tmp_path / "g").meta.notes)


def test_numbers_without_a_node_are_kept_and_said_while_few(tmp_path: Path):
    lines: list[str] = []
    y = np.where(np.arange(N) < 10, 0, 500)
    graph = import_graph(pack(tmp_path, y), tmp_path / "g", report=lines.append)
    assert graph.num_classes == 501
    assert not (tmp_path / "g" / "class_id.npy").exists()
    assert "labels: 2 of the classes 0 to 500 have a node" in lines


@fuzzed(80)
@given(
    y=st.lists(st.one_of(st.integers(-1, 9), st.integers(0, 2**62)), min_size=1, max_size=40),
    declared=st.sampled_from([0, 10, 2**31 - 1]),
)
def test_whatever_the_numbers_outputs_are_few_and_labels_can_be_read_back(
    y: list[int], declared: int
):
    labels = np.array(y)
    made = number_classes(labels, declared)
    known = labels >= 0
    assert np.array_equal(made.y >= 0, known)
    back = made.y if made.class_id is None else made.class_id[made.y]
    assert np.array_equal(back[known], labels[known])
    assert made.y.max(initial=-1) < max(made.num_classes, 1)
    if known.any():
        assert made.num_classes <= max(1000, 10 * len(np.unique(labels[known])), len(labels))
    # Where nothing was said, every second output at least has a node.
    if not made.note:
        assert made.num_classes <= max(declared, 2 * len(np.unique(labels[known])), 1)


def test_a_declared_number_is_believed_while_nodes_could_fill_it():
    y = np.zeros(3000, np.int64)
    assert number_classes(y, 2000).num_classes == 2000
    assert number_classes(y, 4000).num_classes == 1
    assert is_sparse(2000, 1)
    assert not is_sparse(2000, 200)


def test_a_dataset_of_more_empty_classes_than_nodes_is_refused_and_of_fewer_said(tmp_path: Path):
    fields: dict[str, Any] = {
        "name": "g",
        "indptr": np.arange(N + 1),
        "indices": np.arange(N),
        "train_idx": np.arange(5),
        "val_idx": np.arange(0),
        "test_idx": np.arange(0),
        "task": "multiclass",
    }
    y = np.where(np.arange(N) < 10, 0, 2_000_000_000)
    with pytest.raises(DatasetError, match="found 2 of 2000000001 that do"):
        write_graph(tmp_path / "g", **fields, y=y, num_classes=2_000_000_001)
    many = 1500
    ring: dict[str, Any] = {"indptr": np.arange(many + 1), "indices": np.arange(many)}
    ring["y"] = np.zeros(many, np.int64)
    with pytest.warns(GraphWarning, match="found 1 of 1200 that do"):
        write_graph(tmp_path / "g", **(fields | ring), num_classes=1200)


def test_negative_numbers_are_counted_and_no_label_at_all_is_said(tmp_path: Path):
    y = np.arange(N) % 3
    y[16:18] = -5
    y[18] = -1
    lines: list[str] = []
    graph = import_graph(pack(tmp_path, y), tmp_path / "g", report=lines.append)
    assert "labels: 2 of 20 are negative and not -1 (the least: -5): taken as unknown" in lines
    assert graph.y is not None
    assert (graph.y == -1).sum() == 3
    lines.clear()
    import_graph(pack(tmp_path, np.full(N, -1)), tmp_path / "h", report=lines.append)
    assert "labels: none of 20 nodes has a known one: left out" in lines


def test_one_hot_labels_of_any_source_are_said(tmp_path: Path):
    y = np.eye(4)[np.arange(N) % 4]
    y[16:] = np.nan
    lines: list[str] = []
    graph = import_graph(pack(tmp_path, y), tmp_path / "g", report=lines.append)
    assert graph.task == "multilabel"
    said = "labels: one 1 in each row of 4: read as 4 labels per node (multilabel); save y.argmax"
    assert any(line.startswith(said) for line in lines)
    lines.clear()
    asked = ImportOptions(task="multilabel")
    import_graph(pack(tmp_path, y), tmp_path / "h", report=lines.append, options=asked)
    y[0, 1] = 1
    import_graph(pack(tmp_path, y), tmp_path / "i", report=lines.append)
    assert not any("argmax" in line for line in lines)


@pytest.mark.filterwarnings("ignore::runtime.graph.findings.GraphWarning")
@pytest.mark.parametrize("columns", [1, 2])
def test_minus_one_beside_one_class_is_said(columns: int, tmp_path: Path):
    y = np.repeat(np.where(np.arange(N) < 15, 1, -1)[:, None], columns, axis=1)
    lines: list[str] = []
    import_graph(pack(tmp_path, y), tmp_path / "g", report=lines.append)
    counts = f"{5 * columns} of {N * columns}"
    words = f"labels: all known ones are 1, and {counts} are -1, which is unknown; save 0 and 1"
    assert any(line.startswith(words) for line in lines)
    lines.clear()
    y[3] = 0
    import_graph(pack(tmp_path, y), tmp_path / "h", report=lines.append)
    empty = np.where(np.arange(N) < 15, 1, np.nan)
    import_graph(pack(tmp_path, empty), tmp_path / "i", report=lines.append)
    assert not any("known ones are" in line for line in lines)


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (np.array([0, np.inf]), "1 of 2 that are fractions, infinite or huge"),
        (np.array([0.5, 1.5]), "2 of 2"),
        (np.array([0, 1e17]), "1 of 2"),
        (np.array([2.0**53 - 1, 2.0**53]), "1 of 2"),
        (np.array([2.0**24 - 1, 2.0**24], np.float32), "1 of 2"),
        (np.array([0, 2**63], np.uint64), "1 of 2"),
        (np.array([0, 1], complex), "expected numbers"),
    ],
)
def test_what_is_no_label_is_refused_with_its_count(y: np.ndarray, words: str):
    with pytest.raises(DatasetError, match=words):
        make_whole_numbers(y)


def test_unknown_training_labels_are_refused_with_their_count(tmp_path: Path):
    y = np.where(np.arange(N) < 3, -5, 1)
    with pytest.raises(DatasetError, match="each of 15 training nodes, found 3 without"):
        import_graph(pack(tmp_path, y), tmp_path / "g")
