"""Fuzzing of every graph importer: damaged sources are refused in one line and leave nothing."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gnnplan.runtime import codec
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.graph.imports.importing import ImportOptions, import_graph
from tests.support.fuzzing import fuzzed, refused
from tests.support.mutations import damaged, damaged_json

MEMORY_BYTES = 32 << 20
"""Of the machine, as the importer is told: a damaged node count beyond it must be refused."""
OPTIONS = st.builds(
    ImportOptions,
    features=st.sampled_from(["auto", "dense", "sparse", "project:4"]),
    symmetrise=st.booleans(),
    self_loops=st.sampled_from(["keep", "add", "remove"]),
    deduplicate=st.booleans(),
)


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gnnplan.runtime.graph.imports.source.memory_bytes", lambda: MEMORY_BYTES)


def check_sound(graph: Graph) -> None:
    """What was taken in spite of the damage holds together."""
    assert graph.indptr[0] == 0
    assert graph.indptr[-1] == len(graph.indices) == graph.num_edges
    assert (np.diff(graph.indptr) >= 0).all()
    for ids in (graph.indices, graph.train_idx, graph.val_idx, graph.test_idx):
        assert ids.min(initial=0) >= 0
        assert ids.max(initial=0) < graph.num_nodes


@fuzzed(45)
@given(data=st.data())
def test_a_damaged_source_is_refused_in_one_line_or_imported_whole(
    source: Path, tmp_path: Path, data: st.DataObject
):
    with tempfile.TemporaryDirectory(dir=tmp_path) as name:
        copy, out = Path(name) / source.name, Path(name) / "out"
        if source.is_dir():
            shutil.copytree(source, copy)
            victims = sorted(p for p in copy.rglob("*") if p.is_file())
        else:
            shutil.copy(source, copy)
            victims = [copy]
        victim = data.draw(st.sampled_from(victims))
        victim.write_bytes(data.draw(damaged(victim.read_bytes())))
        options = data.draw(OPTIONS)
        text = refused(lambda: import_graph(copy, out / "g", options=options), inside=out)
        if text is None:
            check_sound(open_graph(out / "g", validate=False))
            assert [p.name for p in out.iterdir()] == ["g"]
        else:
            assert not out.exists() or list(out.iterdir()) == []


@fuzzed(60)
@given(data=st.data())
def test_damaged_metadata_of_graphbolt_is_refused_in_one_line(tmp_path: Path, data: st.DataObject):
    with tempfile.TemporaryDirectory(dir=tmp_path) as name:
        folder, out = Path(name) / "source", Path(name) / "out"
        folder.mkdir()
        np.save(folder / "edges.npy", np.array([[0, 1, 2], [1, 2, 3]]))
        np.save(folder / "ids.npy", np.array([0, 1]))
        ids = {"name": "seeds", "format": "numpy", "path": "ids.npy"}
        whole = {
            "dataset_name": "tiny",
            "graph": {"nodes": [{"num": 4}], "edges": [{"format": "numpy", "path": "edges.npy"}]},
            "feature_data": [],
            "tasks": [
                {"num_classes": 2, "train_set": [{"data": [ids, {**ids, "name": "labels"}]}]}
            ],
        }
        # JSON is YAML, so structure can be damaged without leaving the format.
        (folder / "metadata.yaml").write_bytes(data.draw(damaged_json(whole)))
        text = refused(lambda: import_graph(folder, out / "g"), inside=out)
        assert (text is None) == (out / "g").exists()


@pytest.fixture(scope="session")
def datasets(known, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Datasets with dense and with sparse features; do not write into them."""
    from tests.runtime.graph.conftest import write_npz

    folder = tmp_path_factory.mktemp("datasets")
    source = write_npz(known, folder)
    return [
        import_graph(source, folder / kind, options=ImportOptions(features=kind)).path
        for kind in ("dense", "sparse")
    ]


@fuzzed(60)
@given(data=st.data())
def test_a_damaged_dataset_is_refused_in_one_line_or_opened_whole(
    datasets: list[Path], tmp_path: Path, data: st.DataObject
):
    with tempfile.TemporaryDirectory(dir=tmp_path) as name:
        copy = Path(name) / "copy"
        shutil.copytree(data.draw(st.sampled_from(datasets)), copy)
        victim = data.draw(st.sampled_from(sorted(copy.iterdir())))
        whole = victim.read_bytes()
        asked = damaged_json(codec.parse(whole)) if victim.suffix == ".json" else damaged(whole)
        victim.write_bytes(data.draw(asked))
        opened = list[Graph]()
        text = refused(lambda: opened.append(open_graph(copy)))
        if text is None:
            check_sound(opened[0])
