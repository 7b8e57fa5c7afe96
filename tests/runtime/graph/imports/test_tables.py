"""Text edge lists as others write them: padded, commented, marked, with more columns than ends."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.imports import tables, text_layout
from gnnplan.runtime.graph.imports.importing import import_graph

RING = [(0, 1), (1, 2), (2, 0)]


def load(tmp_path: Path, text: str | bytes, name: str = "e.txt") -> Graph:
    data = text if isinstance(text, bytes) else text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return import_graph(tmp_path / name, tmp_path / f"g-{name}")


def pairs(graph: Graph) -> list[tuple[int, int]]:
    dst = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    return sorted(zip(graph.indices.tolist(), dst.tolist(), strict=True))


@pytest.mark.parametrize("name", ["e.txt", "e.edges", "e.csv", "e.txt.gz"])
@pytest.mark.parametrize(
    "text",
    [
        "0    1\n1   2\n2    0\n",
        " 0 1\n 1 2\n 2 0\n",
        "0 1 \n1 2 \n2 0 ",
        "0 1\r\n1 2 \r\n\r\n2 0\r\n",
        "0\t1\n1 \t 2\n2 0\n",
        "\t0\t 1\n1\t2\n  2\t0\n",
        "0 1\n# between\n% rows\n1 2\n  # indented\n2 0\n",
        "\ufeff0 1\n1 2\n2 0\n",
        "\ufeff# first\n0,1\n1,2\n2,0\n",
        " 0 , 1 \n1,2\n\n   \n2,  0\n",
        "0,1,\n1,2,\n2,0,\n",
        "\ufeffsrc;dst\n0;1\n1;2\n2;0\n",
        "\ufeffsep=;\r\nsrc;dst\r\n0;1\r\n1;2\r\n2;0\r\n",
        '"sep=|"\n0|1\n1|2\n2|0\n',
    ],
)
def test_what_is_between_the_cells_changes_nothing(text: str, name: str, tmp_path: Path):
    assert pairs(load(tmp_path, text, name)) == RING


WORDS = "xa,xb\nxb,xc\n"


@pytest.mark.parametrize(
    "first", ["src,dst", "user,item", "cited,citing", "parent,child", "user_id,item_id", "id,name"]
)
def test_usual_names_of_columns_are_no_row_of_words(first: str, tmp_path: Path):
    graph = load(tmp_path, f"{first}\n{WORDS}", "e.csv")
    assert graph.num_edges == 2
    assert np.load(graph.path / "source_id.npy").tolist() == ["xa", "xb", "xc"]
    assert not any("first line" in note for note in graph.meta.notes)


@pytest.mark.parametrize("first", ["anna,xa", "user_1,user_2", "node_a,node_b", "class,school"])
def test_words_over_words_may_be_either_and_that_is_said(first: str, tmp_path: Path):
    graph = load(tmp_path, f"{first}\n{WORDS}", "e.csv")
    kinds = {"anna,xa": "", "class,school": "the names of columns; if it is a row, write a line"}
    words = kinds.get(first, "a row; if it names the columns, rename them to usual ones")
    assert graph.num_edges == (2 if "names of" in words else 3)
    said = [note for note in graph.meta.notes if "first line" in note]
    start = f"e.csv: its first line ({first.replace(',', ', ')}) is taken for {words}"
    assert [note.startswith(start) for note in said] == [True] * bool(words)


@pytest.mark.parametrize("text", ["u,w\nu,x\nw,x\n", "ann,bob\n7,bob\ncid,bob\n"])
def test_a_first_line_whose_words_come_again_is_a_row(text: str, tmp_path: Path):
    graph = load(tmp_path, text, "e.csv")
    assert graph.num_edges == 3
    assert not any("first line" in note for note in graph.meta.notes)


@pytest.mark.filterwarnings("ignore::runtime.graph.findings.GraphWarning")
@pytest.mark.parametrize(
    ("nodes", "features"),
    [
        ("sep=,\nid,a\n0,5\n1,6\n2,7\n", [[5], [6], [7]]),
        (",0,1\n0,0.5,7\n1,0.5,8\n2,0.5,7\n", [[0.5, 7], [0.5, 8], [0.5, 7]]),
        ("id,0,1\n0,5,7\n1,6,7\n2,5,7\n", [[5, 7], [6, 7], [5, 7]]),
        ("id,2019,2020\n0,5,7\n1,6,7\n2,5,7\n", [[5, 7], [6, 7], [5, 7]]),
        ("0,1,2,3\n0.5,9,9,9\n0.5,9,9,9\n0.5,9,9,9\n", [[0.5, 9, 9, 9]] * 3),
        ("a,b\n,x\n3,y\n4,z\n", [[np.nan], [3], [4]]),
        ("4,5\n6,7\n8,9\n", [[4, 5], [6, 7], [8, 9]]),
    ],
)
def test_names_of_columns_are_told_from_rows_of_numbers(nodes: str, features, tmp_path: Path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "edges.csv").write_text("0,1\n1,2\n2,0\n")
    (tmp_path / "s" / "nodes.csv").write_text(nodes)
    graph = import_graph(tmp_path / "s", tmp_path / "g")
    np.testing.assert_array_equal(graph.x, np.array(features, np.float32))
    assert not any("first line" in note for note in graph.meta.notes)


@pytest.mark.parametrize("first", ["0,1,2,3", "name,1,2,3"])
def test_numbers_that_may_be_names_are_said(first: str, tmp_path: Path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "edges.csv").write_text("0,1\n1,2\n2,0\n")
    rows = ["4,5,6,7", "8,9,10,11"] if first[0] == "0" else ["ann,5,6,7", "bob,9,10,11"]
    (tmp_path / "s" / "nodes.csv").write_text("\n".join([first, *rows]) + "\n")
    graph = import_graph(tmp_path / "s", tmp_path / "g")
    start = f"nodes.csv: its first line ({first.replace(',', ', ')}) is taken for a row"
    assert any(note.startswith(start) for note in graph.meta.notes)


@pytest.mark.parametrize("block", [4, 7, 16])
def test_blocks_may_end_anywhere(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tables, "BLOCK_BYTES", block)
    text = "# top\n" + "".join(f"  {i}   {(i + 1) % 50} \n# remark {i}\n" for i in range(50))
    graph = load(tmp_path, text)
    assert pairs(graph) == sorted((i, (i + 1) % 50) for i in range(50))
    assert any("51 comment lines" in note for note in graph.meta.notes)


def test_words_with_blanks_are_one_id(tmp_path: Path):
    graph = load(tmp_path, "ann, bob\n bob ,cid lee\ncid lee,ann \n", "e.csv")
    assert sorted(np.load(graph.path / "source_id.npy")) == ["ann", "bob", "cid lee"]


def test_ids_that_begin_with_a_comments_sign_are_kept_below_the_top(tmp_path: Path):
    assert load(tmp_path, "a,b\n#b,a\n%c,a\n", "e.csv").num_edges == 3
    with pytest.raises(DatasetError, match="found the line '# remark, of two cells' further down"):
        load(tmp_path, "a,b\n# remark, of two cells\nb,a\n", "f.csv")


@pytest.mark.parametrize("text", ["ann,bob\nbob,\n", "src,dst\n,ann\nbob,ann\n", "0,1\n1,\n"])
def test_an_empty_end_is_refused(text: str, tmp_path: Path):
    with pytest.raises(DatasetError, match="an id in each row, found an empty cell"):
        load(tmp_path, text, "e.csv")


def test_utf16_is_refused_by_name(tmp_path: Path):
    with pytest.raises(DatasetError, match="expected text in UTF-8, found UTF-16"):
        load(tmp_path, "0,1\n".encode("utf-16"))


@pytest.mark.parametrize("join", [" ", ",", "\t"])
def test_a_third_column_of_fractions_is_the_weight(join: str, tmp_path: Path):
    # The first rows are whole: the type must not be taken from them.
    rows = [(0, 1, "1"), (1, 2, "2"), (2, 0, "0.25")]
    graph = load(tmp_path, "".join(f"{u}{join}{v}{join}{w}\n" for u, v, w in rows))
    assert graph.edge_weight is not None
    assert graph.edge_weight.tolist() == [0.25, 1, 2]
    assert "edge weights: from c2" in graph.meta.notes


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (("5", "6", "7"), "whole numbers may be weights"),
        (("0.5", "-1.5", "1"), "negative"),
        (("0.5", "", "1"), "empty values"),
        (("a", "b", "c"), "one weight and one type per edge"),
    ],
)
def test_a_third_column_that_is_no_weight_is_named(cells, reason: str, tmp_path: Path):
    rows = zip(RING, cells, strict=True)
    graph = load(tmp_path, "".join(f"{u},{v},{cell}\n" for (u, v), cell in rows), "e.csv")
    assert graph.edge_weight is None
    assert any("not used: c2 (" in n and reason in n for n in graph.meta.notes)


def test_columns_behind_the_third_are_named(tmp_path: Path):
    graph = load(tmp_path, "0 1 0.5 1e9\n1 2 1.5 2e9\n2 0 1 3e9\n")
    assert graph.edge_weight is not None
    assert any(note.startswith("not used: c3 (") for note in graph.meta.notes)


def test_row_numbers_in_front_are_no_ends(tmp_path: Path):
    graph = load(tmp_path, ",id_1,id_2\n0,0,1\n1,1,2\n2,2,0\n", "e.csv")
    assert pairs(graph) == RING
    assert "edges: 3 stored, from id_1, id_2" in graph.meta.notes


def test_one_named_end_of_several_columns_is_refused(tmp_path: Path):
    with pytest.raises(DatasetError, match="found 'source' alone among source, a, b"):
        load(tmp_path, "source,a,b\n1,2,3\n", "e.csv")
    assert pairs(load(tmp_path, "dst,other\n1,0\n2,1\n0,2\n", "f.csv")) == RING


@pytest.mark.parametrize(
    ("first", "ends"),
    [("weight,a,b", "a, b"), ("timestamp,caller_no,callee_no", "caller_no, callee_no"),
     ("rating,user,item", "user, item"), ("id,year,a,b", "a, b"), ("train_mask,a,b", "a, b")],
)  # fmt: skip
def test_columns_of_other_things_by_their_names_are_no_ends(first: str, ends: str, tmp_path: Path):
    front = "9," * (first.count(",") - 1)
    graph = load(tmp_path, f"{first}\n{front}0,1\n{front}1,2\n{front}2,0\n", "e.csv")
    assert pairs(graph) == RING
    assert f"edges: 3 stored, from {ends}" in graph.meta.notes


@pytest.mark.parametrize("first", ["user_id,item_id", "user,item", "a,b"])
def test_numbers_of_two_kinds_of_nodes_are_said(first: str, tmp_path: Path):
    graph = load(tmp_path, f"{first}\n0,1\n1,2\n2,0\n", "e.csv")
    said = [note for note in graph.meta.notes if "read as numbers of the same nodes" in note]
    assert len(said) == (first != "a,b")


def test_gaps_in_ids_make_no_nodes(tmp_path: Path):
    graph = load(tmp_path, "".join(f"{7 * i} {7 * i + 7}\n" for i in range(100)))
    assert graph.num_nodes == 101
    np.testing.assert_array_equal(np.load(graph.path / "source_id.npy"), 7 * np.arange(101))
    assert any("600 ids between them name no node" in note for note in graph.meta.notes)


def test_isolated_nodes_are_said_with_how_many_are_trained_on(tmp_path: Path):
    source = tmp_path / "s"
    source.mkdir()
    (source / "edges.csv").write_text("0,1\n1,0\n")
    (source / "nodes.csv").write_text("id,split\n" + "".join(f"{i},train\n" for i in range(5)))
    graph = import_graph(source, tmp_path / "g")
    text = "3 of 5 nodes are isolated (in no edge), 3 of them in the training split"
    assert text in graph.meta.notes


def load_folder(tmp_path: Path, nodes: str, name: str = "nodes.csv") -> Graph:
    (tmp_path / "s").mkdir(parents=True)
    (tmp_path / "s" / "edges.csv").write_text("0,1\n1,2\n2,0\n")
    (tmp_path / "s" / name).write_text(nodes)
    return import_graph(tmp_path / "s", tmp_path / "g")


def test_names_in_a_comment_above_the_rows_are_those_of_the_columns(tmp_path: Path):
    graph = load_folder(tmp_path, "# by hand\n# id,label,f0\n2.0,1.0,7\n0.0,0.0,5\n1.0,1.0,6\n")
    assert (np.asarray(graph.x).tolist(), graph.num_classes) == ([[7], [5], [6]], 2)
    said = "nodes.csv: the comment above its rows (id, label, f0) is taken for the names of columns"
    assert any(note.startswith(said) for note in graph.meta.notes)
    graph = load(tmp_path, "#dst src weight\n1 0 5\n2 1 6\n0 2 7\n")
    assert (pairs(graph), graph.edge_weight is not None) == (RING, True)
    graph = load(tmp_path, "# source: a page\n0 1 5\n1 2 6\n2 0 7\n", "f.txt")
    assert pairs(graph) == RING
    assert not any("comment above" in note for note in graph.meta.notes)


@pytest.mark.parametrize(
    ("text", "name", "ids"),
    [
        ("Lee, A.\tDoe, B.\nDoe, B.\tRay, C.\n", "e.tsv", ["Doe, B.", "Lee, A.", "Ray, C."]),
        ('"Lee, A.","Doe, B."\n"Doe, B.", "Ray, C."\n', "e.csv", ["Doe, B.", "Lee, A.", "Ray, C."]),
        ('"ann", "bob"\n"bob", "cid"\n', "e.csv", ["ann", "bob", "cid"]),
        ("ann,bob,a;b\nbob,cid,c;d\n", "e.csv", ["ann", "bob", "cid"]),
        ("3;4;0,5\n4;9;1,5\n", "e.csv", [3, 4, 9]),
        ("3,4,0;5\n4,9,1;5\n", "e.csv", [3, 4, 9]),
    ],
)
def test_what_parts_cells_is_not_what_is_within_them(text: str, name: str, ids, tmp_path: Path):
    graph = load(tmp_path, text, name)
    assert graph.num_edges == 2
    assert sorted(np.load(graph.path / "source_id.npy").tolist()) == ids


@pytest.mark.parametrize("block", [1, 5, 1 << 24])
def test_an_empty_line_among_rows_of_one_cell_is_refused(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tables, "BLOCK_BYTES", block)
    for gap in ("\n", " \r\n"):
        with pytest.raises(DatasetError, match="its one column, found an empty line between rows"):
            load_folder(tmp_path / f"{len(gap)}", f"label\n0\n{gap}1\n", "labels.csv")
    graph = load_folder(tmp_path / "end", "\nlabel\n0\n1\n1\n\n \n", "labels.csv")
    assert graph.y is not None
    assert graph.y.tolist() == [0, 1, 1]


@pytest.mark.filterwarnings("ignore::runtime.graph.findings.GraphWarning")
def test_a_row_of_empty_cells_is_a_row(tmp_path: Path):
    graph = load_folder(tmp_path, "a\tb\tc\n1\t2\t3\n\t\t\r\n4\t5\t6\n \t\n", "nodes.tsv")
    expected = [[1, 2, 3], [np.nan] * 3, [4, 5, 6]]
    np.testing.assert_array_equal(graph.x, np.array(expected, np.float32))


def test_what_is_no_text_table_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    matrix = "%%MatrixMarket matrix coordinate real symmetric\n% by hand\n3 3 2\n2 1 5\n3 1 7\n"
    with pytest.raises(DatasetError, match=r"a matrix of MatrixMarket; load it with scipy.io.mmre"):
        load(tmp_path, matrix)
    with pytest.raises(DatasetError, match="expected text in UTF-8, found zero bytes"):
        load(tmp_path, "0,1\n1,0\n".encode("utf-16-le"))
    monkeypatch.setattr(text_layout, "LINE_BYTES", 1 << 20)
    with pytest.raises(DatasetError, match="lines of at most 1 MiB, found a longer one"):
        load(tmp_path, "0 1 " * (1 << 19))


def test_suffixes_are_known_in_upper_case(tmp_path: Path):
    assert pairs(load(tmp_path, gzip.compress(b"0 1\n1 2\n2 0\n"), "E.TXT.GZ")) == RING
