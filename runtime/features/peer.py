"""Tiers on other ranks: rows that they own (peer) or that their host holds (remote).

A read is one all-to-all of slots and one of rows. Every rank takes part in every read, also with
nothing to ask: reads must come in the same order on every rank. The exchange has a process group of
its own, so a loader thread can read while the training thread reduces gradients. On one CPU host
the shared mapping is never slower (measured); peers are for rows on other hosts, on GPUs, or where
the host may not be shared.
"""

import threading
from abc import ABC, abstractmethod
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.comm.collectives import Communicator
from runtime.features.counters import Counters
from runtime.features.gather import addresses_of, copy_from_addresses
from runtime.features.sparse import SparseHost
from runtime.features.tier import AbstractTier
from runtime.stages import Stage


class AbstractServed(ABC):
    """What a rank serves to the others, by slot; the same dtype and width on every rank."""

    dtype: np.dtype[Any]
    width: int

    @abstractmethod
    def take(self, slots: NDArray[np.int64], rows: NDArray[Any]) -> None:
        """rows[i] = the row in slots[i].

        Raises:
            IndexError: a slot is outside.
        """


class ServedArray(AbstractServed):
    """Rows of an array in memory: own rows, or the host's dense mapping."""

    def __init__(self, table: NDArray[Any], *, threads: int = 1) -> None:
        self.table = np.asarray(table).view(np.ndarray)
        self._threads = threads
        self.dtype, self.width = self.table.dtype, int(self.table.shape[1])

    def take(self, slots: NDArray[np.int64], rows: NDArray[Any]) -> None:
        """See `AbstractServed.take`."""
        addresses = addresses_of(self.table, slots, np.empty(slots.size, np.int64))
        copy_from_addresses(addresses, self.dtype, rows, threads=self._threads)


class ServedSparse(AbstractServed):
    """Rows of the host's CSR features, made dense before they are sent."""

    def __init__(self, host: SparseHost, width: int) -> None:
        self._host = host
        self.dtype, self.width = np.dtype(np.float32), width

    def take(self, slots: NDArray[np.int64], rows: NDArray[Any]) -> None:
        """See `AbstractServed.take`."""
        everywhere = np.arange(slots.size)
        self._host.read(slots, everywhere, np.array([slots.size]), rows, Counters())


class Peer(AbstractTier):
    """Rows that the other ranks serve."""

    def __init__(
        self,
        served: AbstractServed,
        ranks: list[int],
        comm: Communicator,
        *,
        kind: Literal["peer", "remote"] = "peer",
        threads: int = 1,
    ) -> None:
        """Serve this rank's rows to the others and read theirs.

        Args:
            served: what the others may ask of this rank.
            ranks: the rank that each of the tier's sources stands for, ascending.
            comm: a communicator that nothing else uses; closed with the tier.
            kind: the row of the counters.
            threads: threads of one copy.
        """
        self.kind = kind
        self.served = served
        self._ranks = ranks
        self._comm = comm
        self._threads = threads
        self._row_bytes = served.dtype.itemsize * served.width
        self._sent = np.empty((0, served.width), served.dtype)
        self._received = np.empty((0, served.width), served.dtype)
        # One exchange at a time; the order of reads over ranks stays the caller's duty.
        self._lock = threading.Lock()

    @property
    def resident_bytes(self) -> int:
        """The exchange buffers (grown to the largest read so far)."""
        return self._sent.nbytes + self._received.nbytes

    def read(
        self,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        counts: NDArray[np.int64],
        out: NDArray[np.float32],
        counters: Counters,
    ) -> None:
        """See `AbstractTier.read`; collective."""
        to_rank = [0] * self._comm.size
        for rank, count in zip(self._ranks, counts.tolist(), strict=True):
            to_rank[rank] += count
        with self._lock:
            before = self._comm.traffic
            asked, from_rank = self._comm.all_to_all_ids(torch.from_numpy(slots), to_rank)
            self._sent = _grown(self._sent, asked.shape[0])
            self._received = _grown(self._received, slots.size)
            served = self._serve(asked.numpy())
            rows = self._received[: slots.size]
            self._comm.all_to_all_rows(
                torch.from_numpy(served), from_rank, to_rank, out=torch.from_numpy(rows)
            )
            addresses = addresses_of(rows, np.arange(slots.size), np.empty(slots.size, np.int64))
            copy_from_addresses(
                addresses, rows.dtype, out, positions=positions, threads=self._threads
            )
            self._count_seconds(before, counters)
        counters.add_rows(self.kind, slots.size, slots.size * self._row_bytes)

    def _serve(self, asked: NDArray[np.int64]) -> NDArray[Any]:
        """The rows that the others asked for, in the order asked, as stored."""
        rows = self._sent[: asked.size]
        self.served.take(asked, rows)
        return rows

    def _count_seconds(self, before: dict[Stage, Any], counters: Counters) -> None:
        after = self._comm.traffic
        for stage in (Stage.EXCHANGE_IDS, Stage.EXCHANGE_ROWS):
            earlier = before[stage].seconds if stage in before else 0.0
            counters.add_seconds(stage.value, after[stage].seconds - earlier)

    def close(self) -> None:
        """Give back the buffers and the process group."""
        self._sent, self._received = self._sent[:0].copy(), self._received[:0].copy()
        self._comm.close()


def _grown(buffer: NDArray[Any], num_rows: int) -> NDArray[Any]:
    """The buffer, or a larger one with a quarter to spare where it holds too few rows."""
    if buffer.shape[0] >= num_rows:
        return buffer
    return np.empty((num_rows + num_rows // 4, buffer.shape[1]), buffer.dtype)
