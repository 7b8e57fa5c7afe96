"""Bytes of a bulk: a ledger of what is allocated."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Ledger:
    """Allocates arrays and counts the bytes that live at once; `free` what is needed no more."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0

    def empty(self, size: int, dtype: Any) -> NDArray[Any]:
        """An uninitialised array of one dimension."""
        array = np.empty(size, dtype=dtype)
        self.live_bytes += array.nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return array

    def trim(self, array: NDArray[Any], size: int) -> NDArray[Any]:
        """The same array cut to its first entries; the rest goes back to the allocator."""
        self.live_bytes -= array.nbytes
        array.resize(size, refcheck=False)
        self.live_bytes += array.nbytes
        return array

    def free(self, *arrays: NDArray[Any]) -> None:
        """Count arrays as gone; the caller drops its references."""
        self.live_bytes -= sum(array.nbytes for array in arrays)
