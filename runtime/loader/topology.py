"""Adjacency lists that a rank's samplers read, as the plan's `TopologyPlacement` says.

  host        the host's shared mapping of the dataset
  replicated  a copy of `indptr` and `indices` in this rank's memory
  cached      the rank's own lists in its memory, all others from the host's mapping or the disk;
              GPUs also read those of their peers, which cores read from the host

Cores that draw for GPUs read the host's mapping under every policy.

The location table of `cached` has features' codes (`slot << 8 | number`) over `sources_of`. Edges'
positions stay those of the dataset, so every sampler draws the same batch under every policy.

Under `partitioned` the graph here is the host's, of which the distributed matrix samplers cut their
rows. Typed samplers sort the whole graph's lists into arrays of the host's, and refuse `cached`.
FastGCN's probabilities take one pass over the dataset.
"""

import mmap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, no_type_check

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.features.device_rows import HostMemory, HostShare
from gnnplan.runtime.features.location import LocationTable
from gnnplan.runtime.graph.dataset import Graph, types_of
from gnnplan.runtime.plan.io import load_array
from gnnplan.runtime.plan.schema import Plan, Source
from gnnplan.runtime.sampling.build import BatchSampler
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.placed_indices import PlacedIndices
from gnnplan.runtime.sampling.registry import find_sampler
from gnnplan.runtime.sampling.typed import Fill, SortedByType, hold_alone

SOURCES = [Source(kind="own"), Source(kind="host"), Source(kind="disk")]
"""First sources that the codes of `topology_location_<g>` number; the ranks follow."""
FIRST_PEER = len(SOURCES)
OFFSET_BYTES = 16
"""Bytes of the two entries of `indptr` that locate a list."""


def sources_of(num_ranks: int) -> list[Source]:
    """List the sources of adjacency lists in the order of their numbers."""
    return [*SOURCES, *(Source(kind="peer", rank=rank) for rank in range(num_ranks))]


@dataclass(frozen=True, eq=False, slots=True)
class LocatedLists:
    """Lists that a rank reads by its location table of topology `cached`."""

    numbers: NDArray[np.uint8]
    """Source number of every node's list, shape [N]."""
    held: dict[int, NDArray[np.int64]]
    """Nodes whose lists this rank and those that it reads keep, by rank."""


def read_lists(plan: Plan, folder: Path, num_nodes: int, rank: int) -> LocatedLists:
    """Read a rank's table of cached lists; raise PlanError where it does not fit what is kept."""
    codes = load_array(plan, folder, f"topology_location_{rank}")
    if codes.shape != (num_nodes,) or codes.dtype not in (np.uint32, np.uint64):
        raise PlanError(
            f"{folder}: expected {num_nodes} unsigned topology codes for rank {rank}, "
            f"found {codes.dtype}{list(codes.shape)}; plan again"
        )
    table = LocationTable(codes, sources_of(plan.num_ranks))
    peers = np.flatnonzero(table.count()[FIRST_PEER:]).tolist()
    held = {
        each: np.asarray(load_array(plan, folder, f"topology_own_ids_{each}"), np.int64)
        for each in {rank, *peers} if each < plan.num_ranks
    }  # fmt: skip
    table.check(held, rank)
    numbers = (np.asarray(codes) & 0xFF).astype(np.uint8)
    located = int(np.count_nonzero(numbers == 0))
    if located != held[rank].size:
        raise PlanError(
            f"{folder}: expected the {held[rank].size} own lists of rank {rank} to be located once "
            f"each, found {located} located; plan again"
        )
    return LocatedLists(numbers, held)


class Topology:
    """Graph to sample from, and the places of one rank's adjacency lists."""

    def __init__(self, graph: Graph, plan: Plan, folder: Path, rank: int) -> None:
        self.policy = plan.strategy.topology.policy
        self._on_gpu = plan.strategy.kind == "cuda"
        self.graph = graph
        self._bulk = plan.strategy.bulk_batches > 1
        self.resident_bytes = 0
        """Bytes of lists, offsets and directory in this rank's memory."""
        self._codes: Any = None
        if self._on_gpu:  # cores draw for it: they read the host's lists, and count as it would
            if self.policy == "cached":
                self._codes = read_lists(plan, folder, graph.num_nodes, rank).numbers
                self.resident_bytes = self._codes.nbytes
        elif self.policy == "replicated":
            indptr, indices = np.array(graph.indptr), np.array(graph.indices)
            self.graph = replace(graph, indptr=indptr, indices=indices)
            self.resident_bytes = indptr.nbytes + indices.nbytes
        elif self.policy == "cached":
            self._open_cached(plan, folder, rank)

    def _open_cached(self, plan: Plan, folder: Path, rank: int) -> None:
        graph = self.graph
        found = read_lists(plan, folder, graph.num_nodes, rank)
        numbers = _without_peers(found.numbers)
        held = np.flatnonzero(numbers == 0)
        indices = graph.indices
        if (numbers == 2).any():
            indices = np.load(graph.array_path("indices"), mmap_mode="r")
            _without_read_ahead(indices)
        placed = PlacedIndices(graph.indptr, indices, held)
        self.graph = replace(graph, indices=placed)
        self.resident_bytes = placed.resident_bytes + numbers.nbytes
        self._codes = numbers

    def counted(self, sampler: BatchSampler, name: str) -> BatchSampler:
        """Wrap a sampler so that it counts what it reads of each source.

        It is returned as it is where all lists are the host's, and in bulk.
        """
        if self.policy not in ("replicated", "cached") or self._bulk:
            return sampler
        return CountedSampler(sampler, self, chosen_only=find_sampler(name).reads_chosen)

    def count(self, batch: MiniBatch, *, chosen_only: bool) -> tuple[dict[str, int], ...]:
        """Return lists visited and bytes read by source (formulas 2.3, 2.4) for a sampled batch.

        A visit reads two offsets (from the host, or the rank's own memory where that holds a copy)
        and the ids of the chosen neighbours, or of all where the sampler looks at each.
        """
        lists, edges = np.zeros(256, np.int64), np.zeros(256, np.int64)
        offsets = 0 if self.policy == "replicated" or self._on_gpu else 1
        codes = np.empty(0, np.uint8) if self._codes is None else self._codes
        indptr = np.asarray(self.graph.indptr).view(np.ndarray)
        # First_seen blocks are prefixes of the outermost one: it has every row once.
        blocks = batch.blocks[:1] if batch.dialect is Dialect.FIRST_SEEN else batch.blocks
        for block in blocks:
            _count_rows(
                batch.n_id, block.num_dst, block.indptr, indptr, codes, offsets, chosen_only,
                lists, edges,
            )  # fmt: skip
        num_bytes = edges * self.graph.indices.dtype.itemsize
        num_bytes[offsets] += OFFSET_BYTES * int(lists.sum())
        return _by_kind(lists), _by_kind(num_bytes)


class CountedSampler:
    """Sampler whose batches say where the lists lay that they read."""

    def __init__(self, sampler: BatchSampler, topology: Topology, *, chosen_only: bool) -> None:
        self.sampler = sampler
        self._topology = topology
        self._chosen_only = chosen_only

    def sample(
        self,
        seeds: NDArray[np.int64],
        *,
        epoch: int,
        step: int,
        input_id: NDArray[np.int64] | None = None,
        global_num_seeds: int | None = None,
    ) -> MiniBatch:
        """Sample as `BatchSampler.sample` says, and fill the counts by source."""
        batch = self.sampler.sample(
            seeds, epoch=epoch, step=step, input_id=input_id, global_num_seeds=global_num_seeds
        )
        counts = self._topology.count(batch, chosen_only=self._chosen_only)
        batch.lists_by_source, batch.list_bytes_by_source = counts
        return batch


@numba.njit(cache=True, nogil=True)
@no_type_check
def _count_rows(n_id, num_rows, chosen_ptr, indptr, codes, constant, chosen_only, lists, edges):
    """Add one visit and the ids read of each row; without codes every list lies in `constant`."""
    for i in range(num_rows):
        node = n_id[i]
        source = codes[node] if codes.size else constant
        lists[source] += 1
        if chosen_only:
            edges[source] += chosen_ptr[i + 1] - chosen_ptr[i]
        else:
            edges[source] += indptr[node + 1] - indptr[node]


def _without_peers(numbers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Read from the host what GPUs read of each other."""
    return np.where(numbers < FIRST_PEER, numbers, np.uint8(1))


def _by_kind(counts: NDArray[np.int64]) -> dict[str, int]:
    """Return counts by kind of source, without those that are 0."""
    named = {source.kind: int(n) for source, n in zip(SOURCES, counts, strict=False)}
    named["peer"] = int(counts[FIRST_PEER:].sum())
    return {kind: n for kind, n in named.items() if n}


def _without_read_ahead(array: Any) -> None:
    mapping = getattr(array, "_mmap", None)
    if mapping is not None:
        mapping.madvise(mmap.MADV_RANDOM)


def sort_lists(graph: Graph, share: HostShare | None = None, *, keep_order: bool) -> SortedByType:
    """Sort a typed graph's lists by type, once per host where its ranks share.

    Collective over the ranks that share.
    """
    num_types = len(types_of(graph).edge_types)
    assert graph.edge_type is not None

    def hold(num_bytes: int, fill: Fill) -> NDArray[np.uint8]:
        def fill_shared(room: HostMemory) -> None:
            fill(np.frombuffer(room, np.uint8))

        room = None if share is None else share.map(num_bytes, fill_shared, used=True)
        return hold_alone(num_bytes, fill) if room is None else np.frombuffer(room, np.uint8)

    return SortedByType.of(
        graph.indptr, graph.indices, graph.edge_type, num_types, keep_order=keep_order, hold=hold
    )
