"""Import of .npz packs: one archive with a CSC topology, features, labels and masks.

Keys: `indptr`, `indices`; `x`, or `x_indptr`, `x_indices`, `x_data`, `x_shape`; `y`; `train_mask`,
`val_mask`, `test_mask` (bool [n]), or `train_masks` ... (bool [splits, n]); `meta` (JSON text).
All but the topology are optional.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import DatasetError
from runtime.graph.archive import extract_npz
from runtime.graph.csc import csc_edges
from runtime.graph.dataset import SparseFeatures
from runtime.graph.reading import reading
from runtime.graph.source import SPLIT_KEYS, ImportOptions, RawFeatures, RawGraph
from runtime.graph.validate import check_csc_ends, check_monotone, check_range


def read_npz(source: Path, scratch: Path, options: ImportOptions) -> RawGraph:
    """Read a pack.

    Raises:
        DatasetError: not such an archive, or its arrays do not fit together.
    """
    arrays = extract_npz(source, scratch)
    missing = [key for key in ("indptr", "indices") if key not in arrays]
    if missing:
        raise DatasetError(
            f"{source}: expected an .npz pack with indptr and indices, found no {missing[0]!r} "
            f"among {', '.join(sorted(arrays)) or 'its members'!s:.200}"
        )
    indptr, indices = arrays["indptr"], arrays["indices"]
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise DatasetError(
            f"{source}: expected indices as a row of integers, found {indices.dtype} of shape "
            f"{list(indices.shape)}"
        )
    indptr = _pointers(source, "indptr", indptr, len(indices))
    num_nodes = len(indptr) - 1
    meta = _meta(source, arrays.get("meta"))
    y = arrays.get("y")
    return RawGraph(
        name=str(meta.get("name") or source.stem),
        num_nodes=num_nodes,
        edges=csc_edges(indptr, indices),
        features=_features(source, arrays),
        y=y,
        task=_task(meta, y),
        num_classes=_count(meta.get("num_classes")),
        split=_split(source, arrays, options.split_index),
    )


def _pointers(source: Path, name: str, indptr: NDArray[Any], num_entries: int) -> NDArray[np.int64]:
    """A pointer array in this machine's integers, checked."""
    if indptr.ndim != 1 or indptr.dtype.kind not in "iu" or len(indptr) < 1:
        raise DatasetError(
            f"{source}: expected {name} as a row of integers, found {indptr.dtype} of shape "
            f"{list(indptr.shape)}"
        )
    path, pointers = source / name, indptr.astype(np.int64, copy=False)
    check_csc_ends(path, pointers, num_entries)
    check_monotone(path, pointers)
    return pointers


def _meta(source: Path, text: NDArray[Any] | None) -> dict[str, Any]:
    if text is None:
        return {}
    with reading(source, "JSON text as member 'meta'"):
        meta = json.loads(str(text))
    if not isinstance(meta, dict):
        raise DatasetError(f"{source}: expected member 'meta' to be a JSON object")
    return meta


def _task(meta: dict[str, Any], y: NDArray[Any] | None) -> str:
    if meta.get("multilabel") is True and y is not None and y.ndim == 2:
        return "multilabel"
    two = _count(meta.get("num_classes")) == 2
    return "binary" if two and meta.get("metric") == "ROC-AUC" else "auto"


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 31 else 0


def _features(source: Path, arrays: dict[str, NDArray[Any]]) -> RawFeatures | None:
    if "x" in arrays:
        x = arrays["x"]
        if x.ndim != 2:
            raise DatasetError(f"{source}: expected x of two axes, found shape {list(x.shape)}")
        return RawFeatures(dim=x.shape[1], dense=x)
    if "x_indptr" not in arrays:
        return None
    with reading(source, "x_indices, x_data and x_shape beside x_indptr"):
        indices, data, shape = (arrays[f"x_{key}"] for key in ("indices", "data", "shape"))
        rows, dim = (int(n) for n in shape.reshape(-1)[:3])
    if indices.ndim != 1 or indices.dtype.kind not in "iu" or data.shape != indices.shape:
        raise DatasetError(f"{source}: expected x_indices and x_data of one equal length")
    indptr = _pointers(source, "x_indptr", arrays["x_indptr"], len(indices))
    if rows != len(indptr) - 1:
        raise DatasetError(f"{source}: expected {len(indptr) - 1} rows in x_shape, found {rows}")
    check_range(source / "x_indices", indices, 0, dim, "feature columns")
    return RawFeatures(dim=dim, csr=SparseFeatures(indptr=indptr, indices=indices, data=data))


def _split(
    source: Path, arrays: dict[str, NDArray[Any]], index: int
) -> dict[str, NDArray[Any]] | None:
    many = f"{SPLIT_KEYS[0]}_masks"
    if index and many not in arrays:
        raise DatasetError(f"{source}: expected several splits for split {index}, found one")
    if index:
        if not 0 <= index < len(arrays[many]):
            raise DatasetError(
                f"{source}: expected a split from 0 to {len(arrays[many]) - 1}, found {index}"
            )
        with reading(source, "train_masks, val_masks and test_masks"):
            return {key: arrays[f"{key}_masks"][index] for key in SPLIT_KEYS}
    if "train_mask" not in arrays:
        return None
    return {key: arrays[f"{key}_mask"] for key in SPLIT_KEYS if f"{key}_mask" in arrays}
