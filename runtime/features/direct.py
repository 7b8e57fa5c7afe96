"""Direct reads of a .npy file of rows: header, alignment, and the cutting of ids into requests."""

import errno
import os
import typing
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from runtime import npy
from runtime.errors import DatasetError
from runtime.features.gather import check_storage

BLOCK_BYTES = 4096
"""Alignment of offset, length and memory of a direct read (512 would do on some disks only)."""
GAP_BYTES = 4096
"""Blocks that nobody asked for are read along up to this length: cheaper than one more request."""


def round_down(num_bytes: int) -> int:
    """The multiple of a block at or below."""
    return num_bytes // BLOCK_BYTES * BLOCK_BYTES


def round_up(num_bytes: int) -> int:
    """The multiple of a block at or above."""
    return round_down(num_bytes + BLOCK_BYTES - 1)


@dataclass(frozen=True, slots=True)
class RowFile:
    """Where the rows lie in a .npy file."""

    num_rows: int
    feature_dim: int
    dtype: np.dtype[Any]
    data_offset: int
    """Bytes before row 0."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.feature_dim * self.dtype.itemsize

    @property
    def end_bytes(self) -> int:
        """Offset after the last row."""
        return self.data_offset + self.num_rows * self.row_bytes

    def block_range(self, first: int, last: int) -> tuple[int, int]:
        """Begin and end, in bytes of the file, of the blocks that hold rows first to last."""
        begin = self.data_offset + first * self.row_bytes
        return round_down(begin), round_up(self.data_offset + (last + 1) * self.row_bytes)

    def cut_requests(
        self, slots: NDArray[np.int64], request_bytes: int, firsts: NDArray[np.int64]
    ) -> int:
        """Cut sorted rows into runs whose blocks fit one request.

        Args:
            slots: shape (n,), ascending, repeated values allowed.
            request_bytes: most bytes of a request; at least two blocks more than a row needs.
            firsts: shape (n + 1,); filled with the position of each request's first row, and n.

        Returns:
            The number of requests.
        """
        return int(_cut_requests(slots, self.data_offset, self.row_bytes, request_bytes, firsts))


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _cut_requests(slots, data_offset, row_bytes, request_bytes, firsts):
    count = 0
    request_begin = 0
    request_end = -1
    for i in range(slots.size):
        begin = (data_offset + slots[i] * row_bytes) // BLOCK_BYTES * BLOCK_BYTES
        last = data_offset + (slots[i] + 1) * row_bytes
        end = (last + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES
        apart = request_end < 0 or begin > request_end + GAP_BYTES
        if apart or end - request_begin > request_bytes:
            firsts[count] = i
            count += 1
            request_begin = begin
        request_end = end
    firsts[count] = slots.size
    return count


def read_header(path: Path) -> RowFile:
    """Read and check the header of a .npy file of rows.

    Raises:
        DatasetError: not a .npy file, not two-dimensional in C order, or shorter than it says.
    """
    try:
        with path.open("rb") as file:
            shape, fortran_order, dtype = npy.read_header(file)
            data_offset = file.tell()
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: expected a .npy file of feature rows ({error})") from None
    if len(shape) != 2 or fortran_order:
        raise DatasetError(f"{path}: expected two axes in C order, found shape {shape}")
    check_storage(dtype)
    rows = RowFile(shape[0], shape[1], dtype, data_offset)
    found_bytes = path.stat().st_size
    if found_bytes < rows.end_bytes:
        raise DatasetError(f"{path}: expected {rows.end_bytes} bytes, found {found_bytes}")
    return rows


def open_file(path: Path) -> tuple[int, bool]:
    """Open for direct reads; returns the descriptor and whether they are direct.

    Where the file system refuses, reads are buffered, the pages dropped after each, and one
    warning says so.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        warnings.warn(
            f"{path}: this file system refuses direct reads; the disk tier reads through the page "
            "cache and drops pages after use, so its rates are not those of the disk",
            RuntimeWarning,
            stacklevel=3,
        )
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        return file, False
    return file, True


def read_blocks(file: int, buffer: NDArray[np.uint8], offset: int, end_bytes: int) -> None:
    """Fill an aligned buffer from an aligned offset, as far as the file's rows reach.

    Raises:
        DatasetError: the file ends before `end_bytes`.
    """
    view = memoryview(buffer)  # type: ignore[arg-type]
    wanted = min(len(view), end_bytes - offset)
    got = 0
    while got < wanted:
        count = os.preadv(file, [view[got:]], offset + got)
        got += count
        # A regular file gives part of a block at its end only.
        if got < wanted and (count == 0 or count % BLOCK_BYTES):
            found_bytes = os.fstat(file).st_size
            raise DatasetError(
                f"features were cut short while in use: expected {end_bytes} bytes, "
                f"found {found_bytes}"
            )
