"""Import of a PyTorch Geometric `Data` saved with torch.save, read with weights_only=True.

Accepted: a `Data` object, its `to_dict()`, or the tuple an `InMemoryDataset` of one graph saves
(`(dict or Data, slices, ...)`). Read are `edge_index` (needed), `x` (dense, sparse COO or sparse
CSR), `y`, `num_nodes`, `edge_weight` (or `edge_attr` of one column), `edge_type`, `node_type`, and
the split as `train_mask`, `val_mask`, `test_mask` ([n], or [n, splits]) or `train_idx` ... .
Everything else is left out. `HeteroData` and `SparseTensor` are refused.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import DatasetError
from runtime.graph.csc import array_edges
from runtime.graph.dataset import SparseFeatures
from runtime.graph.memory import check_num_nodes
from runtime.graph.reading import reading
from runtime.graph.source import SPLIT_KEYS, ImportOptions, RawFeatures, RawGraph
from runtime.graph.tensors import load_torch, to_numpy
from runtime.graph.validate import check_range


def read_pyg(source: Path, scratch: Path, options: ImportOptions) -> RawGraph:
    """Read a saved `Data`.

    Raises:
        DatasetError: damaged, holds other classes, or has no edge_index.
    """
    del scratch
    fields = _fields(source, load_torch(source, _safe_classes()))
    if "edge_index" not in fields:
        raise DatasetError(
            f"{source}: expected a Data with edge_index, found fields "
            f"{', '.join(sorted(map(str, fields))) or 'none'!s:.200}"
        )
    pairs = to_numpy(source, "edge_index", fields["edge_index"])
    if pairs.ndim != 2 or pairs.shape[0] != 2 or pairs.dtype.kind not in "iu":
        raise DatasetError(
            f"{source}: expected edge_index of integers [2, edges], found {pairs.dtype} of shape "
            f"{list(pairs.shape)}"
        )
    features = _features(source, fields.get("x"))
    y = to_numpy(source, "y", fields["y"]) if fields.get("y") is not None else None
    types = fields.get("node_type")
    return RawGraph(
        name=source.stem,
        num_nodes=_num_nodes(source, fields, features, y, pairs),
        edges=array_edges(pairs[0], pairs[1], **_edge_values(source, fields, pairs.shape[1])),
        features=features,
        y=y,
        split=_split(source, fields, options.split_index),
        node_type=None if types is None else to_numpy(source, "node_type", types),
    )


def _safe_classes() -> list[Any]:
    from torch_geometric.data import Data
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import (
        BaseStorage,
        EdgeStorage,
        GlobalStorage,
        NodeStorage,
    )

    return [
        Data,
        DataEdgeAttr,
        DataTensorAttr,
        BaseStorage,
        EdgeStorage,
        GlobalStorage,
        NodeStorage,
    ]


def _fields(source: Path, saved: Any) -> dict[str, Any]:
    value = saved
    if isinstance(saved, tuple) and len(saved) > 1:
        value, slices = saved[:2]
        if isinstance(slices, dict) and any(len(s) > 2 for s in slices.values()):
            raise DatasetError(f"{source}: expected one graph, found a dataset of several")
    if isinstance(value, dict):
        return value
    with reading(source, "a torch_geometric Data object"):
        if hasattr(value, "to_dict"):
            return value.to_dict()
    raise DatasetError(
        f"{source}: expected a torch_geometric Data object or a dict of tensors, "
        f"found {type(value).__name__}"
    )


def _num_nodes(
    source: Path,
    fields: dict[str, Any],
    features: RawFeatures | None,
    y: NDArray[Any] | None,
    pairs: NDArray[Any],
) -> int:
    named = fields.get("num_nodes")
    if named is not None:
        with reading(source, "num_nodes as an integer"):
            return int(named)
    if features is not None:
        return features.num_rows
    if y is not None and y.ndim:
        return len(y)
    return int(pairs.max(initial=-1)) + 1


def _features(source: Path, x: Any) -> RawFeatures | None:
    import torch

    if x is None:
        return None
    if isinstance(x, torch.Tensor) and x.layout in (torch.sparse_coo, torch.sparse_csr):
        with reading(source, "x as a sparse tensor of two axes"):
            import scipy.sparse as sp

            check_num_nodes(int(x.shape[0]))
            coo = (x if x.layout == torch.sparse_coo else x.to_sparse_coo()).coalesce()
            place, shape = coo.indices().numpy(), (int(x.shape[0]), int(x.shape[1]))
            for axis in (0, 1):
                check_range(source / "x", place[axis], 0, shape[axis], "sparse positions")
            csr = sp.csr_matrix((coo.values().numpy(), (place[0], place[1])), shape)
        return RawFeatures(
            dim=shape[1],
            csr=SparseFeatures(
                indptr=csr.indptr.astype(np.int64), indices=csr.indices, data=csr.data
            ),
        )
    table = to_numpy(source, "x", x)
    if table.ndim != 2:
        raise DatasetError(f"{source}: expected x of two axes, found shape {list(table.shape)}")
    return RawFeatures(dim=table.shape[1], dense=table)


def _edge_values(source: Path, fields: dict[str, Any], num_edges: int) -> dict[str, NDArray[Any]]:
    out: dict[str, NDArray[Any]] = {}
    weight = fields.get("edge_weight", fields.get("edge_attr"))
    for name, value, dtype in (
        ("edge_weight", weight, np.float32),
        ("edge_type", fields.get("edge_type"), np.int32),
    ):
        if value is None:
            continue
        array = to_numpy(source, name, value)
        if array.ndim == 2 and array.shape[1] == 1:
            array = array[:, 0]
        if array.ndim == 2 and "edge_weight" not in fields:
            continue  # edge features of several columns have no place in the dataset
        if array.shape != (num_edges,):
            raise DatasetError(
                f"{source}: expected {name} with one value per edge ({num_edges}), "
                f"found shape {list(array.shape)}"
            )
        out[name] = array.astype(dtype)
    return out


def _split(source: Path, fields: dict[str, Any], index: int) -> dict[str, NDArray[Any]] | None:
    out: dict[str, NDArray[Any]] = {}
    for key in SPLIT_KEYS:
        for suffix in ("mask", "idx"):
            value = fields.get(f"{key}_{suffix}")
            if value is None:
                continue
            array = to_numpy(source, f"{key}_{suffix}", value)
            if array.ndim == 2 and array.dtype.kind == "b":
                if not 0 <= index < array.shape[1]:
                    raise DatasetError(
                        f"{source}: expected a split from 0 to {array.shape[1] - 1}, found {index}"
                    )
                array = array[:, index]
            out[key] = array
    return out or None
