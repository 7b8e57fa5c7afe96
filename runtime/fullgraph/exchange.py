"""Rows over the boundary, sent beside the training thread's own work.

A rank has one exchange. With a communication thread it owns a process group, so that the exchange
of rows runs while the training thread aggregates over inner nodes; without one, rows are sent where
they are asked for. Every call is metered as `halo_exchange`.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.comm.collectives import Communicator
from runtime.stages import Stage


@dataclass(slots=True)
class Pending:
    """Rows on their way."""

    exchange: "Exchange"
    rows: "Tensor | Future[Tensor]"

    def wait(self) -> Tensor:
        """The rows received, those of rank 0 first."""
        if isinstance(self.rows, Tensor):
            return self.rows
        started = time.perf_counter()
        rows = self.rows.result()
        self.exchange.exposed_seconds += time.perf_counter() - started
        return rows


class Exchange:
    """Sends rows between ranks and counts them.

    Args:
        comm: the ranks. With `overlap` every rank must make its exchange at the same point.
        overlap: send on a thread and a process group of their own.
    """

    def __init__(self, comm: Communicator, *, overlap: bool = False) -> None:
        self._threaded = overlap and comm.size > 1
        self.comm = comm.duplicate() if self._threaded else comm
        """The ranks; no call on it may be made while rows are under way."""
        self._thread = ThreadPoolExecutor(1, "halo") if self._threaded else None
        self.exposed_seconds = 0.0
        """Seconds for which the training thread packed or waited, since it was last reset."""
        self.rows = 0
        """Rows sent since it was last reset."""
        self.bytes = 0
        """Bytes of those rows."""

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.comm.size

    @property
    def sent_bytes(self) -> int:
        """Bytes sent as halo_exchange since the communicator was made, ids included."""
        found = self.comm.traffic.get(Stage.HALO_EXCHANGE)
        return 0 if found is None else found.sent_bytes

    def reset(self) -> None:
        """Start counting anew."""
        self.exposed_seconds, self.rows, self.bytes = 0.0, 0, 0

    def start(
        self,
        x: Tensor,
        send: Tensor | None,
        counts: Sequence[int],
        received_counts: Sequence[int],
    ) -> Pending:
        """Send rows and return at once (with a thread) or when they have arrived (without).

        Args:
            x: shape (n, d); records no gradient.
            send: rows of x to send, by receiver; None sends all of x in order.
            counts: rows for each rank.
            received_counts: rows from each rank.
        """
        started = time.perf_counter()
        rows = x.detach() if send is None else x.detach().index_select(0, send.to(x.device))
        rows = rows.contiguous()
        self.rows += rows.shape[0]
        self.bytes += rows.nbytes
        if self._thread is None:
            pending = Pending(self, self._send(rows, counts, received_counts))
        else:
            pending = Pending(self, self._thread.submit(self._send, rows, counts, received_counts))
        self.exposed_seconds += time.perf_counter() - started
        return pending

    def _send(self, rows: Tensor, counts: Sequence[int], received: Sequence[int]) -> Tensor:
        with torch.no_grad():
            return self.comm.all_to_all_rows(rows, counts, received, stage=Stage.HALO_EXCHANGE)

    def close(self) -> None:
        """End the thread and leave the process group, if they are its own."""
        if self._thread is not None:
            self._thread.shutdown()
            self.comm.close()
