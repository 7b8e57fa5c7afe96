"""A layer's output for all vertices, written in parts by the ranks and read by all.

Ranks of one host share one mapped file; ranks of several hosts broadcast their parts. A table that
is larger than its rank's memory has room for is a mapped file too: the system writes parts of it
out, where otherwise the rank would be ended.
"""

import os
import shutil
import socket
import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.comm.collectives import Communicator


class LayerTable:
    """Float32 [N, width]; rows never written cost no memory.

    Args:
        num_nodes: N.
        width: Columns.
        comm: The ranks; None: this process alone. Every rank makes the table at the same point.
        folder: Where files are made (and unlinked at once); the system's temporary folder if None.
        most_bytes: Of a table in this process's own memory. A larger one is a file, where the
            folder's disk has room for two. None: any.
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
        self._shared = len(set(comm.all_gather_objects(socket.gethostname()))) == 1
        if self._shared:
            self.rows = _shared_rows(shape, comm, folder)
        else:
            self.rows = _own_rows(shape, folder, most_bytes)

    def exchange(self, parts: list[NDArray[np.int64]]) -> None:
        """Make every rank's rows visible to all; `parts` are the rows each rank has written."""
        comm = self._comm
        if comm is None or comm.size == 1:
            return
        if self._shared:
            comm.barrier()
            return
        for source, rows in enumerate(parts):
            part = torch.from_numpy(self.rows[rows]).to(comm.device)
            self.rows[rows] = comm.broadcast(part, source).cpu().numpy()

    def close(self) -> None:
        """Wait until no rank reads the rows any more, then give them back."""
        if self._shared and self._comm is not None:
            self._comm.barrier()
        del self.rows


def _own_rows(
    shape: tuple[int, int], folder: Path | None, most_bytes: int | None
) -> NDArray[np.float32]:
    """Rows of this process alone: in its memory, or mapped from a file."""
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
    """A file of zeros that takes no room yet."""
    descriptor, name = tempfile.mkstemp(suffix=".layer", dir=folder)
    os.ftruncate(descriptor, size_bytes)
    os.close(descriptor)
    return Path(name)


def _shared_rows(
    shape: tuple[int, int], comm: Communicator, folder: Path | None
) -> NDArray[np.float32]:
    """One file mapped by all ranks of the host, unlinked as soon as all have it open."""
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
