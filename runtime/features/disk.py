"""The disk tier: rows of x.npy read past the page cache, in whole blocks, under a byte budget.

Ids are taken in pieces that fit the budget, sorted, and coalesced into requests of aligned blocks.
A bounded crew of threads reads them into aligned buffers and copies rows out, without the
interpreter's lock. Buffers and index are reserved in a `ByteBudget`, so the tier never grows with
the batch. A mapped file is no disk tier: after one pass the page cache has made it memory, on
nobody's budget.

The reading threads are not pinned (DEC-77). Each stays in one kernel, where it waits in `read(2)`
on a pipe: a byte is a part of a batch to serve, or the order to stop. Threads of a pool would first
take the interpreter's lock, one after another (DEC-79).
"""

import os
import threading
import typing
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from gnnplan.runtime.errors import BudgetExceeded
from gnnplan.runtime.features import direct
from gnnplan.runtime.features.direct import Requests, Stored, read_buffers, read_requests
from gnnplan.runtime.features.gather import copy_from_addresses, widening_of
from gnnplan.runtime.features.tier import AbstractTier, Counters, Ids, Rows
from gnnplan.runtime.intrinsics import pointer


class ByteBudget:
    """Named parts of a fixed number of bytes, shared by threads."""

    def __init__(self, limit_bytes: int, name: str) -> None:
        self.limit_bytes = limit_bytes
        self.name = name
        self.peak_bytes = 0
        self._parts: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes reserved now."""
        with self._lock:
            return sum(self._parts.values())

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be reserved."""
        return self.limit_bytes - self.used_bytes

    def reserve(self, part: str, num_bytes: int) -> None:
        """Add bytes to a part, or raise BudgetExceeded with the sum that passes the limit."""
        if num_bytes < 0:
            raise ValueError(f"expected bytes of at least 0, found {num_bytes}")
        with self._lock:
            parts = dict(self._parts)
            parts[part] = parts.get(part, 0) + num_bytes
            needed_bytes = sum(parts.values())
            if needed_bytes > self.limit_bytes:
                raise BudgetExceeded(f"{self.name}: {_sum_text(parts)} > {self.limit_bytes} bytes")
            self._parts = parts
            self.peak_bytes = max(self.peak_bytes, needed_bytes)

    def release(self, part: str, num_bytes: int) -> None:
        """Give back bytes of a part."""
        with self._lock:
            left_bytes = self._parts.get(part, 0) - num_bytes
            if left_bytes < 0:
                raise ValueError(f"{self.name}: {part} gives back more than it holds")
            self._parts[part] = left_bytes

    @contextmanager
    def holding(self, part: str, num_bytes: int) -> Iterator[None]:
        """Reserve bytes for the length of a `with` block."""
        self.reserve(part, num_bytes)
        try:
            yield
        finally:
            self.release(part, num_bytes)


def _sum_text(parts: dict[str, int]) -> str:
    """Write parts as a sum, such as "buffers 8192 + index 160 = 8352"."""
    held = {name: value for name, value in parts.items() if value}
    terms = " + ".join(f"{name} {value}" for name, value in held.items())
    return f"{terms} = {sum(held.values())}"


MOST_THREADS = 255
"""Largest crew: a part's number is a byte, of which one value says stop."""
_STOP = 255
_JOB = np.dtype(
    [(name, np.int64) for name in (*Stored._fields, *Requests._fields)]
    + [(name, np.int64) for name in ("rows", "count", "parts", "target")]
)
"""Record of a batch that all parts share; arrays are given by address."""
_READ = types.ExternalFunction("read", types.int64(types.int32, types.uintp, types.uintp))
_WRITE = types.ExternalFunction("write", types.int64(types.int32, types.uintp, types.uintp))


class Crew:
    """Threads that read a disk together: one fewer than buffers, since the caller serves too."""

    def __init__(self, buffers: Sequence[NDArray[np.uint8]]) -> None:
        """Start the threads; each of 1 to 255 aligned buffers holds the longest request."""
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
        _wait_and_serve(*work, buffers[0].ctypes.data)  # compiled in this thread, where errors show
        for number, buffer in enumerate(buffers[1:]):
            thread = threading.Thread(
                target=_member, args=(work, buffer), name=f"disk-{number}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def serve(self, stored: Stored, requests: Requests, out: NDArray[Any]) -> tuple[list[int], int]:
        """Read all requests and copy their rows out, for one caller at a time.

        Returns the requests that could not be read whole, while all others are done; and the bytes
        read.
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

    One kernel does it, so that no signal's handler comes between a part and its answer.
    """
    job = jobs[0]
    job.file, job.row_bytes, job.data_offset = stored.file, stored.row_bytes, stored.data_offset
    job.end_bytes, job.drop_pages = stored.end_bytes, stored.drop_pages
    job.widening = stored.widening
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
    """Serve parts of batches until told to stop; begin a wait again that a signal breaks."""
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
            job.widening,
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


DEFAULT_DEPTH = 16
MOST_REQUEST_BYTES = 128 << 10
"""Longest request; longer runs of rows are cut."""
INDEX_BYTES_PER_ID = 6 * 8
"""Bytes of index per id: order, sort space, slot, position, first of request, address."""
LEAST_IDS = 256
"""Least number of ids that a budget must leave room to sort."""


def size_requests(
    row_bytes: int, budget_bytes: int, queue_depth: int = DEFAULT_DEPTH
) -> tuple[int, int]:
    """Return the bytes of a request's buffer, and the number of buffers within a budget."""
    # A row may begin and end inside a block: up to one block more than its own length.
    least_bytes = direct.round_up(row_bytes) + direct.BLOCK_BYTES
    room_bytes = min(3 * budget_bytes // 4, budget_bytes - LEAST_IDS * INDEX_BYTES_PER_ID)
    share_bytes = direct.round_down(room_bytes // queue_depth)
    request_bytes = max(least_bytes, min(MOST_REQUEST_BYTES, share_bytes))
    return request_bytes, max(1, min(queue_depth, room_bytes // request_bytes, MOST_THREADS))


def staging_bytes(num_rows: int, row_bytes: int, budget_bytes: int) -> int:
    """Return the most bytes in which a tier reads so many rows at once: buffers and index.

    >>> staging_bytes(1000, 400, 64 << 20) - staging_bytes(0, 400, 64 << 20)
    48000
    """
    request_bytes, depth = size_requests(row_bytes, budget_bytes)
    buffer_bytes = depth * request_bytes
    most_ids = max(0, budget_bytes - buffer_bytes) // INDEX_BYTES_PER_ID
    return buffer_bytes + min(num_rows, most_ids) * INDEX_BYTES_PER_ID


class Disk(AbstractTier):
    """Tier of the rows of a .npy file (num_rows, feature_dim), read by aligned direct reads."""

    kind = "disk"

    def __init__(self, path: Path, *, budget_bytes: int, queue_depth: int = DEFAULT_DEPTH) -> None:
        """Open a .npy file of rows in C order; nothing is read yet.

        Fewer requests than `queue_depth` are in flight where their buffers would take more than
        three quarters of the budget. BudgetExceeded says that it holds no buffer.
        """
        self.rows = direct.read_header(path)
        self.budget = ByteBudget(budget_bytes, "disk tier")
        sizes = size_requests(self.rows.row_bytes, budget_bytes, queue_depth)
        self.request_bytes, self.queue_depth = sizes
        self.budget.reserve("buffers", self.queue_depth * self.request_bytes)
        with self.budget.holding("index", LEAST_IDS * INDEX_BYTES_PER_ID):
            self._file, self.is_direct = direct.open_file(path)
        self._buffers = read_buffers(self.queue_depth, self.request_bytes)
        try:
            self._crew = Crew(self._buffers)
        except BaseException:
            os.close(self._file)
            raise
        # One read at a time: the budget pays for one index.
        self._lock = threading.Lock()

    @property
    def resident_bytes(self) -> int:
        """Bytes reserved now; `budget.peak_bytes` is the most so far."""
        return self.budget.used_bytes

    def read(self, slots: Ids, positions: Ids, counts: Ids, out: Rows, counters: Counters) -> None:
        """Read rows as `AbstractTier.read` says; `disk_read_bytes` counts whole blocks."""
        del counts
        if slots.size and not (slots.min() >= 0 and slots.max() < self.rows.num_rows):
            raise IndexError(f"expected rows in [0, {self.rows.num_rows}), found {slots.max()}")
        with self._lock:
            most_ids = self.budget.free_bytes // INDEX_BYTES_PER_ID
            for first in range(0, slots.size, most_ids):
                part = slice(first, first + most_ids)
                with self.budget.holding("index", slots[part].size * INDEX_BYTES_PER_ID):
                    self._read_piece(slots[part], positions[part], out, counters)
        counters.add_rows(self.kind, slots.size, slots.size * self.rows.row_bytes)

    def _read_piece(self, slots: Ids, positions: Ids, out: Rows, counters: Counters) -> None:
        order, begins = np.argsort(slots, kind="stable"), np.empty(slots.size + 1, np.int64)
        ascending = slots[order]
        num_requests = self.rows.cut_requests(ascending, self.request_bytes, begins)
        requests = Requests(
            slots=ascending,
            positions=positions[order],
            firsts=begins[: num_requests + 1],
            addresses=np.empty(slots.size, np.int64),
        )
        stored = Stored(
            file=self._file,
            row_bytes=self.rows.row_bytes,
            data_offset=self.rows.data_offset,
            end_bytes=self.rows.end_bytes,
            widening=widening_of(self.rows.dtype, out.dtype),
            drop_pages=not self.is_direct,
        )
        failed, read_bytes = self._crew.serve(stored, requests, out)
        counters.disk_read_bytes += read_bytes
        counters.disk_read_bytes += sum(self._serve(requests, number, out) for number in failed)
        counters.disk_reads += num_requests

    def _serve(self, requests: Requests, number: int, out: NDArray[Any]) -> int:
        """Serve one request by the interpreter, which raises its errors."""
        buffer = self._buffers[0]
        ids = slice(int(requests.firsts[number]), int(requests.firsts[number + 1]))
        slots = requests.slots[ids]
        begin, end = self.rows.block_range(int(slots[0]), int(slots[-1]))
        direct.read_blocks(self._file, buffer[: end - begin], begin, self.rows.end_bytes)
        addresses = slots * self.rows.row_bytes
        addresses += buffer.ctypes.data + self.rows.data_offset - begin
        copy_from_addresses(addresses, self.rows.dtype, out, positions=requests.positions[ids])
        return end - begin

    def close(self) -> None:
        """Stop the threads, close the file and give back the buffers."""
        if self._file < 0:
            return
        self._crew.close()
        os.close(self._file)
        self._file = -1
        self._buffers.clear()
        self.budget.release("buffers", self.queue_depth * self.request_bytes)
