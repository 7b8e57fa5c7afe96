"""The typed generator's edges and tables fit their types, and types are described."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph import dataset
from gnnplan.runtime.graph.dataset import Graph, rows_within_types, types_of
from gnnplan.runtime.graph.generate import EDGE_TYPES, NODE_TYPES, generate_typed


def make(folder: Path, **settings: Any) -> Graph:
    sizes: dict[str, Any] = {"num_papers": 1200, "num_authors": 500, "num_classes": 4}
    return generate_typed(folder, **(sizes | settings))


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return make(tmp_path_factory.mktemp("typed") / "g")


def edges(graph: Graph, number: int) -> np.ndarray:
    assert graph.edge_type is not None
    target = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    own = np.asarray(graph.edge_type) == number
    return np.stack([np.asarray(graph.indices, np.int64)[own], target[own]], axis=1)


def test_edges_join_the_node_types_that_their_name_says(graph: Graph) -> None:
    assert graph.node_type is not None
    for number, name in enumerate(EDGE_TYPES):
        source, _, destination = name.split("__")
        pairs = edges(graph, number)
        assert len(pairs) > 0
        assert (graph.node_type[pairs[:, 0]] == NODE_TYPES.index(source)).all()
        assert (graph.node_type[pairs[:, 1]] == NODE_TYPES.index(destination)).all()
    assert len(edges(graph, 0)) == 1200 * 8
    writes = {tuple(p) for p in edges(graph, 1).tolist()}
    assert writes == {(v, u) for u, v in edges(graph, 2).tolist()}


def test_nodes_are_ranked_by_type_part_by_part(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert graph.node_type is not None
    whole = rows_within_types(graph.node_type, 2)
    monkeypatch.setattr(dataset, "_RANKED", 7)
    np.testing.assert_array_equal(rows_within_types(graph.node_type, 2), whole)
    for number in range(2):
        own = whole[graph.node_type == number]
        np.testing.assert_array_equal(own, np.arange(own.size))


def test_papers_alone_are_labelled_and_split(graph: Graph) -> None:
    assert graph.y is not None
    assert graph.node_type is not None
    assert ((graph.y >= 0) == (graph.node_type == 0)).all()
    split = np.concatenate([graph.train_idx, graph.val_idx, graph.test_idx])
    assert (graph.node_type[split] == 0).all()
    assert len(np.unique(split)) == len(split) == 240 + 120 + 240


def test_rows_of_a_type_tell_its_communities(graph: Graph) -> None:
    """Authors' mean rows by the label of a paper of theirs differ; shuffled ids would hide it."""
    assert graph.y is not None
    assert graph.node_type is not None
    rows = rows_within_types(graph.node_type, 2)
    pairs = edges(graph, 1)
    table, labels = graph.x_by_type["author"][rows[pairs[:, 0]]], graph.y[pairs[:, 1]]
    means = np.stack([table[labels == c].mean(0) for c in range(4)])
    between = np.linalg.norm(means - means.mean(0), axis=1).mean()
    # Noise alone: 16 columns of unit variance over about 900 rows each give 4 / 30 = 0.13.
    assert between > 0.4


def test_types_of_a_dataset_are_its_names_and_widths(graph: Graph, small_graph: Graph) -> None:
    types = types_of(graph)
    assert (types.edge_types, types.node_types) == (list(EDGE_TYPES), list(NODE_TYPES))
    assert types.widths == [32, 16]
    assert graph.feature_dim == 32
    with pytest.raises(DatasetError, match="expected edge types"):
        types_of(small_graph)


def test_equal_seeds_give_equal_datasets(graph: Graph, tmp_path: Path) -> None:
    assert make(tmp_path / "same").fingerprint == graph.fingerprint
    assert make(tmp_path / "other", seed=1).fingerprint != graph.fingerprint


@pytest.mark.parametrize("sizes", [{"num_authors": 2}, {"authors_per_paper": 0}, {"cites": 1e6}])
def test_impossible_sizes_are_refused(tmp_path: Path, sizes: dict[str, Any]) -> None:
    with pytest.raises(DatasetError, match="expected"):
        make(tmp_path / "g", **sizes)
    assert not (tmp_path / "g").exists()
