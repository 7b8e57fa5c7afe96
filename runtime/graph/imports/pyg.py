"""Import of a PyTorch Geometric `Data` or `HeteroData` of torch.save, read with weights_only=True.

Accepted are a `Data`, its `to_dict()`, the tuple that an `InMemoryDataset` of one graph saves
(`(dict or Data, slices, ...)`), and the three `Data` of RandomLinkSplit, which make a link task.
Types of a `HeteroData` keep their names: edge types become `source__relation__destination`.

    edge_index or adj_t; edge_weight (or edge_attr of one column); edge_type; num_nodes
    x (dense, sparse COO or sparse CSR); y; node_type
    train_mask, val_mask, test_mask ([n], or [n, splits]) or train_idx ...
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.graph.csc import EdgeSource, array_edges, csc_edges
from gnnplan.runtime.graph.format import (
    check_csc_ends,
    check_monotone,
    check_range,
    refuse_unreadable,
)
from gnnplan.runtime.graph.imports.inventory import EDGE_DATA, Inventory, Role, looks_like
from gnnplan.runtime.graph.imports.labels import split_fields, split_ids
from gnnplan.runtime.graph.imports.serialized import (
    compressed_columns,
    keeps_order,
    load_torch,
    to_numpy,
    torch_sparse_names,
)
from gnnplan.runtime.graph.imports.source import (
    SPLIT_KEYS,
    EdgeKey,
    ImportOptions,
    RawFeatures,
    RawGraph,
    TypedParts,
    check_num_nodes,
    check_pairs,
    count_ends,
    edge_type_name,
    make_features,
    note_negatives,
    sparse_features,
)
from gnnplan.runtime.graph.imports.tables import as_numbers

LINKS = ("edge_label_index", "pos_edge_label_index")
"""Pairs to predict, also where RandomLinkSplit parts them by label."""
NEGATIVES = "neg_edge_label_index"
EDGE_VALUES = ("edge_weight", "edge_attr", "edge_type")
REASONS = {
    "edge_attr": EDGE_DATA,
    "edge_label_index": "pairs to predict; --task link takes the positive ones for training",
    "edge_label": "labels of edge_label_index",
    "pos_edge_label_index": "pairs to predict; --task link takes them for training",
    "pos_edge_label": "labels of pos_edge_label_index, all of which are links",
    "neg_edge_label_index": "a link task draws its own negatives",
    "neg_edge_label": "a link task draws its own negatives",
    "pos": "positions are no features: concatenate them to x to have them so",
    "node_time": "a dataset has no times",
    "edge_time": EDGE_DATA,
    "time": "a dataset has no times",
    "batch": "of batches of graphs",
    "ptr": "of batches of graphs",
}


def read_pyg(source: Path, scratch: Path, options: ImportOptions) -> RawGraph:
    """Read a file of torch.save, or the folder of a PyG dataset, which has one in processed/."""
    del scratch
    path = _processed_file(source) if source.is_dir() else source
    parts = _parts(path, load_torch(path, _safe_classes()))
    if any(isinstance(key, tuple) for key in parts[0]):
        graph = _TypedReader(path, parts[0], options).read()
    else:
        graph = _Reader(path, parts[0], options).read(parts)
    if source.is_dir():
        graph.name = source.name
        files = sorted(p for p in source.rglob("*") if p.is_file() and p != path)
        graph.inventory.leave(
            f"the graph is that of {path.relative_to(source).as_posix()}",
            *(p.relative_to(source).as_posix() for p in files),
        )
    return graph


def _processed_file(source: Path) -> Path:
    found = [p for p in sorted((source / "processed").glob("*.pt")) if "pre_" not in p.name]
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise DatasetError(
            f"{source}: expected one saved graph processed/*.pt, found {names!s:.200}; name it"
        )
    return found[0]


class _Reader:
    def __init__(self, source: Path, fields: dict[str, Any], options: ImportOptions) -> None:
        self.source = source
        self.fields = {str(k): v for k, v in fields.items() if v is not None}
        self.options = options
        self.inventory = Inventory()
        self.notes: list[str] = []

    def read(self, parts: list[dict[str, Any]]) -> RawGraph:
        """Return the graph; further parts are those of a split of links."""
        named = [str(k) for part in parts for k, v in part.items() if v is not None]
        self.inventory.meet(named)
        features = self._features()
        y = self._take(Role.LABELS, "y")
        edges, implied = self._edges()
        num_nodes = self._num_nodes(features, y, implied)
        split, num_splits = self._split(num_nodes)
        task = "auto"
        if len(parts) > 1 or self.options.task == "link":
            links = self._links(parts)
            if links is not None:
                self.inventory.leave("a split of nodes; that of links is taken", *self._masks())
                split, task, num_splits = links, "link", 1
        node_type = self._take(Role.NODE_TYPES, "node_type")
        _leave_known(self.inventory, named)
        return RawGraph(
            name=self.source.stem,
            num_nodes=num_nodes,
            edges=edges,
            features=features,
            y=y,
            task=task,
            split=split,
            num_splits=num_splits,
            node_type=node_type,
            notes=self.notes,
            inventory=self.inventory,
        )

    def _take(self, role: Role, name: str) -> NDArray[Any] | None:
        if name not in self.fields:
            return None
        self.inventory.use(role, name)
        return to_numpy(self.source, name, self.fields[name], whole=True)

    def _edges(self) -> tuple[EdgeSource, int]:
        """Return the edges, and how many nodes they imply."""
        if "edge_index" not in self.fields:
            name = next((n for n in ("adj_t", "adj") if n in self.fields), None)
            if name is not None:
                return self._adjacency(name)
            found = ", ".join(sorted(self.fields)) or "none"
            raise DatasetError(
                f"{self.source}: expected a Data with edge_index or adj_t, found fields "
                f"{found!s:.200}"
            )
        pairs = to_numpy(self.source, "edge_index", self.fields["edge_index"])
        check_pairs(self.source, "edge_index", pairs)
        self.inventory.use(Role.EDGES, "edge_index")
        for name in ("adj_t", "adj"):
            if name in self.fields:
                self.inventory.leave("the edges are taken from edge_index", name)
        values = self._edge_values(pairs.shape[1])
        return array_edges(pairs[0], pairs[1], **values), count_ends(pairs)

    def _adjacency(self, name: str) -> tuple[EdgeSource, int]:
        """Return the edges of a square matrix: row v of adj_t holds the in-neighbours of v."""
        indptr, indices, weights, shape = compressed_columns(
            self.source, name, self.fields[name], transposed=name == "adj"
        )
        path = self.source / name
        if shape[0] != shape[1] or len(indptr) - 1 != shape[0]:
            raise DatasetError(f"{path}: expected a square matrix, found shape {list(shape)}")
        check_csc_ends(path, indptr, len(indices))
        check_monotone(path, indptr)
        self.inventory.use(Role.EDGES, name)
        transposed, beside = name == "adj", [n for n in EDGE_VALUES if n in self.fields]
        if keeps_order(self.fields[name], transposed=transposed):
            beside = []
        self.inventory.leave(f"of edges whose order {name} does not tell; save edge_index", *beside)
        values = {} if beside else self._edge_values(len(indices))
        if weights is not None and "edge_weight" not in values and not (weights == 1).all():
            values["edge_weight"] = as_numbers(
                self.source / name, weights, np.float32, weights=True
            )
            self.notes.append(f"edge weights: the values of {name}")
        return csc_edges(indptr, indices, **values), shape[0]

    def _edge_values(self, num_edges: int) -> dict[str, NDArray[Any]]:
        out: dict[str, NDArray[Any]] = {}
        attribute = "edge_weight" if "edge_weight" in self.fields else "edge_attr"
        for name, key, role, dtype in (
            (attribute, "edge_weight", Role.WEIGHTS, np.float32),
            ("edge_type", "edge_type", Role.EDGE_TYPES, np.int32),
        ):
            if name not in self.fields:
                continue
            array = to_numpy(self.source, name, self.fields[name], whole=name == "edge_type")
            if array.ndim == 2 and array.shape[1] == 1:
                array = array[:, 0]
            if name == "edge_attr" and array.ndim != 1:
                width = " x ".join(map(str, array.shape[1:]))
                self.inventory.leave(f"{width} values per edge: {EDGE_DATA}", name)
                continue
            if array.shape != (num_edges,):
                raise DatasetError(
                    f"{self.source}: expected {name} with one value per edge ({num_edges}), "
                    f"found shape {list(array.shape)}"
                )
            weights = role is Role.WEIGHTS
            out[key] = as_numbers(self.source / key, array, dtype, weights=weights)
            self.inventory.use(role, name)
        return out

    def _num_nodes(self, features: RawFeatures | None, y: NDArray[Any] | None, implied: int) -> int:
        named = self.fields.get("num_nodes")
        if named is not None:
            self.inventory.use(Role.DESCRIPTION, "num_nodes")
            with refuse_unreadable(self.source, "num_nodes as an integer"):
                return int(named)
        if features is not None:
            return features.num_rows
        if y is not None and y.ndim:
            return len(y)
        return implied

    def _features(self) -> RawFeatures | None:
        if "x" not in self.fields:
            return None
        self.inventory.use(Role.FEATURES, "x")
        return _features(self.source, self.fields["x"])

    def _split(self, num_nodes: int) -> tuple[dict[str, NDArray[Any]] | None, int]:
        out: dict[str, NDArray[Any]] = {}
        count = 1
        for key, names in split_fields(self.fields, "mask", "idx", "index").items():
            self.inventory.leave(f"the split is taken from {names[0]}", *names[1:])
            array = to_numpy(self.source, names[0], self.fields[names[0]])
            out[key], splits = split_ids(names[0], array, num_nodes, index=self.options.split_index)
            count = max(count, splits)
            self.inventory.use(Role.SPLIT, names[0])
        return out or None, count

    def _masks(self) -> list[str]:
        """Name the fields that hold a split of nodes."""
        found = split_fields(self.fields, "mask", "idx", "index").values()
        return [name for names in found for name in names]

    def _links(self, parts: list[dict[str, Any]]) -> dict[str, NDArray[Any]] | None:
        """Return the positive pairs of each part of a split of links."""
        out: dict[str, NDArray[Any]] = {}
        negatives = 0
        for key, fields in zip(SPLIT_KEYS, parts, strict=False):
            name = _pairs_field(fields)
            if name is None:
                continue
            pairs = to_numpy(self.source, name, fields[name])
            check_pairs(self.source, name, pairs)
            pairs = pairs.T
            if (others := fields.get(NEGATIVES)) is not None:
                negatives += to_numpy(self.source, NEGATIVES, others).size // 2
            if name == LINKS[0] and fields.get("edge_label") is not None:
                label = to_numpy(self.source, "edge_label", fields["edge_label"])
                if label.shape != (len(pairs),):
                    raise DatasetError(
                        f"{self.source}: expected edge_label with one label per pair "
                        f"({len(pairs)}), found shape {list(label.shape)}"
                    )
                negatives += int((label <= 0).sum())
                pairs = pairs[label > 0]
                self.inventory.use(Role.SPLIT, "edge_label")
            out[key] = pairs
            self.inventory.use(Role.SPLIT, name)
        note_negatives(self.notes, negatives)
        return out or None


def _pairs_field(fields: dict[str, Any]) -> str | None:
    """Name the field that holds a part's pairs to predict, if it has one."""
    return next((name for name in LINKS if fields.get(name) is not None), None)


def _leave_known(inventory: Inventory, names: Iterable[str], place: str = "") -> None:
    """Say why fields that are known, and not used, are not."""
    for name in names:
        look = looks_like(name)
        reason = REASONS.get(name) or (f"looks like {look}" if look else None)
        if reason is not None:
            inventory.leave_unused(reason, name, place=place)


class _TypedReader:
    """Reader of the stores of a HeteroData, whose nodes are numbered type by type."""

    def __init__(self, source: Path, stores: dict[Any, Any], options: ImportOptions) -> None:
        self.source, self.options = source, options
        self.inventory = Inventory()
        self.edges: dict[EdgeKey, dict[str, Any]] = {}
        self.nodes: dict[str, dict[str, Any]] = {}
        for key, fields in stores.items():
            if key == "_global_store":
                self.inventory.meet(fields or {})
                continue
            known = {str(k): v for k, v in fields.items() if v is not None}
            if isinstance(key, tuple):
                self.edges[key] = known
            else:
                self.nodes[str(key)] = known
            self.inventory.meet(known, _place(key))
        for source_type, _, target in self.edges:
            self.nodes.setdefault(source_type, {})
            self.nodes.setdefault(target, {})

    def read(self) -> RawGraph:
        """Return one graph of all types."""
        pairs = {key: self._pairs(key) for key in self.edges}
        parts = TypedParts(
            source=self.source,
            counts={name: self._count(name, pairs) for name in self.nodes},
            pairs=pairs,
        )
        for key in self.edges:
            weight = self._weight(key, pairs[key].shape[1])
            if weight is not None:
                parts.weights[key] = weight
        num_splits = 1
        for name, fields in self.nodes.items():
            _leave_known(self.inventory, fields.keys() - {"x", "y"}, name)
            if "x" in fields:
                parts.tables[name] = _features(self.source, fields["x"])
                self.inventory.use(Role.FEATURES, "x", place=name)
            if "y" in fields:
                parts.y[name] = to_numpy(self.source, f"y of {name}", fields["y"], whole=True)
                self.inventory.use(Role.LABELS, "y", place=name)
                parts.split[name], count = self._split(name, parts.counts[name])
                num_splits = max(num_splits, count)
        return parts.join(
            self.options,
            name=self.source.stem,
            num_splits=num_splits,
            inventory=self.inventory,
        )

    def _pairs(self, key: EdgeKey) -> NDArray[Any]:
        fields = self.edges[key]
        name = f"edge_index of {_place(key)}"
        if "edge_index" not in fields:
            raise DatasetError(f"{self.source}: expected {name}, found none")
        pairs = to_numpy(self.source, name, fields["edge_index"])
        check_pairs(self.source, name, pairs)
        self.inventory.use(Role.EDGES, "edge_index", place=_place(key))
        _leave_known(self.inventory, fields.keys() - {"edge_weight", "edge_attr"}, _place(key))
        return pairs

    def _weight(self, key: EdgeKey, length: int) -> NDArray[np.float32] | None:
        """Return the weights of a type's edges; None where it has no single value per edge."""
        fields, place = self.edges[key], _place(key)
        name = "edge_weight" if "edge_weight" in fields else "edge_attr"
        if name not in fields:
            return None
        array = to_numpy(self.source, name, fields[name])
        if array.ndim == 0 or len(array) != length:
            raise DatasetError(
                f"{self.source}: expected {name} of {place} with one row per edge ({length}), "
                f"found shape {list(array.shape)}"
            )
        if array.size != length:
            self.inventory.leave(f"several values per edge: {EDGE_DATA}", name, place=place)
            return None
        self.inventory.use(Role.WEIGHTS, name, place=place)
        return as_numbers(self.source / name, array.reshape(-1), np.float32, weights=True)

    def _count(self, name: str, pairs: dict[EdgeKey, NDArray[Any]]) -> int:
        """Return how many nodes of a type there are: as said, by rows, or by the edges' ends."""
        fields = self.nodes[name]
        if "num_nodes" in fields:
            self.inventory.use(Role.DESCRIPTION, "num_nodes", place=name)
            with refuse_unreadable(self.source, f"num_nodes of {name} as an integer"):
                return int(fields["num_nodes"])
        for field in ("x", "y"):
            if getattr(fields.get(field), "ndim", 0):
                return len(fields[field])
        ends = [
            count_ends(found[row])
            for key, found in pairs.items()
            for row in (0, 1)
            if key[2 * row] == name
        ]
        return max(ends, default=0)

    def _split(self, name: str, count: int) -> tuple[dict[str, NDArray[Any]], int]:
        """Return the ids of the chosen split of a type's nodes, and how many splits there are."""
        out: dict[str, NDArray[Any]] = {}
        most = 1
        for key, names in split_fields(self.nodes[name], "mask", "idx", "index").items():
            array = to_numpy(self.source, names[0], self.nodes[name][names[0]])
            out[key], splits = split_ids(names[0], array, count, index=self.options.split_index)
            most = max(most, splits)
            self.inventory.use(Role.SPLIT, names[0], place=name)
            self.inventory.leave(f"the split is taken from {names[0]}", *names[1:], place=name)
        return out, most


def _place(key: Any) -> str:
    return edge_type_name(key) if isinstance(key, tuple) else str(key)


def _safe_classes() -> list[Any]:
    from torch_geometric.data import Data, HeteroData, storage
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr

    parts = ("AttrType", "BaseStorage", "EdgeStorage", "GlobalStorage", "NodeStorage")
    stored = [getattr(storage, name) for name in parts]
    return [Data, HeteroData, DataEdgeAttr, DataTensorAttr, *stored, *torch_sparse_names()]


def _parts(source: Path, saved: Any) -> list[dict[str, Any]]:
    """Return the fields of the one graph, or of the three parts of a split of its links."""
    value = saved
    if isinstance(saved, list | tuple) and [v for v in saved[1:] if hasattr(v, "edge_types")]:
        raise DatasetError(
            f"{source}: expected one HeteroData, found {len(saved)}: links between typed nodes are "
            "not built; save one of them, or the three Data of RandomLinkSplit"
        )
    several = isinstance(saved, list | tuple) and all(hasattr(v, "edge_index") for v in saved)
    if several and len(saved) > 1:
        return _link_parts(source, list(saved))
    if isinstance(saved, tuple) and len(saved) > 1:
        value, slices = saved[:2]
        if isinstance(slices, dict) and any(len(s) > 2 for s in slices.values()):
            raise DatasetError(f"{source}: expected one graph, found a dataset of several")
    elif several and saved:
        value = saved[0]
    return [_fields(source, value)]


def _link_parts(source: Path, saved: list[Any]) -> list[dict[str, Any]]:
    parts = [_fields(source, value) for value in saved]
    if len(parts) != 3 or any(_pairs_field(part) is None for part in parts):
        raise DatasetError(
            f"{source}: expected one Data, or the three of RandomLinkSplit with edge_label_index, "
            f"found {len(parts)}; save each graph in a file of its own"
        )
    return parts


def _fields(source: Path, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    with refuse_unreadable(source, "a torch_geometric Data object"):
        if hasattr(value, "to_dict"):
            return value.to_dict()
    raise DatasetError(
        f"{source}: expected a torch_geometric Data object or a dict of tensors, "
        f"found {type(value).__name__}"
    )


def _features(source: Path, x: Any) -> RawFeatures:
    import torch

    compressed = (torch.sparse_csr, torch.sparse_csc)
    if isinstance(x, torch.Tensor) and x.layout in (torch.sparse_coo, *compressed):
        with refuse_unreadable(source, "x as a sparse tensor of two axes"):
            import scipy.sparse as sp

            check_num_nodes(int(x.shape[0]))
            coo = (x if x.layout == torch.sparse_coo else x.to_sparse_coo()).coalesce()
            place, shape = coo.indices().numpy(), (int(x.shape[0]), int(x.shape[1]))
            for axis in (0, 1):
                check_range(source / "x", place[axis], 0, shape[axis], "sparse positions")
            csr = sp.csr_matrix((coo.values().numpy(), (place[0], place[1])), shape)
        return sparse_features(csr)
    return make_features(source, "x", to_numpy(source, "x", x))
