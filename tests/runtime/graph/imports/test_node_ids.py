"""Rows of a table of nodes belong to the nodes that its ids name, whatever the column is called."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.imports.importing import import_graph


def load(tmp_path: Path, **tables: str) -> Graph:
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    for stem, text in tables.items():
        (source / f"{stem}.csv").write_text(text)
    return import_graph(source, tmp_path / "g")


def joined(graph: Graph) -> list[tuple[int, int]]:
    """The edges, each end named by its row's first feature or, without any, by its label."""
    assert graph.x is not None or graph.y is not None
    names = np.asarray(graph.y if graph.x is None else graph.x[:, 0]).astype(int)
    dst = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    return sorted(zip(names[graph.indices].tolist(), names[dst].tolist(), strict=True))


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ("nodes", "name,f0\nc,3\na,1\nb,2\n"),
        ("labels", "name,label\nc,3\na,1\nb,2\n"),
        ("features", "f0\n3\n1\n2\n"),
    ],
)
def test_ends_in_words_are_never_joined_by_place(table: str, text: str, tmp_path: Path):
    edges = "src,dst\nc,a\na,b\n"
    words = rf"row numbers of {table}.csv as ends, .* found 'c'; name its column of ids id"
    with pytest.raises(DatasetError, match=words):
        load(tmp_path, edges=edges, **{table: text})
    if "name" in text:
        graph = load(tmp_path, edges=edges, **{table: text.replace("name", "id")})
        assert joined(graph) == [(1, 2), (3, 1)]


TRIANGLE = "src,dst\n2,1\n1,0\n0,2\n"
JOINED = [(0, 20), (10, 0), (20, 10)]


@pytest.mark.parametrize(
    "name",
    [
        "paper_id", "user_id", "node_idx", "node_index", "nid", "n_id", "uid", "ID_node",
        "paperid", "PaperIndex",
    ],
)  # fmt: skip
def test_the_one_column_that_looks_like_ids_has_them(name: str, tmp_path: Path):
    graph = load(tmp_path, edges=TRIANGLE, nodes=f"{name},f0\n2,20\n1,10\n0,0\n")
    assert (joined(graph), graph.feature_dim) == (JOINED, 1)
    assert f"node ids: from {name} of nodes.csv" in graph.meta.notes


@pytest.mark.parametrize("name", ["labels", "features"])
def test_other_tables_are_joined_by_it_too(name: str, tmp_path: Path):
    column = "label" if name == "labels" else "f0"
    text = f"paper_id,{column}\n2,20\n1,10\n0,0\n"
    assert joined(load(tmp_path, edges=TRIANGLE, **{name: text})) == JOINED


def test_ids_in_words_may_have_any_such_name(tmp_path: Path):
    graph = load(tmp_path, edges="c,a\na,b\n", nodes="user_id,f0\nc,3\na,1\nb,2\n")
    assert joined(graph) == [(1, 2), (3, 1)]


def test_ids_come_before_the_row_names_of_a_saved_frame(tmp_path: Path):
    graph = load(tmp_path, edges=TRIANGLE, nodes=",paper_id,f0\n0,2,20\n1,1,10\n2,0,0\n")
    assert joined(graph) == JOINED
    assert any("not used: '' of nodes.csv (looks like ids" in n for n in graph.meta.notes)


def test_a_usual_name_comes_before_others(tmp_path: Path):
    graph = load(tmp_path, edges=TRIANGLE, nodes="user_id,id,f0\n7,2,20\n8,1,10\n9,0,0\n")
    assert joined(graph) == JOINED
    assert any("not used: user_id of nodes.csv (looks like ids" in n for n in graph.meta.notes)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ("user_id,token_id,f0\n2,7,20\n1,8,10\n0,9,0\n", "one column of ids, found user_id, tok"),
        ("paper_id,f0\n2,20\n1,10\n1,0\n", "found 1 of 3 repeated in 'paper_id'"),
        ("paper,f0\n2,20\n1,10\n0,0\n", "found 'paper' with each number from 0 to 2 once; name it"),
        ("key,f0\n0,0\n1,10\n2,20\n", "found 'key' with each number from 0 to 2 once"),
        ("user_id,f0\n0,20\n1,10\n7,0\n", r"\(user_id of nodes.csv\), found '2'; add its row, or"),
    ],
)
def test_what_may_be_ids_and_cannot_be_told_is_refused(nodes: str, words: str, tmp_path: Path):
    with pytest.raises(DatasetError, match=words):
        load(tmp_path, edges=TRIANGLE, nodes=nodes)
    assert not (tmp_path / "g").exists()


@pytest.mark.parametrize("values", ["123456", "214365", "5.0 4.0 3.0 2.0 1.0 0.0"])
def test_numbers_of_rows_from_1_on_or_as_fractions_are_told_too(values: str, tmp_path: Path):
    cells = values.split() if " " in values else list(values)
    rows = "".join(f"{cell},{7 * k}\n" for k, cell in enumerate(cells))
    words = f"found 'no' with each number from {'0 to 5' if ' ' in values else '1 to 6'} once"
    with pytest.raises(DatasetError, match=words):
        load(tmp_path, edges="0,5\n3,4\n2,1\n", nodes=f"no,f0\n{rows}")
    graph = load(tmp_path, edges="0,4\n3,4\n2,1\n", nodes="no,f0\n1,5\n2,5\n3,5\n4,5\n5,5\n")
    assert graph.feature_dim == 2


@pytest.mark.parametrize("name", ["group_id", "score_index"])
def test_without_ids_row_k_is_node_k_and_that_is_said(name: str, tmp_path: Path):
    values = ["7", "8", "7"] * 2 if name == "group_id" else ["0.5", "1.5", "2.5"] * 2
    rows = "".join(f"{value},{10 * k}\n" for k, value in enumerate(values))
    graph = load(tmp_path, edges="0,5\n3,4\n2,1\n", nodes=f"{name},f0\n{rows}")
    assert joined(graph) == [(0, 50), (20, 10), (30, 40)]
    assert "nodes.csv: no column of ids: row k is node k" in graph.meta.notes
    assert any(f"not used: {name} of nodes.csv (looks like ids" in n for n in graph.meta.notes)


@pytest.mark.parametrize(
    ("labels", "order", "words"),
    [
        ("label\n3\n1\n2\n", [3, 1, 2], "row k is that of row k of nodes.csv"),
        ("label\n3\n1\n", [-1, 1, 3], "row k is node k"),
    ],
)
def test_a_second_table_without_ids_says_whose_its_rows_are(
    labels: str, order: list[int], words: str, tmp_path: Path
):
    graph = load(tmp_path, edges=TRIANGLE, nodes="id,f0\n2,20\n1,10\n0,0\n", labels=labels)
    assert graph.y is not None
    assert graph.y.tolist() == order
    assert f"labels.csv: no column of ids: {words}" in graph.meta.notes


def test_entries_are_joined_by_the_column_beside_feature_and_value(tmp_path: Path):
    entries = "feature_id,paper,value\n0,2,20\n0,1,10\n"
    graph = load(tmp_path, edges=TRIANGLE, features=entries, nodes="id,label\n1,0\n2,1\n0,1\n")
    assert np.asarray(graph.x).tolist() == [[10], [20], [0]]


def test_ids_of_a_type_that_is_not_read_are_refused(tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    table = pa.table({"id": [b"2", b"1", b"0"], "f0": [20.0, 10.0, 0.0]})
    pq.write_table(table, source / "nodes.parquet")
    with pytest.raises(DatasetError, match="ids as numbers or words in column 'id'"):
        load(tmp_path, edges=TRIANGLE)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"nodes": "id,f0\nc,3\n,1\nb,2\n"}, "an id in each row, found an empty cell"),
        ({"nodes": "id,f0\n2,20\n,10\n0,0\n"}, "an id in each row, found an empty cell"),
        ({"features": "node_id,feature_id,value\n0,0,1\n,1,1\n"}, "found an empty cell"),
        ({"features": "node_id,feature_id,value\n0,0,1\n0.5,1,1\n"}, "expected whole numbers"),
    ],
)
def test_rows_without_an_id_are_refused(tables: dict[str, str], words: str, tmp_path: Path):
    with pytest.raises(DatasetError, match=words):
        load(tmp_path, edges="src,dst\n0,0\n", **tables)
