"""Draw a plan's own batches as its loader does, and count where their rows would be read from.

`Replay` runs the first two stages of the runtime's loader, so seeds, sampler, parameters and
topology are the runtime's. `RowCounter` applies a rank's location table and dynamic cache without
reading a row. The counts equal the counters of a run of the same batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.features.cache import Slots
from gnnplan.runtime.features.disk import INDEX_BYTES_PER_ID, Disk
from gnnplan.runtime.features.location import MAX_SOURCES, SOURCE_BITS
from gnnplan.runtime.features.store import read_location
from gnnplan.runtime.features.tier import AbstractFeatureStore, Counters
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.graph.format import row_dtype
from gnnplan.runtime.loader.factory import LoaderParts
from gnnplan.runtime.loader.stages import AbstractStage, SampleStage, seed_batch
from gnnplan.runtime.meter import StageMeter
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.sampling.seeds import SeedSchedule
from gnnplan.runtime.train.streams import HostStreams

_SOURCE_MASK = (1 << SOURCE_BITS) - 1


class _NothingToRead(AbstractFeatureStore):
    """Feature store of a loader that reads no rows."""

    def __init__(self, feature_dim: int) -> None:
        self.feature_dim = feature_dim

    @property
    def resident_bytes(self) -> int:
        """Return 0."""
        return 0

    def read(self, ids: NDArray[np.int64], out: NDArray[np.float32]) -> Counters:
        """Refuse to read."""
        raise RuntimeError("a replay reads no feature rows")

    def close(self) -> None:
        """Do nothing."""


class Replay(LoaderParts):
    """Seeds and sampling of one rank, without rows, labels or other ranks."""

    def __init__(self, plan: Plan, folder: Path, graph: Graph, rank: int) -> None:
        """Open a rank of a plan."""
        super().__init__(
            plan,
            folder,
            graph,
            rank=rank,
            size=plan.num_ranks,
            comm=None,
            meter=StageMeter(),
            blocks=True,
            device=torch.device("cpu"),
            on_device=False,  # ids are counted here: the device draws the same ones
            streams=HostStreams(),
        )
        self.num_steps = self.schedule.num_steps
        """Optimiser steps per epoch."""

    def replay(self, count: int) -> Iterator[MiniBatch]:
        """Yield the first `count` batches from epoch 0 on, as sampled."""
        stages = self._first_stages()
        for index in range(count):
            epoch, step = divmod(index, self.num_steps)
            batch = seed_batch(epoch, step, self.dialect)
            for stage in stages:
                batch = stage.wait(stage.submit(batch, index))
            yield batch

    def _open_store(self, comm: Communicator | None) -> AbstractFeatureStore:
        del comm
        return _NothingToRead(self.plan.graph.feature_dim)

    def _sample_stage(self, schedule: SeedSchedule) -> AbstractStage:
        """Sample the whole graph on a 1.5D grid too: each rank draws the same batches."""
        if self.plan.strategy.topology.policy == "partitioned":
            return SampleStage(self.sampler(self.plan.strategy.sampler))
        return super()._sample_stage(schedule)


@dataclass(slots=True)
class RowCounts:
    """Rows and bytes that batches read."""

    rows: dict[str, int] = field(default_factory=dict[str, int])
    """Rows by source, as a run report counts them."""
    bytes: dict[str, int] = field(default_factory=dict[str, int])
    rows_of_rank: dict[int, int] = field(default_factory=dict[int, int])
    """Rows served by each other rank (peer, remote)."""
    disk_reads: int = 0
    disk_read_bytes: int = 0
    """Bytes of whole blocks read from disk."""

    def add(self, kind: str, rows: int, num_bytes: int) -> None:
        """Add rows of one source, if any."""
        if rows:
            self.rows[kind] = self.rows.get(kind, 0) + rows
            self.bytes[kind] = self.bytes.get(kind, 0) + num_bytes

    @property
    def exchanged_kind(self) -> str:
        """Return the source of rows that other ranks serve."""
        return "remote" if "remote" in self.rows else "peer"

    def by_server(self) -> dict[tuple[str, int], int]:
        """Return rows by (source, rank that serves them, or -1)."""
        kind = self.exchanged_kind
        found = {(kind, rank): rows for rank, rows in sorted(self.rows_of_rank.items())}
        return found | {(k, -1): n for k, n in self.rows.items() if k not in ("peer", "remote")}

    def row_bytes(self) -> dict[str, float]:
        """Return the mean bytes of a row by source; sparse rows differ."""
        return {k: self.bytes[k] / n for k, n in self.rows.items() if n}

    def merge(self, other: "RowCounts") -> None:
        """Add another's counts."""
        for kind, rows in other.rows.items():
            self.add(kind, rows, other.bytes[kind])
        for rank, rows in other.rows_of_rank.items():
            self.rows_of_rank[rank] = self.rows_of_rank.get(rank, 0) + rows
        self.disk_reads += other.disk_reads
        self.disk_read_bytes += other.disk_read_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCounts:
    """Counts of one rank's batch."""

    vertices: int
    read: RowCounts
    hop_vertices: list[int]
    """Distinct vertices up to each hop, seeds first."""
    hop_edges: list[int]
    block_edges: list[int]
    """Edges of each block, outermost first."""
    lists: dict[str, int]
    """Adjacency lists visited by source; empty with topology on the host."""
    working_rows: int = 0
    """Distinct rows that the rank's batches are spread over."""

    @property
    def edges(self) -> int:
        """Return the edges drawn by all hops."""
        return int(sum(self.hop_edges))


class RowCounter:
    """Location table of a rank, with its dynamic cache."""

    def __init__(self, plan: Plan, folder: Path, graph: Graph, rank: int) -> None:
        """Read the rank's arrays."""
        self._graph, self._rank = graph, rank
        self._sources = plan.strategy.features.sources
        devices = plan.strategy.devices
        self._here = {d.rank for d in devices if d.host == devices[rank].host}
        self._typed = self._widths_by_type(graph)
        self._disk: Disk | None = None
        if self._typed is None:
            location, _ = read_location(graph, plan, folder, rank)
            self._codes: NDArray[Any] = np.asarray(location.codes).view(np.ndarray)
            self._row_bytes = self._bytes_of_sources(plan)
            if graph.x is not None and any(s.kind == "disk" for s in self._sources):
                budget = plan.strategy.features.disk_budget_bytes
                self._disk = Disk(graph.array_path("x"), budget_bytes=budget)
        cache = plan.strategy.features.cache
        slots = cache.rows[rank] if cache.policy != "none" and cache.rows else 0
        self._slots: Slots | None = None
        if slots and self._typed is None:
            clock, nodes = cache.policy == "clock", graph.num_nodes
            self._slots = Slots(nodes, min(slots, nodes), clock=clock)
            stored = row_dtype("float32" if graph.x_csr is not None else plan.graph.feature_dtype)
            self._cache_row_bytes = plan.graph.feature_dim * stored.itemsize
            self._bypass = np.zeros(MAX_SOURCES, np.bool_)
            for number in range(len(self._sources)):
                self._bypass[number] = self._kind(number) == "own"

    def _kind(self, number: int) -> str:
        """Return the name of a source in the runtime's counters."""
        source = self._sources[number]
        if source.kind == "peer" and source.rank == self._rank:
            return "own"
        return "host" if source.kind == "remote" and source.rank in self._here else source.kind

    def _bytes_of_sources(self, plan: Plan) -> list[int]:
        """Return the bytes of a row by source number, as stored there."""
        width = plan.graph.feature_dim
        stored = width * row_dtype(plan.strategy.features.storage_dtype).itemsize
        dense = self._graph.x_csr is None
        host = width * (row_dtype(plan.graph.feature_dtype).itemsize if dense else 4)
        kinds = [self._kind(number) for number in range(len(self._sources))]
        return [stored if kind in ("own", "peer") else host for kind in kinds]

    @staticmethod
    def _widths_by_type(graph: Graph) -> NDArray[np.int64] | None:
        """Return the bytes of a row by node type, where features lie by type."""
        if not graph.x_by_type:
            return None
        tables = [np.asarray(graph.x_by_type[name]) for name in graph.meta.node_types]
        return np.array([t.shape[1] * t.dtype.itemsize for t in tables], np.int64)

    def count(self, ids: NDArray[np.int64]) -> RowCounts:
        """Count the rows and bytes that a batch's vertices read."""
        found = RowCounts()
        if self._typed is not None:
            types = np.bincount(np.asarray(self._graph.node_type)[ids], minlength=self._typed.size)
            found.add("host", ids.size, int(types @ self._typed))
            return found
        if self._slots is not None:
            decision = self._slots.decide(ids, self._codes, self._bypass)
            served = decision.num_served
            found.add("cache", served, served * self._cache_row_bytes)
            ids = decision.ids
        codes = self._codes[ids]
        numbers = (codes & _SOURCE_MASK).astype(np.int64)
        for number, rows in enumerate(np.bincount(numbers, minlength=len(self._sources)).tolist()):
            if rows:
                self._count_source(found, number, rows, ids, codes, numbers)
        return found

    def _count_source(
        self,
        found: RowCounts,
        number: int,
        rows: int,
        ids: NDArray[np.int64],
        codes: NDArray[Any],
        numbers: NDArray[np.int64],
    ) -> None:
        kind, num_bytes = self._kind(number), rows * self._row_bytes[number]
        if kind == "host" and self._graph.x_csr is not None:
            csr: Any = self._graph.x_csr
            mine = ids[numbers == number]
            entries = int((csr.indptr[mine + 1] - csr.indptr[mine]).sum())
            num_bytes = entries * (csr.indices.dtype.itemsize + csr.data.dtype.itemsize)
        found.add(kind, rows, num_bytes)
        if kind in ("peer", "remote"):
            server = self._sources[number].rank
            found.rows_of_rank[server] = found.rows_of_rank.get(server, 0) + rows
        if kind == "disk" and self._disk is not None:
            slots = (codes[numbers == number] >> SOURCE_BITS).astype(np.int64)
            self._count_disk(self._disk, slots, found)

    @staticmethod
    def _count_disk(disk: Disk, slots: NDArray[np.int64], found: RowCounts) -> None:
        """Count requests and blocks, cut as the tier cuts them under its budget."""
        most = disk.budget.free_bytes // INDEX_BYTES_PER_ID
        for first in range(0, slots.size, most):
            piece = np.sort(slots[first : first + most])
            firsts = np.empty(piece.size + 1, np.int64)
            count = disk.rows.cut_requests(piece, disk.request_bytes, firsts)
            for i in range(count):
                low, high = int(piece[firsts[i]]), int(piece[firsts[i + 1] - 1])
                begin, end = disk.rows.block_range(low, high)
                found.disk_read_bytes += end - begin
            found.disk_reads += count

    def close(self) -> None:
        """Free the disk tier's buffers."""
        if self._disk is not None:
            self._disk.close()
