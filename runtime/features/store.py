"""The host's feature store: one read fills a batch's rows from every tier and counts them.

A read looks up each id in the location table, copies the rows that lie in memory in one pass, and
hands the others to the tiers that fetch them (peer, remote, disk, sparse). A dynamic cache is a
store over another one (`cache`); a dataset with a table per node type has a store of its own.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import DatasetError, PlanError
from gnnplan.runtime.features.cache import CachedFeatureStore
from gnnplan.runtime.features.disk import Disk
from gnnplan.runtime.features.gather import TableAddress, check_output, copy_from_addresses
from gnnplan.runtime.features.location import (
    MAX_SOURCES,
    DenseGroup,
    LocationTable,
    Scratch,
    locate,
    look_up,
    partition,
)
from gnnplan.runtime.features.peer import (
    HostRows,
    LackingRows,
    Peer,
    number_by_rank,
)
from gnnplan.runtime.features.tier import (
    AbstractFeatureStore,
    AbstractTier,
    Counters,
    Dense,
    Served,
    SparseHost,
    Tiers,
    TypedHost,
)
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.format import convert_rows, row_dtype, row_type_name
from gnnplan.runtime.plan.io import load_array
from gnnplan.runtime.plan.schema import Plan

OwnIds = dict[int, NDArray[np.int64]]
_PART_BYTES = 64 << 20
"""Size, as float32, of the own rows that are read at once: no plan counts a copy of them all."""


def group_by_dtype(dense: Mapping[int, Dense]) -> list[DenseGroup]:
    """Group arrays by dtype, so that one pass of one kernel copies each group."""
    groups: dict[np.dtype[Any], DenseGroup] = {}
    for number, each in dense.items():
        dtype = each.table.dtype
        if dtype not in groups:
            zeros = (np.zeros(MAX_SOURCES, np.int64) for _ in range(3))
            groups[dtype] = DenseGroup(dtype, [], *zeros)
        group = groups[dtype]
        group.numbers.append(number)
        group.bases[number] = each.table.ctypes.data
        group.row_bytes[number] = each.row_bytes
        group.num_rows[number] = each.table.shape[0]
    return list(groups.values())


class FeatureStore(AbstractFeatureStore):
    """A location table and the tiers that it points into."""

    def __init__(
        self,
        location: LocationTable,
        dense: Mapping[int, Dense],
        tiers: Sequence[tuple[AbstractTier, list[int]]],
        feature_dim: int,
        *,
        threads: int = 1,
    ) -> None:
        """Assemble a store; `open_store` does it for a plan."""
        self.feature_dim = feature_dim
        self._location = location
        self._dense = dict(dense)
        self._tiers = list(tiers)
        self._threads = threads
        self._groups = group_by_dtype(self._dense)
        self._order = [number for _, numbers in self._tiers for number in numbers]
        self._host = self._only_host()
        self._host_address = None if self._host is None else TableAddress.of(self._host.table)
        self._local = threading.local()
        self._lock = threading.Lock()
        self._scratch_bytes = 0

    def _only_host(self) -> Dense | None:
        """Return the host's array if every node is read from it: slots are then ids."""
        used = np.flatnonzero(self._location.count())
        if self._tiers or used.size != 1:
            return None
        only = self._dense[int(used[0])]
        return only if only.kind == "host" else None

    @property
    def resident_bytes(self) -> int:
        """Bytes of own rows, staging and exchange buffers, and scratch, without shared mappings."""
        held: list[Dense | AbstractTier] = list({id(d): d for d in self._dense.values()}.values())
        held += [tier for tier, _ in self._tiers]
        return sum(each.resident_bytes for each in held) + self._scratch_bytes

    def read(self, ids: NDArray[np.int64], out: NDArray[Any]) -> Counters:
        """Read rows as `AbstractFeatureStore.read` says."""
        check_output(ids, out, self.feature_dim)
        scratch = self._scratch(ids.size)
        counters = Counters()
        if self._host is not None and self._host_address is not None:
            addresses = self._host_address.addresses(ids, scratch.addresses[: ids.size])
            copy_from_addresses(addresses, self._host.table.dtype, out, threads=self._threads)
            counters.add_rows("host", ids.size, ids.size * self._host.row_bytes)
            return counters
        counts = look_up(self._location.codes, ids, scratch)
        self._copy_dense(ids.size, out, scratch, counts, counters)
        if self._tiers:
            self._read_tiers(ids.size, out, scratch, counts, counters)
        return counters

    def _copy_dense(
        self,
        num_ids: int,
        out: NDArray[Any],
        scratch: Scratch,
        counts: NDArray[np.int64],
        counters: Counters,
    ) -> None:
        for group in self._groups:
            if counts[group.numbers].any():
                addresses = locate(group, num_ids, scratch)
                copy_from_addresses(addresses, group.dtype, out, threads=self._threads)
        for number, each in self._dense.items():
            count = int(counts[number])
            counters.add_rows(each.kind, count, count * each.row_bytes)

    def _read_tiers(
        self,
        num_ids: int,
        out: NDArray[Any],
        scratch: Scratch,
        counts: NDArray[np.int64],
        counters: Counters,
    ) -> None:
        """Let every tier fetch its share, even an empty one: a peer exchange is collective."""
        starts = partition(num_ids, self._order, counts, scratch)
        lane = 0
        for tier, numbers in self._tiers:
            part = slice(int(starts[lane]), int(starts[lane + len(numbers)]))
            slots, positions = scratch.lane_slots[part], scratch.positions[part]
            tier.read(slots, positions, counts[numbers], out, counters)
            lane += len(numbers)

    def _scratch(self, num_ids: int) -> Scratch:
        held: Scratch | None = getattr(self._local, "scratch", None)
        if held is None or held.size < num_ids:
            grown = Scratch.grown(num_ids)
            with self._lock:
                self._scratch_bytes += grown.nbytes - (held.nbytes if held else 0)
            held = self._local.scratch = grown
        return held

    def close(self) -> None:
        """Close every tier and release the arrays; no read may be under way."""
        for tier, _ in self._tiers:
            tier.close()
        self._tiers, self._dense, self._groups, self._host = [], {}, [], None


def open_store(
    graph: Graph,
    plan: Plan,
    plan_folder: Path,
    rank: int,
    *,
    threads: int,
    comm: Communicator | None = None,
) -> AbstractFeatureStore:
    """Open a plan's feature store for one rank, behind its dynamic cache where it has one.

    Where the plan reads rows of other ranks the call is collective over `comm`, None for the
    default group. Raises PlanError for arrays that are missing or point to wrong rows,
    BudgetExceeded where the disk budget holds no buffer.
    """
    location, own_ids = read_location(graph, plan, plan_folder, rank)
    served, hosts = open_host_rows(graph, plan, plan_folder, rank, location, threads)
    own = load_own_rows(OwnRows(served, plan, rank, own_ids[rank], hosts, comm, threads))
    dense, tiers = build_tiers(graph, plan, rank, served, own, comm, threads)
    store = FeatureStore(location, dense, tiers, graph.feature_dim, threads=threads)
    cache = plan.strategy.features.cache
    if cache.policy == "none" or not cache.rows or cache.rows[rank] == 0:
        return store
    return CachedFeatureStore(
        store,
        location,
        rank=rank,
        policy=cache.policy,
        num_slots=cache.rows[rank],
        dtype=served.dtype,
        threads=threads,
    )


def read_location(
    graph: Graph, plan: Plan, plan_folder: Path, rank: int
) -> tuple[LocationTable, OwnIds]:
    """Read and check a rank's location table, and the ids in its own and its peers' slots."""
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


def open_host_rows(
    graph: Graph, plan: Plan, plan_folder: Path, rank: int, location: LocationTable, threads: int
) -> tuple[Served, HostRows]:
    """Open the dataset's rows, and find which hosts hold which; the table may read no others."""
    if graph.x is None and graph.x_csr is None and not graph.x_by_type:
        raise DatasetError(f"{graph.path}: expected features, found a topology-only dataset")
    hosts = HostRows(plan, plan_folder, graph.num_nodes)
    hosts.check(location, rank)
    return _host_rows(graph, threads), hosts


def build_tiers(
    graph: Graph,
    plan: Plan,
    rank: int,
    served: Served,
    own_rows: NDArray[Any],
    comm: Communicator | None,
    threads: int,
) -> tuple[dict[int, Dense], Tiers]:
    """Open the arrays in memory, by source number, and the other tiers.

    `served` are the host's rows, and `own_rows` this rank's, which it serves to others. Collective
    where the plan reads from other ranks.
    """
    own = Dense("own", own_rows, private=True)
    sources, devices = plan.strategy.features.sources, plan.strategy.devices
    here = [device.rank for device in devices if device.host == devices[rank].host]
    dense: dict[int, Dense] = {}
    tiers: Tiers = []
    if any(source.kind == "peer" for source in sources):
        tiers.append(_others("peer", own, plan, [rank], comm, threads))
    if any(source.kind == "remote" for source in sources):
        tiers.append(_others("remote", served, plan, here, comm, threads))
    for number, source in enumerate(sources):
        if source.kind == "own" or (source.kind == "peer" and source.rank == rank):
            dense[number] = own
        elif source.kind == "disk":
            tiers.append((_disk(graph, plan), [number]))
        elif source.kind == "host" or (source.kind == "remote" and source.rank in here):
            if isinstance(served, Dense):
                dense[number] = served
            else:
                tiers.append((served, [number]))
    return dense, tiers


@dataclass(frozen=True, eq=False, slots=True)
class OwnRows:
    """Rows that a rank keeps, and where it reads them."""

    served: Served
    """Rows of the dataset, as this rank's host holds them."""
    plan: Plan
    rank: int
    ids: NDArray[np.int64]
    """Node in each slot."""
    hosts: HostRows
    comm: Communicator | None
    """Communicator for rows that this host lacks; None for one on the default group."""
    threads: int

    @property
    def stored(self) -> np.dtype[Any]:
        """Return the dtype in which the plan stores rows."""
        return row_dtype(self.plan.strategy.features.storage_dtype)


def load_own_rows(own: OwnRows) -> NDArray[Any]:
    """Copy a rank's rows into an array, as `own_row_parts` reads them."""
    table = np.empty((own.ids.size, own.served.width), own.stored)
    for part, rows in own_row_parts(own, into=table):
        if rows.base is not table:
            table[part] = rows
    return table


def own_row_parts(
    own: OwnRows, *, into: NDArray[Any] | None = None
) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Read a rank's rows part by part, in the plan's storage dtype.

    Yields the places of a part among `own.ids` and its rows, a view of `into` where the dataset
    stores rows in its dtype. Rows that this host lacks come from another host; the parts are
    collective then. Storage that would change values needs a plan that is `approximate`.
    """
    served, plan, ids, stored = own.served, own.plan, own.ids, own.stored
    whole = np.dtype(np.float32)
    lacking, changed = None, False
    count = max(1, _PART_BYTES // max(1, whole.itemsize * served.width))
    num_parts = -(-ids.size // count)
    if not own.hosts.all_everywhere:
        everyone = _all_ranks(own.comm, plan)
        lacking = LackingRows(own.hosts, served, own.rank, everyone)
        num_parts = max(everyone.all_gather_objects(num_parts))
    for number in range(num_parts):
        part = slice(number * count, (number + 1) * count)
        some = ids[part]
        block = None if into is None or served.dtype != stored else into[part]
        if block is None:
            block = np.empty((some.size, served.width), served.dtype)
        served.take(some, block, threads=own.threads)
        if lacking is not None:
            lacking.fill(some, block)
        rows = convert_rows(block, stored)
        if rows is not block:
            kept, given = (convert_rows(each, whole) for each in (rows, block))
            changed = changed or not np.array_equal(kept, given, equal_nan=True)
        yield part, rows
    if lacking is not None:
        lacking.close()
    if changed and plan.statistics_class != "approximate":
        name, other = row_type_name(stored), row_type_name(served.dtype)
        raise PlanError(
            f"features stored as {name} differ from the dataset's {other}, and the plan is "
            f"{plan.statistics_class}; plan again with --allow approximate or without {name}"
        )


def _disk(graph: Graph, plan: Plan) -> Disk:
    if graph.x is None:
        raise PlanError(
            f"{graph.path}: the plan reads rows from disk, which needs dense features; "
            "import the graph with --features dense, or plan again"
        )
    tier = Disk(graph.array_path("x"), budget_bytes=plan.strategy.features.disk_budget_bytes)
    if (tier.rows.num_rows, tier.rows.feature_dim) != graph.x.shape:
        tier.close()
        raise DatasetError(f"{graph.path}: x.npy changed while it was open")
    return tier


def _host_rows(graph: Graph, threads: int) -> Served:
    if graph.x is not None:
        return Dense("host", graph.x, private=False)
    if graph.x_by_type:
        return TypedHost.of(graph)
    csr: Any = graph.x_csr
    return SparseHost(csr.indptr, csr.indices, csr.data, graph.feature_dim, threads=threads)


def _others(
    kind: Literal["peer", "remote"],
    served: Served,
    plan: Plan,
    local: list[int],
    comm: Communicator | None,
    threads: int,
) -> tuple[AbstractTier, list[int]]:
    """Open the tier of the ranks that are not `local`; return it with its source numbers."""
    numbers = number_by_rank(kind, plan.strategy.features.sources, local)
    ranks = sorted(numbers)
    if ranks and not 0 <= ranks[0] <= ranks[-1] < plan.num_ranks:
        raise PlanError(
            f"expected {kind} sources to name ranks from 0 to {plan.num_ranks - 1}, found "
            f"{ranks[0]} to {ranks[-1]}; plan again"
        )
    twin = _all_ranks(comm, plan).duplicate()
    return Peer(served, ranks, twin, kind=kind, threads=threads), [numbers[r] for r in ranks]


def _all_ranks(comm: Communicator | None, plan: Plan) -> Communicator:
    """Return the given communicator, or one on the default group; check its size."""
    found = Communicator() if comm is None else comm
    if found.size != plan.num_ranks:
        raise PlanError(
            f"the plan reads rows from other ranks: expected a communicator of {plan.num_ranks} "
            f"ranks, found {found.size}; start it with `gnnplan train` or torchrun"
        )
    return found


class TypedFeatureStore(AbstractFeatureStore):
    """Rows of a dataset with a feature table per node type, all read from the host."""

    def __init__(self, graph: Graph) -> None:
        self._rows = TypedHost.of(graph)
        self.feature_dim = self._rows.width

    @property
    def resident_bytes(self) -> int:
        """Bytes of the index from node to row."""
        return self._rows.resident_bytes

    def read(self, ids: NDArray[np.int64], out: NDArray[Any]) -> Counters:
        """Read rows as `AbstractFeatureStore.read` says; columns beyond a type's own are zero."""
        check_output(ids, out, self.feature_dim)
        counters = Counters()
        self._rows.read(ids, np.arange(ids.size), np.array([ids.size]), out, counters)
        return counters

    def close(self) -> None:
        """Do nothing: no file is open."""
