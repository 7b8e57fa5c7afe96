"""Masks and lists of node ids, told apart by name and values.

A mask is an array of one 0/1 flag per node of any numeric type; a list holds node ids. What is
named a mask must be one. Another array is a mask only if its values cannot be ids: one value per
node, all 0 or 1, so that ids would be repeated.
"""

from collections.abc import Container
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import DatasetError

_STEMS = {"train": ("train",), "val": ("val", "valid"), "test": ("test",)}


def split_fields(names: Container[str], *kinds: str) -> dict[str, list[str]]:
    """Names of arrays of train, val and test: each stem with each kind, such as `train_mask`."""
    found = {
        key: [f"{stem}_{kind}" for stem in stems for kind in kinds if f"{stem}_{kind}" in names]
        for key, stems in _STEMS.items()
    }
    return {key: fields for key, fields in found.items() if fields}


def split_ids(
    name: str, array: NDArray[Any], num_nodes: int, *, index: int = 0, splits_first: bool = False
) -> tuple[NDArray[np.int64], int]:
    """Node ids that a mask or a list of ids stands for, and how many splits the array holds.

    Args:
        name: of the array in its source; decides whether it must be a mask.
        array: flags [n], flags of several splits [n, splits] or [splits, n], ids [k], or pairs
            [k, 2] of a link task.
        num_nodes: n.
        index: which of several splits.
        splits_first: which axis counts the splits where both are n long.

    Raises:
        DatasetError: neither, or both; one line that says what to change.
    """
    named_mask = "mask" in name.lower()
    if array.dtype.kind not in "fiub":
        raise DatasetError(f"{name}: expected flags or node ids, found values of {array.dtype}")
    if not named_mask and array.dtype.kind != "b":
        return _list_or_flags(name, array, num_nodes), 1
    if array.ndim == 2:
        flags, count = _one_split(name, array, num_nodes, index, splits_first)
    else:
        flags, count = array, 1
    if flags.shape != (num_nodes,):
        raise DatasetError(
            f"{name}: expected one flag per node ({num_nodes}), found shape {list(array.shape)}"
            + ("" if array.dtype.kind == "b" else "; node ids are named train_idx, val_idx ...")
        )
    if not are_flags(flags):
        raise DatasetError(
            f"{name}: expected one flag of 0 or 1 per node, found other values; name it "
            f"{name.lower().replace('mask', 'idx')} if these are node ids"
        )
    return np.flatnonzero(flags), count


def are_flags(values: NDArray[Any]) -> bool:
    """Whether all values are 0 or 1 (or boolean)."""
    return values.dtype.kind == "b" or bool(np.isin(values, (0, 1)).all())


def _list_or_flags(name: str, array: NDArray[Any], num_nodes: int) -> NDArray[np.int64]:
    if array.shape == (num_nodes,) and num_nodes > 1 and are_flags(array):
        repeated = len(np.unique(array)) < len(array)
        if repeated:
            return np.flatnonzero(array)
    if array.dtype.kind not in "iu":
        raise DatasetError(
            f"{name}: expected integer node ids or one flag of 0 or 1 per node ({num_nodes}), "
            f"found {array.dtype} of shape {list(array.shape)}"
        )
    if array.ndim == 2 and 1 in array.shape:
        array = array.reshape(-1)
    return array.astype(np.int64)


def _one_split(
    name: str, array: NDArray[Any], num_nodes: int, index: int, splits_first: bool
) -> tuple[NDArray[Any], int]:
    rows, columns = array.shape
    by_row = columns == num_nodes and (splits_first or rows != num_nodes)
    if not by_row and rows != num_nodes:
        raise DatasetError(
            f"{name}: expected one flag per node ({num_nodes}), found shape {list(array.shape)}"
        )
    count = rows if by_row else columns
    if not 0 <= index < count:
        raise DatasetError(f"{name}: expected a split from 0 to {count - 1}, found {index}")
    return (array[index] if by_row else array[:, index]), count
