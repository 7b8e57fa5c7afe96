"""Bytes of a bulk: a ledger of what is allocated, and what that predicts for another k.

At every moment the arrays of a stack are sums over its batches, linear in k; beside them there are
the relabelling table and scratch, which is as long as the longest row and does not grow with k. So
the moments of a pilot of a few batches tell the peak of any stack.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEADROOM = 1.15
"""Over the prediction when k is cut to a budget: batches vary, and the first stack's buffers are
sized by a pilot of one batch."""


class Ledger:
    """Allocates arrays and counts the bytes that live at once; `free` what is needed no more."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.scratch_bytes = 0
        self.moments: list[tuple[int, int]] = []
        """(stack, scratch) in bytes after every allocation."""

    def empty(self, size: int, dtype: Any) -> NDArray[Any]:
        """An uninitialised array, part of the stack."""
        array = np.empty(size, dtype=dtype)
        self.note(array.nbytes)
        return array

    def note(self, num_bytes: int) -> None:
        """Count what was allocated elsewhere, or is gone where negative."""
        self.live_bytes += num_bytes
        self.moments.append((self.live_bytes, self.scratch_bytes))

    def scratch(self, size: int, dtype: Any) -> NDArray[Any]:
        """An array of zeros whose size does not grow with the stack."""
        array = np.zeros(size, dtype=dtype)
        self.scratch_bytes += array.nbytes
        self.moments.append((self.live_bytes, self.scratch_bytes))
        return array

    def free_scratch(self) -> None:
        """Count all scratch as gone; the caller drops its references."""
        self.scratch_bytes = 0

    def trim(self, array: NDArray[Any], size: int) -> NDArray[Any]:
        """The same array cut to its first entries; the rest goes back to the allocator."""
        self.live_bytes -= array.nbytes
        array.resize(size, refcheck=False)
        self.live_bytes += array.nbytes
        return array

    def free(self, *arrays: NDArray[Any] | None) -> None:
        """Count arrays as gone; the caller drops its references."""
        self.live_bytes -= sum(array.nbytes for array in arrays if array is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class BulkBytes:
    """What stacks of one sampler take."""

    table_bytes: int
    """The thread's relabelling table and edge scratch, whatever k is."""
    moments: tuple[tuple[float, int], ...]
    """(bytes per batch of the stack, bytes of scratch) at each moment of sampling."""

    @staticmethod
    def of(ledger: Ledger, table_bytes: int, num_batches: int) -> "BulkBytes":
        """From a stack that has been sampled."""
        moments = tuple((live / num_batches, scratch) for live, scratch in set(ledger.moments))
        return BulkBytes(table_bytes=table_bytes, moments=moments)

    def peak_bytes(self, num_batches: int) -> int:
        """Predicted peak of a stack of k batches."""
        parts = (num_batches * batch + scratch for batch, scratch in self.moments)
        return self.table_bytes + int(max(parts))

    def largest_stack(self, budget_bytes: int) -> int:
        """The most batches that fit a budget with headroom; 0 where not even one does."""
        room = budget_bytes - self.table_bytes
        fits = ((room - scratch) / (HEADROOM * max(batch, 1)) for batch, scratch in self.moments)
        return max(0, int(min(fits)))


def object_bytes(num_batches: int, num_blocks: int) -> int:
    """Bytes of the Python objects around the arrays, as tracemalloc counts them."""
    return 800 * num_batches + 450 * num_blocks
