"""Saved PyG objects: what is accepted besides a plain Data, and what is refused."""

import copy
import pickle
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms import RandomLinkSplit, ToSparseTensor

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.dataset import Graph, rows_within_types
from gnnplan.runtime.graph.generate import generate_typed
from gnnplan.runtime.graph.imports.importing import ImportOptions, import_graph
from gnnplan.runtime.loader.loader import PlannedLoader
from tests.support.plans import make_plan

PAIRS = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 2]])


def load(value, tmp_path: Path, **options) -> Graph:
    torch.save(value, tmp_path / "saved.pt")
    chosen = ImportOptions(**options)
    return import_graph(tmp_path / "saved.pt", tmp_path / "g", options=chosen, overwrite=True)


def test_a_data_a_dict_and_a_dataset_of_one_graph_are_the_same(tmp_path: Path):
    data = Data(edge_index=PAIRS, x=torch.eye(3), y=torch.tensor([0, 1, 1]))
    forms = [data, data.to_dict(), (data.to_dict(), None, Data), (data, None)]
    prints = {load(form, tmp_path).fingerprint for form in forms}
    assert len(prints) == 1


def test_the_folder_of_a_pyg_dataset_is_taken_by_its_processed_graph(tmp_path: Path):
    root = tmp_path / "Mine"
    (root / "processed").mkdir(parents=True)
    (root / "raw").mkdir()
    (root / "raw" / "ind.mine.x").write_text("")
    data = Data(edge_index=PAIRS, x=torch.eye(3), y=torch.tensor([0, 1, 1]))
    torch.save((data.to_dict(), None, Data), root / "processed" / "data.pt")
    torch.save("none", root / "processed" / "pre_filter.pt")
    graph = import_graph(root, tmp_path / "g")
    assert (graph.name, graph.num_nodes) == ("Mine", 3)
    left = [note for note in graph.meta.notes if note.startswith("not used")]
    assert len(left) == 1
    assert "processed/pre_filter.pt, raw/ind.mine.x (the graph is that of processed/" in left[0]
    torch.save(data, root / "processed" / "other.pt")
    with pytest.raises(DatasetError, match=r"one saved graph .*found data.pt, other"):
        import_graph(root, tmp_path / "h")


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_features_are_read(tmp_path: Path, layout: torch.layout):
    dense = torch.tensor([[0.0, 2.0], [0.0, 0.0], [3.0, 4.0]])
    with warnings.catch_warnings():
        # torch says once per process that its CSR layout is in beta.
        warnings.filterwarnings("ignore", message="Sparse CS")
        x = dense.to_sparse(layout=layout)
    graph = load(Data(edge_index=PAIRS, x=x), tmp_path)
    np.testing.assert_array_equal(graph.x, dense.numpy())


def test_weights_types_and_column_masks_are_read(tmp_path: Path):
    masks = torch.tensor([[True, False], [False, True], [False, False]])
    data = Data(
        edge_index=PAIRS,
        num_nodes=3,
        edge_attr=torch.tensor([[1.0], [2.0], [3.0], [4.0]]),
        edge_type=torch.tensor([0, 1, 0, 1]),
        train_mask=masks,
        val_mask=masks.flip(1),
    )
    graph = load(data, tmp_path, split_index=1)
    assert graph.edge_weight is not None
    assert graph.edge_weight.tolist() == [3, 1, 2, 4]
    assert graph.edge_type is not None
    assert graph.edge_type.tolist() == [0, 0, 1, 1]
    assert (graph.train_idx.tolist(), graph.val_idx.tolist()) == ([1], [0])
    with pytest.raises(DatasetError, match="a split from 0 to 1, found 2"):
        load(data, tmp_path, split_index=2)


def test_labels_that_bfloat16_does_not_tell_apart_are_refused(tmp_path: Path):
    y = torch.tensor([0, 255, 1])
    graph = load(Data(edge_index=PAIRS, y=y.bfloat16()), tmp_path)
    assert graph.y is not None
    assert graph.y.tolist() == y.tolist()
    with pytest.raises(DatasetError, match="expected y of which no digit is lost, found bfloat16"):
        load(Data(edge_index=PAIRS, y=(y + 2).bfloat16()), tmp_path)


def test_float_labels_of_several_columns_are_multilabel(tmp_path: Path):
    data = Data(edge_index=PAIRS, y=torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
    graph = load(data, tmp_path)
    assert (graph.task, graph.num_classes) == ("multilabel", 2)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Data(x=torch.eye(3)), "with edge_index"),
        (Data(edge_index=PAIRS.float(), num_nodes=3), "edge_index of integers"),
        (Data(edge_index=PAIRS, x=torch.eye(2)), "from 0 to 1, found 2"),
        (Data(edge_index=PAIRS, x=torch.eye(3), y=torch.zeros(2)), "one row per node"),
        (Data(edge_index=PAIRS, x=torch.eye(3), y=torch.rand(3)), "whole numbers"),
        (Data(edge_index=PAIRS, num_nodes=3, edge_weight=torch.ones(2)), "one value per edge"),
        (Data(edge_index=PAIRS, x=torch.eye(3), train_mask=torch.ones(2) > 0), "one flag per node"),
        (Data(edge_index=PAIRS, num_nodes=-5), "at least one node"),
        (Data(edge_index=PAIRS[:, :0], num_nodes=3), "empty graph"),
        (torch.eye(3), "found Tensor"),
        (HeteroData(), "with edge_index or adj_t"),
        (HeteroData().to_dict() | {("a", "to", "b"): {}}, "edge_index of a__to__b, found none"),
        ([1, 2], "found list"),
        (Data(adj_t=torch.ones(3, 3)), "adj_t as a sparse matrix.*Data.edge_index instead"),
        (Data(adj_t=torch.ones(3, 2).to_sparse()), "a square matrix"),
        ([Data(edge_index=PAIRS)] * 2, "the three of RandomLinkSplit"),
    ],
)
def test_what_is_no_graph_is_refused(tmp_path: Path, value, words: str):
    with pytest.raises(DatasetError, match=words):
        load(value, tmp_path)
    assert not (tmp_path / "g").exists()


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_rows_of_adj_t_hold_in_neighbours(tmp_path: Path, layout: torch.layout):
    A = torch.zeros(3, 3)
    A[PAIRS[1], PAIRS[0]] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CS")
        adj_t = A.to_sparse(layout=layout)
    graph = load(Data(adj_t=adj_t, x=torch.eye(3)), tmp_path)
    assert (graph.indptr.tolist(), graph.indices.tolist()) == ([0, 1, 2, 4], [2, 0, 1, 2])
    assert graph.edge_weight is not None
    assert graph.edge_weight.tolist() == [3, 1, 2, 4]


@pytest.mark.parametrize("name", ["adj", "adj_t"])
def test_values_beside_a_matrix_of_another_order_are_left(name: str, tmp_path: Path):
    place = PAIRS if name == "adj" else PAIRS.flip(0)
    types, said = torch.tensor([0, 1, 2, 3]), f"not used: edge_type (of edges whose order {name}"
    for taken in (torch.arange(4), torch.tensor([2, 0, 1, 3])):
        matrix = torch.sparse_coo_tensor(
            place[:, taken], torch.ones(4), (3, 3), check_invariants=True
        )
        graph = load(Data(num_nodes=3, edge_type=types[taken], **{name: matrix}), tmp_path)
        assert (graph.indptr.tolist(), graph.indices.tolist()) == ([0, 1, 2, 4], [2, 0, 1, 2])
        if graph.edge_type is None:
            assert any(note.startswith(said) for note in graph.meta.notes)
        else:
            assert graph.edge_type.tolist() == [2, 0, 1, 3]
    assert graph.edge_type is not None


def test_what_a_transform_leaves_in_a_data_is_read(tmp_path: Path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse")
        data = ToSparseTensor()(Data(edge_index=PAIRS, x=torch.eye(3)))
        graph = load(data, tmp_path)
    assert graph.indices.tolist() == [2, 0, 1, 2]
    assert graph.edge_weight is None


def sparse_tensor(**fields) -> Any:
    """What torch_sparse (not installed) saves, by classes of its names."""
    names = ("tensor", "SparseTensor"), ("storage", "SparseStorage")
    tensor, storage = list[Any](
        type(name, (), {"__module__": f"torch_sparse.{module}"})() for module, name in names
    )
    tensor.storage = storage
    vars(storage).update(
        {"_row": None, "_rowptr": None, "_value": None, "_sparse_sizes": (3, 3), **fields}
    )
    return tensor


@pytest.mark.parametrize("pointers", [True, False])
def test_a_sparse_tensor_is_read_without_its_package(
    tmp_path: Path, pointers: bool, monkeypatch: pytest.MonkeyPatch
):
    place = (
        {"_rowptr": torch.tensor([0, 1, 2, 4])}
        if pointers
        else {"_row": torch.tensor([0, 1, 2, 2])}
    )
    tensor = sparse_tensor(_col=torch.tensor([2, 0, 1, 2]), **place)
    for part in (tensor, tensor.storage):
        module = types.ModuleType(type(part).__module__)
        setattr(module, type(part).__name__, type(part))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "torch_sparse", types.ModuleType("torch_sparse"))
    torch.save(Data(adj_t=tensor, x=torch.eye(3)), tmp_path / "saved.pt")
    monkeypatch.undo()
    graph = import_graph(tmp_path / "saved.pt", tmp_path / "g")
    assert (graph.indptr.tolist(), graph.indices.tolist()) == ([0, 1, 2, 4], [2, 0, 1, 2])


def test_the_three_parts_of_a_split_of_links_are_a_link_task(tmp_path: Path):
    ring = torch.arange(40)
    whole = Data(edge_index=torch.stack([ring, ring.roll(1)]), x=torch.eye(40))
    parts = RandomLinkSplit(num_val=0.1, num_test=0.2)(whole)
    graph = load(parts, tmp_path)
    assert (graph.task, graph.num_edges) == ("link", 28)
    for ids, part in zip((graph.train_idx, graph.val_idx, graph.test_idx), parts, strict=True):
        positive = part.edge_label_index.T[part.edge_label == 1]
        np.testing.assert_array_equal(ids, positive.numpy())
    assert any("40 pairs labelled 0 left out" in note for note in graph.meta.notes)
    alone = load(parts[0], tmp_path)
    assert (alone.task, len(alone.train_idx)) == ("multiclass", 24)
    assert any("--task link takes the positive" in note for note in alone.meta.notes)
    assert load(parts[0], tmp_path, task="link").num_train == 28


def test_fields_of_the_other_parts_of_a_split_are_named_too(tmp_path: Path):
    ring = torch.arange(40)
    data = Data(edge_index=torch.stack([ring, ring.roll(1)]), x=torch.eye(40))
    parts = RandomLinkSplit(0.1, 0.2)(data)
    parts[1].seen_at, parts[2].fold = torch.arange(40), torch.arange(40)
    graph = load(parts, tmp_path)
    left = " ".join(note for note in graph.meta.notes if note.startswith("not used"))
    assert "seen_at" in left
    assert "fold (looks like a split)" in left


def test_a_one_hot_y_is_said(tmp_path: Path):
    graph = load(Data(edge_index=PAIRS, y=torch.eye(3)), tmp_path)
    assert any("save y.argmax(1)" in note for note in graph.meta.notes)
    table = torch.tensor([[1, 1], [0, 1], [1, 0]])
    plain = load(Data(edge_index=PAIRS, y=table), tmp_path)
    assert not any("argmax" in note for note in plain.meta.notes)


def test_labels_of_one_node_type_are_looked_at_without_the_other_nodes(tmp_path: Path):
    data = HeteroData()
    data["paper"].x, data["author"].x = torch.eye(3), torch.ones(2, 1)
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1, 1], [0, 1, 2]])
    words = {"argmax": torch.eye(3), "1 of 3 are -1": torch.tensor([1, 1, -1]), "": torch.ones(3)}
    for word, y in words.items():
        data["paper"].y = y
        said = [n for n in load(data, tmp_path).meta.notes if "argmax" in n or "are -1" in n]
        assert [word in note for note in said] == [True] * bool(word)


def test_a_class_that_is_not_read_is_named(tmp_path: Path):
    with pytest.raises(DatasetError, match=r"class pathlib\.\w*PosixPath, which is not made"):
        load(Data(edge_index=PAIRS, num_nodes=3, where=tmp_path), tmp_path)


def users_hetero(tmp_path: Path) -> tuple[HeteroData, Graph]:
    """A typed graph of our own as a user's HeteroData, edges in no order."""
    graph = generate_typed(tmp_path / "own", num_papers=200, num_authors=80, num_classes=4)
    assert graph.node_type is not None
    assert graph.edge_type is not None
    assert graph.y is not None
    within = rows_within_types(graph.node_type, 2)
    target = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    data, shuffle = HeteroData(), np.random.default_rng(0)
    for number, name in enumerate(graph.meta.node_types):
        data[name].x = torch.from_numpy(np.array(graph.x_by_type[name]))
        own = np.flatnonzero(graph.node_type == number)
        if name == "paper":
            data[name].y = torch.from_numpy(graph.y[own])
            for split in ("train", "val", "test"):
                ids = getattr(graph, f"{split}_idx")
                data[name][f"{split}_mask"] = torch.from_numpy(np.isin(own, ids))
    for number, name in enumerate(graph.meta.edge_types):
        own = shuffle.permutation(np.flatnonzero(graph.edge_type == number))
        ends = np.stack([within[np.asarray(graph.indices)[own]], within[target[own]]])
        source, relation, target_type = name.split("__")
        data[source, relation, target_type].edge_index = torch.from_numpy(ends)
        data[source, relation, target_type].edge_attr = torch.from_numpy(ends.T.copy())
    return data, graph


def test_types_of_a_hetero_graph_keep_their_names_and_tables(tmp_path: Path):
    data, own = users_hetero(tmp_path)
    graph = load(data, tmp_path)
    assert (graph.meta.node_types, graph.meta.edge_types) == (
        data.node_types,
        ["__".join(key) for key in data.edge_types],
    )
    assert (graph.num_nodes, graph.num_edges, graph.num_classes) == (280, own.num_edges, 4)
    for name in data.node_types:
        np.testing.assert_array_equal(graph.x_by_type[name], data[name].x)
    assert graph.node_type is not None
    assert graph.y is not None
    papers = np.flatnonzero(graph.node_type == data.node_types.index("paper"))
    np.testing.assert_array_equal(graph.y[papers], data["paper"].y)
    assert set(graph.y[np.setdiff1d(np.arange(280), papers)]) == {-1}
    np.testing.assert_array_equal(np.isin(papers, graph.train_idx), data["paper"].train_mask)


def test_batches_of_a_hetero_graph_index_the_users_own_stores(tmp_path: Path):
    data, _ = users_hetero(tmp_path)
    graph = load(data, tmp_path)
    make_plan(graph, tmp_path / "plan", model="rgcn", batch_size=32, fanouts=[3, 2])
    attr = {key: {"edge_attr": data[key].edge_attr} for key in data.edge_types}
    loader = PlannedLoader(tmp_path / "plan", graph, blocks=False, edge_data=attr)
    seen = 0
    for batch in [*loader, *loader.over("val")]:
        for key in data.edge_types:
            store, users = batch[key], data[key]
            own = torch.stack(
                [
                    batch[key[0]].n_id[store.edge_index[0]],
                    batch[key[2]].n_id[store.edge_index[1]],
                ]
            )
            assert torch.equal(users.edge_index[:, store.e_id], own)
            assert torch.equal(store.edge_attr, own.t())
            seen += store.e_id.numel()
        for name in data.node_types:
            assert torch.equal(batch[name].x, data[name].x[batch[name].n_id])
    assert seen > 300


def test_fields_of_a_hetero_graph_that_import_left_out_say_why(tmp_path: Path):
    data, _ = users_hetero(tmp_path)
    data["author"].pos = torch.rand(80, 2)
    graph = load(data, tmp_path)
    make_plan(graph, tmp_path / "plan", model="rgcn", batch_size=32, fanouts=[3, 2])
    batch = next(iter(PlannedLoader(tmp_path / "plan", graph, blocks=False)))
    with pytest.raises(AttributeError, match=r"import: not used: pos .*node_data=\{'author': \{'p"):
        _ = batch["author"].pos
    key = data.edge_types[0]
    with pytest.raises(AttributeError, match=r"import: not used: edge_attr .*edge_data=\{\('"):
        _ = batch[key].edge_attr
    with pytest.raises(KeyError, match=r"import: not used: edge_attr .*edge_data="):
        _ = batch.edge_attr_dict
    moved = copy.copy(batch).to("cpu")
    assert isinstance(moved, HeteroData)
    assert (moved.metadata(), moved.input_type) == (data.metadata(), "paper")
    assert set(moved.x_dict) == set(data.node_types)
    assert "pos" not in pickle.loads(pickle.dumps(moved))["author"]


@pytest.mark.filterwarnings("ignore:There exist type names")
@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (lambda d: None, {"deduplicate": True}, r"T.RemoveDuplicatedEdges\(\)"),
        (lambda d: None, {"features": "sparse"}, "auto or dense"),
        (
            lambda d: d["author"].update({"y": torch.ones(80), "train_mask": torch.ones(80) > 0}),
            {},
            "labels of one node type, found those of paper, author",
        ),
        (
            lambda d: d["paper"].update({"x": torch.ones(3, 2), "num_nodes": 200}),
            {},
            "x of paper with one row per node",
        ),
        (
            lambda d: d["author", "writes", "paper"].edge_index.add_(1000),
            {},
            "nodes of type author",
        ),
        (lambda d: d["paper", "a__b", "paper"].update({"edge_index": PAIRS}), {}, "without __"),
        (lambda d: d["author"].update({"x": torch.tensor(1.0)}), {}, "x of two axes"),
        (lambda d: d["paper"].update({"y": torch.ones(200) * 1j}), {}, "y of paper as numbers"),
        (
            lambda d: d["author", "writes", "paper"].update({"edge_weight": torch.ones(3)}),
            {},
            "edge_weight of author__writes__paper with one row per edge",
        ),
    ],
)
def test_a_hetero_graph_that_cannot_be_kept_is_refused(
    change: Any, options: dict[str, Any], words: str, tmp_path: Path
):
    data, _ = users_hetero(tmp_path)
    change(data)
    with pytest.raises(DatasetError, match=words):
        load(data, tmp_path, **options)
