"""Many direct reads in a row without the interpreter: a reading thread holds no lock but its own.

The disk tier has several threads wait for the disk at once. A request served by the interpreter
costs it some microseconds under its global lock, as often as there are requests, and the thread
that trains stands in the same queue; here a thread takes the lock once for all its requests.
"""

import typing
from typing import NamedTuple

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from runtime.features.direct import BLOCK_BYTES
from runtime.features.gather import copy_rows, widen_rows

_AHEAD = 4
_READ = types.ExternalFunction(
    "pread", types.int64(types.int32, types.intp, types.uintp, types.int64)
)
_ADVISE = types.ExternalFunction(
    "posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32)
)
_DROP_PAGES = 4  # POSIX_FADV_DONTNEED of Linux


class Requests(NamedTuple):
    """Which rows each request brings, and where they go; the kernels take it as it is."""

    slots: NDArray[np.int64]
    """Rows in ascending order, shape (n,)."""
    positions: NDArray[np.int64]
    """Row of the output of each, shape (n,)."""
    firsts: NDArray[np.int64]
    """Position of each request's first row, and n; shape (number of requests + 1,)."""
    addresses: NDArray[np.int64]
    """Room for n addresses; each thread uses its own requests' part."""


class Stored(NamedTuple):
    """A file of rows, opened."""

    file: int
    """Descriptor."""
    row_bytes: int
    """Of a row as it is stored."""
    data_offset: int
    """Bytes of the file before row 0."""
    end_bytes: int
    """Where the rows end."""
    widen: bool
    """Rows are float16, the output float32."""
    drop_pages: bool
    """Reads go through the page cache; its pages are given back."""


def read_blocks_at(
    file: int, numbers: NDArray[np.int64], buffer: NDArray[np.uint8], out: NDArray[np.uint8]
) -> int:
    """Read blocks of a file of nothing else one after another, each copied out: what reading costs.

    Args:
        file: descriptor, opened for direct reads.
        numbers: blocks, shape (n,).
        buffer: aligned memory of one block.
        out: memory of one block; it holds the last afterwards.

    Returns:
        Blocks read before one failed; n when none did.
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
        widen=False,
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

    Args:
        stored: where the rows are.
        requests: all of them.
        first: the first to serve.
        stride: between those that this thread serves.
        buffer: address of an aligned buffer that holds the longest request.
        target: address of the output, C-contiguous rows of float32 (float16 without `widen`).

    Returns:
        The request that could not be read whole, or the number of requests; and the bytes read.
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
            # Whole blocks but at the file's end; what else comes is the interpreter's to explain.
            if more <= 0 or (more % BLOCK_BYTES != 0 and got + more < wanted):
                return request, done
            got += more
        if stored.drop_pages:
            _ADVISE(file, begin, end - begin, np.int32(_DROP_PAGES))
        for row in range(i, j):
            addresses[row] = buffer + offset + slots[row] * row_bytes - begin
        if stored.widen:
            widen_rows(addresses, requests.positions, target, row_bytes, i, j, _AHEAD, 0)
        else:
            copy_rows(addresses, requests.positions, target, row_bytes, i, j, _AHEAD, 0)
        done += end - begin
        request += stride
    return count, done
