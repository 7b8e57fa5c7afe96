"""Rows of other ranks: what their memories (peer) or their hosts' datasets (remote) hold.

A read is one all-to-all of slots and one of rows. Every rank takes part in every read, in the same
order, even with nothing to ask. Each exchange has a process group of its own, so that a loader
thread may read while the training thread reduces gradients. GPUs exchange rows of their memories
where these are not mapped.

In a plan of several hosts, an array `host_rows_<h>` lists the ids whose rows host h holds, in its
mapping and on its disk; without it the host holds all. The file keeps its length; missing rows may
be holes.
"""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.features.gather import addresses_of, copy_from_addresses
from gnnplan.runtime.features.location import IN_DATASET, MAX_SOURCES, SOURCE_MASK, LocationTable
from gnnplan.runtime.features.tier import AbstractTier, Counters, Ids, Rows, Served
from gnnplan.runtime.graph.format import BFLOAT16, convert_rows
from gnnplan.runtime.plan.io import load_array
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.stages import Stage

_STAGES = (Stage.EXCHANGE_IDS, Stage.EXCHANGE_ROWS)


class Peer(AbstractTier):
    """Tier of the rows that other ranks serve."""

    def __init__(
        self,
        served: Served,
        ranks: list[int],
        comm: Communicator,
        *,
        kind: Literal["peer", "remote"] = "peer",
        threads: int = 1,
    ) -> None:
        """Serve this rank's rows to the others, and read theirs.

        `ranks` has the rank of each of the tier's sources, ascending. Nothing else uses the
        communicator, which is closed with the tier.
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
        """Bytes of the exchange buffers, which grow to the largest read."""
        return self._sent.nbytes + self._received.nbytes

    def read(self, slots: Ids, positions: Ids, counts: Ids, out: Rows, counters: Counters) -> None:
        """Read rows as `AbstractTier.read` says; collective."""
        to_rank = [0] * self._comm.size
        for rank, count in zip(self._ranks, counts.tolist(), strict=True):
            to_rank[rank] += count
        with self._lock:
            before = [self._comm.stage_seconds(stage) for stage in _STAGES]
            asked, from_rank = self._comm.all_to_all_ids(torch.from_numpy(slots), to_rank)
            self._sent = _grown(self._sent, asked.shape[0])
            self._received = _grown(self._received, slots.size)
            served = self._sent[: asked.shape[0]]
            self.served.take(asked.numpy(), served, threads=self._threads)
            rows = self._received[: slots.size]
            self._comm.all_to_all_rows(
                torch.from_numpy(sendable(served)), from_rank, to_rank,
                out=torch.from_numpy(sendable(rows)),
            )  # fmt: skip
            addresses = addresses_of(rows, np.arange(slots.size), np.empty(slots.size, np.int64))
            copy_from_addresses(
                addresses, rows.dtype, out, positions=positions, threads=self._threads
            )
            for stage, seconds in zip(_STAGES, before, strict=True):
                counters.add_seconds(stage.value, self._comm.stage_seconds(stage) - seconds)
        counters.add_rows(self.kind, slots.size, slots.size * self._row_bytes)

    def close(self) -> None:
        """Give back the buffers and the process group."""
        self._sent, self._received = self._sent[:0].copy(), self._received[:0].copy()
        self._comm.close()


class DeviceExchange:
    """Exchange of the rows in the GPUs' memories, over nccl or, by way of the host, gloo."""

    def __init__(
        self, own: Tensor, ranks: dict[int, int], comm: Communicator, *, kind: str = "peer"
    ) -> None:
        """Serve rows `own`; `ranks` has the rank of each source, `comm` is closed with this."""
        self._own, self._comm, self._kind = own, comm, kind
        # Rank of every source number; sources of no peer sort behind the last rank.
        ranked = torch.full((MAX_SOURCES + 1,), comm.size, dtype=torch.int64)
        for number, rank in ranks.items():
            ranked[number] = rank
        self._ranks = ranked.to(own.device)
        self._lock = threading.Lock()

    def fill(self, numbers: Tensor, slots: Tensor, wanted: Tensor | None, out: Tensor) -> Counters:
        """Write the rows of other ranks into the batch, as `Staged.fill` does; collective.

        The host waits once, for the numbers of rows.
        """
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
            rows = exchange_rows(self._comm, served, from_rank, counts)
            counters.add_seconds(Stage.EXCHANGE_ROWS.value, time.perf_counter() - start)
        out.index_copy_(0, places, rows.to(device=device, dtype=out.dtype))
        row_bytes = self._own.shape[1] * self._own.element_size()
        counters.add_rows(self._kind, sum(counts), sum(counts) * row_bytes)
        return counters

    @property
    def resident_bytes(self) -> int:
        """Zero bytes: only the batch holds rows."""
        return 0

    def close(self) -> None:
        """Give back the process group."""
        self._comm.close()


def sendable(rows: NDArray[Any]) -> NDArray[Any]:
    """Return rows as gloo and torch take them: bfloat16 by its bits, as float16."""
    return rows.view(np.float16) if rows.dtype == BFLOAT16 else rows


def exchange_rows(
    comm: Communicator, rows: Tensor, counts: Sequence[int], received_counts: Sequence[int]
) -> Tensor:
    """Exchange rows as `Communicator.all_to_all_rows`; bfloat16 by its bits, as float16."""
    bits = rows.view(torch.float16) if rows.dtype == torch.bfloat16 else rows
    return comm.all_to_all_rows(bits, counts, received_counts).view(rows.dtype)


def _grown(buffer: NDArray[Any], num_rows: int) -> NDArray[Any]:
    """Return the buffer, or one with a quarter to spare where it holds too few rows."""
    if buffer.shape[0] >= num_rows:
        return buffer
    return np.empty((num_rows + num_rows // 4, buffer.shape[1]), buffer.dtype)


class HostRows:
    """Record of the rows that each host of a plan holds."""

    def __init__(self, plan: Plan, folder: Path, num_nodes: int) -> None:
        self._host_of = [device.host for device in plan.strategy.devices]
        self._held: dict[int, NDArray[np.bool_]] = {}
        for host in sorted(set(self._host_of)):
            name = f"host_rows_{host}"
            if name not in plan.arrays:
                continue
            ids = np.asarray(load_array(plan, folder, name))
            if ids.ndim != 1 or ids.dtype.kind not in "iu":
                raise PlanError(f"{name}: expected node ids, found {ids.dtype}{list(ids.shape)}")
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < num_nodes:
                raise PlanError(
                    f"{name}: expected node ids from 0 to {num_nodes - 1}, found {ids.min()} to "
                    f"{ids.max()}; plan again"
                )
            held = np.zeros(num_nodes, np.bool_)
            held[ids] = True
            self._held[host] = held

    @property
    def all_everywhere(self) -> bool:
        """Whether every host holds every row."""
        return not self._held

    def check(self, table: LocationTable, rank: int) -> None:
        """Check that no code reads a row from a host that does not hold it."""
        for number, source in enumerate(table.sources):
            if source.kind not in IN_DATASET:
                continue
            reader = source.rank if source.kind == "remote" else rank
            if not 0 <= reader < len(self._host_of):
                raise PlanError(
                    f"source {number}: expected a rank from 0 to {len(self._host_of) - 1} to serve "
                    f"another host's rows, found {reader}; plan again"
                )
            held = self._held.get(self._host_of[reader])
            if held is None:
                continue
            lacking = np.flatnonzero(((table.codes & SOURCE_MASK) == number) & ~held)
            if lacking.size:
                raise PlanError(
                    f"location table of rank {rank}: node {lacking[0]} points to {source.kind} "
                    f"rows of host {self._host_of[reader]}, which does not hold it; plan again"
                )

    def lacking(self, ids: NDArray[np.int64], rank: int) -> NDArray[np.int64]:
        """Return the positions of the ids whose rows this rank's host does not hold."""
        held = self._held.get(self._host_of[rank])
        return np.empty(0, np.int64) if held is None else np.flatnonzero(~held[ids])

    def server_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a rank whose host holds each id; the ranks of a host take turns by id."""
        servers = np.full(ids.size, -1, np.int64)
        for host in sorted(set(self._host_of)):
            ranks = np.flatnonzero(np.array(self._host_of) == host)
            held = self._held.get(host)
            mine = servers < 0 if held is None else (servers < 0) & held[ids]
            servers[mine] = ranks[ids[mine] % ranks.size]
        if (servers < 0).any():
            raise PlanError(f"no host holds the row of node {ids[np.argmin(servers)]}; plan again")
        return servers


class LackingRows:
    """Rows of a dataset that this rank's host lacks, read from hosts that hold them."""

    def __init__(self, hosts: HostRows, served: Served, rank: int, comm: Communicator) -> None:
        """Serve this host's rows to all ranks, and read theirs; collective."""
        self._hosts, self._rank, self._size = hosts, rank, comm.size
        self._tier = Peer(served, list(range(comm.size)), comm.duplicate(), kind="remote")

    def fill(self, ids: NDArray[np.int64], rows: NDArray[Any]) -> None:
        """Replace those of the rows of `ids` that this host lacks; collective."""
        places = self._hosts.lacking(ids, self._rank)
        servers = self._hosts.server_of(ids[places])
        order = np.argsort(servers, kind="stable")
        counts = np.bincount(servers, minlength=self._size)
        fetched = np.empty((places.size, rows.shape[1]), np.float32)
        self._tier.read(ids[places[order]], order, counts, fetched, Counters())
        rows[places] = convert_rows(fetched, rows.dtype)  # widened on the way: nothing is lost

    def close(self) -> None:
        """Give back the buffers and the process group."""
        self._tier.close()


def number_by_rank(kind: str, sources: Sequence[Any], local: Sequence[int]) -> dict[int, int]:
    """Return the source number of each rank that sources of a kind name and that is not local."""
    found: dict[int, int] = {}
    for number, source in enumerate(sources):
        if source.kind != kind or source.rank in local:
            continue
        if source.rank in found:
            raise PlanError(f"expected one {kind} source per rank, found two of rank {source.rank}")
        found[source.rank] = number
    return found
