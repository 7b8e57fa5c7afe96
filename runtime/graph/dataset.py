"""A graph dataset on disk, memory-mapped: the object every other part is given.

    graph = open_graph(Path("data/products"))
    in_neighbours = graph.indices[graph.indptr[v] : graph.indptr[v + 1]]

`format.py` says what the folder holds. Arrays come back read-only and mapped: opening costs no
memory, and processes on one host share the pages.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime import codec
from runtime.errors import DatasetError
from runtime.graph.fingerprint import fingerprint_files
from runtime.graph.format import META_FILE, GraphMeta, Task, read_meta
from runtime.graph.reading import map_array
from runtime.graph.staging import Staging
from runtime.graph.validate import (
    GraphWarning,
    check_array,
    check_csc_ends,
    check_labels,
    check_monotone,
    check_range,
    check_split,
    warn_of_nan,
)

__all__ = ["Graph", "GraphWarning", "SparseFeatures", "commit_dataset", "open_graph", "write_graph"]

SPLITS = ("train_idx", "val_idx", "test_idx")
FLOATS = ("float16", "float32")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SparseFeatures:
    """CSR features: the entries of row v are `data[indptr[v]:indptr[v + 1]]`."""

    indptr: NDArray[np.int64]
    """[num_nodes + 1]."""
    indices: NDArray[Any]
    """Column of each entry, int32 or int64."""
    data: NDArray[Any]
    """Value of each entry, float16 or float32."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Graph:
    """A graph dataset: topology in CSC, features, labels and split."""

    path: Path
    meta: GraphMeta
    fingerprint: str
    """Hash of the content as it is now on disk."""
    indptr: NDArray[np.int64]
    """[num_nodes + 1]; in-neighbours of v are `indices[indptr[v]:indptr[v + 1]]`."""
    indices: NDArray[Any]
    """[num_edges], int32 or int64."""
    x: NDArray[Any] | None = None
    """Dense features [num_nodes, feature_dim], float16 or float32."""
    x_csr: SparseFeatures | None = None
    x_by_type: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Dense features per node type, rows in order of node id within the type."""
    y: NDArray[np.int64] | None = None
    """[num_nodes], or [num_nodes, num_classes] of 0/1 for multilabel; -1 is unknown."""
    train_idx: NDArray[np.int64]
    """[k] node ids; for task link [k, 2] node pairs (source, destination)."""
    val_idx: NDArray[np.int64]
    test_idx: NDArray[np.int64]
    edge_weight: NDArray[np.float32] | None = None
    edge_type: NDArray[np.int32] | None = None
    node_type: NDArray[np.int32] | None = None

    @property
    def name(self) -> str:
        """Name of the dataset."""
        return self.meta.name

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.meta.num_nodes

    @property
    def num_edges(self) -> int:
        """Number of stored (directed) edges."""
        return self.meta.num_edges

    @property
    def feature_dim(self) -> int:
        """Columns of a feature row."""
        return self.meta.feature_dim

    @property
    def feature_dtype(self) -> str:
        """NumPy name of the stored features' type."""
        return self.meta.feature_dtype

    @property
    def num_classes(self) -> int:
        """Number of classes (or of labels per node, for multilabel)."""
        return self.meta.num_classes

    @property
    def task(self) -> Task:
        """What is predicted: multiclass, multilabel, binary or link."""
        return self.meta.task

    @property
    def topology_only(self) -> bool:
        """Whether the dataset has no features; `feature_dim` may still be declared."""
        return self.meta.feature_storage == "none"

    @property
    def row_bytes(self) -> int:
        """Bytes of one dense feature row in the stored type."""
        return self.meta.feature_dim * np.dtype(self.meta.feature_dtype).itemsize

    @property
    def num_train(self) -> int:
        """Number of training nodes (or pairs)."""
        return len(self.train_idx)


def open_graph(folder: Path, *, validate: bool = True) -> Graph:
    """Open a dataset folder, memory-mapped.

    Args:
        folder: the dataset.
        validate: also read the arrays once: indptr never falls, indices and labels in range, NaN
            features counted. Without it only shapes, types, lengths and the split are checked,
            which is how a process opens what another has just validated.

    Raises:
        DatasetError: not a dataset, damaged or inconsistent; one line that names the file.

    Warns:
        GraphWarning: features hold NaN; the text has the count.
    """
    folder = Path(folder)
    meta = read_meta(folder)
    arrays = _map_arrays(folder, meta)
    _check_fast(folder, meta, arrays)
    if validate:
        _check_full(folder, meta, arrays)
    sparse = None
    if meta.feature_storage == "sparse":
        sparse = SparseFeatures(
            indptr=arrays["x_indptr"], indices=arrays["x_indices"], data=arrays["x_data"]
        )
    return Graph(
        path=folder.resolve(),
        meta=meta,
        fingerprint=_fingerprint(folder, meta, arrays),
        x_csr=sparse,
        x_by_type={name: arrays[f"x_{name}"] for name in _typed(meta)},
        indptr=arrays["indptr"],
        indices=arrays["indices"],
        x=arrays.get("x"),
        y=arrays.get("y"),
        **{name: np.array(arrays[name]) for name in SPLITS},
        edge_weight=arrays.get("edge_weight"),
        edge_type=arrays.get("edge_type"),
        node_type=arrays.get("node_type"),
    )


def write_graph(
    folder: Path,
    *,
    name: str,
    indptr: NDArray[Any],
    indices: NDArray[Any],
    train_idx: NDArray[Any],
    val_idx: NDArray[Any],
    test_idx: NDArray[Any],
    task: Task,
    num_classes: int,
    x: NDArray[Any] | None = None,
    x_csr: SparseFeatures | None = None,
    y: NDArray[Any] | None = None,
    feature_dim: int | None = None,
    edge_weight: NDArray[Any] | None = None,
    edge_type: NDArray[Any] | None = None,
    node_type: NDArray[Any] | None = None,
    notes: list[str] | None = None,
) -> Graph:
    """Write arrays as a dataset folder, whole or not at all, and open it (validated).

    Args:
        folder: output; an earlier dataset there is replaced, anything else refused.
        name: name of the dataset.
        indptr: [num_nodes + 1] CSC pointers.
        indices: [num_edges] in-neighbours.
        train_idx: node ids (or [k, 2] pairs for task link); `val_idx` and `test_idx` alike.
        val_idx: see `train_idx`.
        test_idx: see `train_idx`.
        task: multiclass | multilabel | binary | link.
        num_classes: number of classes, 0 where there are no labels.
        x: dense features, float16 or float32.
        x_csr: sparse features, instead of `x`.
        y: labels, -1 unknown.
        feature_dim: declared width; needed with `x_csr`, optional without features.
        edge_weight: [num_edges].
        edge_type: [num_edges].
        node_type: [num_nodes].
        notes: one line per decision taken while making it.

    Raises:
        DatasetError: the arrays do not fit together, or the folder cannot be written.
    """
    table = x if x is not None else (x_csr.data if x_csr is not None else None)
    with Staging(folder) as staging:
        ids = np.int32 if len(indptr) - 1 <= np.iinfo(np.int32).max else np.int64
        if indices.size and (indices.min() < 0 or indices.max() > np.iinfo(ids).max):
            raise DatasetError(
                f"{folder}: expected node ids from 0 to {len(indptr) - 2} in indices"
            )
        staging.save("indptr", indptr, np.int64)
        staging.save("indices", indices, ids)
        for key, array in zip(SPLITS, (train_idx, val_idx, test_idx), strict=True):
            staging.save(key, array, np.int64)
        if x is not None:
            staging.save("x", x)
        elif x_csr is not None:
            staging.save("x_indptr", x_csr.indptr, np.int64)
            staging.save("x_indices", x_csr.indices)
            staging.save("x_data", x_csr.data)
        for key, array, dtype in (
            ("y", y, np.int64),
            ("edge_weight", edge_weight, np.float32),
            ("edge_type", edge_type, np.int32),
            ("node_type", node_type, np.int32),
        ):
            if array is not None:
                staging.save(key, array, dtype)
        width = x.shape[1] if x is not None and x.ndim == 2 else feature_dim or 0
        return commit_dataset(
            staging,
            name=name,
            num_nodes=len(indptr) - 1,
            num_edges=len(indices),
            feature_dim=width,
            feature_dtype="float32" if table is None else str(table.dtype),
            feature_storage="dense" if x is not None else ("none" if x_csr is None else "sparse"),
            num_classes=num_classes,
            task=task,
            notes=notes or [],
        )


def commit_dataset(staging: Staging, **facts: Any) -> Graph:
    """Validate the staged arrays, write graph.json, and put the folder in its place.

    Args:
        staging: holds the array files.
        facts: the fields of `GraphMeta` except `fingerprint`.

    Raises:
        DatasetError: the arrays do not fit together.
    """
    staging.finish_arrays()
    try:
        meta = codec.decode(GraphMeta, codec.to_plain(facts))
    except codec.CodecError as error:
        raise DatasetError(f"{staging.target}: cannot become a dataset: {error}") from None
    try:
        arrays = _map_arrays(staging.folder, meta)
        _check_fast(staging.folder, meta, arrays)
        _check_full(staging.folder, meta, arrays)
    except DatasetError as error:
        # The staging folder's name means nothing to a user, and is gone when the text is read.
        text = str(error).replace(str(staging.folder), str(staging.target))
        raise DatasetError(text) from None
    meta = dataclasses.replace(meta, fingerprint=_fingerprint(staging.folder, meta, arrays))
    (staging.folder / META_FILE).write_text(codec.dumps(meta))
    staging.commit()
    return open_graph(staging.target, validate=False)


def _typed(meta: GraphMeta) -> list[str]:
    return meta.node_types if meta.feature_storage == "typed" else []


def _map_arrays(folder: Path, meta: GraphMeta) -> dict[str, NDArray[Any]]:
    needed = ["indptr", "indices", *SPLITS]
    if meta.feature_storage == "dense":
        needed += ["x"]
    elif meta.feature_storage == "sparse":
        needed += ["x_indptr", "x_indices", "x_data"]
    needed += [f"x_{name}" for name in _typed(meta)]
    needed += ["node_type"] if _typed(meta) else []
    optional = ["y", "edge_weight", "edge_type", "node_type"]
    present = [n for n in optional if n not in needed and (folder / f"{n}.npy").exists()]
    return {name: map_array(folder / f"{name}.npy") for name in [*needed, *present]}


def _check_fast(folder: Path, meta: GraphMeta, arrays: dict[str, NDArray[Any]]) -> None:
    nodes, edges, dim = meta.num_nodes, meta.num_edges, meta.feature_dim
    index, pair = ("int32", "int64"), (None, 2) if meta.task == "link" else (None,)
    labels = (nodes, meta.num_classes) if meta.task == "multilabel" else (nodes,)
    rules: dict[str, tuple[tuple[str, ...], tuple[int | None, ...]]] = {
        "indptr": (("int64",), (nodes + 1,)),
        "indices": (index, (edges,)),
        "x": ((meta.feature_dtype,), (nodes, dim)),
        "x_indptr": (("int64",), (nodes + 1,)),
        "x_indices": (index, (None,)),
        "x_data": ((meta.feature_dtype,), (None,)),
        "y": (("int64",), labels),
        "edge_weight": (("float32",), (edges,)),
        "edge_type": (("int32",), (edges,)),
        "node_type": (("int32",), (nodes,)),
        **dict.fromkeys(SPLITS, (("int64",), pair)),
        **{f"x_{name}": (FLOATS, (None, None)) for name in _typed(meta)},
    }
    for name, array in arrays.items():
        check_array(folder / f"{name}.npy", array, *rules[name])
    check_csc_ends(folder / "indptr.npy", arrays["indptr"], edges)
    if "x_indptr" in arrays:
        check_array(folder / "x_data.npy", arrays["x_data"], FLOATS, arrays["x_indices"].shape)
        check_csc_ends(folder / "x_indptr.npy", arrays["x_indptr"], len(arrays["x_indices"]))
    for name in SPLITS:
        empty = name != "train_idx"
        check_split(folder / f"{name}.npy", arrays[name], nodes, may_be_empty=empty)


def _check_full(folder: Path, meta: GraphMeta, arrays: dict[str, NDArray[Any]]) -> None:
    check_monotone(folder / "indptr.npy", arrays["indptr"])
    check_range(folder / "indices.npy", arrays["indices"], 0, meta.num_nodes, "node ids")
    if "x_indptr" in arrays:
        check_monotone(folder / "x_indptr.npy", arrays["x_indptr"])
        path = folder / "x_indices.npy"
        check_range(path, arrays["x_indices"], 0, meta.feature_dim, "feature columns")
    if "y" in arrays:
        check_labels(folder / "y.npy", arrays["y"], meta, arrays["train_idx"])
    if "node_type" in arrays and meta.node_types:
        types = arrays["node_type"]
        check_range(folder / "node_type.npy", types, 0, len(meta.node_types), "node types")
        for number, name in enumerate(_typed(meta)):
            rows = int((types == number).sum())
            table = arrays[f"x_{name}"]
            check_array(folder / f"x_{name}.npy", table, FLOATS, (rows, None))
    for name in ("x", "x_data", *(f"x_{t}" for t in _typed(meta))):
        if name in arrays:
            warn_of_nan(folder / f"{name}.npy", arrays[name])


def _fingerprint(folder: Path, meta: GraphMeta, arrays: dict[str, NDArray[Any]]) -> str:
    # The name, the notes and where the folder lies are not part of what the graph is.
    facts = (meta.num_nodes, meta.num_edges, meta.feature_dim, meta.num_classes, meta.task)
    return fingerprint_files((folder / f"{name}.npy" for name in arrays), facts=str(facts))
