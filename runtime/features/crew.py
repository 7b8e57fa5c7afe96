"""Threads that read a disk together and are woken without the interpreter.

Each sits in one kernel for as long as the crew lives, and waits there in `read(2)` on a pipe. A
byte in it is a part of a batch to serve; another byte says that it is done. Woken by a thread pool,
each thread would take the interpreter's lock first, one after the other (DEC-79). Pipes, as eventfd
and futex are Linux's alone.
"""

import os
import threading
import typing
import weakref
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from runtime.features.direct_read import Requests, Stored, read_requests
from runtime.intrinsics import pointer

MOST_THREADS = 255
"""A part's number is a byte, and one byte says stop."""
_STOP = 255
_JOB = np.dtype(
    [(name, np.int64) for name in (*Stored._fields, *Requests._fields)]
    + [(name, np.int64) for name in ("rows", "count", "parts", "target")]
)
"""What a batch's parts have in common: of arrays the addresses."""
_READ = types.ExternalFunction("read", types.int64(types.int32, types.uintp, types.uintp))
_WRITE = types.ExternalFunction("write", types.int64(types.int32, types.uintp, types.uintp))


class Crew:
    """One thread fewer than there are buffers; who calls `serve` is one of the crew."""

    def __init__(self, buffers: Sequence[NDArray[np.uint8]]) -> None:
        """Start the threads.

        Args:
            buffers: aligned, each holds the longest request; one per read in flight, 1 to 255.

        Raises:
            OSError: no pipes are left to open.
            RuntimeError: no threads are left to start.
        """
        if not 1 <= len(buffers) <= MOST_THREADS:
            raise ValueError(f"expected 1 to {MOST_THREADS} buffers, found {len(buffers)}")
        self._buffers = list(buffers)
        self._job = np.zeros(1, _JOB)
        self._ends = np.zeros((len(buffers), 2), np.int64)  # what `read_requests` returns, by part
        self._pipes = [*os.pipe(), *os.pipe()]
        self._threads: list[threading.Thread] = []
        self.close = weakref.finalize(self, _stop, self._threads, self._pipes)
        """Stop the threads and wait for them; also done when the crew is forgotten."""
        work = (self._pipes[0], self._pipes[3], self._job, self._ends)
        os.write(self._pipes[1], bytes([_STOP]))
        _wait_and_serve(*work, buffers[0].ctypes.data)  # compiled here, where an error is seen
        for number, buffer in enumerate(buffers[1:]):
            thread = threading.Thread(
                target=_member, args=(work, buffer), name=f"disk-{number}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def serve(self, stored: Stored, requests: Requests, out: NDArray[Any]) -> tuple[list[int], int]:
        """Read all requests and copy their rows out; a crew serves one caller at a time.

        Args:
            stored: the file.
            requests: which rows, and where they go.
            out: C-contiguous rows.

        Returns:
            Requests that could not be read whole (cut short, failing): all others are done, none
            is under way. And the bytes read.
        """
        count, buffer = requests.firsts.size - 1, self._buffers[0]
        parts = min(len(self._buffers), count)
        _serve_together(
            self._pipes[1], self._pipes[2], parts, stored, requests, self._job, self._ends,
            buffer.ctypes.data, out.ctypes.data,
        )  # fmt: skip
        failed, done = list[int](), int(self._ends[:parts, 1].sum())
        for first in self._ends[:parts, 0].tolist():
            while first < count:
                failed.append(first)
                first, more = read_requests(
                    stored, requests, first + parts, parts, buffer.ctypes.data, out.ctypes.data
                )
                done += more
        return failed, done


def _member(
    work: tuple[int, int, NDArray[np.int64], NDArray[np.int64]], buffer: NDArray[np.uint8]
) -> None:
    _wait_and_serve(*work, buffer.ctypes.data)  # the buffer lives as long as the thread


def _stop(threads: Sequence[threading.Thread], pipes: Sequence[int]) -> None:
    for _ in threads:
        os.write(pipes[1], bytes([_STOP]))
    for thread in threads:
        thread.join()
    for end in pipes:
        os.close(end)


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _serve_together(orders, answers, parts, stored, requests, jobs, ends, buffer, target):
    """Give parts 1, 2, ... to the threads, serve part 0, and wait for all.

    One kernel, so that no signal's handler comes between a part that is given out and its answer.
    """
    job = jobs[0]
    job.file, job.row_bytes, job.data_offset = stored.file, stored.row_bytes, stored.data_offset
    job.end_bytes, job.widen, job.drop_pages = stored.end_bytes, stored.widen, stored.drop_pages
    job.slots, job.positions = requests.slots.ctypes.data, requests.positions.ctypes.data
    job.firsts, job.addresses = requests.firsts.ctypes.data, requests.addresses.ctypes.data
    job.rows, job.count = requests.slots.size, requests.firsts.size - 1
    job.parts, job.target = parts, target
    numbers = np.arange(1, max(2, parts)).astype(np.uint8)
    sent = 0
    while sent < parts - 1:
        sent += max(0, _WRITE(orders, numbers[sent:].ctypes.data, np.uint64(parts - 1 - sent)))
    ends[0, 0], ends[0, 1] = read_requests(stored, requests, 0, parts, buffer, target)
    answered = 0
    while answered < parts - 1:
        answered += max(0, _READ(answers, numbers.ctypes.data, np.uint64(numbers.size)))


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def _wait_and_serve(orders, answers, jobs, ends, buffer):
    """Serve parts of batches until told to stop; a wait that a signal breaks is begun again."""
    byte = np.zeros(1, np.uint8)
    while True:
        if _READ(orders, byte.ctypes.data, np.uint64(1)) != 1:
            continue
        if byte[0] == _STOP:
            return
        job, part = jobs[0], np.int64(byte[0])
        stored = Stored(
            job.file,
            job.row_bytes,
            job.data_offset,
            job.end_bytes,
            job.widen != 0,
            job.drop_pages != 0,
        )
        requests = Requests(
            numba.carray(pointer(job.slots), job.rows, np.int64),
            numba.carray(pointer(job.positions), job.rows, np.int64),
            numba.carray(pointer(job.firsts), job.count + 1, np.int64),
            numba.carray(pointer(job.addresses), job.rows, np.int64),
        )
        ends[part, 0], ends[part, 1] = read_requests(
            stored, requests, part, job.parts, buffer, job.target
        )
        while _WRITE(answers, byte.ctypes.data, np.uint64(1)) != 1:
            pass
