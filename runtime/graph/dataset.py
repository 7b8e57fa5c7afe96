"""Open and write graph datasets.

    graph = open_graph(Path("data/products"))
    in_neighbours = graph.indices[graph.indptr[v] : graph.indptr[v + 1]]

`format.py` says what the folder holds. Arrays are read-only and mapped: opening costs no memory,
and processes on one host share the pages.
"""

import dataclasses
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gnnplan.runtime import codec
from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.findings import Finding, GraphWarning, find_all
from gnnplan.runtime.graph.format import (
    BFLOAT16,
    META_FILE,
    SPLITS,
    GraphMeta,
    Task,
    check_fast,
    check_full,
    content_fingerprint,
    map_arrays,
    one_line,
    read_meta,
    row_dtype,
    row_type_name,
    typed_names,
)
from gnnplan.runtime.graph.staging import Staging
from gnnplan.runtime.plan.schema import Workload

__all__ = ["Graph", "GraphWarning", "SparseFeatures", "commit_dataset", "open_graph", "write_graph"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SparseFeatures:
    """CSR features: the entries of row v are `data[indptr[v]:indptr[v + 1]]`."""

    indptr: NDArray[np.int64]
    """[num_nodes + 1] pointers."""
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
    """Hash of the present content."""
    indptr: NDArray[np.int64]
    """[num_nodes + 1] pointers; in-neighbours of v are `indices[indptr[v]:indptr[v + 1]]`."""
    indices: NDArray[Any]
    """[num_edges] in-neighbours, int32 or int64."""
    x: NDArray[Any] | None = None
    """Dense features [num_nodes, feature_dim], float16, float32 or `format.BFLOAT16`."""
    x_csr: SparseFeatures | None = None
    x_by_type: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Dense features per node type, rows in order of node id within the type."""
    y: NDArray[np.int64] | None = None
    """Labels [num_nodes], or [num_nodes, num_classes] of 0/1 for multilabel; -1 is unknown."""
    train_idx: NDArray[np.int64]
    """[k] node ids; for task link [k, 2] node pairs (source, destination)."""
    val_idx: NDArray[np.int64]
    test_idx: NDArray[np.int64]
    edge_weight: NDArray[np.float32] | None = None
    edge_type: NDArray[np.int32] | None = None
    edge_id: NDArray[np.int64] | None = None
    """[num_edges] position of each edge in the source's own order; None: the same, or not known. A
    mirrored edge has the id of the edge it mirrors, a deduplicated one the first's, an added
    self-loop -1."""
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
        """Number of stored, directed edges."""
        return self.meta.num_edges

    @property
    def feature_dim(self) -> int:
        """Columns of a feature row."""
        return self.meta.feature_dim

    @property
    def feature_dtype(self) -> str:
        """Name of the stored features' type."""
        return self.meta.feature_dtype

    @property
    def num_classes(self) -> int:
        """Number of classes (or of labels per node, for multilabel)."""
        return self.meta.num_classes

    @property
    def task(self) -> Task:
        """Kind of prediction: multiclass, multilabel, binary or link."""
        return self.meta.task

    @property
    def topology_only(self) -> bool:
        """Whether the dataset has no features; `feature_dim` may be declared all the same."""
        return self.meta.feature_storage == "none"

    @property
    def row_bytes(self) -> int:
        """Bytes of one dense feature row in the stored type."""
        return self.meta.feature_dim * row_dtype(self.meta.feature_dtype).itemsize

    def array_path(self, name: str) -> Path:
        """Return the path of an array file; raises DatasetError where the graph was replaced."""
        open_graph(self.path, validate=False, fingerprint=self.fingerprint)
        return self.path / f"{name}.npy"

    @property
    def num_train(self) -> int:
        """Number of training nodes (or pairs)."""
        return len(self.train_idx)


def open_graph(folder: Path, *, validate: bool = True, fingerprint: str = "") -> Graph:
    """Open a dataset folder, memory-mapped.

    Args:
        folder: the dataset.
        validate: whether all arrays are read once and checked, beside their headers and the split.
        fingerprint: hash of the graph that must lie there; empty: any.

    Raises:
        DatasetError: not a dataset, damaged, another graph, or with a fault that no training can
            use; one line that names the file.

    Warns:
        GraphWarning: oddities, each with its count.
    """
    folder = Path(folder)
    meta, arrays = _open_arrays(folder)
    if validate:
        check_full(folder, meta, arrays)
        _report(folder, find_all(meta, arrays))
    graph = _graph(folder, meta, arrays)
    if fingerprint and graph.fingerprint != fingerprint:
        raise DatasetError(
            f"{folder}: expected the graph that this work began with (fingerprint "
            f"{fingerprint[:12]}), found {graph.name} ({graph.fingerprint[:12]}): it was replaced "
            "meanwhile; begin again"
        )
    return graph


def inspect_graph(folder: Path) -> tuple[Graph, list[Finding]]:
    """Open and validate a dataset folder; return it with all findings, faults included."""
    folder = Path(folder)
    meta, arrays = _open_arrays(folder)
    check_full(folder, meta, arrays)
    return _graph(folder, meta, arrays), find_all(meta, arrays)


def _open_arrays(folder: Path) -> tuple[GraphMeta, dict[str, NDArray[Any]]]:
    meta = read_meta(folder)
    arrays = map_arrays(folder, meta)
    check_fast(folder, meta, arrays)
    return meta, arrays


def _report(folder: Path, findings: list[Finding]) -> None:
    """Refuse a dataset with a fault, and warn of oddities."""
    for finding in findings:
        text = f"{folder / finding.array}.npy: {finding.text}"
        if finding.fault:
            raise DatasetError(text)
        warnings.warn(text, GraphWarning, stacklevel=3)


def _graph(folder: Path, meta: GraphMeta, arrays: dict[str, NDArray[Any]]) -> Graph:
    sparse = None
    if meta.feature_storage == "sparse":
        sparse = SparseFeatures(
            indptr=arrays["x_indptr"], indices=arrays["x_indices"], data=arrays["x_data"]
        )
    optional = ("x", "y", "edge_weight", "edge_type", "edge_id", "node_type")
    rest: dict[str, Any] = {name: arrays.get(name) for name in optional}
    rest |= {name: np.array(arrays[name]) for name in SPLITS}
    return Graph(
        path=folder.resolve(),
        meta=meta,
        fingerprint=content_fingerprint(folder, meta, arrays),
        x_csr=sparse,
        x_by_type={name: arrays[f"x_{name}"] for name in typed_names(meta)},
        indptr=arrays["indptr"],
        indices=arrays["indices"],
        **rest,
    )


def write_graph(
    folder: Path,
    *,
    name: str,
    indptr: ArrayLike,
    indices: ArrayLike,
    train_idx: ArrayLike,
    val_idx: ArrayLike,
    test_idx: ArrayLike,
    task: Task,
    num_classes: int,
    x: ArrayLike | None = None,
    x_csr: SparseFeatures | None = None,
    y: ArrayLike | None = None,
    feature_dim: int | None = None,
    edge_weight: ArrayLike | None = None,
    edge_type: ArrayLike | None = None,
    edge_id: ArrayLike | None = None,
    node_type: ArrayLike | None = None,
    notes: list[str] | None = None,
    overwrite: bool = False,
) -> Graph:
    """Write arrays as a dataset folder, whole or not at all, and open it (validated).

    Arrays are those of `Graph`'s fields of the same names; lists are taken too. `feature_dim`
    declares the width where there is no `x`, `num_classes` is 0 where there are no labels, and
    `notes` has a line for each decision taken. With `overwrite` an earlier dataset is kept as
    `<folder>.previous`.

    Raises:
        DatasetError: the arrays do not fit together or hold a fault that no training can use, or
            the folder cannot be written.

    Warns:
        GraphWarning: oddities, each with its count; the notes have them too.
    """
    given: dict[str, Any] = {
        "indptr": indptr, "indices": indices, "train_idx": train_idx, "val_idx": val_idx,
        "test_idx": test_idx, "x": x, "y": y, "edge_weight": edge_weight, "edge_type": edge_type,
        "edge_id": edge_id, "node_type": node_type,
    }  # fmt: skip
    if x is None and x_csr is not None:
        given |= {"x_indptr": x_csr.indptr, "x_indices": x_csr.indices, "x_data": x_csr.data}
    arrays = {
        key: _as_array(folder / f"{key}.npy", each)
        for key, each in given.items()
        if each is not None
    }
    num_nodes = len(arrays["indptr"]) - 1
    for key in _IDS:
        if key in arrays:
            _refuse_flags(folder / f"{key}.npy", arrays[key], num_nodes)
    ids = np.int32 if num_nodes <= np.iinfo(np.int32).max else np.int64
    sources = arrays["indices"]
    if sources.size and (sources.min() < 0 or sources.max() > np.iinfo(ids).max):
        raise DatasetError(f"{folder}: expected node ids from 0 to {num_nodes - 1} in indices")
    table = arrays.get("x", arrays.get("x_data"))
    width = table.shape[1] if "x" in arrays and table is not None and table.ndim == 2 else 0
    with Staging(folder, overwrite=overwrite) as staging:
        for key, array in arrays.items():
            staging.save(key, array, _STORED.get(key, np.int64) if key != "indices" else ids)
        return commit_dataset(
            staging,
            name=name,
            num_nodes=num_nodes,
            num_edges=len(sources),
            feature_dim=width or feature_dim or 0,
            feature_dtype="float32" if table is None else row_type_name(table.dtype),
            feature_storage="dense" if x is not None else ("none" if x_csr is None else "sparse"),
            num_classes=num_classes,
            task=task,
            notes=notes or [],
        )


_IDS = ("indptr", "indices", *SPLITS, "edge_id", "x_indptr", "x_indices")
"""Arrays of numbers of nodes, edges or entries, in which flags have no place."""
_STORED: dict[str, Any] = {
    **dict.fromkeys(("x", "x_indices", "x_data")),  # as they are
    "edge_weight": np.float32,
    "edge_type": np.int32,
    "node_type": np.int32,
}
"""Types of arrays in their files, where it is not int64."""


def _as_array(path: Path, values: ArrayLike) -> NDArray[Any]:
    """Return numbers as an array; a list is taken too."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # unequal rows; a tensor with gradients
        raise DatasetError(f"{path}: expected an array of numbers: {one_line(error)}") from None
    if array.ndim == 0 or not (array.dtype.kind in "fiub" or array.dtype == BFLOAT16):
        found = f"one {type(values).__name__}" if array.ndim == 0 else f"values of {array.dtype}"
        raise DatasetError(f"{path}: expected an array of numbers, found {found}")
    return array


def _refuse_flags(path: Path, ids: NDArray[Any], num_nodes: int) -> None:
    """Refuse flags in the place of ids: booleans, or a 0 or 1 for each of several nodes."""
    each = ids.shape == (num_nodes,) and num_nodes > 2 and path.stem in SPLITS
    if ids.dtype.kind == "b" or (each and bool(np.isin(ids, (0, 1)).all())):
        raise DatasetError(
            f"{path}: expected ids, found a flag for each of {len(ids)}; give np.flatnonzero(flags)"
        )


def commit_dataset(staging: Staging, **facts: Any) -> Graph:
    """Validate the staged arrays, write graph.json, and put the folder in its place.

    `facts` are the fields of `GraphMeta` except `fingerprint`. Raises DatasetError where arrays do
    not fit together, or hold a fault that no training can use.
    """
    staging.finish_arrays()
    try:
        meta = codec.decode(GraphMeta, codec.to_plain(facts))
    except codec.CodecError as error:
        raise DatasetError(f"{staging.target}: cannot become a dataset: {error}") from None
    arrays = map_arrays(staging.folder, meta)
    check_fast(staging.folder, meta, arrays)
    check_full(staging.folder, meta, arrays)
    found = find_all(meta, arrays)
    _report(staging.folder, [finding for finding in found if finding.fault])
    meta = dataclasses.replace(
        meta,
        fingerprint=content_fingerprint(staging.folder, meta, arrays),
        notes=[*meta.notes, *(finding.note for finding in found)],
    )
    (staging.folder / META_FILE).write_text(codec.dumps(meta))
    _report(staging.target, found)
    staging.commit()
    return open_graph(staging.target, validate=False)


def check_features(graph: Graph) -> None:
    """Refuse to train on a dataset that only declares the width of its features.

    Raises:
        DatasetError: it is one; the line says what to do.
    """
    if graph.topology_only:
        raise DatasetError(
            f"{graph.path}: expected features to train on, found none; import it with features, or "
            "with --features dense --feature-dim for noise in their place"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphTypes:
    """Types of a graph's edges and nodes, for models of typed graphs."""

    edge_types: list[str]
    """Names in order of their numbers."""
    node_types: list[str]
    widths: list[int]
    """Number of feature columns of each node type."""


def is_typed(workload: Workload) -> bool:
    """Return whether the model reads the types of edges, so that each type is sampled apart."""
    return workload.model == "rgcn"


def types_of(graph: Graph) -> GraphTypes:
    """Return a dataset's types; one without node types has the single type `node`."""
    if graph.edge_type is None:
        raise DatasetError(
            f"{graph.name}: expected edge types (edge_type.npy) for model rgcn, found none; "
            "choose another model"
        )
    count = int(graph.edge_type.max()) + 1
    names = list(graph.meta.edge_types) or [str(number) for number in range(count)]
    if count > len(names):
        raise DatasetError(
            f"{graph.name}: expected edge types from 0 to {len(names) - 1}, as many as graph.json "
            f"names, found {count - 1}"
        )
    if not graph.x_by_type:
        return GraphTypes(edge_types=names, node_types=["node"], widths=[graph.feature_dim])
    node_types = list(graph.meta.node_types)
    widths = [int(graph.x_by_type[name].shape[1]) for name in node_types]
    return GraphTypes(edge_types=names, node_types=node_types, widths=widths)


_RANKED = 1 << 22
"""Nodes that are ranked by type at once: no plan counts copies of all ids."""


def rows_within_types(node_type: NDArray[np.integer], num_types: int) -> NDArray[np.int64]:
    """Return each node's row in the feature table of its type: its rank by id, int64 [N].

    >>> rows_within_types(np.array([0, 1, 0, 0, 1]), 2).tolist()
    [0, 0, 1, 2, 1]
    """
    rows, counts = np.empty(len(node_type), np.int64), np.zeros(num_types, np.int64)
    for first in range(0, len(node_type), _RANKED):
        types, into = (each[first : first + _RANKED] for each in (np.asarray(node_type), rows))
        for number in range(num_types):
            own = np.flatnonzero(types == number)
            into[own] = np.arange(counts[number], counts[number] + len(own))
            counts[number] += len(own)
    return rows
