"""Adjacency lists that a rank's samplers read, as the plan's `TopologyPlacement` says.

  host        the host's shared mapping of the dataset
  replicated  a copy of `indptr` and `indices` in this rank's memory
  cached      the rank's own lists in its memory, all others from the host's mapping or the disk

The location table of `cached` has features' codes (`slot << 8 | number`) over `SOURCES`. Positions
of edges stay those of the dataset, so every sampler draws the same batch under every policy.

Under `partitioned` the graph here is the host's, of which the distributed matrix samplers cut their
rows. Typed samplers sort the whole graph's lists into arrays of their own and refuse `cached`.
FastGCN's probabilities take one pass over the dataset.
"""

import dataclasses
import mmap
from pathlib import Path
from typing import Any, no_type_check

import numba
import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import PlanError
from gnnplan.runtime.features.location import LocationTable
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.plan.io import load_array
from gnnplan.runtime.plan.schema import Plan, Source
from gnnplan.runtime.sampling.build import BatchSampler
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch
from gnnplan.runtime.sampling.placed_indices import PlacedIndices
from gnnplan.runtime.sampling.registry import find_sampler

SOURCES = [Source(kind="own"), Source(kind="host"), Source(kind="disk")]
"""Sources that the codes of `topology_location_<g>` number."""
OFFSET_BYTES = 16
"""Bytes of the two entries of `indptr` that locate a list."""


class Topology:
    """Graph to sample from, and the places of one rank's adjacency lists."""

    def __init__(self, graph: Graph, plan: Plan, folder: Path, rank: int) -> None:
        self.policy = plan.strategy.topology.policy
        self.graph = graph
        self._bulk = plan.strategy.bulk_batches > 1
        self.resident_bytes = 0
        """Bytes of lists, offsets and directory in this rank's memory."""
        self._codes: Any = None
        if self.policy == "replicated":
            indptr, indices = np.array(graph.indptr), np.array(graph.indices)
            self.graph = dataclasses.replace(graph, indptr=indptr, indices=indices)
            self.resident_bytes = indptr.nbytes + indices.nbytes
        elif self.policy == "cached":
            self._open_cached(plan, folder, rank)

    def _open_cached(self, plan: Plan, folder: Path, rank: int) -> None:
        graph = self.graph
        codes = load_array(plan, folder, f"topology_location_{rank}")
        own = np.asarray(load_array(plan, folder, f"topology_own_ids_{rank}"), np.int64)
        if codes.shape != (graph.num_nodes,) or codes.dtype not in (np.uint32, np.uint64):
            raise PlanError(
                f"{folder}: expected {graph.num_nodes} unsigned topology codes for rank {rank}, "
                f"found {codes.dtype}{list(codes.shape)}; plan again"
            )
        table = LocationTable(codes, SOURCES)
        table.check({rank: own}, rank)
        numbers = (np.asarray(codes) & 0xFF).astype(np.uint8)
        held = np.flatnonzero(numbers == 0)
        if held.size != own.size:
            raise PlanError(
                f"{folder}: expected the {own.size} own lists of rank {rank} to be located once "
                f"each, found {held.size} located; plan again"
            )
        indices = graph.indices
        if (numbers == 2).any():
            indices = np.load(graph.array_path("indices"), mmap_mode="r")
            _without_read_ahead(indices)
        placed = PlacedIndices(graph.indptr, indices, held)
        self.graph = dataclasses.replace(graph, indices=placed)
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

        A visit reads two offsets (from the host, or the copy of `replicated`) and the ids of the
        chosen neighbours, or of all neighbours where the sampler looks at each.
        """
        lists, edges = np.zeros(len(SOURCES), np.int64), np.zeros(len(SOURCES), np.int64)
        offsets = 0 if self.policy == "replicated" else 1
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
        kinds = [source.kind for source in SOURCES]
        return tuple(
            {kind: int(n) for kind, n in zip(kinds, each, strict=True) if n}
            for each in (lists, num_bytes)
        )


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


def _without_read_ahead(array: Any) -> None:
    mapping = getattr(array, "_mmap", None)
    if mapping is not None:
        mapping.madvise(mmap.MADV_RANDOM)
