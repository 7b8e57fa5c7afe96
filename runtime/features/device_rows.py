"""Rows where a GPU addresses them: padded to 16 bytes, in its memory or page-locked on the host.

A row that begins at a multiple of 16 bytes is read and written in words of 16 bytes, whatever its
length: the words at its end reach into a gap that belongs to nobody.

Rows of other GPUs by all-to-all, where their memory is not mapped or many are wanted at once.

Every rank takes part in every read. Ids are sorted by owner on the device, slots and rows travel
by the communicator (nccl between GPUs; gloo, in tests and for two ranks on one GPU, by way of the
host), and arrive where the batch wants them. The host waits once, for the numbers of rows.

Rows that a GPU cannot address: fetched by the host into page-locked rows, then put in place.

Disk, sparse features, rows behind another host: the tiers of the host's store read them. Which
rows those are the host must know, so this waits for the ids; the copy back runs on the stream.
"""

import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.features.host_memory import HostMemory
from gnnplan.runtime.features.location import MAX_SOURCES
from gnnplan.runtime.features.tier import Counters
from gnnplan.runtime.features.tiers import Tiers
from gnnplan.runtime.stages import Stage

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


class DeviceExchange:
    """What this rank serves to the others, and reads of theirs."""

    def __init__(
        self, own: Tensor, ranks: dict[int, int], comm: Communicator, *, kind: str = "peer"
    ) -> None:
        """Serve this rank's rows.

        Args:
            own: this rank's rows [num_rows, feature_dim], on the device.
            ranks: the rank that each source number stands for.
            comm: a communicator that nothing else uses; closed with this.
            kind: the row of the counters.
        """
        self._own, self._comm, self._kind = own, comm, kind
        # Every source number's rank; those of no peer sort behind the last rank.
        ranked = torch.full((MAX_SOURCES + 1,), comm.size, dtype=torch.int64)
        for number, rank in ranks.items():
            ranked[number] = rank
        self._ranks = ranked.to(own.device)
        self._lock = threading.Lock()

    def fill(self, numbers: Tensor, slots: Tensor, wanted: Tensor | None, out: Tensor) -> Counters:
        """Write the rows of other ranks into the batch; collective. As `Staged.fill`."""
        size, device = self._comm.size, self._own.device
        rank = self._ranks[numbers]
        if wanted is not None:
            rank = torch.where(wanted, rank, size)
        order = torch.argsort(rank, stable=True)
        counts = torch.bincount(rank, minlength=size + 1)[:size].tolist()
        places = order[: sum(counts)]
        counters = Counters()
        with self._lock:
            start = time.perf_counter()
            asked, from_rank = self._comm.all_to_all_ids(slots[places], counts)
            counters.add_seconds(Stage.EXCHANGE_IDS.value, time.perf_counter() - start)
            start = time.perf_counter()
            served = self._own[asked.to(device)].contiguous()
            rows = self._comm.all_to_all_rows(served, from_rank, counts)
            counters.add_seconds(Stage.EXCHANGE_ROWS.value, time.perf_counter() - start)
        out.index_copy_(0, places, rows.to(device=device, dtype=out.dtype))
        row_bytes = self._own.shape[1] * self._own.element_size()
        counters.add_rows(self._kind, sum(counts), sum(counts) * row_bytes)
        return counters

    @property
    def resident_bytes(self) -> int:
        """Nothing beside the rows of the batch."""
        return 0

    def close(self) -> None:
        """Give back the process group."""
        self._comm.close()


_NO_LANE = 255


class Staged:
    """The tiers of some sources, read for a device."""

    def __init__(self, tiers: Tiers, width: int, device: torch.device, *, pinned: bool) -> None:
        """Wrap a rank's tiers.

        Args:
            tiers: each with the numbers of its sources, in the tier's order.
            width: columns of a row.
            device: where the rows are wanted.
            pinned: stage in page-locked memory.
        """
        self._tiers = tiers
        self._width, self._device, self._pinned = width, device, pinned
        self._lanes = np.full(MAX_SOURCES, _NO_LANE, np.uint8)
        order = [number for _, numbers in tiers for number in numbers]
        self._lanes[order] = np.arange(len(order))
        staged = np.append(self._lanes != _NO_LANE, False)
        self.holds = torch.from_numpy(staged).to(device)
        """bool [257] by source number; the last for ids outside the graph (-1)."""

    @property
    def resident_bytes(self) -> int:
        """Bytes that the tiers hold."""
        return sum(tier.resident_bytes for tier, _ in self._tiers)

    def fill(self, numbers: Tensor, slots: Tensor, wanted: Tensor | None, out: Tensor) -> Counters:
        """Write the rows of these sources into the batch; every tier is read, also for nothing.

        Args:
            numbers: source number of each row, -1 for none; int64 [n] on the device.
            slots: int64 [n] there.
            wanted: bool [n]; rows that are not wanted are left alone. None: all are.
            out: [n, feature_dim] on the device; the rows of other sources stay as they are.

        Returns:
            What the tiers counted.
        """
        mine = self.holds[numbers] if wanted is None else self.holds[numbers] & wanted
        places = mine.nonzero().squeeze(1)
        number, slot = torch.stack([numbers[places], slots[places]]).cpu().numpy()
        lanes = self._lanes[number]
        order = np.argsort(lanes, kind="stable")
        counts = np.bincount(number, minlength=MAX_SOURCES).astype(np.int64)
        staging = torch.empty((slot.size, self._width), pin_memory=self._pinned)
        counters, first = Counters(), 0
        for tier, sources in self._tiers:
            part = order[first : first + int(counts[sources].sum())]
            tier.read(
                np.ascontiguousarray(slot[part]), part, counts[sources], staging.numpy(), counters
            )
            first += part.size
        if slot.size:
            rows = staging.to(self._device, non_blocking=self._pinned)
            out.index_copy_(0, places, rows.to(out.dtype))
        return counters

    def close(self) -> None:
        """Close the tiers."""
        for tier, _ in self._tiers:
            tier.close()
        self._tiers = []
