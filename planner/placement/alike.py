"""Own lists of devices that hold the same rows: one array for all, gone over once.

Devices whose memories hold everything, or everything hot, hold the same; of a graph of 100 M nodes
a list is nearly a gigabyte.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FEW = 64
"""Ids that are compared before all are."""


def repeated(ids: NDArray[np.int64], times: int) -> NDArray[np.int64]:
    """The ids `times` times, shape [times, len(ids)], without a copy; to be read only.

    Like any array to kernels that tell arrays that may be written to from others.
    """
    row = np.ascontiguousarray(ids)
    return np.lib.stride_tricks.as_strided(row, (times, row.size), (0, row.strides[0]))


def memory_of(ids: NDArray[Any]) -> Hashable:
    """What is equal where two lists are the same memory: they are equal then, too."""
    return ids.ctypes.data, ids.shape, ids.strides, ids.dtype.str


def first_alike(own: Sequence[NDArray[Any]]) -> list[int]:
    """The first device that holds what each one does, by content.

    >>> a = np.array([1, 2])
    >>> first_alike([a, np.array([2, 1]), a, np.array([1, 2])])
    [0, 1, 0, 0]
    """
    known: dict[Hashable, int] = {}
    firsts: list[int] = []
    for g, ids in enumerate(own):
        memory = memory_of(ids)
        if memory not in known:
            known[memory] = next((h for h in firsts if h != g and _equal(own[h], ids)), g)
        firsts.append(known[memory])
    return firsts


def _equal(one: NDArray[Any], other: NDArray[Any]) -> bool:
    few = slice(0, FEW)  # lists that differ do so at once, as a rule
    return (
        one.size == other.size
        and bool(np.array_equal(one[few], other[few]))
        and bool(np.array_equal(one, other))
    )
