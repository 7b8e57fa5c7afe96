"""Packs as GNN-benchmark, heterophilous-graphs and SciPy write them; pickles that are not run."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.imports.importing import ImportOptions, import_graph

N = 20
A: Any = sp.random_array((N, N), density=0.2, format="csr", rng=np.random.default_rng(0))
X: Any = sp.random_array((N, 5), density=0.4, format="csr", rng=np.random.default_rng(1))
Y = np.arange(N) % 3


def parts(matrix, stem: str, joint: str) -> dict[str, Any]:
    names = ("data", "indices", "indptr")
    out = {f"{stem}{joint}{name}": getattr(matrix, name) for name in names}
    return {**out, f"{stem}{joint}shape": np.array(matrix.shape)}


def pickled(value) -> np.ndarray:
    out = np.empty((), object)
    out[()] = value
    return out


PACKS: dict[str, dict[str, Any]] = {
    "underscores": {**parts(A, "adj", "_"), **parts(X, "attr", "_"), "labels": Y},
    "dots": {**parts(A, "adj_matrix", "."), **parts(X, "attr_matrix", "."), "labels": Y},
    "dense": {**parts(A, "adj", "_"), "attr_matrix": X.toarray(), "labels": Y},
    "pickled": {
        "adj_matrix": pickled(sp.csr_matrix(A)),
        "attr_matrix": pickled(sp.csr_matrix(X)),
        "label": Y,
        "names": np.array(["a", None], object),
    },
    "pickled arrays": {
        "adj_matrix": pickled(A),
        "node_attr": pickled(X.toarray(order="F")),
        "node_label": pickled(Y.astype(">i4")),
    },
}


@pytest.mark.parametrize("layout", PACKS)
def test_the_same_graph_in_every_layout(layout: str, tmp_path: Path):
    np.savez(tmp_path / "p.npz", **PACKS[layout])
    graph = import_graph(tmp_path / "p.npz", tmp_path / "g")
    columns = A.tocsc()
    columns.sort_indices()
    np.testing.assert_array_equal(graph.indptr, columns.indptr)
    np.testing.assert_array_equal(graph.indices, columns.indices)
    np.testing.assert_array_equal(graph.edge_weight, columns.data.astype(np.float32))
    np.testing.assert_array_equal(graph.x, X.toarray().astype(np.float32))
    np.testing.assert_array_equal(graph.y, Y)
    assert graph.edge_id is not None
    # Its own order is by row, as the matrix stores it.
    np.testing.assert_array_equal(A.data[graph.edge_id], columns.data)


@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
def test_a_saved_matrix_goes_from_row_to_column_in_each_format(kind: str, tmp_path: Path):
    matrix = sp.csr_matrix(A).asformat(kind)
    matrix.data[:] = 1
    sp.save_npz(tmp_path / "p.npz", matrix)
    graph = import_graph(tmp_path / "p.npz", tmp_path / "g")
    dst = np.repeat(np.arange(N), np.diff(graph.indptr))
    assert (A.toarray()[graph.indices, dst] > 0).all()
    assert (graph.num_edges, graph.edge_weight) == (A.nnz, None)
    assert any("not used: data (every edge weighs 1)" in note for note in graph.meta.notes)


def test_heterophilous_packs_come_in_with_their_splits(tmp_path: Path):
    edges = np.stack(A.nonzero(), axis=1)
    masks = np.stack([np.arange(N) < 5 + k for k in range(10)])
    np.savez(
        tmp_path / "p.npz",
        edges=edges,
        node_features=X.toarray(),
        node_labels=Y,
        train_masks=masks,
        val_masks=np.roll(masks, 14, axis=1) & ~masks,
        test_masks=np.zeros_like(masks),
    )
    options = ImportOptions(split_index=4, symmetrise=True)
    graph = import_graph(tmp_path / "p.npz", tmp_path / "g", options=options)
    assert len(graph.train_idx) == 9
    loops = int((edges[:, 0] == edges[:, 1]).sum())
    assert graph.num_edges == 2 * len(edges) - loops
    assert graph.edge_id is not None
    pairs = {tuple(sorted(pair)) for pair in edges[graph.edge_id].tolist()}
    dst = np.repeat(np.arange(N), np.diff(graph.indptr))
    assert pairs == {
        tuple(sorted(p)) for p in zip(graph.indices.tolist(), dst.tolist(), strict=True)
    }


@pytest.mark.parametrize("ends", [A.nonzero(), ([0, 1], [3, 2])])
def test_a_pack_of_pygs_names_has_its_edges_by_column(ends: tuple[Any, Any], tmp_path: Path):
    source, target = np.asarray(ends)
    masks = {"train_mask": np.arange(N) < 9, "val_mask": np.arange(N) == 9}
    np.savez(tmp_path / "p.npz", edge_index=np.asarray(ends), x=X.toarray(), y=Y, **masks)
    graph = import_graph(tmp_path / "p.npz", tmp_path / "g")
    dst = np.repeat(np.arange(N), np.diff(graph.indptr))
    pairs = zip(graph.indices.tolist(), dst.tolist(), strict=True)
    assert sorted(pairs) == sorted(zip(source.tolist(), target.tolist(), strict=True))
    assert (graph.num_nodes, len(graph.train_idx), len(graph.val_idx)) == (N, 9, 1)
    assert "edge_index" in " ".join(graph.meta.notes)
    assert "undirected" not in " ".join(graph.meta.notes)


class Bomb:
    """Runs a call where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("wrap", [lambda b: b, lambda b: [b], lambda b: {"data": b}])
def test_a_pickle_that_calls_something_is_refused_and_not_run(wrap, tmp_path: Path):
    ran = tmp_path / "ran"
    np.savez(tmp_path / "p.npz", adj_matrix=pickled(wrap(Bomb(ran))), labels=Y)
    with pytest.raises(DatasetError, match=r"not run; .*numpy.savez") as found:
        import_graph(tmp_path / "p.npz", tmp_path / "g")
    assert "\n" not in str(found.value)
    assert not ran.exists()
    with np.load(tmp_path / "p.npz", allow_pickle=True) as pack:
        pack["adj_matrix"]
    assert ran.exists()  # the file does what is claimed of it


def test_a_matrix_whose_arrays_call_something_is_refused(tmp_path: Path):
    ran = tmp_path / "ran"
    matrix: Any = sp.csr_matrix(A)
    matrix.data = Bomb(ran)
    np.savez(tmp_path / "p.npz", adj_matrix=pickled(matrix))
    with pytest.raises(DatasetError, match="not run"):
        import_graph(tmp_path / "p.npz", tmp_path / "g")
    assert not ran.exists()


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_pickles_of_the_protocols_that_numpy_writes_are_read(protocol: int, tmp_path: Path):
    from gnnplan.runtime.graph.imports.serialized import PickledArray, unpickle

    path = tmp_path / "a.npy"
    path.write_bytes(pickle.dumps(pickled(sp.csr_matrix(A)), protocol=protocol))
    found = unpickle(path, "adj_matrix", PickledArray(path, 0))
    assert isinstance(found, dict)
    np.testing.assert_array_equal(found["data"], A.data)
    np.testing.assert_array_equal(found["indices"], A.indices)


def test_packs_without_known_edges_say_what_is_known(tmp_path: Path):
    np.savez(tmp_path / "p.npz", adjacency=np.zeros((2, 2)))
    with pytest.raises(DatasetError, match=r"indptr and indices .or adj_indptr .*among adjacency"):
        import_graph(tmp_path / "p.npz", tmp_path / "g")
    np.savez(tmp_path / "p.npz", **parts(X, "adj", "_"))
    with pytest.raises(DatasetError, match="a square matrix of edges, found 20 by 5"):
        import_graph(tmp_path / "p.npz", tmp_path / "g")
