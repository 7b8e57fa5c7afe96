"""Which rows each host's copy of the dataset holds, and fetching own rows that this one lacks.

A plan with several hosts may give arrays `host_rows_<h>`: the ids whose rows host h holds (in its
x.npy, so in its shared mapping and on its disk). The file keeps its full length and its row
numbers; the rows not held may be holes that take no space. Without the array a host holds all.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.comm.collectives import Communicator
from runtime.errors import PlanError
from runtime.features.counters import Counters
from runtime.features.location import IN_DATASET, SOURCE_MASK, LocationTable
from runtime.features.peer import AbstractServed, Peer
from runtime.plan import Plan, load_array


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
