"""CSR features on the host: rows stay sparse in the shared mapping and are filled in when read."""

import typing

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.features.gather import in_ranges
from gnnplan.runtime.features.tier import AbstractTier, Counters


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _fill_rows(indptr, indices, data, slots, positions, out, first, last):
    """Zero row positions[i] of out, then write CSR row slots[i]; returns entries, -1 if bad."""
    num_entries = 0
    for i in range(first, last):
        row = out[positions[i]]
        row[:] = 0
        begin, end = indptr[slots[i]], indptr[slots[i] + 1]
        for e in range(begin, end):
            column = indices[e]
            if column < 0 or column >= row.size:
                return -1
            row[column] = data[e]
        num_entries += end - begin
    return num_entries


class SparseHost(AbstractTier):
    """Dense rows out of CSR features (`x_indptr`, `x_indices`, `x_data`)."""

    kind = "host"

    def __init__(
        self,
        indptr: NDArray[np.int64],
        indices: NDArray[np.int32] | NDArray[np.int64],
        data: NDArray[np.float32] | NDArray[np.float16],
        *,
        threads: int = 1,
    ) -> None:
        self._arrays = tuple(np.asarray(a).view(np.ndarray) for a in (indptr, indices, data))
        self._threads = threads
        self._entry_bytes = indices.dtype.itemsize + data.dtype.itemsize

    @property
    def resident_bytes(self) -> int:
        """None: the mapping is shared."""
        return 0

    def read(
        self,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        counts: NDArray[np.int64],
        out: NDArray[np.float32],
        counters: Counters,
    ) -> None:
        """See `AbstractTier.read`; bytes are those of the entries read."""
        del counts
        indptr, indices, data = self._arrays
        num_rows = indptr.shape[0] - 1
        if slots.size and not (slots.min() >= 0 and slots.max() < num_rows):
            raise IndexError(f"expected rows in [0, {num_rows}), found {slots.max()}")
        entries: list[int] = []

        def work(first: int, last: int) -> None:
            args = (indptr, indices, data, slots, positions, out, first, last)
            entries.append(int(_fill_rows(*args)))

        in_ranges(work, slots.size, self._threads)
        if min(entries) < 0:
            raise DatasetError(f"x_indices: expected columns in [0, {out.shape[1]})")
        counters.add_rows(self.kind, slots.size, sum(entries) * self._entry_bytes)

    def close(self) -> None:
        """Drop the mapping."""
        self._arrays = tuple(np.empty(1, a.dtype) for a in self._arrays)
