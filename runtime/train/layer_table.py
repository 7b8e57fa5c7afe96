"""Outputs of a layer while an evaluation runs: in a rank's memory, in a file, or on its GPU.

The ranks of a host share one file, those of several hosts hand their rows over. A rank alone keeps
the rows on its GPU where that has room. Before a layer begins, every rank looks at the room of all:
a file that its disk has no room for would end the ranks by SIGBUS, amid the evaluation.
"""

import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.device import available_ram_bytes
from gnnplan.runtime.errors import GnnplanError
from gnnplan.runtime.features.gather import gather_rows
from gnnplan.runtime.folders import boot_id
from gnnplan.runtime.limits import size_text

PAGE_BYTES = 4096
"""Bytes that a row takes more than its own where no other lies beside it."""
SENT_BYTES = 64 << 20
"""Most bytes of rows that cross between hosts at once: a GPU has no more room for sure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRoom:
    """Where a layer's output may lie."""

    host_bytes: int | None = None
    """Most bytes in the rank's own memory; larger ones are files. None: any."""
    device: torch.device | None = None
    """The rank's GPU; None: cores."""
    device_bytes: int = 0
    """Most bytes in the GPU's memory; larger ones lie on the host."""


def written_bytes(num_rows: int, num_nodes: int, width: int) -> int:
    """Return about the most bytes that rows of a table take, of which they touch whole pages."""
    return min(4 * num_nodes * width, num_rows * (4 * width + PAGE_BYTES))


class _Place(Enum):
    """Where a table lies."""

    MEMORY = "memory"
    FILE = "file"
    SHARED = "shared file"
    NOWHERE = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """What one rank finds before it makes a table."""

    host: tuple[str, str]
    """Name and start of the kernel: hosts may bear one name, and containers one kernel."""
    folder: str
    disk_bytes: int
    memory_bytes: int
    most_bytes: int | None
    """Most bytes in the rank's own memory, as its plan leaves; None: any."""


def _look_around(folder: Path | None, most_bytes: int | None) -> _Found:
    place = tempfile.gettempdir() if folder is None else str(folder)
    return _Found(
        host=(socket.gethostname(), boot_id()),
        folder=place,
        disk_bytes=shutil.disk_usage(place).free,
        memory_bytes=available_ram_bytes(),
        most_bytes=most_bytes,
    )


def _choose_place(own: _Found, ranks: Sequence[_Found], table_bytes: int, need: int) -> _Place:
    """Choose where a rank's table lies; all ranks know the choice of each.

    `need` are the bytes for which a copy must find room; each rank of a host has a copy, unless
    they share a file.
    """
    near = [each for each in ranks if each.host == own.host]
    disk = min(each.disk_bytes for each in near)
    memory = min(each.memory_bytes for each in near)
    if 1 < len(near) == len(ranks) and need <= disk:
        return _Place.SHARED
    need *= len(near)
    planned = need <= memory if own.most_bytes is None else table_bytes <= own.most_bytes
    if not planned and need <= disk:
        return _Place.FILE
    return _Place.MEMORY if planned or need <= memory else _Place.NOWHERE


class LayerTable:
    """Output of a layer, float32 (num_nodes, width); rows never written cost no memory.

    All ranks of `comm` make it at the same point. A table of more than `most_bytes` in this
    process's own memory becomes an unlinked file in `folder`, where the disk has room. `need_bytes`
    are those for which there must be room, as for the table after it too; None: twice its own.

    Raises:
        GnnplanError: on every rank, where one of them has room neither in memory nor on the disk.
    """

    def __init__(
        self,
        num_nodes: int,
        width: int,
        comm: Communicator | None,
        folder: Path | None,
        most_bytes: int | None = None,
        need_bytes: int | None = None,
    ):
        self._comm = comm
        self.rows: NDArray[np.float32]
        shape, size = (num_nodes, width), 4 * num_nodes * width
        need = 2 * size if need_bytes is None else need_bytes
        own = _look_around(folder, most_bytes)
        ranks = [own] if comm is None or comm.size == 1 else comm.all_gather_objects(own)
        places = [_choose_place(each, ranks, size, need) for each in ranks]
        if _Place.NOWHERE in places:
            raise GnnplanError(_say_room(ranks[places.index(_Place.NOWHERE)], ranks, need))
        place = places[0 if comm is None else comm.rank]
        self._shared = place is _Place.SHARED
        if comm is not None and self._shared:
            self.rows = _shared_rows(shape, comm, folder)
        else:
            self.rows = _own_rows(shape, folder, in_file=place is _Place.FILE)

    def put(self, ids: NDArray[np.int64], out: Tensor) -> None:
        """Write outputs of nodes."""
        self.rows[ids] = out.cpu().numpy()

    def take(self, ids: NDArray[np.int64], device: torch.device) -> Tensor:
        """Return outputs of nodes on a device."""
        x = np.empty((ids.shape[0], self.rows.shape[1]), np.float32)
        return torch.from_numpy(gather_rows(self.rows, ids, x)).to(device)

    def exchange(self, parts: list[NDArray[np.int64]]) -> None:
        """Show every rank's rows to all; `parts` has the rows that each rank has written."""
        comm = self._comm
        if comm is None or comm.size == 1:
            return
        if self._shared:
            comm.barrier()
            return
        most = max(1, SENT_BYTES // (4 * self.rows.shape[1]))
        for source, rows in enumerate(parts):
            for first in range(0, rows.shape[0], most):
                some = rows[first : first + most]
                part = torch.from_numpy(self.rows[some]).to(comm.device)
                self.rows[some] = comm.broadcast(part, source).cpu().numpy()

    def close(self) -> None:
        """Wait until no rank reads the rows any more, then give them back."""
        if self._shared and self._comm is not None:
            self._comm.barrier()
        del self.rows


class DeviceLayerTable:
    """`LayerTable` in the memory of the GPU of a rank that evaluates alone."""

    def __init__(self, num_nodes: int, width: int, device: torch.device) -> None:
        self._device = device
        self.rows = torch.empty((num_nodes, width), device=device)

    def _places(self, ids: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.array(ids)).to(self._device)

    def put(self, ids: NDArray[np.int64], out: Tensor) -> None:
        """See `LayerTable.put`."""
        self.rows[self._places(ids)] = out

    def take(self, ids: NDArray[np.int64], device: torch.device) -> Tensor:
        """See `LayerTable.take`."""
        assert device == self._device
        return self.rows[self._places(ids)]

    def exchange(self, parts: list[NDArray[np.int64]]) -> None:
        """See `LayerTable.exchange`: there is one rank."""

    def close(self) -> None:
        """Give the rows back."""
        del self.rows


def _say_room(found: _Found, ranks: Sequence[_Found], need: int) -> str:
    """Say what a rank's host lacks for its tables."""
    copies = sum(each.host == found.host for each in ranks)
    return (
        f"validation and test: expected {size_text(copies * need)} on {found.host[0]} for outputs "
        f"of layers, found {size_text(found.disk_bytes)} free in {found.folder} and "
        f"{size_text(found.memory_bytes)} of memory; set TMPDIR to a folder with room, or sample "
        "(--eval-fanouts), or score nothing (--eval-every 0): --resume goes on"
    )


def make_layer_table(
    num_nodes: int,
    width: int,
    comm: Communicator | None,
    folder: Path | None,
    room: TableRoom,
    need_bytes: int | None = None,
) -> LayerTable | DeviceLayerTable:
    """Make a table on the GPU of one rank alone where it has room, else on the host; collective."""
    alone = comm is None or comm.size == 1
    if alone and room.device is not None and 4 * num_nodes * width <= room.device_bytes:
        with suppress(torch.OutOfMemoryError):  # taken otherwise, or in pieces that do not join
            return DeviceLayerTable(num_nodes, width, room.device)
    return LayerTable(num_nodes, width, comm, folder, room.host_bytes, need_bytes)


def _own_rows(shape: tuple[int, int], folder: Path | None, *, in_file: bool) -> NDArray[np.float32]:
    """Make rows of this process alone, in its memory or mapped from a file."""
    if not in_file:
        return np.empty(shape, np.float32)
    path = _empty_file(4 * shape[0] * shape[1], folder)
    try:
        return np.memmap(path, np.float32, "r+", shape=shape)
    finally:
        path.unlink()


def _empty_file(size_bytes: int, folder: Path | None) -> Path:
    """Make a file of zeros that takes no room yet."""
    descriptor, name = tempfile.mkstemp(suffix=".layer", dir=folder)
    os.ftruncate(descriptor, size_bytes)
    os.close(descriptor)
    return Path(name)


def _shared_rows(
    shape: tuple[int, int], comm: Communicator, folder: Path | None
) -> NDArray[np.float32]:
    """Map one file in all ranks of the host, unlinked as soon as all have it open."""
    name = ""
    if comm.rank == 0:
        name = f"{_empty_file(4 * shape[0] * shape[1], folder)}"
    path = Path(comm.broadcast_object(name))
    try:
        rows = np.memmap(path, np.float32, "r+", shape=shape)
        comm.barrier()
    finally:
        if comm.rank == 0:
            path.unlink()
    return rows
