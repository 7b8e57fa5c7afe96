"""Direct reads of a .npy file of rows: its header, aligned memory, requests, and their kernel.

Several threads of the disk tier wait for the disk at once. A thread serves all its requests in one
kernel, without the interpreter: else each request would take its lock, for which the training
thread waits too. Buffers lie side by side in huge pages, which a disk fills faster than small pages
(DEC-78).
"""

import contextlib
import errno
import mmap
import os
import typing
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from gnnplan.runtime import npy
from gnnplan.runtime.errors import DatasetError
from gnnplan.runtime.features.gather import check_storage, copy_rows, widen_rows

BLOCK_BYTES = 4096
"""Alignment of offset, length and memory of a direct read."""
GAP_BYTES = 4096
"""Longest gap that is read along, because that is cheaper than one more request."""


def round_down(num_bytes: int) -> int:
    """Return the multiple of a block at or below."""
    return num_bytes // BLOCK_BYTES * BLOCK_BYTES


def round_up(num_bytes: int) -> int:
    """Return the multiple of a block at or above."""
    return round_down(num_bytes + BLOCK_BYTES - 1)


@dataclass(frozen=True, slots=True)
class RowFile:
    """Layout of the rows in a .npy file."""

    num_rows: int
    feature_dim: int
    dtype: np.dtype[Any]
    data_offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.feature_dim * self.dtype.itemsize

    @property
    def end_bytes(self) -> int:
        """Offset after the last row."""
        return self.data_offset + self.num_rows * self.row_bytes

    def block_range(self, first: int, last: int) -> tuple[int, int]:
        """Return begin and end, in bytes of the file, of the blocks of rows first to last."""
        begin = self.data_offset + first * self.row_bytes
        return round_down(begin), round_up(self.data_offset + (last + 1) * self.row_bytes)

    def cut_requests(
        self, slots: NDArray[np.int64], request_bytes: int, firsts: NDArray[np.int64]
    ) -> int:
        """Cut ascending rows into runs whose blocks fit one request; return the number of runs.

        `firsts` (n + 1,) gets the position of each run's first row, and n. A request has at least
        two blocks more than a row needs.
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
    """Read the header of a .npy file of rows; raise DatasetError for any other, or a cut, file."""
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
    """Open a file for direct reads; return its descriptor and whether reads are direct.

    Where the file system refuses, reads are buffered, their pages dropped, and one warning says so.
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

    A file that ends before `end_bytes` raises DatasetError.
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


_AHEAD = 4
_READ = types.ExternalFunction(
    "pread", types.int64(types.int32, types.intp, types.uintp, types.int64)
)
_ADVISE = types.ExternalFunction(
    "posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32)
)
_DROP_PAGES = 4  # POSIX_FADV_DONTNEED of Linux


class Requests(NamedTuple):
    """Rows of each request and their places in the output, as the kernels take them."""

    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    """Row of the output for each of `slots`, which ascend."""
    firsts: NDArray[np.int64]
    """Position of each request's first row, and n; (number of requests + 1,)."""
    addresses: NDArray[np.int64]
    """Room for n addresses, of which each thread uses its own requests' part."""


class Stored(NamedTuple):
    """Open file of rows, as the kernels take it; offsets are bytes of the file."""

    file: int
    row_bytes: int
    data_offset: int
    end_bytes: int
    widening: int
    """What `gather.widening_of` says of the rows and the output."""
    drop_pages: bool
    """Whether reads go through the page cache, whose pages are then given back."""


def read_blocks_at(
    file: int, numbers: NDArray[np.int64], buffer: NDArray[np.uint8], out: NDArray[np.uint8]
) -> int:
    """Read blocks of a file one after another and copy each out, to time reads.

    `buffer` and `out` hold one block, aligned. Returns the number of blocks before the first
    failure.
    """
    count, block_bytes = numbers.size, buffer.size
    requests = Requests(
        slots=numbers,
        positions=np.zeros(count, np.int64),
        firsts=np.arange(count + 1),
        addresses=np.empty(count, np.int64),
    )
    stored = Stored(
        file=file,
        row_bytes=block_bytes,
        data_offset=0,
        end_bytes=(int(numbers.max()) + 1) * block_bytes,
        widening=0,
        drop_pages=False,
    )
    found: tuple[int, int] = read_requests(
        stored, requests, 0, 1, buffer.ctypes.data, out.ctypes.data
    )
    return found[0]


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def read_requests(
    stored: Stored, requests: Requests, first: int, stride: int, buffer: int, target: int
) -> tuple[int, int]:
    """Read requests `first`, `first + stride`, ... and copy their rows out.

    `buffer` is the address of an aligned buffer of the longest request, `target` that of
    C-contiguous rows, in float32 or as they are stored. Returns the request that could not be read
    whole, else the number of requests; and the bytes read.
    """
    done = 0
    request = first
    slots, firsts, addresses = requests.slots, requests.firsts, requests.addresses
    file, row_bytes, offset = np.int32(stored.file), stored.row_bytes, stored.data_offset
    count = firsts.size - 1
    while request < count:
        i, j = firsts[request], firsts[request + 1]
        begin = (offset + slots[i] * row_bytes) // BLOCK_BYTES * BLOCK_BYTES
        end = offset + (slots[j - 1] + 1) * row_bytes
        end = (end + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES
        wanted = min(end, stored.end_bytes) - begin
        got = 0
        while got < wanted:
            more = _READ(file, buffer + got, np.uint64(end - begin - got), begin + got)
            # Only the file's end gives less than whole blocks; the interpreter explains all else.
            if more <= 0 or (more % BLOCK_BYTES != 0 and got + more < wanted):
                return request, done
            got += more
        if stored.drop_pages:
            _ADVISE(file, begin, end - begin, np.int32(_DROP_PAGES))
        for row in range(i, j):
            addresses[row] = buffer + offset + slots[row] * row_bytes - begin
        if stored.widening != 0:
            mode = stored.widening
            widen_rows(addresses, requests.positions, target, row_bytes, i, j, _AHEAD, mode)
        else:
            copy_rows(addresses, requests.positions, target, row_bytes, i, j, _AHEAD, 0)
        done += end - begin
        request += stride
    return count, done


HUGE_PAGE_BYTES = 2 << 20


def read_buffers(count: int, num_bytes: int) -> list[NDArray[np.uint8]]:
    """Return `count` aligned buffers of `num_bytes` each, whole blocks, in huge pages.

    No more of them is resident than they are long. A forked child does not have them, since what a
    disk writes while pages are shared may reach either process.
    """
    if num_bytes % BLOCK_BYTES:
        raise ValueError(f"expected whole blocks of {BLOCK_BYTES} bytes, found {num_bytes} bytes")
    size = count * num_bytes
    huge = size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    room = mmap.mmap(
        -1, size + (HUGE_PAGE_BYTES if huge else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    begin = 0
    if huge:
        begin = -np.frombuffer(room, np.uint8).ctypes.data % HUGE_PAGE_BYTES
        _advise(room, "MADV_HUGEPAGE", begin, huge)
    _advise(room, "MADV_DONTFORK", 0, len(room))
    return [
        np.frombuffer(room, np.uint8, num_bytes, begin + number * num_bytes)
        for number in range(count)
    ]


def _advise(room: mmap.mmap, advice: str, begin: int, size: int) -> None:
    """Give Linux's advice; do nothing elsewhere, or in a kernel built without it."""
    if hasattr(mmap, advice):
        with contextlib.suppress(OSError):
            room.madvise(getattr(mmap, advice), begin, size)
