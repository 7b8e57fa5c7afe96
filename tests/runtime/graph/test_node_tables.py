"""Tables of nodes: labels, masks, splits and ids are never features; tables are joined by id."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.imports.importing import import_graph
from gnnplan.runtime.graph.imports.inventory import looks_like

RING = "src,dst\n0,1\n1,2\n2,3\n3,0\n"


def load(tmp_path: Path, nodes: str | None = None, **tables: str) -> Graph:
    source = tmp_path / "source"
    source.mkdir()
    files = {"edges": RING} | ({} if nodes is None else {"nodes": nodes}) | tables
    for stem, text in files.items():
        (source / f"{stem}.csv").write_text(text)
    return import_graph(source, tmp_path / "g")


def said(graph: Graph, words: str) -> bool:
    return any(words in note for note in graph.meta.notes)


@pytest.mark.parametrize("name", ["label", "Labels", "target", "y", "CLASS", "category", "y_true"])
def test_a_label_column_is_the_label_in_its_usual_names(name: str, tmp_path: Path):
    graph = load(tmp_path, f"id,{name},f\n0,0,1\n1,1,2\n2,1,3\n3,0,4\n")
    assert graph.y is not None
    assert graph.y.tolist() == [0, 1, 1, 0]
    assert graph.feature_dim == 1
    assert said(graph, f"from {name} of nodes.csv")


def test_one_label_is_taken_and_the_others_are_named(tmp_path: Path):
    graph = load(
        tmp_path, "id,target,label,class_2,f\n0,5,0,1,1\n1,6,1,1,2\n2,7,1,0,3\n3,8,0,0,4\n"
    )
    assert graph.num_classes == 2
    assert graph.feature_dim == 1
    assert said(graph, "not used: target, class_2 of nodes.csv (looks like labels")


def test_y_beside_x_is_no_label_unasked(tmp_path: Path):
    graph = load(tmp_path, "id,x,y\n0,0,1\n1,1,2\n2,1,3\n3,0,4\n")
    assert (graph.y, graph.feature_dim) == (None, 1)
    assert said(graph, "not used: y of nodes.csv (a label or, beside x, a coordinate")


@pytest.mark.parametrize("yes", ["1", "True", "1.0"])
def test_mask_columns_make_the_split(yes: str, tmp_path: Path):
    no = {"1": "0", "True": "False", "1.0": "0.0"}[yes]
    header = "id,train_mask,val_mask,test_mask,f\n"
    rows = [f"0,{yes},{no},{no},1", f"1,{no},{yes},{no},2", f"2,{yes},{no},{no},3"]
    graph = load(tmp_path, header + "\n".join([*rows, f"3,{no},{no},{yes},4"]) + "\n")
    assert (graph.train_idx.tolist(), graph.val_idx.tolist()) == ([0, 2], [1])
    assert graph.test_idx.tolist() == [3]
    assert graph.feature_dim == 1
    assert not said(graph, "at random")


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("mask", "0101"),
        ("fold", "0123"),
        ("set", "0011"),
        ("test_score", "1234"),
        ("user_id", "9876"),
    ],
)
def test_what_looks_like_a_mask_split_or_id_is_named_and_no_feature(
    column: str, values: str, tmp_path: Path
):
    rows = "".join(f"{i},{v},{i}\n" for i, v in enumerate(values))
    graph = load(tmp_path, f"id,{column},f\n{rows}")
    assert graph.feature_dim == 1
    assert said(graph, f"not used: {column} of nodes.csv (looks like")


def test_a_val_mask_alone_is_refused(tmp_path: Path):
    with pytest.raises(DatasetError, match="expected training nodes beside val"):
        load(tmp_path, "id,val_mask,f\n0,0,1\n1,1,2\n2,0,3\n3,0,4\n")


def test_a_byte_order_mark_hides_no_column(tmp_path: Path):
    bom = "\ufeff"
    nodes = f"{bom}id,label,split,f\n2,0,train,20\n1,1,val,10\n0,1,test,0\n"
    graph = load(tmp_path, nodes, edges=f"{bom}src,dst\n2,1\n1,0\n0,2\n")
    assert graph.feature_dim == 1
    assert np.asarray(graph.x)[graph.indices[graph.indptr[0]]].tolist() == [0.0]


def test_features_and_target_are_joined_by_id(tmp_path: Path):
    graph = load(
        tmp_path,
        features="node_id,f,g\n3,30,1\n1,10,1\n0,0,1\n2,20,1\n",
        target="id,name,target\n1,b,1\n0,a,0\n3,d,0\n2,c,1\n",
        other="1,2\n",
    )
    names = np.load(graph.path / "source_id.npy").tolist()
    assert names == [1, 0, 3, 2]
    assert graph.y is not None
    assert graph.y.tolist() == [1, 0, 0, 1]
    assert np.asarray(graph.x)[:, 0].tolist() == [10, 0, 30, 20]
    assert said(graph, "not used: other.csv")
    assert said(graph, "not used: name of target.csv (words")


def test_features_by_entry_are_joined_too_and_nodes_without_one_have_none(tmp_path: Path):
    graph = load(
        tmp_path,
        features="node_id,feature_id,value\n3,2,1.5\n0,0,1\n0,1,2\n",
        target="target\n1\n0\n1\n0\n",
    )
    assert np.asarray(graph.x).tolist() == [[1, 2, 0], [0, 0, 0], [0, 0, 0], [0, 0, 1.5]]
    assert graph.num_classes == 2


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"features": "f\n1\n2\n", "target": "target\n0\n1\n0\n1\n"}, "a row per node"),
        ({"features": "id,f\n0,1\n9,2\n", "target": "id,target\n0,1\n1,1\n"}, "found 1 others"),
        ({"features": "id,f\n0,1\n", "target": "id,target\n0,1\n1,1\n"}, "found none of 1"),
        ({"features": "f\n1\n", "my_features": "f\n1\n"}, "one table of features, found 2"),
    ],
)
def test_tables_that_do_not_fit_together_are_refused(tables, words: str, tmp_path: Path):
    with pytest.raises(DatasetError, match=words):
        load(tmp_path, **tables)


def test_words_for_a_missing_value_are_no_class(tmp_path: Path):
    labels = ["dog", "nan", "N/A", "cat", "None", "?", "", "dog"]
    rows = "".join(f"{i},{word},{i + 1}\n" for i, word in enumerate(labels))
    graph = load(tmp_path, f"id,label,f\n{rows}")
    assert graph.y is not None
    assert graph.y.tolist() == [1, -1, -1, 0, -1, -1, -1, 1]
    assert said(graph, "labels: 5 of 8 are ? or N/A or None or nan or empty: unknown; rename such")
    assert said(graph, "text labels numbered in sorted order: cat, dog")


def test_numbers_beside_a_word_for_a_missing_value_stay_the_classes(tmp_path: Path):
    rows = "".join(f"{i},{y},{i + 1}\n" for i, y in enumerate(["10", "?", "9", "2"]))
    graph = load(tmp_path, f"id,label,f\n{rows}")
    assert graph.y is not None
    assert graph.y.tolist() == [10, -1, 9, 2]


@pytest.mark.parametrize(
    ("target", "column"),
    [
        ("id,outcome\n0,1\n1,0\n2,1\n3,0\n", "outcome"),
        ("id,age,class_2\n0,7,1\n1,7,0\n2,8,1\n3,7,0\n", "class_2"),
        ("id,x,y\n0,7,1\n1,7,0\n2,8,1\n3,7,0\n", "y"),
        ("user_id,grade\n3,0\n2,1\n1,0\n0,1\n", "grade"),
    ],
)
def test_a_table_of_labels_has_them_in_the_one_column_that_may(
    target: str, column: str, tmp_path: Path
):
    graph = load(tmp_path, target=target)
    assert graph.y is not None
    assert said(graph, f"from {column} of target.csv")
    ids = np.load(graph.path / "source_id.npy")
    assert graph.y[np.argsort(ids)].tolist() == [1, 0, 1, 0]


def test_a_dev_mask_is_that_of_validation(tmp_path: Path):
    rows = "0,1,0,5\n1,0,1,6\n2,1,0,7\n3,0,0,8\n"
    graph = load(tmp_path, f"id,train_mask,dev_mask,f\n{rows}")
    assert (graph.train_idx.tolist(), graph.val_idx.tolist()) == ([0, 2], [1])


def write_parquet(tmp_path: Path, **columns) -> Graph:
    source = tmp_path / "source"
    source.mkdir()
    (source / "edges.csv").write_text(RING)
    pq.write_table(pa.table(columns), source / "nodes.parquet")
    return import_graph(source, tmp_path / "g")


def test_list_columns_are_as_many_features_as_they_are_long(tmp_path: Path):
    wide = pa.array([[1, 2], [3, 4], [5, 6], [7, 8]], pa.list_(pa.float32(), 2))
    graph = write_parquet(tmp_path, a=[0.5] * 4, emb=[[1.0, 2.0, 3.0]] * 4, wide=wide)
    assert np.asarray(graph.x)[1].tolist() == [0.5, 1, 2, 3, 3, 4]
    assert said(graph, "features: 6 columns from a, emb, wide of nodes.parquet")


def test_a_list_of_labels_is_multilabel(tmp_path: Path):
    graph = write_parquet(tmp_path, label=[[0, 1], [1, 1], [1, 0], [0, 0]], f=[1.0] * 4)
    assert (graph.task, graph.num_classes) == ("multilabel", 2)


def test_lists_of_different_lengths_are_refused(tmp_path: Path):
    with pytest.raises(DatasetError, match="lists of one length in column 'emb'"):
        write_parquet(tmp_path, emb=[[1.0], [1.0, 2.0], [1.0], [1.0]])


def test_values_that_are_no_numbers_are_named(tmp_path: Path):
    graph = write_parquet(
        tmp_path,
        words=[["a"], ["b"], [], []],
        map=[{"k": 1}] * 4,
        blob=[b"x"] * 4,
        flag=[True, False, False, True],
    )
    assert said(graph, "not used: words, map, blob of nodes.parquet (neither numbers nor words")
    assert said(graph, "features: 1 columns from flag")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("TrainMask", "a mask"), ("is_test", "a mask"), ("in_train", "a split"), ("userId", "ids"),
        ("Unnamed: 0", "ids"), ("label_3", "labels"), ("classid", "labels"), ("f0", None),
        ("age", None), ("x", None), ("weight", None), ("classroom", None), ("position", None),
        ("outcome", "labels"), ("Outcome_30d", "labels"), ("response", "labels"), ("gt", "labels"),
        ("cls", "labels"), ("lbl", "labels"), ("y1", "labels"), ("y_2", "labels"),
        ("holdout", "a split"), ("dev", "a mask"), ("dev_mask", "a mask"), ("nid", "ids"),
        ("paperid", "ids"), ("response_time", None), ("cls_0", None), ("std_dev", None),
        ("yield", None), ("valid_id", "a split"), ("grid", None), ("eval", "a split"),
        ("is_eval", "a split"), ("KFold", "a split"), ("intrain", "a split"), ("evaluated", None),
    ],
)  # fmt: skip
def test_names_say_what_must_not_be_a_feature(name: str, kind: str | None):
    assert looks_like(name) == kind
