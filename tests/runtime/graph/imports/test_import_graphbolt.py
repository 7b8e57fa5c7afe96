"""GraphBolt metadata: link tasks, what is refused, and life without PyYAML."""

import sys
from pathlib import Path

import numpy as np
import pytest

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.dataset import GraphWarning
from gnnplan.runtime.graph.imports.importing import import_graph

HOMOGENEOUS = """
dataset_name: tiny
graph:
  nodes: [{num: 4}]
  edges: [{format: numpy, path: edges.npy}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    root.mkdir()
    np.save(root / "edges.npy", np.array([[0, 1, 2], [1, 2, 3]]))
    (root / "metadata.yaml").write_text(HOMOGENEOUS)
    return root


def test_numpy_edges_are_two_rows_and_the_rest_is_optional(folder: Path, tmp_path: Path):
    graph = import_graph(folder, tmp_path / "g")
    assert graph.indices.tolist() == [0, 1, 2]
    assert graph.indptr.tolist() == [0, 0, 1, 2, 3]
    assert graph.topology_only


def test_seeds_of_two_columns_make_a_link_task_without_the_negatives(folder: Path, tmp_path: Path):
    np.save(folder / "pairs.npy", np.array([[0, 1], [1, 3], [2, 3]]))
    np.save(folder / "labels.npy", np.array([1, 0, 1]))
    entries = [
        f"{{name: {n}, format: numpy, path: {p}.npy}}"
        for n, p in (("seeds", "pairs"), ("labels", "labels"))
    ]
    task = "tasks: [{name: link_prediction, %s}]"
    sets = ", ".join(
        f"{name}: [{{data: [{', '.join(entries)}]}}]"
        for name in ("train_set", "validation_set", "test_set")
    )
    (folder / "metadata.yaml").write_text(HOMOGENEOUS + task % sets)
    with pytest.warns(GraphWarning, match=r"2 of 2 \w+ links are (stored edges|among)"):
        graph = import_graph(folder, tmp_path / "g")
    assert (graph.task, graph.num_classes, graph.y) == ("link", 0, None)
    assert graph.train_idx.tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("{num: 4}", "{num: 4, type: user}", "heterogeneous"),
        ("{num: 4}", "{num: 4}, {num: 5}", "heterogeneous"),
        ("{num: 4}", "{num: four}", "graph.nodes"),
        ("{num: 4}", "{num: 99999999999999}", "fit in memory"),
        ("{num: 4}", "{num: 3}", "from 0 to 2, found 3"),
        ("edges.npy", "none.npy", "expected the file that it names"),
        ("edges.npy", "../../secret.npy", "inside its folder"),
        ("numpy", "pickle", "format numpy, torch or csv"),
        ("graph:", "graf:", "graph.nodes"),
        ("dataset_name: tiny", "dataset_name: [", "YAML"),
        ("dataset_name: tiny", "!!python/object/apply:os.getcwd []", "YAML"),
    ],
)
def test_wrong_metadata_is_refused(folder: Path, tmp_path: Path, old: str, new: str, words: str):
    (folder / "metadata.yaml").write_text(HOMOGENEOUS.replace(old, new))
    with pytest.raises(DatasetError, match=words):
        import_graph(folder, tmp_path / "g")
    assert not (tmp_path / "g").exists()


def test_without_pyyaml_the_message_says_what_to_install(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(DatasetError, match="needs PyYAML; install it"):
        import_graph(folder, tmp_path / "g")


BOMB = "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9 if n else ['x'] * 9)}]\n" for n in range(9)
)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dataset_name: tiny", BOMB + "dataset_name: *a8"),
        ("format: numpy", "format: 7"),
        ("path: edges.npy", f"path: {'9' * 400}.npy"),
        ("path: edges.npy", 'path: "a\\0b"'),
    ],
    ids=["aliases", "number", "too long", "zero byte"],
)
def test_words_that_are_none_are_refused(folder: Path, tmp_path: Path, old: str, new: str):
    (folder / "metadata.yaml").write_text(HOMOGENEOUS.replace(old, new))
    with pytest.raises(DatasetError, match=r"metadata\.yaml"):
        import_graph(folder, tmp_path / "g")


def test_seeds_without_an_axis_are_refused(folder: Path, tmp_path: Path):
    np.save(folder / "ids.npy", np.array(1))
    task = "tasks: [{train_set: [{data: [{name: seeds, format: numpy, path: ids.npy}]}]}]"
    (folder / "metadata.yaml").write_text(HOMOGENEOUS + task)
    with pytest.raises(DatasetError, match="in one or two columns"):
        import_graph(folder, tmp_path / "g")
