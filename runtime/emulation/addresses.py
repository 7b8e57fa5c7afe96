"""Addresses that an emulated GPU's kernels use: each lies in its memory, or in what it may reach.

The interpreter reads and writes wherever a pointer leads; on a GPU a stray one ends the process.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray


class AddressError(RuntimeError):
    """A kernel's pointer leads where its GPU cannot read or write."""


class Reachable:
    """The ranges of bytes that kernels may use, for one launch.

    Args:
        ranges: first address and number of bytes of each; they may overlap.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        kept = np.array(sorted(each for each in ranges if each[1]), np.uint64).reshape(-1, 2)
        self._starts = kept[:, 0]
        self._ends = np.maximum.accumulate(kept[:, 0] + kept[:, 1])

    def check(
        self, pointers: NDArray[Any], mask: NDArray[Any] | None, size: int, verb: str
    ) -> None:
        """Refuse accesses beyond the ranges.

        Args:
            pointers: addresses.
            mask: which of them are used; None: all.
            size: bytes at each.
            verb: what is done there, for the error.

        Raises:
            AddressError: an access begins or ends outside.
        """
        used = np.asarray(pointers, np.uint64).reshape(-1)
        if mask is not None:
            used = used[np.broadcast_to(mask, np.shape(pointers)).reshape(-1).astype(bool)]
        if not used.size:
            return
        place = np.searchsorted(self._starts, used, side="right")
        known = np.concatenate([np.zeros(1, np.uint64), self._ends])
        stray = used + np.uint64(size) > known[place]
        if stray.any():
            raise AddressError(
                f"a kernel {verb} {size} bytes at {int(used[stray][0]):#x}, which is neither the "
                "emulated GPU's memory nor page-locked nor a peer's mapped memory "
                f"({int(stray.sum())} of {used.size} accesses)"
            )


class CheckedMemory:
    """The interpreter's own access to memory, with every address checked while a kernel runs."""

    def __init__(self, interpreter: Any) -> None:
        self._interpreter = interpreter
        self.reachable: Reachable | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._interpreter, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        """Read at addresses."""
        self._check(pointers, mask, np.dtype(dtype).itemsize, "reads")
        return self._interpreter.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, values: Any, mask: Any) -> Any:
        """Write at addresses."""
        self._check(pointers, mask, values.dtype.itemsize, "writes")
        return self._interpreter.store(pointers, values, mask)

    def atomic_rmw(self, operation: Any, pointers: Any, values: Any, mask: Any, sem: Any) -> Any:
        """Change values at addresses."""
        self._check(pointers, mask, values.dtype.itemsize, "changes")
        return self._interpreter.atomic_rmw(operation, pointers, values, mask, sem)

    def atomic_cas(self, pointers: Any, expected: Any, values: Any, sem: Any) -> Any:
        """Exchange values at addresses."""
        self._check(pointers, None, values.dtype.itemsize, "changes")
        return self._interpreter.atomic_cas(pointers, expected, values, sem)

    def _check(self, pointers: Any, mask: Any, size: int, verb: str) -> None:
        if self.reachable is not None:
            self.reachable.check(pointers, mask, size, verb)
