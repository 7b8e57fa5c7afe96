"""Building a rank's tiers from a graph and a plan: location table, own rows, host, others, disk."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import DatasetError, PlanError
from gnnplan.runtime.features.disk import Disk
from gnnplan.runtime.features.location import LocationTable
from gnnplan.runtime.features.peer import (
    AbstractServed,
    HostRows,
    Peer,
    ServedArray,
    ServedSparse,
    fetch_lacking,
    ranks_of,
)
from gnnplan.runtime.features.sparse import SparseHost
from gnnplan.runtime.features.tier import AbstractTier, Dense
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.io import load_array
from gnnplan.runtime.plan.schema import Plan

OwnIds = dict[int, NDArray[np.int64]]
Tiers = list[tuple[AbstractTier, list[int]]]


def read_location(
    graph: Graph, plan: Plan, plan_folder: Path, rank: int
) -> tuple[LocationTable, OwnIds]:
    """This rank's location table, checked, and the ids in the own slots of it and its peers.

    Raises:
        PlanError: arrays are missing, of the wrong length, or a code points to the wrong row.
    """
    sources = plan.strategy.features.sources
    ranks = {rank} | {source.rank for source in sources if source.kind == "peer"}
    own_ids: OwnIds = {}
    for each in sorted(ranks):
        ids = load_array(plan, plan_folder, f"feature_own_ids_{each}")
        own_ids[each] = np.asarray(ids, np.int64).view(np.ndarray)
    codes = load_array(plan, plan_folder, f"feature_location_{rank}")
    if codes.shape != (graph.num_nodes,) or codes.dtype not in (np.uint32, np.uint64):
        raise PlanError(
            f"{plan_folder}: expected {graph.num_nodes} unsigned location codes for rank {rank}, "
            f"found {codes.dtype}{list(codes.shape)}; plan again"
        )
    table = LocationTable(codes, sources)
    table.check(own_ids, rank)
    return table, own_ids


def build_tiers(
    graph: Graph,
    plan: Plan,
    plan_folder: Path,
    rank: int,
    location: LocationTable,
    own_ids: OwnIds,
    comm: Communicator | None,
    threads: int,
) -> tuple[dict[int, Dense], Tiers]:
    """The arrays in memory by source number, and the other tiers with theirs.

    Collective where the plan reads from other ranks or its hosts hold different rows.

    Raises:
        PlanError: the plan needs what is not there.
        DatasetError: the dataset has no features.
        BudgetExceeded: the disk budget is too small.
    """
    if graph.x is None and graph.x_csr is None:
        raise DatasetError(f"{graph.path}: expected features, found a topology-only dataset")
    hosts = HostRows(plan, plan_folder, graph.num_nodes)
    hosts.check(location, rank)
    own_table = load_own_rows(graph, plan, own_ids[rank], rank, hosts, comm, threads)
    own = Dense("own", own_table, private=True)
    sources, devices = plan.strategy.features.sources, plan.strategy.devices
    here = [device.rank for device in devices if device.host == devices[rank].host]
    dense: dict[int, Dense] = {}
    tiers: Tiers = []
    if any(source.kind == "peer" for source in sources):
        served = ServedArray(own.table, threads=threads)
        tiers.append(_others("peer", served, plan, [rank], comm, threads))
    if any(source.kind == "remote" for source in sources):
        tiers.append(_others("remote", _host_rows(graph, threads), plan, here, comm, threads))
    for number, source in enumerate(sources):
        if source.kind == "own" or (source.kind == "peer" and source.rank == rank):
            dense[number] = own
        elif source.kind == "disk":
            tiers.append((_disk(graph, plan), [number]))
        elif source.kind == "host" or (source.kind == "remote" and source.rank in here):
            if graph.x is not None:
                dense[number] = Dense("host", graph.x, private=False)
            else:
                tiers.append((_sparse(graph, threads), [number]))
    return dense, tiers


def load_own_rows(
    graph: Graph,
    plan: Plan,
    ids: NDArray[np.int64],
    rank: int,
    hosts: HostRows,
    comm: Communicator | None,
    threads: int,
) -> NDArray[np.float32] | NDArray[np.float16]:
    """Copy this rank's rows out of the dataset, as the plan wants them stored.

    Rows that this rank's host lacks come from one that holds them; collective then.

    Raises:
        PlanError: float16 storage would change values, and the plan is not `approximate`.
    """
    stored = np.dtype(plan.strategy.features.storage_dtype)
    served = _host_rows(graph, threads)
    rows = np.empty((ids.size, served.width), served.dtype)
    served.take(ids, rows)
    if not hosts.all_everywhere:
        fetch_lacking(hosts, served, ids, rank, _all_ranks(comm, plan), rows)
    if rows.dtype == stored:
        return rows
    converted = rows.astype(stored)
    lossless = np.array_equal(converted.astype(rows.dtype), rows, equal_nan=True)
    if not lossless and plan.statistics_class != "approximate":
        raise PlanError(
            f"features stored as {stored} differ from the dataset's {rows.dtype}, and the plan is "
            f"{plan.statistics_class}; plan again with --allow approximate or without {stored}"
        )
    return converted


def _sparse(graph: Graph, threads: int) -> SparseHost:
    csr: Any = graph.x_csr
    return SparseHost(csr.indptr, csr.indices, csr.data, threads=threads)


def _disk(graph: Graph, plan: Plan) -> Disk:
    if graph.x is None:
        raise PlanError(
            f"{graph.path}: the plan reads rows from disk, which needs dense features; "
            "import the graph with --features dense, or plan again"
        )
    tier = Disk(
        graph.array_path("x"),
        budget_bytes=plan.strategy.features.disk_budget_bytes,
    )
    if (tier.rows.num_rows, tier.rows.feature_dim) != graph.x.shape:
        tier.close()
        raise DatasetError(f"{graph.path}: x.npy changed while it was open")
    return tier


def _host_rows(graph: Graph, threads: int) -> AbstractServed:
    """The rows of this host's copy of the dataset."""
    if graph.x is not None:
        return ServedArray(graph.x, threads=threads)
    return ServedSparse(_sparse(graph, threads), graph.feature_dim)


def _others(
    kind: Literal["peer", "remote"],
    served: AbstractServed,
    plan: Plan,
    local: list[int],
    comm: Communicator | None,
    threads: int,
) -> tuple[AbstractTier, list[int]]:
    """The tier of the ranks that are not `local`, with their source numbers."""
    numbers = ranks_of(kind, plan.strategy.features.sources, local)
    ranks = sorted(numbers)
    if ranks and not 0 <= ranks[0] <= ranks[-1] < plan.num_ranks:
        raise PlanError(
            f"expected {kind} sources to name ranks from 0 to {plan.num_ranks - 1}, found "
            f"{ranks[0]} to {ranks[-1]}; plan again"
        )
    twin = _all_ranks(comm, plan).duplicate()
    return Peer(served, ranks, twin, kind=kind, threads=threads), [numbers[r] for r in ranks]


def _all_ranks(comm: Communicator | None, plan: Plan) -> Communicator:
    """The communicator given, or one on the default group; it must hold the plan's ranks."""
    found = Communicator() if comm is None else comm
    if found.size != plan.num_ranks:
        raise PlanError(
            f"the plan reads rows from other ranks: expected a communicator of {plan.num_ranks} "
            f"ranks, found {found.size}; start it with `gnnplan train` or torchrun"
        )
    return found
