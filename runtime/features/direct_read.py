"""Many direct reads in a row without the interpreter: a reading thread holds no lock but its own.

The disk tier has several threads wait for the disk at once. A request served by the interpreter
costs it some microseconds under its global lock, as often as there are requests, and the thread
that trains stands in the same queue; here a thread takes the lock once for all its requests.
"""

import typing

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
    found: tuple[int, int] = read_requests(
        file,
        numbers,
        np.zeros(count, np.int64),
        np.arange(count + 1),
        np.empty(count, np.int64),
        0,
        1,
        buffer.ctypes.data,
        block_bytes,
        0,
        (int(numbers.max()) + 1) * block_bytes,
        out.ctypes.data,
        False,
        False,
    )
    return found[0]


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def read_requests(
    file: int,
    slots: np.ndarray,
    positions: np.ndarray,
    firsts: np.ndarray,
    addresses: np.ndarray,
    request: int,
    stride: int,
    buffer: int,
    row_bytes: int,
    data_offset: int,
    end_bytes: int,
    target: int,
    widen: bool,
    drop_pages: bool,
) -> tuple[int, int]:
    """Read requests `request`, `request + stride`, ... and copy their rows out.

    Args:
        file: descriptor.
        slots: rows in ascending order, shape (n,).
        positions: row of the output of each, shape (n,).
        firsts: position of each request's first row, and n; shape (number of requests + 1,).
        addresses: room for n addresses; each thread uses its own requests' part.
        request: the first to serve.
        stride: between those that this thread serves.
        buffer: address of an aligned buffer that holds the longest request.
        row_bytes: of a row as it is stored.
        data_offset: bytes of the file before row 0.
        end_bytes: where the rows end.
        target: address of the output, C-contiguous rows of float32 (float16 with `widen` False).
        widen: rows are float16, the output float32.
        drop_pages: reads go through the page cache; its pages are given back.

    Returns:
        The request that could not be read whole, or the number of requests; and the bytes read.
    """
    done = 0
    count = firsts.size - 1
    while request < count:
        first, last = firsts[request], firsts[request + 1]
        begin = (data_offset + slots[first] * row_bytes) // BLOCK_BYTES * BLOCK_BYTES
        end = data_offset + (slots[last - 1] + 1) * row_bytes
        end = (end + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES
        wanted = min(end, end_bytes) - begin
        got = 0
        while got < wanted:
            more = _READ(np.int32(file), buffer + got, np.uint64(end - begin - got), begin + got)
            # Whole blocks but at the file's end; what else comes is the interpreter's to explain.
            if more <= 0 or (more % BLOCK_BYTES != 0 and got + more < wanted):
                return request, done
            got += more
        if drop_pages:
            _ADVISE(np.int32(file), begin, end - begin, np.int32(_DROP_PAGES))
        for i in range(first, last):
            addresses[i] = buffer + data_offset + slots[i] * row_bytes - begin
        if widen:
            widen_rows(addresses, positions, target, row_bytes, first, last, _AHEAD, False)
        else:
            copy_rows(addresses, positions, target, row_bytes, first, last, _AHEAD, False)
        done += end - begin
        request += stride
    return count, done
