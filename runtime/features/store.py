"""The feature store: one read fills a batch's rows from every tier, and counts them.

A read looks each id up in the location table (one pass), copies the rows that lie in memory (own
and host) in one prefetching pass, and hands the rest, in a stable order by source, to the tiers
that must fetch them (peer, remote, disk, sparse). A dynamic cache is an `AbstractFeatureStore` over
another; a dataset with a table per node type has a store of its own. Batches' buffers are used
again when nothing refers to their rows any more, since a fresh 12 MB array costs page faults.
"""

import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, no_type_check

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import DatasetError, PlanError
from gnnplan.runtime.features import gather as lookup, tiers as building
from gnnplan.runtime.features.cache import CachedFeatureStore
from gnnplan.runtime.features.gather import addresses_of, check_output, copy_from_addresses
from gnnplan.runtime.features.location import LocationTable
from gnnplan.runtime.features.tier import AbstractFeatureStore, AbstractTier, Counters, Dense
from gnnplan.runtime.graph.dataset import Graph, rows_within_types
from gnnplan.runtime.plan.schema import Plan


class FeatureStore(AbstractFeatureStore):
    """A location table and the tiers it points into."""

    def __init__(
        self,
        location: LocationTable,
        dense: Mapping[int, Dense],
        tiers: Sequence[tuple[AbstractTier, list[int]]],
        feature_dim: int,
        *,
        threads: int = 1,
    ) -> None:
        """Put a store together; `open_store` does it for a plan.

        Args:
            location: this rank's table, checked.
            dense: arrays in memory, by source number.
            tiers: every other tier with the numbers of its sources, in the tier's order.
            feature_dim: columns of a row.
            threads: threads of one copy.
        """
        self.feature_dim = feature_dim
        self._location = location
        self._dense = dict(dense)
        self._tiers = list(tiers)
        self._threads = threads
        self._groups = lookup.group_by_dtype(self._dense)
        self._order = [number for _, numbers in self._tiers for number in numbers]
        self._host = self._only_host()
        self._local = threading.local()
        self._lock = threading.Lock()
        self._scratch_bytes = 0

    def _only_host(self) -> Dense | None:
        """The host's array, where every node is read from there (slot = id: no table needed)."""
        used = np.flatnonzero(self._location.count())
        if self._tiers or used.size != 1:
            return None
        only = self._dense[int(used[0])]
        return only if only.kind == "host" else None

    @property
    def resident_bytes(self) -> int:
        """Own rows, staging and exchange buffers, and scratch; shared mappings are not counted."""
        held: list[Dense | AbstractTier] = list({id(d): d for d in self._dense.values()}.values())
        held += [tier for tier, _ in self._tiers]
        return sum(each.resident_bytes for each in held) + self._scratch_bytes

    def read(self, ids: NDArray[np.int64], out: NDArray[np.float32]) -> Counters:
        """See `AbstractFeatureStore.read`."""
        check_output(ids, out, self.feature_dim)
        scratch = self._scratch(ids.size)
        counters = Counters()
        if self._host is not None:
            addresses = addresses_of(self._host.table, ids, scratch.addresses[: ids.size])
            copy_from_addresses(addresses, self._host.table.dtype, out, threads=self._threads)
            counters.add_rows("host", ids.size, ids.size * self._host.row_bytes)
            return counters
        counts = lookup.look_up(self._location.codes, ids, scratch)
        self._copy_dense(ids.size, out, scratch, counts, counters)
        if self._tiers:
            self._read_tiers(ids.size, out, scratch, counts, counters)
        return counters

    def _copy_dense(
        self,
        num_ids: int,
        out: NDArray[np.float32],
        scratch: lookup.Scratch,
        counts: NDArray[np.int64],
        counters: Counters,
    ) -> None:
        """Copy the rows that lie in memory, in the batch's order; the others stay as they are."""
        for group in self._groups:
            if counts[group.numbers].any():
                addresses = lookup.locate(group, num_ids, scratch)
                copy_from_addresses(addresses, group.dtype, out, threads=self._threads)
        for number, each in self._dense.items():
            count = int(counts[number])
            counters.add_rows(each.kind, count, count * each.row_bytes)

    def _read_tiers(
        self,
        num_ids: int,
        out: NDArray[np.float32],
        scratch: lookup.Scratch,
        counts: NDArray[np.int64],
        counters: Counters,
    ) -> None:
        """Let every tier fetch its share; also an empty one, which a peer exchange needs."""
        starts = lookup.partition(num_ids, self._order, counts, scratch)
        lane = 0
        for tier, numbers in self._tiers:
            part = slice(int(starts[lane]), int(starts[lane + len(numbers)]))
            slots, positions = scratch.lane_slots[part], scratch.positions[part]
            tier.read(slots, positions, counts[numbers], out, counters)
            lane += len(numbers)

    def _scratch(self, num_ids: int) -> lookup.Scratch:
        """This thread's working arrays, at least `num_ids` long."""
        held: lookup.Scratch | None = getattr(self._local, "scratch", None)
        if held is None or held.size < num_ids:
            grown = lookup.Scratch(num_ids + num_ids // 4)
            with self._lock:
                self._scratch_bytes += grown.nbytes - (held.nbytes if held else 0)
            held = self._local.scratch = grown
        return held

    def close(self) -> None:
        """Close every tier and let go of the arrays; no read may be under way."""
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
    """Open the feature tiers of a plan for one rank: checks the table, loads the own rows.

    Where the plan gives the rank a dynamic cache, the store is wrapped in it.

    Args:
        graph: the dataset, whose x (dense or CSR) the host and disk tiers read.
        plan: the plan.
        plan_folder: where its arrays lie.
        rank: this rank.
        comm: all ranks of the plan, None for the default group; needed where the plan reads from
            other ranks. Collective then: the store makes itself process groups of its own.
        threads: threads of one copy (the plan's `threads.gather`).

    Raises:
        PlanError: the plan's arrays are missing or point to the wrong rows.
        DatasetError: the dataset has no features, or its file is damaged.
        BudgetExceeded: the plan's disk budget does not hold one buffer.
    """
    location, own_ids = building.read_location(graph, plan, plan_folder, rank)
    dense, tiers = building.build_tiers(
        graph, plan, plan_folder, rank, location, own_ids, comm, threads
    )
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
        dtype=graph.feature_dtype if graph.x is not None else np.float32,
        threads=threads,
    )


SPARE_FRACTION = 0.125
"""Rows added when a buffer grows, so that a slightly larger batch does not grow it again."""


class BufferRing:
    """`count` growing float32 buffers of rows of one width. Thread-safe without a lock.

    Args:
        count: buffers in the ring.
        width: columns of a row.
        pinned: page-locked memory, for copies to a GPU.
    """

    def __init__(self, count: int, width: int, *, pinned: bool = False) -> None:
        self._width = width
        self._pinned = pinned
        self._buffers = [self._allocate(0) for _ in range(count)]
        # Popping and appending a deque are atomic; a weak reference's callback may run anywhere.
        self._free: deque[int] = deque(range(count))  # a stack
        self._in_use: dict[int, weakref.ref[NDArray[np.float32]]] = {}
        self.overflows = 0

    def take(self, rows: int) -> NDArray[np.float32]:
        """A C-contiguous array [rows, width] with undefined content."""
        try:
            slot = self._free.pop()  # the latest returned: no more are ever touched than needed
        except IndexError:
            self.overflows += 1
            return self._allocate(rows)
        if self._buffers[slot].shape[0] < rows:
            self._buffers[slot] = self._allocate(rows + int(rows * SPARE_FRACTION))
        view = self._buffers[slot][:rows]

        def release(gone: Any, slot: int = slot) -> None:
            del gone
            self._in_use.pop(slot, None)
            self._free.append(slot)

        self._in_use[slot] = weakref.ref(view, release)
        return view

    @property
    def num_bytes(self) -> int:
        """Bytes the ring holds now."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def _allocate(self, rows: int) -> NDArray[np.float32]:
        if self._pinned:
            import torch

            return torch.empty((rows, self._width), dtype=torch.float32, pin_memory=True).numpy()
        return np.empty((rows, self._width), np.float32)  # numpy's large arrays get huge pages


_jit: Any = numba.njit(cache=True, nogil=True)


@_jit
@no_type_check
def _copy_type(table, number, node_type, row_of, ids, out):
    """Copy the rows of the ids of one type; return how many there are."""
    width = table.shape[1]
    count = 0
    for i in range(ids.shape[0]):
        if node_type[ids[i]] == number:
            source = table[row_of[ids[i]]]
            for c in range(width):
                out[i, c] = source[c]
            out[i, width:] = 0
            count += 1
    return count


class TypedFeatureStore(AbstractFeatureStore):
    """The dataset's own tables.

    Args:
        graph: A dataset with a feature table per node type.
        plan: Refused where it places rows elsewhere than on the host; None: not looked at.

    Raises:
        DatasetError: the dataset has no such tables.
        PlanError: the plan places rows in ranks or on disk.
    """

    def __init__(self, graph: Graph, plan: Plan | None = None) -> None:
        if not graph.x_by_type or graph.node_type is None:
            raise DatasetError(f"{graph.name}: expected a feature table per node type, found none")
        placed = None if plan is None else plan.strategy.features
        cached = placed is not None and placed.cache.policy != "none"
        if placed is not None and (any(placed.own_rows) or placed.disk_budget_bytes or cached):
            raise PlanError(
                "expected typed features to be placed on the host, found a plan with rows in ranks "
                "or on disk, or with a cache; plan again"
            )
        self._tables: list[Any] = [
            np.asarray(graph.x_by_type[name]) for name in graph.meta.node_types
        ]
        self.feature_dim = max(int(table.shape[1]) for table in self._tables)
        self._node_type = np.ascontiguousarray(graph.node_type)
        self._row_of = rows_within_types(self._node_type, len(self._tables))

    @property
    def resident_bytes(self) -> int:
        """Bytes of the index from node to row."""
        return self._row_of.nbytes

    def read(self, ids: NDArray[np.int64], out: NDArray[np.float32]) -> Counters:
        """See `AbstractFeatureStore.read`; columns beyond a node's type are zero."""
        check_output(ids, out, self.feature_dim)
        if len(ids) and (ids.min() < 0 or ids.max() >= len(self._node_type)):
            raise IndexError(f"expected node ids from 0 to {len(self._node_type) - 1}")
        counters = Counters()
        for number, table in enumerate(self._tables):
            rows = int(_copy_type(table, number, self._node_type, self._row_of, ids, out))
            counters.add_rows("host", rows, rows * table.shape[1] * table.dtype.itemsize)
        return counters

    def close(self) -> None:
        """Nothing is held open."""
