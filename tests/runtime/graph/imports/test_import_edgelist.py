"""Edge lists: columns, headers, ids of any kind, with and without a node table."""

import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.imports.importing import ImportOptions, import_graph


def load(tmp_path: Path, text: str, name: str = "edges.csv", **options) -> Graph:
    (tmp_path / name).write_text(text)
    chosen = ImportOptions(**options)
    return import_graph(tmp_path / name, tmp_path / "g", options=chosen, overwrite=True)


def edges_of(graph: Graph) -> list[tuple[int, int]]:
    dst = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    return sorted(zip(graph.indices.tolist(), dst.tolist(), strict=True))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("edges.csv", "0,1\n2,1\n3,0\n"),
        ("edges.csv", "src,dst\n0,1\n2,1\n3,0\n"),
        ("edges.csv", "when,to,from\n7,1,0\n8,1,2\n9,0,3"),
        ("edges.tsv", "# FromNodeId ToNodeId\n0\t1\n2\t1\n3\t0\n"),
        ("edges.txt", "% comment\n0 1\n2 1\n3 0\n"),
        ("edges.csv", '"a","b"\n0,1\n2,1\n3,0\n'),
    ],
)
def test_the_same_edges_in_any_dress(tmp_path: Path, name: str, text: str):
    graph = load(tmp_path, text, name)
    assert edges_of(graph) == [(0, 1), (2, 1), (3, 0)]
    assert graph.num_nodes == 4


def test_gzip_weights_and_types(tmp_path: Path):
    path = tmp_path / "edges.csv.gz"
    path.write_bytes(gzip.compress(b"u,v,weight,type\n0,1,0.5,2\n1,0,2,1\n"))
    graph = import_graph(path, tmp_path / "g")
    assert graph.edge_weight is not None
    assert graph.edge_type is not None
    assert graph.edge_weight.tolist() == [2.0, 0.5]
    assert graph.edge_type.tolist() == [1, 2]


def test_text_ids_are_numbered_and_kept(tmp_path: Path):
    graph = load(tmp_path, "anna,bert\ncleo,bert\nbert,anna\n")
    names = np.load(tmp_path / "g" / "source_id.npy").tolist()
    pairs = sorted((names[u], names[v]) for u, v in edges_of(graph))
    assert pairs == [("anna", "bert"), ("bert", "anna"), ("cleo", "bert")]
    assert "source_id.npy" in graph.meta.notes[0]


def test_far_apart_ids_are_renumbered_in_order(tmp_path: Path):
    graph = load(tmp_path, "10000000000,5\n5,-3\n")
    assert np.load(tmp_path / "g" / "source_id.npy").tolist() == [-3, 5, 10**10]
    assert edges_of(graph) == [(1, 0), (2, 1)]


def test_without_a_split_one_is_drawn_by_the_seed_and_said(tmp_path: Path):
    text = "".join(f"{i},{(i + 1) % 50}\n" for i in range(50))
    graph = load(tmp_path, text, seed=5)
    assert [len(i) for i in (graph.train_idx, graph.val_idx, graph.test_idx)] == [30, 10, 10]
    assert any("drew 60/20/20 % at random, seed 5" in note for note in graph.meta.notes)
    again = load(tmp_path, text, seed=5)
    np.testing.assert_array_equal(graph.train_idx, again.train_idx)
    assert load(tmp_path, text, seed=6).train_idx.tolist() != again.train_idx.tolist()


def test_ids_as_fractions_that_stand_for_several_are_refused(tmp_path: Path):
    # Both are 2**53 as fractions.
    with pytest.raises(DatasetError, match=r"no digit is lost, found 2 of 2 .*9007199254740992"):
        load(tmp_path, "src,dst\n9007199254740993.0,1\n9007199254740992.0,1\n")
    assert load(tmp_path, "src,dst\n9007199254740991.0,1\n9007199254740990.0,1\n").num_nodes == 3
    pq.write_table(
        pa.table({"src": np.array([2**24, 3], np.float32), "dst": np.array([0, 1])}),
        tmp_path / "e.parquet",
    )
    with pytest.raises(DatasetError, match=r"1 of 2 too large for float32 .*16777216\)"):
        import_graph(tmp_path / "e.parquet", tmp_path / "h")


@pytest.mark.parametrize(
    ("kind", "words"),
    [(np.float64, "no digit is lost"), (np.uint64, "found '9007199254740993'")],
)
def test_ends_are_compared_with_ids_to_the_last_digit(kind: type, words: str, tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    ends = pa.table({"src": np.array([2**53 + 1], kind), "dst": np.array([5])})
    pq.write_table(ends, source / "edges.parquet")
    (source / "nodes.csv").write_text("id,f\n9007199254740992,1\n5,2\n")
    with pytest.raises(DatasetError, match=words):
        import_graph(source, tmp_path / "g")


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ("id,f\n1,0.5\n1,0.5\n", "repeated ids"),
        ("id,f\n1,0.5\n2,0.5\n", "named in the node table"),
        ("id,split\n0,train\n1,maybe\n", "found 'maybe'"),
        ("id,f\n", "no rows"),
    ],
)
def test_a_wrong_node_table_is_refused(tmp_path: Path, nodes: str, words: str):
    source = tmp_path / "source"
    source.mkdir()
    (source / "edges.csv").write_text("0,1\n")
    (source / "nodes.csv").write_text(nodes)
    with pytest.raises(DatasetError, match=words):
        import_graph(source, tmp_path / "g")


def test_text_labels_are_numbered_in_sorted_order(tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "edges.csv").write_text("a,b\nb,c\n")
    (source / "nodes.csv").write_text("id,label,split\na,dog,train\nb,cat,valid\nc,,\nd,dog,test\n")
    graph = import_graph(source, tmp_path / "g")
    assert graph.y is not None
    assert graph.y.tolist() == [1, 0, -1, 1]
    assert (graph.train_idx.tolist(), graph.val_idx.tolist()) == ([0], [1])
    assert graph.num_nodes == 4


@pytest.mark.parametrize(
    "text", ["", "# only\n", "0,1\n2\n", "0,1\n0.5,2\n", "0\n1\n", "src,dst\n"]
)
def test_tables_that_are_no_edges_are_refused(tmp_path: Path, text: str):
    with pytest.raises(DatasetError):
        load(tmp_path, text)
    assert not (tmp_path / "g").exists()
