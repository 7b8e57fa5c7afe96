"""Building a rank's tiers from a graph and a plan: location table, own rows, host, peers, disk."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.comm.collectives import Communicator
from runtime.errors import DatasetError, PlanError
from runtime.features.counters import Counters
from runtime.features.disk import Disk
from runtime.features.gather import addresses_of, copy_from_addresses
from runtime.features.location import LocationTable
from runtime.features.peer import Peer
from runtime.features.sparse import SparseHost
from runtime.features.tier import AbstractTier, Dense
from runtime.graph.dataset import Graph
from runtime.plan import Plan, load_array

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
    rank: int,
    own_ids: OwnIds,
    comm: Communicator | None,
    threads: int,
) -> tuple[dict[int, Dense], Tiers]:
    """The arrays in memory by source number, and the other tiers with theirs.

    Raises:
        PlanError: the plan needs what is not there.
        DatasetError: the dataset has no features.
        BudgetExceeded: the disk budget is too small.
    """
    if graph.x is None and graph.x_csr is None:
        raise DatasetError(f"{graph.path}: expected features, found a topology-only dataset")
    own = Dense("own", load_own_rows(graph, plan, own_ids[rank], threads), private=True)
    dense: dict[int, Dense] = {}
    tiers: Tiers = []
    peers: dict[int, int] = {}
    for number, source in enumerate(plan.strategy.features.sources):
        if source.kind == "own" or (source.kind == "peer" and source.rank == rank):
            dense[number] = own
        elif source.kind == "peer":
            peers[source.rank] = number
        elif source.kind == "disk":
            tiers.append((_disk(graph, plan), [number]))
        elif graph.x is not None:
            dense[number] = Dense("host", graph.x, private=False)
        else:
            tiers.append((_sparse(graph, threads), [number]))
    if any(source.kind == "peer" for source in plan.strategy.features.sources):
        tiers.insert(0, _peers(plan, own, peers, comm, threads))
    return dense, tiers


def load_own_rows(
    graph: Graph, plan: Plan, ids: NDArray[np.int64], threads: int
) -> NDArray[np.float32] | NDArray[np.float16]:
    """Copy this rank's rows out of the dataset, as the plan wants them stored.

    Raises:
        PlanError: float16 storage would change values, and the plan is not `approximate`.
    """
    stored = np.dtype(plan.strategy.features.storage_dtype)
    if graph.x is not None:
        table = np.asarray(graph.x).view(np.ndarray)
        rows = np.empty((ids.size, table.shape[1]), table.dtype)
        addresses = addresses_of(table, ids, np.empty(ids.size, np.int64))
        copy_from_addresses(addresses, table.dtype, rows, threads=threads)
    else:
        rows = np.empty((ids.size, graph.feature_dim), np.float32)
        everywhere = np.arange(ids.size)
        counts = np.array([ids.size])
        _sparse(graph, threads).read(ids, everywhere, counts, rows, Counters())
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
    tier = Disk(Path(graph.path) / "x.npy", budget_bytes=plan.strategy.features.disk_budget_bytes)
    if (tier.rows.num_rows, tier.rows.feature_dim) != graph.x.shape:
        tier.close()
        raise DatasetError(f"{graph.path}: x.npy changed while it was open")
    return tier


def _peers(
    plan: Plan, own: Dense, peers: dict[int, int], comm: Communicator | None, threads: int
) -> tuple[AbstractTier, list[int]]:
    if comm is None or comm.size != plan.num_ranks:
        found = "none" if comm is None else str(comm.size)
        raise PlanError(
            f"the plan reads rows from peers: expected a communicator of {plan.num_ranks} ranks, "
            f"found {found}; start it with `gnnplan train` or torchrun"
        )
    ranks = sorted(peers)
    tier = Peer(own.table, ranks, comm.duplicate(), threads=threads)
    return tier, [peers[rank] for rank in ranks]
