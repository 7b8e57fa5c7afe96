"""Rows of other GPUs by all-to-all, where their memory is not mapped or many are wanted at once.

Every rank takes part in every read. Ids are sorted by owner on the device, slots and rows travel
by the communicator (nccl between GPUs; gloo, in tests and for two ranks on one GPU, by way of the
host), and arrive where the batch wants them. The host waits once, for the numbers of rows.
"""

import threading
import time

import torch
from torch import Tensor

from runtime.comm.collectives import Communicator
from runtime.features.counters import Counters
from runtime.features.location import MAX_SOURCES
from runtime.stages import Stage


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
