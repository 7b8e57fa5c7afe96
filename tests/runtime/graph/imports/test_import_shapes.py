"""Values of another shape or type than is meant are read as they are, or refused in one line."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch_geometric.data import Data

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.imports import tables
from gnnplan.runtime.graph.imports.importing import ImportOptions, import_graph

N = 20
RING = np.arange(N)
SRC, DST = [2, 1, 0], [1, 0, 2]


def load_edges(tmp_path: Path, **columns: Any) -> Graph:
    pq.write_table(pa.table({"src": SRC, "dst": DST} | columns), tmp_path / "e.parquet")
    return import_graph(tmp_path / "e.parquet", tmp_path / "g")


def load_pack(tmp_path: Path, options: ImportOptions | None = None, **arrays: Any) -> Graph:
    ring: dict[str, Any] = {"indptr": np.arange(N + 1), "indices": np.roll(RING, 1)}
    np.savez(tmp_path / "p.npz", **ring, **arrays)
    return import_graph(tmp_path / "p.npz", tmp_path / "g", options=options, overwrite=True)


def test_lists_of_one_number_are_numbers(tmp_path: Path):
    graph = load_edges(tmp_path, src=[[2], [1], [0]], weight=[[2.0], [1.0], [0.5]])
    assert graph.edge_weight is not None
    assert list(zip(graph.indices.tolist(), graph.edge_weight.tolist(), strict=True)) == [
        (1, 1.0), (2, 2.0), (0, 0.5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"weight": [[1.0, 2.0]] * 3}, "per edge in column 'weight', found lists of 2"),
        ({"src": [[2, 0], [1, 0], [0, 0]]}, "per edge in column 'src', found lists of 2"),
        ({"dst": [b"a", b"b", b"c"]}, "per edge in column 'dst', found another type"),
        ({"weight": [b"a", b"b", b"c"]}, "per edge in column 'weight', found another type"),
    ],
)
def test_lists_and_other_types_are_no_ends_and_no_weights(columns, words: str, tmp_path: Path):
    with pytest.raises(DatasetError, match=words):
        load_edges(tmp_path, **columns)


def test_lists_of_types_are_named(tmp_path: Path):
    graph = load_edges(tmp_path, type=[[1, 2]] * 3)
    assert graph.edge_type is None
    assert "not used: type (edge types are whole numbers)" in graph.meta.notes


def test_lists_whose_length_changes_far_down_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tables, "ROWS_PER_CHUNK", 2)
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "edges.csv").write_text("0,1\n1,2\n2,3\n3,0\n")
    labels = [[0, 1], [1, 0], [1, 0, 1], [0, 0, 1]]
    pq.write_table(pa.table({"id": [0, 1, 2, 3], "label": labels}), tmp_path / "s/nodes.parquet")
    with pytest.raises(DatasetError, match="lists of one length in column 'label'"):
        import_graph(tmp_path / "s", tmp_path / "g")


def test_two_columns_of_one_name_are_refused_in_parquet_too(tmp_path: Path):
    table = pa.Table.from_arrays([pa.array(SRC), pa.array(DST), pa.array(DST)], ["src", "d", "d"])
    pq.write_table(table, tmp_path / "e.parquet")
    with pytest.raises(DatasetError, match="different column names, found several 'd'"):
        import_graph(tmp_path / "e.parquet", tmp_path / "g")


def test_two_lists_of_one_node_are_refused(tmp_path: Path):
    (tmp_path / "edges.csv").write_text("0,1\n1,0\n")
    (tmp_path / "features.json").write_text('{"0": [1], "1": [2], "0": [3]}')
    with pytest.raises(DatasetError, match=r"a list of feature numbers .*1 repeated ids"):
        import_graph(tmp_path, tmp_path / "g")


@pytest.mark.parametrize(
    ("types", "words"),
    [
        (np.array(["a"] * N), "node_type: expected numbers"),
        (np.full(N, 0.5), "node_type: expected whole numbers"),
        (np.full(N, -1), "node_type: expected node types from 0"),
    ],
)
def test_node_types_are_whole_numbers_from_0(types: np.ndarray, words: str, tmp_path: Path):
    with pytest.raises(DatasetError, match=words):
        load_pack(tmp_path, node_type=types)
    if types.dtype.kind == "U":
        return
    edges = torch.from_numpy(np.stack([np.roll(RING, 1), RING]))
    data = Data(edge_index=edges, num_nodes=N, node_type=torch.from_numpy(types))
    torch.save(data, tmp_path / "p.pt")
    with pytest.raises(DatasetError, match=words):
        import_graph(tmp_path / "p.pt", tmp_path / "h")


def test_one_held_out_link_is_a_link(tmp_path: Path):
    pairs = np.array([[0, 5], [1, 6]])
    graph = load_pack(tmp_path, train_idx=pairs, val_idx=np.array([[5, 9]]), test_idx=pairs + 2)
    assert graph.task == "link"
    assert graph.val_idx.tolist() == [[5, 9]]


def test_a_lone_row_of_two_numbers_is_two_nodes_unless_links_are_asked_for(tmp_path: Path):
    row = np.array([[0, 5]])
    graph = load_pack(tmp_path, train_idx=row, y=RING % 2)
    assert graph.train_idx.tolist() == [0, 5]
    assert any("--task link reads a link" in note for note in graph.meta.notes)
    graph = load_pack(tmp_path, ImportOptions(task="link"), train_idx=row)
    assert graph.train_idx.tolist() == [[0, 5]]


def test_pairs_are_no_nodes(tmp_path: Path):
    pairs = np.array([[0, 5], [1, 6], [2, 7]])
    words = r"node ids for task multiclass, found shape \[3, 2\]"
    with pytest.raises(DatasetError, match=words):
        load_pack(tmp_path, ImportOptions(task="multiclass"), train_idx=pairs, y=RING % 2)


@pytest.mark.parametrize(("sign", "weight"), [("->", ""), ("--", " 0.5")])
def test_signs_between_the_ends_are_no_nodes(sign: str, weight: str, tmp_path: Path):
    text = "".join(f"{u} {sign} {v}{weight}\n" for u, v in zip(SRC, DST, strict=True))
    (tmp_path / "e.txt").write_text(text)
    graph = import_graph(tmp_path / "e.txt", tmp_path / "g")
    assert (graph.num_nodes, graph.indices.tolist()) == (3, [1, 2, 0])
    assert (graph.edge_weight is not None) == bool(weight)
    assert "not used: c1 (the same sign in each row)" in graph.meta.notes


def test_shapes_that_are_none_are_one_line(tmp_path: Path):
    with pytest.raises(DatasetError, match=r"node types: expected one per node .*shape \[\]"):
        load_pack(tmp_path, node_type=np.array(1))
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "edges.csv").write_text("0,1\n1,0\n")
    (tmp_path / "s" / "features.json").write_text('{"0": [[0, 1]], "1": [[1, 0]]}')
    with pytest.raises(DatasetError, match=r"list of feature numbers .*lists of lists"):
        import_graph(tmp_path / "s", tmp_path / "h")
    (tmp_path / "s" / "features.json").unlink()
    table = pa.table({"id": [0, 1], "feature": [[0, 1], [1, 0]], "value": [[1.0, 2.0]] * 2})
    pq.write_table(table, tmp_path / "s" / "features.parquet")
    assert import_graph(tmp_path / "s", tmp_path / "h").feature_dim == 4


@pytest.mark.parametrize("kind", [np.uint8, np.uint64])
def test_ends_of_any_integers_count_the_nodes(kind: type, tmp_path: Path):
    np.savez(tmp_path / "p.npz", edges=np.stack([RING, np.roll(RING, 1)]).T.astype(kind))
    assert import_graph(tmp_path / "p.npz", tmp_path / "g").num_nodes == N
