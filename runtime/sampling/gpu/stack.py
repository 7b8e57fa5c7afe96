"""Draw k batches at once on a GPU, alone or over a process grid, and what stacks share.

One launch of every step per hop, whatever k is. A vertex of batch b is the key b N + v. Rows of a
stack stand batch by batch, each draws from its own batch's stream, and one relabelling table
numbers the keys of all batches in order of first appearance, so new ones stand batch by batch too.

Where ranks hold the graph in parts (`GridTopology`), the c ranks of a process row draw their c k
batches as one stack, as `distributed.grid` does on cores, from lists that they fetch hop by hop
(DEC-117); all draw the same inner hops, and each the last hop of its own batches alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.comm.mesh import ProcessGrid
from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.features.device_rows import copy_list
from gnnplan.runtime.sampling.checks import check_seeds
from gnnplan.runtime.sampling.dependent import HopStreams
from gnnplan.runtime.sampling.distributed.grid_rows import FetchedRows, GridRows, Shard
from gnnplan.runtime.sampling.gpu.choose import (
    SAMPLED,
    choose_some,
    row_bounds,
    row_ends,
    scan_below,
)
from gnnplan.runtime.sampling.gpu.hops import DeviceBatch, Hop, seeds_on_device
from gnnplan.runtime.sampling.gpu.neighbor import DeviceNeighborSampler, room
from gnnplan.runtime.sampling.gpu.relabel import DeviceRelabel
from gnnplan.runtime.sampling.gpu.rng import StackStreams
from gnnplan.runtime.sampling.gpu.topology import ALL, DeviceTopology, Source, add_parts
from gnnplan.runtime.sampling.memory import Ledger, StackCutter
from gnnplan.runtime.sampling.minibatch import Dialect, Request

EVERY = slice(0, None, 1)
"""All batches of a stack."""
_PASSING = 3
"""Bytes under way while a stack is drawn, in bytes of its results: positions, values and ranks."""


@runtime_checkable
class DeviceStack(Protocol):
    """Draws several batches at once."""

    def sample_stack(self, requests: Sequence[Request], own: slice = EVERY) -> list[DeviceBatch]:
        """Draw the batches `requests[own]` of a stack; the last hop of these alone.

        Their tensors may be views of common ones.
        """
        ...


def owners(ends: Tensor) -> Tensor:
    """Return the row of each entry of rows that end at `ends`; int64."""
    numbers = torch.arange(ends.numel() - 1, device=ends.device)
    return torch.repeat_interleave(numbers, ends[1:] - ends[:-1])


def stack_of(sampler: object) -> DeviceStack:
    """Return what draws stacks of a sampler's batches, equal to them one by one.

    Raises:
        SamplerError: it has no such form, as `BulkSampler.of` says for the host's.
    """
    from gnnplan.runtime.sampling.gpu.layerwise import DeviceLayerwiseSampler
    from gnnplan.runtime.sampling.gpu.neighbor import DeviceNeighborSampler, Method

    if isinstance(sampler, DeviceLayerwiseSampler):
        return sampler
    if isinstance(sampler, DeviceNeighborSampler) and sampler.method is Method.NEIGHBOR:
        return DeviceNeighborStack(sampler)
    raise SamplerError(
        "expected uniform neighbours without replacement, ladies, pladies or fastgcn for "
        f"stacks of batches, found {type(sampler).__name__}; plan with bulk_batches 1"
    )


class StackedBatches:
    """Cuts steps into stacks as `StackCutter`, by bytes that include what is under way.

    Each step is its requests: this rank's, or on a grid those of its process row, by column.
    """

    def __init__(
        self,
        stack: DeviceStack,
        budget_bytes: int | None,
        kept_batches: int,
        grid: ProcessGrid | None = None,
    ) -> None:
        self._stack, self._cutter = stack, StackCutter(budget_bytes, kept_batches)
        self._grid = grid
        self._own = EVERY if grid is None else slice(grid.column, None, grid.replication)

    def stacks(self, steps: Sequence[Sequence[Request]]) -> Iterator[list[DeviceBatch]]:
        """Draw this rank's batches stack by stack; drop one before asking for the next."""
        return self._cutter.stacks(steps, self._sample_stack, self._fit)

    def _sample_stack(self, steps: Sequence[Sequence[Request]]) -> tuple[list[DeviceBatch], int]:
        """Draw one stack; also the bytes of its largest batch, what is under way included."""
        found = self._stack.sample_stack([each for step in steps for each in step], self._own)
        return found, max((1 + _PASSING) * max(batch_bytes(batch) for batch in found), 1)

    def _fit(self, each: int, room: int) -> int:
        """Return the batches that fit, on a grid those that fit on every rank."""
        return room // each if self._grid is None else self._grid.agree_min(room // each)


def batch_bytes(batch: DeviceBatch) -> int:
    """Return the bytes of a batch's tensors, nested blocks counted once."""
    nested = batch.blocks[:1] if batch.dialect is Dialect.FIRST_SEEN else batch.blocks
    held = [batch.n_id, *(t for block in nested for t in block.tensors().values())]
    return sum(t.numel() * t.element_size() for t in held)


def with_own_tensors(batch: DeviceBatch) -> DeviceBatch:
    """Copy a batch out of a stack's tensors; nested blocks stay parts of the first."""
    whole = {name: tensor.clone() for name, tensor in batch.blocks[0].tensors().items()}
    blocks = [replace(batch.blocks[0], **whole)]
    for block in batch.blocks[1:]:
        own = {
            name: whole[name][: tensor.numel()]
            if batch.dialect is Dialect.FIRST_SEEN
            else tensor.clone()
            for name, tensor in block.tensors().items()
        }
        blocks.append(replace(block, **own))
    return replace(batch, blocks=blocks, n_id=batch.n_id.clone())


@dataclass(slots=True)
class _Known:
    """Vertices numbered so far, level by level: the seeds, then what each hop added."""

    keys: list[Tensor]
    local: Tensor
    """Id within its batch of each number, int64."""
    sizes: Tensor

    def add(self, new: Tensor, ends: Tensor) -> None:
        """Add a level of new keys that end at `ends`, int64 [k + 1]."""
        batch = owners(ends)
        rank = torch.arange(new.numel(), device=new.device) - ends[batch]
        self.local = torch.cat([self.local, rank + self.sizes[batch]])
        self.sizes = self.sizes + (ends[1:] - ends[:-1])
        self.keys.append(new)

    def everything(self, num_nodes: int) -> tuple[Tensor, Tensor]:
        """Return all keys in the order of local ids, batch by batch, and the batches' ends."""
        keys, ends = torch.cat(self.keys), row_ends(self.sizes)
        ordered = torch.empty_like(keys)
        batch = torch.div(keys, num_nodes, rounding_mode="floor")
        ordered[ends[batch] + self.local] = keys
        return ordered, ends


@dataclass(frozen=True, slots=True)
class _Level:
    """One hop of the stack, and where each batch's part of it ends on the host."""

    row_ptr: Tensor
    positions: Tensor
    local: Tensor
    nodes: Tensor
    row_ends: list[int]
    edge_ends: list[int]
    node_ends: list[int]

    def of(self, b: int) -> tuple[Hop, Tensor]:
        """Return batch b's part."""
        edges = slice(self.edge_ends[b], self.edge_ends[b + 1])
        rows = slice(self.row_ends[b], self.row_ends[b + 1] + 1)
        hop = Hop(
            row_ptr=self.row_ptr[rows] - edges.start,
            positions=self.positions[edges],
            local=self.local[edges],
            weight=None,
            num_edges=edges.stop - edges.start,
        )
        return hop, self.nodes[self.node_ends[b] : self.node_ends[b + 1]]


class DeviceNeighborStack:
    """Draws several batches of a sampler, which is by method `neighbor`, together."""

    def __init__(self, sampler: DeviceNeighborSampler) -> None:
        self._sampler = sampler
        self._num_nodes, self._device = sampler.num_nodes, sampler.device

    def sample_stack(self, requests: Sequence[Request], own: slice = EVERY) -> list[DeviceBatch]:
        """Draw the batches `requests[own]` of a stack together; waits twice per hop."""
        sampler, n = self._sampler, self._num_nodes
        batches = [check_seeds(request.seeds) for request in requests]
        seeds, ends = seeds_on_device(batches, n, self._device)
        steps = [sampler.streams.streams(r.epoch, r.step, sampler.num_hops) for r in requests]
        table, keys = DeviceRelabel(self._device), owners(ends) * n + seeds
        table.number(keys, [])
        nothing = torch.zeros(0, dtype=torch.int64, device=self._device)
        known = _Known([], nothing, torch.zeros_like(ends[1:]))
        known.add(keys, ends)
        fresh = (keys, ends)
        levels: list[_Level] = []
        for hop in range(sampler.num_hops):
            rows = fresh if sampler.dialect is Dialect.FIRST_SEEN else known.everything(n)
            drawn = own if hop == sampler.num_hops - 1 else EVERY
            level, fresh = self._hop(hop, drawn, *rows, known, table, steps)
            levels.append(level)
        starts = ends.tolist()
        made: list[DeviceBatch] = []
        for b, request in list(enumerate(requests))[own]:
            parts = [level.of(b) for level in levels]
            nodes = [seeds[starts[b] : starts[b + 1]], *(new for _, new in parts)]
            checked = replace(request, seeds=batches[b])
            made.append(sampler.batch_of(checked, [hop for hop, _ in parts], nodes))
        return made

    def _hop(
        self,
        hop: int,
        own: slice,
        keys: Tensor,
        ends: Tensor,
        known: _Known,
        table: DeviceRelabel,
        steps: Sequence[HopStreams],
    ) -> tuple[_Level, tuple[Tensor, Tensor]]:
        """Draw and number the edges of the rows `keys`, of the batches `own` alone.

        Also return the new keys and their ends.
        """
        n = self._num_nodes
        batch_of = owners(ends)
        nodes = keys - batch_of * n
        graph, _ = self._sampler.topology.lists_of(nodes)
        if own.step > 1:
            mine = batch_of % own.step == own.start
            ends = row_ends(torch.bincount(batch_of[mine], minlength=len(steps)))
            batch_of, nodes = batch_of[mine], nodes[mine]
        counts, (positions, values) = self._draw(hop, graph, batch_of, nodes, steps)
        if self._sampler.edge_ids:
            positions = graph.edge_ids(positions)
        row_ptr = row_ends(counts)
        edge_batch = torch.repeat_interleave(batch_of, counts, output_size=positions.numel())
        numbers, new = table.number(edge_batch * n + values, known.keys)
        batch = torch.div(new, n, rounding_mode="floor")
        new_ends = row_ends(torch.bincount(batch, minlength=len(steps)))
        known.add(new, new_ends)
        places = torch.stack([ends, row_ptr[ends], new_ends]).tolist()
        local = known.local[numbers].to(torch.int32)
        return _Level(row_ptr, positions, local, new - batch * n, *places), (new, new_ends)

    def _draw(
        self,
        hop: int,
        graph: DeviceTopology,
        batch_of: Tensor,
        nodes: Tensor,
        steps: Sequence[HopStreams],
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Draw the edges of each row: counts, positions and values; waits for their number."""
        fanout = self._sampler.fanouts[hop]
        streams = StackStreams.of(steps, hop, self._device)
        lists = row_bounds(graph, nodes, fanout, passes=1 if fanout < 0 else SAMPLED)
        row_ptr = row_ends(lists.counts)
        count = int(row_ptr[-1])
        edges = room(count, self._device)
        if fanout < 0:
            scan_below(streams.first, graph, lists, -1, row_ptr, edges)
            return lists.counts, edges
        words = None
        if not streams.plain:
            turns = torch.arange(fanout, device=self._device).repeat(nodes.numel())
            ids = nodes.repeat_interleave(fanout)
            words = streams.words(batch_of.repeat_interleave(fanout), ids, turns)
        each = streams.first[batch_of]
        choose_some(each, graph, nodes, lists, row_ptr, fanout, edges, words=words)
        return lists.counts, edges


class DeviceGridRows(GridRows):
    """`GridRows` in tensors of a device."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._device = self.shard.indptr.device
        self._bounds = torch.from_numpy(self._bounds).to(self._device)
        self._indptr = torch.zeros(self._indptr.size, dtype=torch.int64, device=self._device)

    @property
    def directory(self) -> Tensor:
        """Return the offsets that `view` fills."""
        return self._indptr

    def _distinct(self, nodes: Tensor) -> tuple[Tensor, NDArray[np.int64]]:
        ids = torch.unique(nodes)
        return ids, np.array(torch.searchsorted(ids, self._bounds).tolist(), np.int64)

    def _serve(self, rows: Tensor) -> list[Tensor]:
        shard, starts = self.shard, self.shard.indptr[rows]
        lengths = shard.indptr[rows + 1] - starts
        ptr = row_ends(lengths)
        total = int(ptr[-1])
        shift = torch.repeat_interleave(starts - ptr[:-1], lengths, output_size=total)
        places = torch.arange(total, device=self._device) + shift
        held = [values for values in (shard.indices, shard.edge_weight) if values is not None]
        found = [lengths, *(values[places] for values in held)]
        return [*found, starts + shard.edge_start] if self.edge_ids else found

    def _entries(self, lengths: Tensor, rows: Sequence[int]) -> list[int]:
        ends = torch.tensor([0, *rows], device=self._device).cumsum(0)
        return np.diff(row_ends(lengths)[ends].tolist()).tolist()

    def _running(self, lengths: Tensor) -> Tensor:
        return row_ends(lengths)

    def _concatenated(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))

    def _received(self, tensor: Tensor) -> Tensor:
        return tensor


@dataclass(frozen=True, eq=False, slots=True)
class FetchedLists(DeviceTopology):
    """Lists of the nodes that were fetched last, alone."""

    found: FetchedRows = field(kw_only=True)

    def edge_ids(self, positions: Tensor) -> Tensor:
        """Return the places in the whole graph of positions here, where they were fetched too."""
        found: Any = self.found
        if found.edge_start is None:
            return positions
        slots = torch.searchsorted(found.ptr, positions, right=True) - 1
        return positions + (found.edge_start - found.ptr[:-1])[slots]


@dataclass(frozen=True, eq=False, slots=True)
class GridTopology(DeviceTopology):
    """A graph in block rows over the devices of a process grid; `indices` are this rank's."""

    rows: DeviceGridRows = field(kw_only=True)

    @staticmethod
    def open(
        shard: Shard, grid: ProcessGrid, device: torch.device, *, edge_ids: bool
    ) -> "GridTopology":
        """Copy a rank's block row to its device; collective over the grid."""
        weight = shard.edge_weight
        held: Any = {
            "indptr": copy_list(shard.indptr, device),
            "indices": copy_list(shard.indices, device),
            "edge_weight": None if weight is None else copy_list(weight, device),
        }
        rows = DeviceGridRows(shard=replace(shard, **held), grid=grid, edge_ids=edge_ids)
        counts = torch.zeros(2 * len(Source), dtype=torch.int64, device=device)
        widest = -grid.agree_min(-int(np.diff(shard.indptr).max(initial=0)))
        return GridTopology(
            rows.directory, held["indices"], None, None, (0, ALL), (0, 0), counts, widest, rows=rows
        )

    def hold_weights(
        self, edge_weight: NDArray[np.floating] | None, device: torch.device
    ) -> Tensor | None:
        """Return the weights of this rank's edges, which came with its block row."""
        del edge_weight, device
        held: Any = self.rows.shard.edge_weight
        return held

    def lists_of(
        self, nodes: Tensor, weight: Tensor | None = None
    ) -> tuple[DeviceTopology, Tensor | None]:
        """Fetch the lists of some nodes, the same on all ranks of a process row; collective."""
        del weight
        found: Any = self.rows.fetch(nodes, Ledger())
        lists = FetchedLists(
            self.rows.view(found), found.cols, None, None, self.own, self.host, self.counts,
            self.widest, found=found,
        )  # fmt: skip
        return lists, found.weight

    def sum_columns(
        self, weight: Tensor | None, total: Tensor, add: Callable[[Tensor, Tensor, Any], None]
    ) -> Tensor:
        """Add up the block rows in their order, so that all ranks find the same; collective."""
        del weight
        mine: Any = self.rows.shard
        grid = self.rows.grid
        for block in range(grid.num_rows):
            if block == grid.row:
                add_parts(mine.indices, mine.edge_weight, total, add)
            total = grid.column_comm.broadcast(total, source=block)
        return total
