"""Rows where a GPU addresses them: padded to 16 bytes, in its memory or page-locked on the host.

A row that begins at a multiple of 16 bytes is read and written in words of 16 bytes, whatever its
length: the words at its end reach into a gap that belongs to nobody.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.features.host_memory import HostMemory

WORD_BYTES = 16
"""Widest access of one lane."""
_COPY_BYTES = 64 << 20
"""Rows are copied into place in parts of this size: a mapped dataset is not read as a whole."""


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Rows that the device can address, and the kind of their source."""

    kind: str
    table: Tensor
    """Shape (num_rows, feature_dim), rows contiguous: on the device, or page-locked on the host."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.table.shape[1] * self.table.element_size()


def word_multiple(num_bytes: int) -> int:
    """The next multiple of 16.

    >>> [word_multiple(n) for n in (0, 1, 16, 2408)]
    [0, 16, 16, 2416]
    """
    return -(-num_bytes // WORD_BYTES) * WORD_BYTES


def padded_rows(
    count: int, width: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """An undefined [count, width] tensor whose rows begin at multiples of 16 bytes.

    The gap between rows is free for anyone to overwrite.
    """
    stride = word_multiple(width * dtype.itemsize) // dtype.itemsize
    return torch.empty((count, stride), dtype=dtype, device=device)[:, :width]


def owns_padding(table: Tensor) -> bool:
    """Whether every row of a table can be accessed in whole words of 16 bytes within its memory."""
    size = table.element_size()
    stride_bytes, row_bytes = table.stride(0) * size, word_multiple(table.shape[1] * size)
    if table.data_ptr() % WORD_BYTES or stride_bytes % WORD_BYTES or stride_bytes < row_bytes:
        return False
    room = table.untyped_storage().nbytes() - table.storage_offset() * size
    return (table.shape[0] - 1) * stride_bytes + row_bytes <= room


def on_device(rows: NDArray[Any], device: torch.device) -> Tensor:
    """A padded copy of a rank's rows in the device's memory.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    dtype = torch.from_numpy(np.empty(0, rows.dtype)).dtype
    table = padded_rows(rows.shape[0], rows.shape[1], dtype, device)
    _fill(table, rows)
    return table


def on_host(rows: NDArray[Any], device: torch.device) -> Tensor:
    """A padded copy of rows in host memory that the device reads in place.

    Raises:
        PinError: the system does not let so much memory be locked.
    """
    dtype = torch.from_numpy(np.empty(0, rows.dtype)).dtype
    stride_bytes = word_multiple(rows.shape[1] * dtype.itemsize)
    room = HostMemory.anonymous(stride_bytes * rows.shape[0])
    whole = room.tensor(dtype, rows.shape[0] * stride_bytes // dtype.itemsize)
    table = whole.view(rows.shape[0], stride_bytes // dtype.itemsize)[:, : rows.shape[1]]
    room.lock(device)
    _fill(table, rows)
    return table


def _fill(table: Tensor, rows: NDArray[Any]) -> None:
    """Copy rows into a padded table, part by part."""
    most = max(1, _COPY_BYTES // max(1, rows.shape[1] * rows.dtype.itemsize))
    for first in range(0, rows.shape[0], most):
        part = np.array(rows[first : first + most])
        table[first : first + most].copy_(torch.from_numpy(part))
