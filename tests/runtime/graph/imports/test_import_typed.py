"""Graphs of several types: the same one in every format that keeps its types' names."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.transforms import RandomLinkSplit, ToUndirected

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.dataset import Graph, types_of
from gnnplan.runtime.graph.imports import source
from gnnplan.runtime.graph.imports.importing import ImportOptions, import_graph
from gnnplan.runtime.graph.imports.source import TypedParts
from tests.runtime.graph.conftest import write_gz
from tests.runtime.graph.typed_sources import (
    KEYS,
    WRITERS,
    Typed,
    known_typed,
    write_graphbolt_typed,
    write_hetero,
    write_ogb_typed,
)

OPTIONS = {"OGB": {"split_name": "time"}}


@pytest.fixture(scope="module")
def typed() -> Typed:
    return known_typed()


def load(name: str, typed: Typed, folder: Path, **options: Any) -> tuple[Graph, list[str]]:
    source = WRITERS[name](typed, folder)
    chosen = ImportOptions(**{**OPTIONS.get(name, {}), **options})
    said: list[str] = []
    return import_graph(source, folder / "g", options=chosen, report=said.append), said


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_typed_graph(name: str, typed: Typed, tmp_path: Path):
    graph, said = load(name, typed, tmp_path)
    assert graph.meta.node_types == ["paper", "author"]
    assert graph.meta.edge_types == ["author__writes__paper", "paper__cites__paper"]
    assert types_of(graph).widths == [3, 1]
    np.testing.assert_array_equal(graph.x_by_type["paper"], typed.x)
    np.testing.assert_array_equal(graph.x_by_type["author"], np.ones((12, 1)))
    assert graph.y is not None
    np.testing.assert_array_equal(graph.y, [*typed.y, *[-1] * 12])
    for key, ids in typed.split.items():
        np.testing.assert_array_equal(getattr(graph, f"{key}_idx"), ids)
    target = np.repeat(np.arange(42), np.diff(graph.indptr))
    for number, (key, pairs) in enumerate(typed.edges.items()):
        own = np.flatnonzero(np.asarray(graph.edge_type) == number)
        users = np.asarray(graph.edge_id)[own]
        first = {"paper": 0, "author": 30}
        stored = np.stack([graph.indices[own] - first[key[0]], target[own] - first[key[2]]])
        np.testing.assert_array_equal(stored, pairs[:, users])
        assert len(np.unique(users)) == 50
    assert "features: author has none, so one column of ones stands for them" in said


def test_what_a_typed_folder_has_beside_is_named(typed: Typed, tmp_path: Path):
    _, said = load("OGB", typed, tmp_path)
    left = " ".join(line for line in said if line.startswith("not used"))
    for name in ("cites___paper/edge_reltype.csv.gz", "paper/node_year.csv.gz", "split/random"):
        assert name in left, said
    (tmp_path / "b").mkdir()
    _, said = load("GraphBolt", typed, tmp_path / "b")
    left = " ".join(line for line in said if line.startswith("not used"))
    assert "other of venue (graph.nodes has no nodes of this type)" in left
    assert "when of paper:cites:paper" in left


def test_one_of_the_splits_of_a_typed_set_is_chosen(typed: Typed, tmp_path: Path):
    graph, _ = load("OGB", typed, tmp_path, split_name="random")
    np.testing.assert_array_equal(graph.train_idx, typed.split["train"][1:])
    masks = torch.stack([torch.arange(30) < 5, torch.arange(30) > 20], dim=1)
    data = torch.load(write_hetero(typed, tmp_path), weights_only=False)
    data["paper"].y = torch.zeros(30, dtype=torch.long)
    data["paper"].train_mask = masks
    del data["paper"].val_mask, data["paper"].test_mask
    torch.save(data, tmp_path / "several.pt")
    options = ImportOptions(split_index=1)
    other = import_graph(tmp_path / "several.pt", tmp_path / "h", options=options)
    assert other.train_idx.tolist() == list(range(21, 30))
    assert any("one of 2 splits" in note for note in other.meta.notes)


@pytest.mark.parametrize("name", WRITERS)
def test_symmetrise_adds_the_types_that_pyg_would(name: str, typed: Typed, tmp_path: Path):
    graph, _ = load(name, typed, tmp_path, symmetrise=True)
    expected = ToUndirected(merge=True)(
        torch.load(write_hetero(typed, tmp_path), weights_only=False)
    )
    assert graph.meta.edge_types == ["__".join(key) for key in expected.edge_types]
    first = {"paper": 0, "author": 30}
    target = np.repeat(np.arange(42), np.diff(graph.indptr))
    for number, key in enumerate(expected.edge_types):
        own = np.flatnonzero(np.asarray(graph.edge_type) == number)
        ends = {tuple(pair) for pair in zip(graph.indices[own], target[own], strict=True)}
        pairs = expected[key].edge_index + torch.tensor([[first[key[0]]], [first[key[2]]]])
        assert ends == {tuple(pair) for pair in pairs.t().tolist()}


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_edges_are_read_from_the_types_own_arrays_in_bounded_memory(
    dtype: type[np.integer], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(source, "CHUNK_EDGES", 1 << 12)
    rng = np.random.default_rng(0)
    edges, cites, writes = 200_000, ("paper", "cites", "paper"), ("author", "writes", "paper")
    pairs = {key: rng.integers(0, 900, (2, edges)).astype(dtype) for key in (cites, writes)}
    weights = {writes: rng.random(edges, np.float32)}
    parts = TypedParts(
        source=Path("g"), counts={"paper": 900, "author": 900}, pairs=dict(pairs), weights=weights
    )
    tracemalloc.start()
    try:
        raw = parts.join(ImportOptions(symmetrise=True), name="g")
        for _ in raw.edges.chunks():
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * edges, "as much as one number per edge of one type"
    read = [*raw.edges.chunks()]
    assert {len(chunk["src"]) for chunk in read[:-1]} <= set(range(1, (1 << 12) + 1))
    found = {name: np.concatenate([chunk[name] for chunk in read]) for name in read[0]}
    other = np.flatnonzero(pairs[cites][0] != pairs[cites][1])
    places = [np.arange(edges), other, np.arange(edges), np.arange(edges)]
    src = [pairs[cites][0], pairs[cites][1, other], 900 + pairs[writes][0], pairs[writes][1]]
    dst = [pairs[cites][1], pairs[cites][0, other], pairs[writes][1], 900 + pairs[writes][0]]
    ones = np.ones(edges + len(other), np.float32)
    np.testing.assert_array_equal(found["src"], np.concatenate(src))
    np.testing.assert_array_equal(found["dst"], np.concatenate(dst))
    np.testing.assert_array_equal(found["edge_id"], np.concatenate(places))
    kinds = np.repeat([0, 1, 2], [edges + len(other), edges, edges])
    np.testing.assert_array_equal(found["edge_type"], kinds)
    expected = np.concatenate([ones, weights[writes], weights[writes]])
    np.testing.assert_array_equal(found["edge_weight"], expected)
    for name, kind in raw.edges.attributes.items():
        assert found[name].dtype == kind
    assert len(found["src"]) <= raw.edges.num_edges


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("type: author, ", "", "a type of its own for each entry of graph.nodes"),
        ("author:writes:paper", "author:paper", "a type source:relation:target"),
        ("author:writes:paper", "editor:writes:paper", "source:relation:target.*editor"),
        ("author:writes:paper", "paper:cites:paper", "once, for each entry"),
        ("type: paper\n", "type: venue\n", "sets of a type of graph.nodes, found those of 'venue'"),
        ("num: 30", "num: 20", "seeds from 0 to 19"),
    ],
)
def test_wrong_types_of_graphbolt_are_refused(
    old: str, new: str, words: str, typed: Typed, tmp_path: Path
):
    source = write_graphbolt_typed(typed, tmp_path)
    path = source / "metadata.yaml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(DatasetError, match=words):
        import_graph(source, tmp_path / "g")
    assert not (tmp_path / "g").exists()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda raw: (raw / "num-node-dict.csv.gz").unlink(), "expected num-node-dict.csv.gz"),
        (
            lambda raw: write_gz(raw / "triplet-type-list.csv.gz", np.array([["a", "b"]])),
            "relation and target type per line, found 2",
        ),
        (
            lambda raw: (raw / "relations" / "___".join(KEYS[0]) / "edge.csv.gz").unlink(),
            "expected edge.csv.gz of OGB",
        ),
        (
            lambda raw: write_gz(raw / "node-feat/paper/node-feat.csv.gz", np.ones((3, 2))),
            r"x of paper with one row per node \(30\), found 3",
        ),
        (
            lambda raw: write_gz(
                raw.parent / "split/time/paper/train.csv.gz", np.array([[0, 5], [1, 6]])
            ),
            "a node id per line, found 2 columns",
        ),
    ],
)
def test_a_damaged_typed_folder_is_refused(
    damage: Callable[[Path], None], words: str, typed: Typed, tmp_path: Path
):
    source = write_ogb_typed(typed, tmp_path)
    damage(source / "raw")
    with pytest.raises(DatasetError, match=words):
        import_graph(source, tmp_path / "g", options=ImportOptions(split_name="time"))
    assert not (tmp_path / "g").exists()


def test_a_split_of_typed_links_is_refused_and_not_taken_for_its_first_part(
    typed: Typed, tmp_path: Path
):
    data = torch.load(write_hetero(typed, tmp_path), weights_only=False)
    parts = RandomLinkSplit(edge_types=[KEYS[0]])(data)
    torch.save(parts, tmp_path / "parts.pt")
    with pytest.raises(DatasetError, match="links between typed nodes are not built"):
        import_graph(tmp_path / "parts.pt", tmp_path / "g")
