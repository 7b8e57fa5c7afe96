"""Every format gives the same dataset, and the data packs come in as they are."""

from pathlib import Path

import numpy as np
import pytest

from gnnplan.planner.cli.main import main
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.refine import answer_first
from gnnplan.planner.request import check_request
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.dataset import Graph, inspect_graph, open_graph
from gnnplan.runtime.graph.imports import features
from gnnplan.runtime.graph.imports.importing import ImportOptions, detect_format, import_graph
from gnnplan.runtime.loader.loader import PlannedLoader
from tests.runtime.graph.conftest import write_pyg
from tests.support.plans import make_plan


def same_as_known(graph: Graph, known) -> None:
    indptr, indices = known.csc()
    np.testing.assert_array_equal(graph.indptr, indptr)
    np.testing.assert_array_equal(graph.indices, indices)
    np.testing.assert_array_equal(graph.x, known.x)
    np.testing.assert_array_equal(graph.y, known.y)
    for key, ids in known.split.items():
        np.testing.assert_array_equal(np.sort(getattr(graph, f"{key}_idx")), ids)
    assert (graph.task, graph.num_classes, graph.feature_dtype) == ("multiclass", 3, "float32")


def test_every_format_gives_the_same_dataset(source: Path, known, tmp_path: Path):
    lines: list[str] = []
    graph = import_graph(source, tmp_path / "g", report=lines.append)
    same_as_known(graph, known)
    assert graph.name == "known"
    assert lines[0].startswith("COO to CSC needs about")
    same_as_known(open_graph(tmp_path / "g"), known)
    assert [p.name for p in tmp_path.iterdir()] == ["g"]
    stems = {p.stem for p in (tmp_path / "g").iterdir()} - {"source_id", "edge_id"}
    assert stems == {"graph", "indptr", "indices", "x", "y", "train_idx", "val_idx", "test_idx"}


@pytest.mark.parametrize("symmetrise", [False, True])
def test_stored_edges_are_found_again_in_the_source(
    source: Path, format_name: str, known, symmetrise: bool, tmp_path: Path
):
    graph = import_graph(source, tmp_path / "g", options=ImportOptions(symmetrise=symmetrise))
    src, dst = known.src, known.dst
    if format_name == "npz":  # its own order is by destination
        indptr, src = known.csc()
        dst = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
        assert (graph.edge_id is None) != symmetrise
    stored = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    ids = np.arange(graph.num_edges) if graph.edge_id is None else graph.edge_id
    there = (src[ids] == graph.indices) & (dst[ids] == stored)
    back = (dst[ids] == graph.indices) & (src[ids] == stored)
    assert (there | back).all()
    assert there.all() == (not symmetrise)
    assert np.bincount(ids).tolist() == [
        1 + (symmetrise and u != v) for u, v in zip(src, dst, strict=True)
    ]


def test_options_shape_the_topology_alike_in_every_format(source: Path, known, tmp_path: Path):
    options = ImportOptions(symmetrise=True, self_loops="remove", deduplicate=True)
    graph = import_graph(source, tmp_path / "g", options=options)
    A = np.zeros((graph.num_nodes, graph.num_nodes), int)
    A[known.dst, known.src] = A[known.src, known.dst] = 1
    np.fill_diagonal(A, 0)
    assert graph.num_edges == A.sum()
    np.testing.assert_array_equal(graph.indices, np.nonzero(A)[1])


def test_formats_are_recognised(source: Path, format_name: str):
    expected = {"ogb-binary": "ogb", "parquet": "edgelist"}
    assert detect_format(source) == expected.get(format_name, format_name)


@pytest.mark.parametrize("name", [".", "../papers/"])
def test_a_dataset_of_the_current_folder_has_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "edges.csv").write_text("0,1\n1,0\n")
    monkeypatch.chdir(tmp_path / "papers")
    assert import_graph(Path(name), tmp_path / "g").name == "papers"


def test_what_is_no_source_is_refused(tmp_path: Path):
    with pytest.raises(DatasetError, match="found nothing there"):
        import_graph(tmp_path / "nowhere.npz", tmp_path / "g")
    (tmp_path / "picture.png").write_bytes(b"")
    with pytest.raises(DatasetError, match="name the format"):
        import_graph(tmp_path / "picture.png", tmp_path / "g")
    with pytest.raises(DatasetError, match="name the format"):
        import_graph(tmp_path, tmp_path / "g")
    with pytest.raises(DatasetError, match="expected auto or one of"):
        import_graph(tmp_path / "picture.png", tmp_path / "g", format="guess")


@pytest.mark.parametrize(
    "change",
    [
        {"self_loops": "some"},
        {"task": "guess"},
        {"features": "project:0"},
        {"features": "project:x"},
        {"features": "tiny"},
        {"feature_dtype": "int8"},
        {"random_split": (0.9, 0.2, 0.2)},
        {"random_split": (0.5, float("nan"), 0.2)},
        {"seed": -1},
        {"split_index": -1},
    ],
)
def test_options_that_mean_nothing_are_refused(change):
    with pytest.raises(DatasetError, match="expected"):
        ImportOptions(**change)


# Sizes from the packs' README; mean and sum of features are compared with the archive itself.
PACKS = {
    "cora": (2708, 10556, 1433, 7, "multiclass", (140, 500, 1000)),
    "pubmed": (19717, 88648, 500, 3, "multiclass", (60, 500, 1000)),
    "minesweeper": (10000, 78804, 7, 2, "binary", (5000, 2500, 2500)),
    "blogcatalog-groups": (10312, 667966, 0, 39, "multilabel", (6187, 2062, 2063)),
    "ca-astroph": (18772, 396100, 0, 0, "multiclass", (11263, 3754, 3755)),
    "amazon-computers": (13752, 491722, 767, 10, "multiclass", (8251, 2750, 2751)),
}


@pytest.mark.parametrize("name", PACKS)
def test_packs_come_in_whole(name: str, data_folder: Path, tmp_path: Path):
    graph = import_graph(data_folder / f"{name}.npz", tmp_path / "g")
    nodes, edges, dim, classes, task, split = PACKS[name]
    assert (graph.name, graph.num_nodes, graph.num_edges) == (name, nodes, edges)
    assert (graph.feature_dim, graph.num_classes, graph.task) == (dim, classes, task)
    assert (len(graph.train_idx), len(graph.val_idx), len(graph.test_idx)) == split
    with np.load(data_folder / f"{name}.npz") as pack:
        np.testing.assert_array_equal(graph.indptr, pack["indptr"])
        np.testing.assert_array_equal(graph.indices, pack["indices"])
        np.testing.assert_array_equal(graph.train_idx, np.flatnonzero(pack["train_mask"]))
        if graph.y is not None:
            np.testing.assert_array_equal(graph.y, pack["y"])
        if "x" in pack:
            np.testing.assert_array_equal(graph.x, pack["x"].astype(np.float32))
        elif "x_data" in pack:
            assert graph.x is not None
            rows = np.repeat(np.arange(nodes), np.diff(pack["x_indptr"]))
            values = pack["x_data"].astype(np.float32)
            np.testing.assert_array_equal(graph.x[rows, pack["x_indices"]], values)
            assert np.count_nonzero(graph.x) == np.count_nonzero(values)
        else:
            assert graph.topology_only


def test_a_numbered_split_of_a_pack_can_be_chosen(data_folder: Path, tmp_path: Path):
    source = data_folder / "minesweeper.npz"
    graph = import_graph(source, tmp_path / "g", options=ImportOptions(split_index=3))
    with np.load(source) as pack:
        np.testing.assert_array_equal(graph.train_idx, np.flatnonzero(pack["train_masks"][3]))
    with pytest.raises(DatasetError, match="a split from 0 to 9, found 10"):
        import_graph(source, tmp_path / "h", options=ImportOptions(split_index=10))
    with pytest.raises(DatasetError, match="found one"):
        import_graph(data_folder / "cora.npz", tmp_path / "h", options=ImportOptions(split_index=1))


def test_a_declared_width_makes_a_topology_plannable(data_folder: Path, tmp_path: Path):
    options = ImportOptions(feature_dim=128, features="none")
    graph = import_graph(data_folder / "ca-astroph.npz", tmp_path / "g", options=options)
    assert graph.topology_only
    assert graph.row_bytes == 512
    check_request(graph.path, PlanSettings())
    with pytest.raises(DatasetError, match="with --features dense --feature-dim for noise"):
        answer_first(graph.path, PlanSettings(), machine=None, out=tmp_path / "none")
    assert not (tmp_path / "none").exists()
    text = " ".join(graph.meta.notes)
    assert "128 columns declared, to plan with: nothing can be trained on them" in text
    assert "10 classes drawn at random" in text
    featured = import_graph(data_folder / "cora.npz", tmp_path / "h", options=options)
    assert featured.topology_only
    assert featured.num_classes == 7  # its own


def test_what_no_plan_can_use_is_said_by_the_import_and_refused_by_info(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = ring_with_chords(tmp_path)
    said = list[str]()
    graph = import_graph(source, tmp_path / "g", report=said.append)
    sentence = "expected features or a declared feature_dim, found neither; import it with"
    assert f"warning: no plan can be made for this dataset: {sentence}" in said[-1]
    with pytest.raises(SettingsError, match=sentence):
        check_request(graph.path, PlanSettings())
    assert main(["graph", "info", str(graph.path)]) == 2
    assert sentence in capsys.readouterr().err
    rows = np.ones((400, 2), np.float32)
    nodes = np.arange(400)
    np.savez(tmp_path / "rows.npz", indptr=np.arange(401), indices=np.roll(nodes, 1), x=rows)
    import_graph(tmp_path / "rows.npz", tmp_path / "h", report=said.append)
    assert "found none; import it with labels, with --task link" in said[-1]
    linked = ImportOptions(task="link", feature_dim=4)
    import_graph(source, tmp_path / "i", options=linked, report=said.append)
    assert "no plan" not in said[-1]
    assert main(["graph", "info", str(tmp_path / "i")]) == 0


def ring_with_chords(folder: Path, num_nodes: int = 400) -> Path:
    """A list of edges in both directions, with some twice and a self-loop."""
    nodes = np.arange(num_nodes)
    ends = [(nodes, np.roll(nodes, step)) for step in (1, 7, 30)]
    src = np.concatenate([*(s for s, _ in ends), *(d for _, d in ends), [5, 5, 9]])
    dst = np.concatenate([*(d for _, d in ends), *(s for s, _ in ends), [4, 4, 9]])
    np.savetxt(folder / "ring.txt", np.stack([src, dst], axis=1), fmt="%d")
    return folder / "ring.txt"


def test_a_topology_alone_gets_features_and_labels_and_trains(tmp_path: Path):
    source = ring_with_chords(tmp_path)
    options = ImportOptions(feature_dim=6)
    graph = import_graph(source, tmp_path / "g", options=options)
    again = import_graph(source, tmp_path / "h", options=options)
    assert graph.fingerprint == again.fingerprint
    assert graph.x is not None
    assert graph.y is not None
    assert graph.x.shape == (400, 6)
    assert abs(float(graph.x.mean())) < 0.1
    assert abs(float(graph.x.std()) - 1) < 0.1
    assert set(graph.y.tolist()) == set(range(10))
    text = " ".join(graph.meta.notes)
    assert "6 columns of normal noise (seed 0) stand for them" in text
    assert "there is nothing to learn" in text
    make_plan(graph, tmp_path / "plan", batch_size=64, fanouts=[3, 2])
    batch = next(iter(PlannedLoader(tmp_path / "plan", graph, blocks=False)))
    np.testing.assert_array_equal(batch.x, graph.x[batch.n_id])


def test_noise_beyond_a_quarter_of_memory_is_declared_alone_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(features, "memory_bytes", lambda: 4 * 400 * 6 * 4 - 1)
    source = ring_with_chords(tmp_path)
    graph = import_graph(source, tmp_path / "g", options=ImportOptions(feature_dim=6))
    assert graph.topology_only
    assert graph.feature_dim == 6
    assert any("are declared, to plan with, and not drawn" in note for note in graph.meta.notes)
    options = ImportOptions(feature_dim=6, features="dense")
    assert import_graph(source, tmp_path / "h", options=options).x is not None


def test_without_links_a_fifth_of_the_edges_is_held_out(tmp_path: Path):
    source = ring_with_chords(tmp_path)
    options = ImportOptions(task="link", feature_dim=4)
    graph = import_graph(source, tmp_path / "g", options=options)
    assert (graph.task, graph.num_classes, graph.y) == ("link", 0, None)
    parts = [
        {tuple(sorted(pair)) for pair in ids.tolist()}
        for ids in (graph.train_idx, graph.val_idx, graph.test_idx)
    ]
    sizes = [len(part) for part in parts]
    assert sizes == [len(ids) for ids in (graph.train_idx, graph.val_idx, graph.test_idx)]
    assert sum(sizes) == 1200
    assert sizes == pytest.approx([960, 120, 120], abs=45)
    target = np.repeat(np.arange(400), np.diff(graph.indptr))
    stored = {
        tuple(sorted(pair)) for pair in zip(graph.indices.tolist(), target.tolist(), strict=True)
    }
    assert stored == parts[0] | {(9, 9)}
    assert inspect_graph(graph.path)[1] == []
    rows = np.loadtxt(source, dtype=np.int64)
    edges = np.stack([graph.indices, target], axis=1)
    assert graph.edge_id is not None
    np.testing.assert_array_equal(rows[graph.edge_id], edges)


def test_a_split_of_nodes_is_no_split_of_links(known, tmp_path: Path):
    said: list[str] = []
    graph = import_graph(
        write_pyg(known, tmp_path),
        tmp_path / "g",
        options=ImportOptions(task="link"),
        report=said.append,
    )
    assert graph.train_idx.shape[1] == 2
    assert any(line.startswith("not used: train_mask, val_mask, test_mask") for line in said), said
