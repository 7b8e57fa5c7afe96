"""Tiers on other ranks: rows that they own (peer) or that their host holds (remote).

A read is one all-to-all of slots and one of rows. Every rank takes part in every read, also with
nothing to ask: reads must come in the same order on every rank. The exchange has a process group of
its own, so a loader thread can read while the training thread reduces gradients. On one CPU host
the shared mapping is never slower (measured); peers are for rows on other hosts, on GPUs, or where
the host may not be shared.

Which rows each host's copy of the dataset holds, and fetching own rows that this one lacks.

A plan with several hosts may give arrays `host_rows_<h>`: the ids whose rows host h holds (in its
x.npy, so in its shared mapping and on its disk). The file keeps its full length and its row
numbers; the rows not held may be holes that take no space. Without the array a host holds all.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.features.gather import addresses_of, copy_from_addresses
from gnnplan.runtime.features.location import IN_DATASET, SOURCE_MASK, LocationTable
from gnnplan.runtime.features.sparse import SparseHost
from gnnplan.runtime.features.tier import AbstractTier, Counters
from gnnplan.runtime.plan.io import load_array
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.stages import Stage


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


class HostRows:
    """The rows that each host of a plan holds."""

    def __init__(self, plan: Plan, folder: Path, num_nodes: int) -> None:
        """Read the plan's arrays.

        Raises:
            PlanError: an array is damaged, or names nodes that the graph does not have.
        """
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
        """Check that no code reads a row from a host that does not hold it.

        Raises:
            PlanError: a source names no rank of the plan, or a row is not held; names the node.
        """
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
        """Positions of the ids whose rows this rank's host does not hold."""
        held = self._held.get(self._host_of[rank])
        return np.empty(0, np.int64) if held is None else np.flatnonzero(~held[ids])

    def server_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """A rank whose host holds each id: hosts in order, a host's ranks in turns by id.

        Raises:
            PlanError: no host holds one of them.
        """
        servers = np.full(ids.size, -1, np.int64)
        for host in sorted(set(self._host_of)):
            ranks = np.flatnonzero(np.array(self._host_of) == host)
            held = self._held.get(host)
            mine = servers < 0 if held is None else (servers < 0) & held[ids]
            servers[mine] = ranks[ids[mine] % ranks.size]
        if (servers < 0).any():
            raise PlanError(f"no host holds the row of node {ids[np.argmin(servers)]}; plan again")
        return servers


def fetch_lacking(
    hosts: HostRows,
    served: AbstractServed,
    ids: NDArray[np.int64],
    rank: int,
    comm: Communicator,
    rows: NDArray[Any],
) -> None:
    """Replace the rows of the ids that this host lacks by those of a host that holds them.

    Collective: every rank serves its host's rows, also where it lacks none itself.

    Args:
        hosts: who holds what.
        served: this host's rows.
        ids: shape (n,); this rank's own ids.
        rank: this rank.
        comm: all ranks.
        rows: shape (n, feature_dim), of the served dtype; filled where the host lacks the row.

    Raises:
        PlanError: no host holds one of them.
    """
    places = hosts.lacking(ids, rank)
    servers = hosts.server_of(ids[places])
    order = np.argsort(servers, kind="stable")
    counts = np.bincount(servers, minlength=comm.size)
    fetched = np.empty((places.size, served.width), np.float32)
    tier = Peer(served, list(range(comm.size)), comm.duplicate(), kind="remote")
    tier.read(ids[places[order]], order, counts, fetched, Counters())
    tier.close()
    rows[places] = fetched.astype(rows.dtype)  # float16 was widened on the way: nothing is lost


def ranks_of(kind: str, sources: Sequence[Any], local: Sequence[int]) -> dict[int, int]:
    """Source number by rank, for the sources of a kind that are not read locally.

    Raises:
        PlanError: two sources stand for one rank.
    """
    found: dict[int, int] = {}
    for number, source in enumerate(sources):
        if source.kind != kind or source.rank in local:
            continue
        if source.rank in found:
            raise PlanError(f"expected one {kind} source per rank, found two of rank {source.rank}")
        found[source.rank] = number
    return found
