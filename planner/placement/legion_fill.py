"""Which GPU of a clique holds which row and list (formulas 2.5), each within its own bytes."""

import typing
from collections.abc import Sequence

import numba
import numpy as np
from numpy.typing import NDArray


def deal_rows(queue: NDArray[np.int64], num_devices: int) -> list[NDArray[np.int64]]:
    """Rank r to GPU r mod K_g, slot r div K_g ([L5]); as many to each, so what is over stays out.

    Args:
        queue: ids, hottest first.
        num_devices: K_g.

    Example:
        >>> [ids.tolist() for ids in deal_rows(np.array([7, 3, 5, 1, 9]), 2)]
        [[7, 5], [3, 1]]
    """
    full = len(queue) // num_devices * num_devices
    return [queue[g:full:num_devices] for g in range(num_devices)]


def fill_lists(
    queue: NDArray[np.int64], sizes: NDArray[np.int64], free_bytes: Sequence[int]
) -> list[NDArray[np.int64]]:
    """Each list to the GPU with most free bytes; one that fits none is left out ([C9]).

    Args:
        queue: ids, in the order they are placed.
        sizes: bytes of each list, of the same shape.
        free_bytes: of each GPU.

    Returns:
        Ids each GPU holds, in order.
    """
    free = np.array(free_bytes, np.int64)
    device = _fill(sizes.astype(np.int64), free)
    return [queue[device == g] for g in range(len(free))]


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _fill(sizes: np.ndarray, free: np.ndarray) -> np.ndarray:
    device = np.full(sizes.size, -1, np.int16)
    for i in range(sizes.size):
        best = 0
        for g in range(1, free.size):
            if free[g] > free[best]:
                best = g
        if free.size and sizes[i] <= free[best]:
            free[best] -= sizes[i]
            device[i] = best
    return device
