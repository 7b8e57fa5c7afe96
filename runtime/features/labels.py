"""Labels of a batch's seeds: reads at random places of a table that is rarely in a cache."""

import typing
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from runtime.intrinsics import prefetch

AHEAD = 32
"""How many seeds ahead a label is asked for."""


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _take(values, ids, out):
    """out[i] = values[ids[i]]; returns the position of the first id out of range, or -1."""
    base = values.ctypes.data
    for i in range(ids.size):
        if i + AHEAD < ids.size:
            prefetch(base + ids[i + AHEAD] * values.itemsize)  # never faults, whatever the id
        if ids[i] < 0 or ids[i] >= values.size:
            return i
        out[i] = values[ids[i]]
    return -1


def take_labels(labels: NDArray[Any], ids: NDArray[np.int64]) -> NDArray[Any]:
    """labels[ids], in a new array.

    Args:
        labels: [num_nodes], or [num_nodes, num_classes] where nodes have several.
        ids: [n] node ids.

    Raises:
        IndexError: an id is not a node's.
    """
    if labels.ndim != 1:
        return np.ascontiguousarray(labels[ids])
    out = np.empty(ids.size, labels.dtype)
    bad = _take(labels, ids, out)
    if bad >= 0:
        raise IndexError(f"expected node ids in [0, {labels.size}), found {ids[bad]}")
    return out
