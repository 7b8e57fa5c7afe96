"""The disk tier: rows of x.npy read past the page cache, in whole blocks, under a byte budget.

Ids are taken in pieces that fit the budget, sorted, and coalesced into requests of aligned blocks;
a bounded crew of threads reads them into aligned buffers and copies rows out, without the
interpreter's lock (`crew`, `direct_read`). What the tier holds
(buffers and index) is reserved in a `ByteBudget`, so it cannot grow with the batch. A mapped file
is not a disk tier: after one pass the page cache has made it memory, and on nobody's budget.

The reading threads run wherever the system puts them, beside training as well: kept to one core
they would slow training down less, but read slower while it waits for them (DEC-77).
"""

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.features import direct
from runtime.features.budget import ByteBudget
from runtime.features.counters import Counters
from runtime.features.crew import MOST_THREADS, Crew
from runtime.features.direct_read import Requests, Stored
from runtime.features.gather import copy_from_addresses
from runtime.features.read_buffers import read_buffers
from runtime.features.tier import AbstractTier

DEFAULT_DEPTH = 16
"""Requests in flight."""
MOST_REQUEST_BYTES = 128 << 10
"""Longest request; a coalesced run of rows is cut there."""
INDEX_BYTES_PER_ID = 6 * 8
"""Per id under way: order and the sort's own space, slot, position, first of request, address."""
LEAST_IDS = 256
"""A budget must leave room to sort at least this many ids at a time."""


class Disk(AbstractTier):
    """Rows of a .npy file [num_rows, feature_dim] by aligned direct reads."""

    kind = "disk"

    def __init__(
        self,
        path: Path,
        *,
        budget_bytes: int,
        queue_depth: int = DEFAULT_DEPTH,
    ) -> None:
        """Open the file; nothing is read yet.

        Args:
            path: the .npy file, C order, float32 or float16.
            budget_bytes: most bytes the tier may hold.
            queue_depth: most requests in flight, at most 255; fewer where their buffers would take
                more than three quarters of the budget.

        Raises:
            BudgetExceeded: not even one buffer and the least index fit.
            DatasetError: the file is not a .npy file of rows, or is cut short.
        """
        self.rows = direct.read_header(path)
        self.budget = ByteBudget(budget_bytes, "disk tier")
        # A row may begin and end inside a block: up to one block more than its own length.
        least_bytes = direct.round_up(self.rows.row_bytes) + direct.BLOCK_BYTES
        room_bytes = min(3 * budget_bytes // 4, budget_bytes - LEAST_IDS * INDEX_BYTES_PER_ID)
        share_bytes = direct.round_down(room_bytes // queue_depth)
        self.request_bytes = max(least_bytes, min(MOST_REQUEST_BYTES, share_bytes))
        self.queue_depth = max(1, min(queue_depth, room_bytes // self.request_bytes, MOST_THREADS))
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
        """Bytes reserved now; `budget.peak_bytes` is the most there ever were."""
        return self.budget.used_bytes

    def read(
        self,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        counts: NDArray[np.int64],
        out: NDArray[np.float32],
        counters: Counters,
    ) -> None:
        """See `AbstractTier.read`; bytes are those of the rows, `disk_read_bytes` of the blocks."""
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

    def _read_piece(
        self,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        out: NDArray[np.float32],
        counters: Counters,
    ) -> None:
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
            widen=self.rows.dtype != out.dtype,
            drop_pages=not self.is_direct,
        )
        failed, read_bytes = self._crew.serve(stored, requests, out)
        counters.disk_read_bytes += read_bytes
        counters.disk_read_bytes += sum(self._serve(requests, number, out) for number in failed)
        counters.disk_reads += num_requests

    def _serve(self, requests: Requests, number: int, out: NDArray[Any]) -> int:
        """One request by the interpreter, with its errors."""
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
        """Stop the threads, close the file, give back the buffers."""
        if self._file < 0:
            return
        self._crew.close()
        os.close(self._file)
        self._file = -1
        self._buffers.clear()
        self.budget.release("buffers", self.queue_depth * self.request_bytes)
