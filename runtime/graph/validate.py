"""What must hold in a dataset: checks that cost nothing, and checks that read the arrays once.

The fast ones (dtypes, shapes, lengths, ends of indptr, the split) run on every open. The full ones
(indptr never falls, indices, types and labels in range) stream through the arrays in chunks.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import DatasetError
from runtime.graph.format import GraphMeta

CHUNK_BYTES = 1 << 25


class GraphWarning(UserWarning):
    """Something in a dataset is usable but probably not what was meant."""


def chunks(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Slices of about `CHUNK_BYTES` along the first axis."""
    row_bytes = max(1, array.nbytes // max(1, len(array)))
    rows = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, len(array), rows):
        yield array[start : start + rows]


def count_overflows(values: NDArray[Any], stored: NDArray[Any]) -> int:
    """How many finite values became infinite where `values` were cast to the type of `stored`."""
    wider = values.dtype.kind == "f" and values.dtype.itemsize > stored.dtype.itemsize
    if not wider or stored.dtype.kind != "f":
        return 0
    lost = np.isinf(stored)
    return int((lost & np.isfinite(values)).sum()) if lost.any() else 0


def check_array(
    path: Path, array: NDArray[Any], dtypes: tuple[str, ...], shape: tuple[int | None, ...]
) -> None:
    """Check dtype and shape; None in `shape` stands for any length.

    Raises:
        DatasetError: with what was expected and what was found.
    """
    shape_fits = array.ndim == len(shape) and all(
        want is None or want == have for want, have in zip(shape, array.shape, strict=True)
    )
    if str(array.dtype) not in dtypes or not shape_fits:
        want = ", ".join("any" if n is None else str(n) for n in shape)
        raise DatasetError(
            f"{path}: expected {' or '.join(dtypes)} of shape [{want}], "
            f"found {array.dtype} of shape {list(array.shape)}"
        )


def check_csc_ends(path: Path, indptr: NDArray[np.int64], num_entries: int) -> None:
    """Check the first and last entry of a pointer array."""
    if indptr[0] != 0 or indptr[-1] != num_entries:
        raise DatasetError(
            f"{path}: expected to run from 0 to the number of entries {num_entries}, "
            f"found {indptr[0]} to {indptr[-1]}; the file is truncated or of another graph"
        )


def check_monotone(path: Path, indptr: NDArray[np.int64]) -> None:
    """Check that a pointer array never falls."""
    rows = CHUNK_BYTES // 8
    for start in range(0, len(indptr) - 1, rows):
        part = indptr[start : start + rows + 1]
        falls = part[1:] < part[:-1]
        if falls.any():
            entry = start + int(falls.argmax())
            raise DatasetError(
                f"{path}: expected values that never fall, found {indptr[entry]} at {entry} "
                f"and then {indptr[entry + 1]}"
            )


def check_range(path: Path, array: NDArray[Any], low: int, high: int, what: str) -> None:
    """Check that every value lies in [low, high)."""
    for part in chunks(array):
        least, most = int(part.min()), int(part.max())
        if least < low or most >= high:
            found = least if least < low else most
            raise DatasetError(f"{path}: expected {what} from {low} to {high - 1}, found {found}")


def check_split(path: Path, ids: NDArray[np.int64], num_nodes: int, *, may_be_empty: bool) -> None:
    """Check that a split's node ids are in range, and that there are some."""
    if ids.size == 0:
        if may_be_empty:
            return
        raise DatasetError(f"{path}: expected at least one training node, found none")
    check_range(path, ids, 0, num_nodes, "node ids")


def check_labels(
    path: Path, y: NDArray[np.int64], meta: GraphMeta, train_idx: NDArray[np.int64]
) -> None:
    """Check label values, and that training nodes have one."""
    high = 2 if meta.task in ("multilabel", "binary") else max(meta.num_classes, 1)
    check_range(path, y, -1, high, "labels")
    if meta.task == "link":
        return
    known = y[train_idx] >= 0
    unknown = int((~known.reshape(len(train_idx), -1).any(axis=1)).sum())
    if unknown:
        raise DatasetError(
            f"{path}: expected a known label for each of {len(train_idx)} training nodes, "
            f"found {unknown} without (-1)"
        )
