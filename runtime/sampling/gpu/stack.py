"""Draw k batches at once on a GPU: `DeviceNeighborSampler`'s batches, and what stacks share.

One launch of every step per hop, whatever k is. A vertex of batch b is the key b N + v. Rows of a
stack stand batch by batch, each draws from its own batch's stream, and one relabelling table
numbers the keys of all batches in order of first appearance, so new ones stand batch by batch too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.checks import check_seeds
from gnnplan.runtime.sampling.dependent import HopStreams
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
from gnnplan.runtime.sampling.memory import StackCutter
from gnnplan.runtime.sampling.minibatch import Dialect, Request

_PASSING = 3
"""Bytes under way while a stack is drawn, in bytes of its results: positions, values and ranks."""


@runtime_checkable
class DeviceStack(Protocol):
    """Draws several batches at once."""

    def sample_stack(self, requests: Sequence[Request]) -> list[DeviceBatch]:
        """Draw the batches of some requests; their tensors may be views of common ones."""
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
    """Cuts requests into stacks as `StackCutter`, by bytes that include what is under way."""

    def __init__(self, stack: DeviceStack, budget_bytes: int | None, kept_batches: int) -> None:
        self._stack, self._cutter = stack, StackCutter(budget_bytes, kept_batches)

    def stacks(self, requests: Sequence[Request]) -> Iterator[list[DeviceBatch]]:
        """Draw the batches stack by stack; drop one before asking for the next."""
        return self._cutter.stacks(requests, self._sample_stack, lambda each, room: room // each)

    def _sample_stack(self, requests: Sequence[Request]) -> tuple[list[DeviceBatch], int]:
        """Draw one stack; also the bytes of its largest batch, what is under way included."""
        found = self._stack.sample_stack(requests)
        return found, max((1 + _PASSING) * max(batch_bytes(batch) for batch in found), 1)


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

    def sample_stack(self, requests: Sequence[Request]) -> list[DeviceBatch]:
        """Draw the batches of some requests together; waits twice per hop."""
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
            level, fresh = self._hop(hop, *rows, known, table, steps)
            levels.append(level)
        starts = ends.tolist()
        made: list[DeviceBatch] = []
        for b, request in enumerate(requests):
            parts = [level.of(b) for level in levels]
            nodes = [seeds[starts[b] : starts[b + 1]], *(new for _, new in parts)]
            checked = replace(request, seeds=batches[b])
            made.append(sampler.batch_of(checked, [hop for hop, _ in parts], nodes))
        return made

    def _hop(
        self,
        hop: int,
        keys: Tensor,
        ends: Tensor,
        known: _Known,
        table: DeviceRelabel,
        steps: Sequence[HopStreams],
    ) -> tuple[_Level, tuple[Tensor, Tensor]]:
        """Draw and number the edges of the rows `keys`; also the new keys and their ends."""
        n = self._num_nodes
        batch_of = owners(ends)
        counts, (positions, values) = self._draw(hop, batch_of, keys - batch_of * n, steps)
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
        self, hop: int, batch_of: Tensor, nodes: Tensor, steps: Sequence[HopStreams]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Draw the edges of each row: counts, positions and values; waits for their number."""
        graph, fanout = self._sampler.topology, self._sampler.fanouts[hop]
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
