"""Saved PyG objects: what is accepted besides a plain Data, and what is refused."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from runtime.errors import DatasetError
from runtime.graph.dataset import Graph
from runtime.graph.importing import ImportOptions, import_graph

PAIRS = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 2]])


def load(value, tmp_path: Path, **options) -> Graph:
    torch.save(value, tmp_path / "saved.pt")
    return import_graph(tmp_path / "saved.pt", tmp_path / "g", options=ImportOptions(**options))


def test_a_data_a_dict_and_a_dataset_of_one_graph_are_the_same(tmp_path: Path):
    data = Data(edge_index=PAIRS, x=torch.eye(3), y=torch.tensor([0, 1, 1]))
    forms = [data, data.to_dict(), (data.to_dict(), None, Data), (data, None)]
    prints = {load(form, tmp_path).fingerprint for form in forms}
    assert len(prints) == 1


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_features_are_read(tmp_path: Path, layout: torch.layout):
    dense = torch.tensor([[0.0, 2.0], [0.0, 0.0], [3.0, 4.0]])
    with warnings.catch_warnings():
        # torch says once per process that its CSR layout is in beta.
        warnings.filterwarnings("ignore", message="Sparse CSR")
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
        (Data(edge_index=PAIRS, x=torch.eye(3), y=torch.zeros(2)), "one per node"),
        (Data(edge_index=PAIRS, x=torch.eye(3), y=torch.rand(3)), "whole numbers"),
        (Data(edge_index=PAIRS, num_nodes=3, edge_weight=torch.ones(2)), "one value per edge"),
        (Data(edge_index=PAIRS, x=torch.eye(3), train_mask=torch.ones(2) > 0), "one flag per node"),
        (Data(edge_index=PAIRS, num_nodes=-5), "at least one node"),
        (Data(edge_index=PAIRS[:, :0], num_nodes=3), "empty graph"),
        (torch.eye(3), "found Tensor"),
        (HeteroData(), "saved.pt"),
        ([1, 2], "found list"),
    ],
)
def test_what_is_no_graph_is_refused(tmp_path: Path, value, words: str):
    with pytest.raises(DatasetError, match=words):
        load(value, tmp_path)
    assert not (tmp_path / "g").exists()
