"""Outputs of a layer while an evaluation runs: in a rank's memory, in a file, or on its GPU.

The ranks of a host share one file, those of several hosts hand their rows over. A rank alone keeps
the rows on its GPU where that has room.
"""

import os
import shutil
import socket
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.features.gather import gather_rows
from gnnplan.runtime.folders import boot_id

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


class LayerTable:
    """Output of a layer, float32 (num_nodes, width); rows never written cost no memory.

    All ranks of `comm` make it at the same point. A table of more than `most_bytes` in this
    process's own memory becomes an unlinked file in `folder`, where the disk has room for two.
    """

    def __init__(
        self,
        num_nodes: int,
        width: int,
        comm: Communicator | None,
        folder: Path | None,
        most_bytes: int | None = None,
    ):
        self._comm = comm
        self._shared = False
        self.rows: NDArray[np.float32]
        shape = (num_nodes, width)
        if comm is None or comm.size == 1:
            self.rows = _own_rows(shape, folder, most_bytes)
            return
        here = socket.gethostname(), boot_id()  # hosts may bear one name, and containers one kernel
        self._shared = len(set(comm.all_gather_objects(here))) == 1
        if self._shared:
            self.rows = _shared_rows(shape, comm, folder)
        else:
            self.rows = _own_rows(shape, folder, most_bytes)

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


def make_layer_table(
    num_nodes: int, width: int, comm: Communicator | None, folder: Path | None, room: TableRoom
) -> LayerTable | DeviceLayerTable:
    """Make a table on the GPU of one rank alone where it has room, else on the host; collective."""
    alone = comm is None or comm.size == 1
    if alone and room.device is not None and 4 * num_nodes * width <= room.device_bytes:
        with suppress(torch.OutOfMemoryError):  # taken otherwise, or in pieces that do not join
            return DeviceLayerTable(num_nodes, width, room.device)
    return LayerTable(num_nodes, width, comm, folder, room.host_bytes)


def _own_rows(
    shape: tuple[int, int], folder: Path | None, most_bytes: int | None
) -> NDArray[np.float32]:
    """Make rows of this process alone, in its memory or mapped from a file."""
    size = 4 * shape[0] * shape[1]
    place = Path(tempfile.gettempdir() if folder is None else folder)
    if most_bytes is None or size <= most_bytes or shutil.disk_usage(place).free < 2 * size:
        return np.empty(shape, np.float32)
    path = _empty_file(size, folder)
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
