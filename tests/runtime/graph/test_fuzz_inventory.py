"""Fuzzing of what imports are given beside the plain case: every part is used or named."""

import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given, strategies as st
from torch_geometric.data import Data

from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.imports.importing import import_graph
from tests.support.fuzzing import fuzzed, refused

NODES = 9
NODE_COLUMNS = {
    "number": ("f0", "age", "Size", "x", "weight"),
    "flag": ("train_mask", "val_mask", "test_mask", "is_val", "mask", "label", "target", "LABELS"),
    "word": ("name", "city", "split", "category", "note"),
    "id": ("user_id", "uuid", "index", "fold"),
}
EDGE_COLUMNS = ("weight", "type", "time", "label", "train_mask", "note", "Unnamed: 0")
FLAGS = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bool")
EXTRAS = ("pos", "batch", "edge_attr", "time", "val_ids", "labels2", "x_mean", "name")


def values(kind: str, name: str, rng: np.random.Generator) -> list[str]:
    """Cells of a column of nodes."""
    if kind == "word":
        words = ["train", "val", "test", ""] if name == "split" else ["ann", "bob", "cid"]
        return ["train", *rng.choice(words, NODES - 1).tolist()]
    if kind == "flag":
        return ["1", *map(str, rng.integers(0, 2, NODES - 1).tolist())]
    if kind == "id":
        return [str(i) for i in rng.permutation(NODES)]
    return [f"{v:.2f}" for v in rng.random(NODES)]


@st.composite
def columns(draw: st.DrawFn) -> dict[str, list[str]]:
    """Some columns of nodes, in any order."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pool = [(kind, name) for kind, names in NODE_COLUMNS.items() for name in names]
    chosen = draw(st.lists(st.sampled_from(pool), max_size=9, unique_by=lambda c: c[1].lower()))
    return {name: values(kind, name, rng) for kind, name in chosen}


def text_of(table: dict[str, list[str]], draw: Any) -> bytes:
    """A table as some program or other may write it."""
    delimiter = draw(st.sampled_from([",", "\t", ";", ", ", " ,"]))
    end = draw(st.sampled_from(["\n", "\r\n", " \n"]))
    mark = draw(st.sampled_from(["", "\ufeff"]))
    remark = draw(st.sampled_from(["", "# a remark\n", "% of rows\n\n"]))
    rows = [list(table), *zip(*table.values(), strict=True)]
    return (mark + remark + "".join(delimiter.join(row) + end for row in rows)).encode()


def named(graph: Graph, name: str) -> bool:
    """Whether a note says what became of a part."""
    text = name if name.strip() else repr(name)
    return any(text in note for note in graph.meta.notes)


def taken(source: Path, folder: Path) -> Graph | None:
    """The dataset, or None where the source was refused in one line."""
    graphs: list[Graph] = []
    text = refused(lambda: graphs.append(import_graph(source, folder)), inside=folder.parent)
    assert (text is None) == folder.exists()
    return graphs[0] if graphs else None


@fuzzed(40)
@given(data=st.data())
def test_every_column_of_a_folder_is_used_or_named(data: st.DataObject, tmp_path: Path):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    ids = np.sort(rng.choice(1000, NODES, replace=False))
    ends = {key: [str(v) for v in rng.choice(ids, 12)] for key in ("src", "dst")}
    extra = data.draw(st.lists(st.sampled_from(EDGE_COLUMNS), unique=True))
    edges = {**ends, **{n: [str(i % 3) for i in range(12)] for n in extra}}
    table = {"id": [str(i) for i in ids], **data.draw(columns())}
    with tempfile.TemporaryDirectory(dir=tmp_path) as name:
        source = Path(name) / "source"
        source.mkdir()
        (source / "edges.csv").write_bytes(text_of(edges, data.draw))
        (source / "nodes.csv").write_bytes(text_of(table, data.draw))
        (source / "more.csv").write_text("1,2\n")
        graph = taken(source, Path(name) / "g")
        if graph is None:
            return
        assert [n for n in (*edges, *table, "more.csv") if not named(graph, n)] == []
        features = set(NODE_COLUMNS["number"]) & set(table)
        assert graph.feature_dim == len(features)
        np.testing.assert_array_equal(np.load(graph.path / "source_id.npy"), ids)
        order = np.arange(12) if graph.edge_id is None else graph.edge_id
        stored = ids[graph.indices].astype(str)
        assert stored.tolist() == np.array(ends["src"])[order].tolist()
        if graph.edge_weight is not None:
            assert graph.edge_weight.tolist() == (order % 3).tolist()


@fuzzed(40)
@given(data=st.data())
def test_ids_and_order_survive_any_dress_of_a_plain_list(data: st.DataObject, tmp_path: Path):
    ids = data.draw(st.lists(st.integers(-5, 10**6), min_size=2, max_size=6, unique=True))
    pairs = data.draw(st.lists(st.tuples(*[st.sampled_from(ids)] * 2), min_size=1, max_size=10))
    pad = st.sampled_from([" ", "  ", "\t", " \t "])
    edge = st.sampled_from(["", " ", "\t"])
    text = data.draw(st.sampled_from(["", "\ufeff"]))
    for u, v in pairs:
        text += data.draw(st.sampled_from(["", "", "# remark 1 2\n", "\n", "  % x\n"]))
        text += data.draw(edge) + f"{u}{data.draw(pad)}{v}" + data.draw(edge)
        text += data.draw(st.sampled_from(["\n", "\r\n"]))
    with tempfile.TemporaryDirectory(dir=tmp_path) as name:
        path = Path(name) / "e.txt"
        path.write_bytes(text.encode())
        graph = import_graph(path, Path(name) / "g")
        kept = graph.path / "source_id.npy"
        numbers = np.load(kept) if kept.exists() else np.arange(graph.num_nodes)
        assert numbers.tolist() == sorted({v for pair in pairs for v in pair})
        dst = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
        order = np.arange(len(pairs)) if graph.edge_id is None else graph.edge_id
        found = zip(numbers[graph.indices].tolist(), numbers[dst].tolist(), strict=True)
        assert list(found) == [pairs[k] for k in order.tolist()]


@fuzzed(40)
@given(data=st.data())
def test_masks_of_any_type_and_further_fields_are_used_or_named(
    data: st.DataObject, tmp_path: Path
):
    ring = np.arange(NODES)
    fields: dict[str, Any] = {"x": np.ones((NODES, 2), np.float32), "y": ring % 2}
    flags: dict[str, np.ndarray] = {}
    for key in ("train", "val", "test"):
        if key == "train" or data.draw(st.booleans()):
            drawn = data.draw(st.lists(st.booleans(), min_size=NODES, max_size=NODES))
            flags[key] = np.array(drawn)
            fields[f"{key}_mask"] = flags[key].astype(data.draw(st.sampled_from(FLAGS)))
    for name in data.draw(st.lists(st.sampled_from(EXTRAS), unique=True)):
        fields[name] = np.ones((NODES, 3), np.float32)
    with tempfile.TemporaryDirectory(dir=tmp_path) as name:
        if data.draw(st.booleans()):
            source = Path(name) / "p.pt"
            tensors = {key: torch.from_numpy(array) for key, array in fields.items()}
            edges = torch.from_numpy(np.stack([np.roll(ring, 1), ring]))
            saved = io.BytesIO()
            torch.save(Data(edge_index=edges, **tensors), saved)
            source.write_bytes(saved.getvalue())
        else:
            source = Path(name) / "p.npz"
            np.savez(source, indptr=np.arange(NODES + 1), indices=np.roll(ring, 1), **fields)
        graph = taken(source, Path(name) / "g")
        if graph is None:
            assert not flags["train"].any()
            return
        assert [n for n in fields if not named(graph, n)] == []
        for key in ("train", "val", "test"):
            expected = np.flatnonzero(flags.get(key, []))
            np.testing.assert_array_equal(getattr(graph, f"{key}_idx"), expected)
