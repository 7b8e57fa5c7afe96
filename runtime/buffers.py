"""Re-used buffers for the feature rows of batches.

A fresh 12 MB array costs page faults on every batch, a re-used one does not. The ring has a fixed
number of buffers; one that was handed out is free again when nothing refers to its rows any more:
no tensor on them, no view of such a tensor, no gradient graph that saved one. So a buffer can
never be overwritten while in use, however long a caller keeps a batch; a caller that keeps more
batches than the ring has buffers gets fresh memory instead (`overflows` counts it).
"""

import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

SPARE_FRACTION = 0.125
"""Rows added when a buffer grows, so that a slightly larger batch does not grow it again."""


class BufferRing:
    """`count` growing float32 buffers of rows of one width. Thread-safe without a lock.

    Args:
        count: buffers in the ring.
        width: columns of a row.
        pinned: page-locked memory, for copies to a GPU.
    """

    def __init__(self, count: int, width: int, *, pinned: bool = False) -> None:
        self._width = width
        self._pinned = pinned
        self._buffers = [self._allocate(0) for _ in range(count)]
        # Popping and appending a deque are atomic; a weak reference's callback may run anywhere.
        self._free: deque[int] = deque(range(count))  # a stack
        self._in_use: dict[int, weakref.ref[NDArray[np.float32]]] = {}
        self.overflows = 0

    def take(self, rows: int) -> NDArray[np.float32]:
        """A C-contiguous array [rows, width] with undefined content."""
        try:
            slot = self._free.pop()  # the latest returned: no more are ever touched than needed
        except IndexError:
            self.overflows += 1
            return self._allocate(rows)
        if self._buffers[slot].shape[0] < rows:
            self._buffers[slot] = self._allocate(rows + int(rows * SPARE_FRACTION))
        view = self._buffers[slot][:rows]

        def release(gone: Any, slot: int = slot) -> None:
            del gone
            self._in_use.pop(slot, None)
            self._free.append(slot)

        self._in_use[slot] = weakref.ref(view, release)
        return view

    @property
    def num_bytes(self) -> int:
        """Bytes the ring holds now."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def _allocate(self, rows: int) -> NDArray[np.float32]:
        if self._pinned:
            import torch

            return torch.empty((rows, self._width), dtype=torch.float32, pin_memory=True).numpy()
        return np.empty((rows, self._width), np.float32)  # numpy's large arrays get huge pages
