"""Draw batches on a GPU without a wait of the host, into buffers of fixed, padded sizes.

An epoch's order of seeds lies on the device, and a counter there says which batch is next. So the
same launches, or a CUDA graph of them replayed, draw one batch after the other: the sampler's own,
with the same nodes and edges in the same order. How many rows and edges a batch has stays on the
device; kernels take their bounds from there. What a batch does not use is padding: rows without
edges, and edges that join padding rows.

A batch that needs more than its `Envelope` overflows: it is left empty and flagged, and the host,
which may look seldom, draws it again by the sampler.

Links are drawn with their negatives; their distinct ends, ascending, are the seeds, and the step's
own edges are looked up in the graph and passed over by every hop. In typed graphs each node has a
row for each edge type.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, no_type_check

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.sampling.exclusion import Exclude
from gnnplan.runtime.sampling.gpu.hops import BlockEdges, DeviceBlock, PaddedBatch
from gnnplan.runtime.sampling.gpu.neighbor import (
    CapturedNeighborSampler,
    DeviceNeighborSampler,
    Method,
    PaddedHops,
)
from gnnplan.runtime.sampling.gpu.relabel import AGE, programs_for
from gnnplan.runtime.sampling.gpu.rng import LOWEST, plain_words, signed, write_streams
from gnnplan.runtime.sampling.gpu.segments import find_edges, make_left_out
from gnnplan.runtime.sampling.gpu.tasks import (
    DeviceExcludingSampler,
    DeviceLinkSampler,
    DeviceTypedSampler,
    number_ends_kernel,
    on_device,
    take_links_kernel,
)
from gnnplan.runtime.sampling.gpu.topology import DeviceTopology
from gnnplan.runtime.sampling.memory import DENSE_BYTES, Envelope
from gnnplan.runtime.sampling.minibatch import IGNORED, Dialect
from gnnplan.runtime.sampling.rng import Purpose, stream
from gnnplan.runtime.sampling.seeds import LinkSchedule, SeedSchedule

if TYPE_CHECKING:
    from gnnplan.runtime.features.device_store import DeviceFeatureStore

_BLOCK = 512


@triton.jit
@no_type_check
def _take_kernel(
    cursor, spans, order, train, labels, nodes, input_id, weight, y, numbers, streams, ranks, stamp,
    LABELS: tl.constexpr, DENSE: tl.constexpr, HOPS: tl.constexpr, LANES: tl.constexpr,
    PURPOSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    step = tl.load(cursor + 1)
    begin, end = tl.load(spans + 3 * step), tl.load(spans + 3 * step + 1)
    total = tl.load(spans + 3 * step + 2)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < end - begin
    place = tl.load(order + begin + at, mask=mask, other=0)
    node = tl.load(train + place, mask=mask, other=0)
    tl.store(nodes + at, node, mask=mask)
    tl.store(input_id + at, place, mask=mask)
    one = tl.full((BLOCK,), 1, tl.float32)
    tl.store(weight + at, tl.div_rn(one, (at * 0 + tl.maximum(total, 1)).to(tl.float32)), mask=mask)
    for column in range(LABELS):
        label = tl.load(labels + place * LABELS + column, mask=mask, other=0)
        tl.store(y + at * LABELS + column, label, mask=mask)
    if DENSE:
        tl.store(ranks + node, tl.load(stamp) * AGE + at, mask=mask)
    if tl.program_id(0) == 0:
        tl.store(numbers, end - begin)
        tl.store(numbers + 2 * HOPS + 1, 0)
        write_streams(cursor, streams, HOPS, LANES, PURPOSE)


@triton.jit
@no_type_check
def _pad(array, value, count, size, BLOCK: tl.constexpr):
    """Write a value behind the first `count` of `size` entries."""
    begin = count + tl.program_id(0).to(tl.int64) * BLOCK
    for first in range(begin, size, tl.num_programs(0) * BLOCK):
        at = tl.arange(0, BLOCK).to(tl.int64) + first
        tl.store(array + at, value, mask=at < size)


@triton.jit
@no_type_check
def _seal_kernel(
    cursor, spans, numbers, labels, label_room, counts, now, overflow, labels_now, stamp, sizes,
    row_places, edge_places, row_ptr, rows, local, positions, nodes, input_id, weight, y,
    LABELS: tl.constexpr, IGNORE: tl.constexpr, POSITIONS: tl.constexpr, EACH: tl.constexpr,
    HOPS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    bad = tl.load(numbers + 2 * HOPS + 1) != 0
    for hop in range(HOPS):
        num_dst = tl.where(bad, 0, tl.load(numbers + hop))
        num_edges = tl.where(bad, 0, tl.load(numbers + HOPS + 1 + hop))
        room, src_room = tl.load(sizes + hop), tl.load(sizes + hop + 1)
        edge_room = tl.load(sizes + HOPS + 1 + hop)
        row_end = row_ptr + tl.load(row_places + hop)
        _pad(row_end, num_edges, num_dst * EACH, room * EACH + 1, BLOCK)
        place = tl.load(edge_places + hop)
        _pad(local + place, (src_room - 1).to(tl.int32), num_edges, edge_room, BLOCK)
        _pad(rows + place, (room - 1).to(tl.int32), num_edges, edge_room, BLOCK)
        if POSITIONS:
            _pad(positions + place, 0, num_edges, edge_room, BLOCK)
    num_labels = tl.where(bad, 0, tl.load(labels))
    _pad(nodes, 0, tl.where(bad, 0, tl.load(numbers + HOPS)), tl.load(sizes + HOPS), BLOCK)
    _pad(input_id, 0, num_labels, label_room, BLOCK)
    _pad(weight, 0.0, num_labels, label_room, BLOCK)
    if LABELS > 0:
        _pad(y, IGNORE, num_labels * LABELS, label_room * LABELS, BLOCK)
    if tl.program_id(0) == 0:
        lane = tl.arange(0, LANES)
        number = tl.where(bad, 0, tl.load(numbers + lane, mask=lane <= 2 * HOPS, other=0))
        tl.store(counts + lane, number, mask=lane <= 2 * HOPS)
        epoch, step = tl.load(cursor), tl.load(cursor + 1)
        tl.store(now, epoch)
        tl.store(now + 1, step)
        tl.store(now + 2, num_labels)
        tl.store(now + 3, tl.load(spans + 3 * step + 2))
        tl.store(overflow, bad.to(tl.int64))
        tl.store(labels_now, num_labels)
        tl.store(cursor + 1, tl.minimum(step + 1, tl.load(cursor + 2)))
        tl.store(stamp, tl.load(stamp) + 1)


PaddedSampler = DeviceNeighborSampler | DeviceTypedSampler | DeviceLinkSampler
"""Samplers whose batches are drawn in padded form."""


class BlockWeights(Protocol):
    """Edges and weights that a model makes of those that were drawn."""

    @property
    def launches(self) -> int:
        """Return how many kernels `fill` launches."""
        ...

    def prepare(self, batch: PaddedBatch) -> PaddedBatch:
        """Return a batch whose blocks are the model's; allocates their buffers."""
        ...

    def fill(self, batch: PaddedBatch) -> None:
        """Fill the blocks of a batch that was drawn; only launches kernels."""
        ...


class LinkEnds:
    """Draws links, their negatives and distinct ends without a wait of the host.

    A batch with more parallel edges to leave out than there is room for overflows.
    """

    def __init__(self, sampler: DeviceLinkSampler, schedule: LinkSchedule) -> None:
        self._negatives, self.seed = sampler.negatives, sampler.negatives.seed
        self._graph, self._both = sampler.topology, sampler.exclude is Exclude.BOTH
        self._device = sampler.neighbors.device
        self.room = max(schedule.largest_share(), 1)
        self.pitch = 2 + sampler.negatives.num_negatives
        self._pairs = on_device(schedule.pairs, self._device)
        self._batch_size = schedule.batch_size
        self.drawn = self._integers(3)
        """Stream of the negatives, links of this rank, candidates; int64."""
        self._ends = self._integers(self.room, self.pitch)
        self._sorted, self._places, self._sums = (
            self._integers(self._ends.numel()) for _ in range(3)
        )
        self._first = torch.ones(self._ends.numel(), dtype=torch.bool, device=self._device)
        keys = self._batch_size * (0 if sampler.exclude is Exclude.NONE else 1 + self._both)
        self._asked, self._pool = self._integers(keys), self._integers(self._batch_size)
        self.left_out = make_left_out(keys, self._device) if keys else None
        """Edges that no hop draws: the whole step's links, as far as the graph has them."""

    @property
    def launches(self) -> int:
        """Return how many kernels `take` launches."""
        return 6 if self.left_out is None else 11

    def _integers(self, *sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=torch.int64, device=self._device)

    def take(
        self, cursor: Tensor, spans: Tensor, order: Tensor, hops: PaddedHops, batch: PaddedBatch
    ) -> None:
        """Write the next links, and their distinct ends as seeds; only launches kernels."""
        num_hops, overflow = len(hops.fanouts), hops.numbers[-2:]
        asked = self._pool if self.left_out is None else self._asked
        take_links_kernel[(triton.cdiv(max(self.room, self._batch_size), _BLOCK),)](
            cursor, spans, order, self._pairs, self.drawn, self._ends, batch.input_id,
            batch.seed_weight, asked, self._pool, hops.streams, overflow, self._batch_size,
            self._graph.num_nodes, self.room, PITCH=self.pitch, BOTH=self._both,
            POOLED=self._negatives.pooled, KEYS=self.left_out is not None, HOPS=num_hops,
            LANES=triton.next_power_of_2(num_hops), PURPOSE=int(Purpose.NEIGHBOR),
            NEGATIVE=int(Purpose.NEGATIVE), BLOCK=_BLOCK,
        )  # fmt: skip
        self._negatives.launch(self.drawn, self._ends, batch.input_id, self._pool)
        torch.sort(self._ends.view(-1), out=(self._sorted, self._places))
        torch.ne(self._sorted[1:], self._sorted[:-1], out=self._first[1:])
        torch.cumsum(self._first, 0, dtype=torch.int64, out=self._sums)
        number_ends_kernel[(triton.cdiv(self._ends.numel(), _BLOCK),)](
            self._sorted, self._places, self._sums, self.drawn, batch.n_id, batch.y,
            hops.table.ranks, hops.table.stamp, hops.numbers, overflow, hops.envelope.rows[0] - 1,
            PITCH=self.pitch, DENSE=hops.table.keys is None, BLOCK=_BLOCK,
        )  # fmt: skip
        if self.left_out is not None:
            find_edges(self._graph, self._asked, self.left_out, overflow)


class PaddedDraws:
    """Draws the batches of one rank, one after the other, into padded buffers.

    One stream and one thread at a time. The sampler draws uniform neighbours or LABOR-0 in
    independent batches, or those of a typed graph or of links.

    Args:
        sampler: Whose batches are drawn.
        schedule: Who gets which seeds or links.
        envelope: Sizes of the buffers.
        store: Rows that batches come with, all addressable by the device; None: none.
        row_dtype: Type of the rows in batches: float32, float16 or bfloat16.
        labels: Labels of all nodes, [N] or [N, classes]; None: none.
        edge_ids: Batches come with positions of edges in the graph.
        weights: Edges and weights that the model makes of those drawn; None: it takes them so.
        dense_bytes: Most bytes of a rank for each node of the graph; else nodes are hashed.

    Raises:
        SamplerError: batches of that kind are not drawn in padded form.
    """

    def __init__(
        self,
        sampler: PaddedSampler,
        schedule: SeedSchedule | LinkSchedule,
        envelope: Envelope,
        *,
        store: "DeviceFeatureStore | None" = None,
        labels: NDArray[Any] | None = None,
        row_dtype: torch.dtype = torch.float32,
        edge_ids: bool = False,
        weights: BlockWeights | None = None,
        dense_bytes: int = DENSE_BYTES,
    ) -> None:
        hops = sampler.neighbors if isinstance(sampler, DeviceLinkSampler) else sampler
        _check(hops, schedule, envelope, edge_ids=edge_ids)
        self.device, self.sampler = hops.device, sampler
        self.envelope, self._weights = envelope, weights
        self._policy = hops.streams
        self._edge_ids, self._row_dtype = edge_ids, row_dtype
        self._links = self._types = None
        if isinstance(sampler, DeviceLinkSampler):
            assert isinstance(schedule, LinkSchedule)
            self._links, schedule = LinkEnds(sampler, schedule), schedule.ids
        assert isinstance(schedule, SeedSchedule)
        self.schedule = schedule
        typed = isinstance(hops, DeviceTypedSampler)
        self._hops = PaddedHops(
            hops.topology, hops.fanouts, envelope, self.device,
            every_hop=hops.dialect is Dialect.EVERY_HOP,
            method=Method.NEIGHBOR if typed else hops.method, by_type=hops.by_type if typed else (),
            left_out=None if self._links is None else self._links.left_out, dense_bytes=dense_bytes,
        )  # fmt: skip
        if typed:
            self._types = hops.node_type
        if store is not None:
            store.check_padded()
        self._store = store
        integers = self._hops.integers
        self.row_counts = integers(1) if store is None else store.new_counts()
        """Rows gathered so far by source, as `DeviceFeatureStore.named` takes them."""
        self._next: tuple[int, int] | None = None
        # Epoch, step, steps, seed; epoch and first step of the streams; seed of negatives.
        self._cursor = integers(7)
        self._spans = integers(3 * (schedule.num_steps + 1))
        self._order = integers(len(schedule.train_idx))
        train = schedule.train_idx
        self._train = torch.from_numpy(np.array(train)).to(self.device)
        self._labels = None
        if labels is not None and self._links is None:
            self._labels = torch.from_numpy(np.array(labels[train])).to(self.device)

    @property
    def launches(self) -> int:
        """Return how many kernels `fill` launches."""
        takes = 1 if self._links is None else self._links.launches
        types = (self._hops.each > 1) + (self._types is not None)
        gathers = 0 if self._store is None else self._store.num_launches
        weighs = 0 if self._weights is None else self._weights.launches
        return takes + self._hops.launches + 1 + types + weighs + gathers

    def new_batch(self) -> PaddedBatch:
        """Make the buffers of one batch; `fill` draws into them."""
        rows, edges, device = self.envelope.rows, self.envelope.edges, self.device
        row_places = np.cumsum([0, *(room + 1 for room in rows[:-1])])
        edge_places = np.cumsum([0, *edges]).tolist()
        integers, each = self._hops.integers, self._hops.each
        kept = BlockEdges(
            row_places=torch.from_numpy(each * row_places[:-1]).to(device),
            edge_places=torch.tensor(edge_places[:-1], device=device),
            row_ptr=integers(each * int(row_places[-1])),
            rows=torch.zeros(edge_places[-1], dtype=torch.int32, device=device),
            local=torch.zeros(edge_places[-1], dtype=torch.int32, device=device),
            positions=integers(edge_places[-1]) if self._edge_ids else None,
        )
        counts, labels, links = integers(2 * len(edges) + 1), self._labels, self._links
        num_labels = rows[0] if links is None else links.room
        y = None if labels is None else labels.new_zeros((num_labels, *labels.shape[1:]))
        x = None if self._store is None else self._store.empty(rows[-1], self._row_dtype).zero_()
        row_ends = kept.row_ptr if each == 1 else integers(int(row_places[-1]))
        blocks: list[DeviceBlock] = []
        for hop in reversed(range(len(edges))):
            first, last = row_places[hop : hop + 2].tolist()
            edge = slice(edge_places[hop], edge_places[hop + 1])
            of_types = kept.row_ptr[each * first : each * (last - 1) + 1]
            blocks.append(
                DeviceBlock(
                    num_src=rows[hop + 1],
                    num_dst=rows[hop],
                    indptr=row_ends[first:last],
                    indices=kept.local[edge],
                    dst=kept.rows[edge],
                    e_id=None if kept.positions is None else kept.positions[edge],
                    live=counts[hop : hop + 1],
                    relation_ptr=None if each == 1 else of_types,
                )
            )
        if self._types is not None:
            blocks[0] = replace(blocks[0], src_type=self._types.new_zeros(rows[-1]))
        batch = PaddedBatch(
            blocks=blocks,
            n_id=integers(rows[-1]),
            input_id=integers(num_labels),
            x=x,
            y=y if links is None else integers(num_labels * links.pitch).view(num_labels, -1),
            labels_now=integers(1),
            seed_weight=torch.zeros(num_labels, dtype=torch.float32, device=device),
            counts=counts,
            now=integers(4),
            overflow=integers(1),
            kept=kept,
            row_ends=row_ends,
        )
        return batch if self._weights is None else self._weights.prepare(batch)

    def begin_epoch(self, epoch: int, step: int = 0) -> None:
        """Deal the seeds of an epoch, and go to one of its steps."""
        order, spans = self._deal(epoch)
        self._order[: order.numel()].copy_(order)
        self._spans[: 3 * len(spans)].copy_(torch.tensor(spans).flatten())
        self._hops.table.forget()
        per_epoch = self._policy.steps_per_epoch
        source = (epoch, 0) if per_epoch is None else (0, epoch * per_epoch)
        seed = signed(self._policy.seed % (1 << 64))
        negatives = 0 if self._links is None else signed(self._links.seed % (1 << 64))
        numbers = [epoch, step, self.schedule.num_steps, seed, *source, negatives]
        self._cursor.copy_(torch.tensor(numbers))

    def seek(self, step: int) -> None:
        """Go to a step of the same epoch, whose batch is drawn next; waits for nothing."""
        self._cursor[1:2].fill_(step)

    def expect(self, epoch: int, step: int) -> None:
        """Go to a step of any epoch, whose batch the caller draws next."""
        if self._next is None or self._next[0] != epoch:
            self.begin_epoch(epoch, step)
        elif self._next[1] != step:
            self.seek(step)
        self._next = (epoch, step + 1)

    def expect_none(self) -> None:
        """Go behind the last step, so that an empty batch is drawn next."""
        if self._next is not None and self._next[1] < self.schedule.num_steps:
            self.seek(self.schedule.num_steps)
            self._next = self._next[0], self.schedule.num_steps

    def take_row_counts(self) -> list[int]:
        """Return rows by source since the last call, as `row_counts`; waits."""
        counts = self.row_counts.tolist()
        self.row_counts.zero_()
        return counts

    def _deal(self, epoch: int) -> tuple[Tensor, list[tuple[int, int, int]]]:
        """Return positions of seeds, and of each step its first, its end, and the seeds of all."""
        schedule, steps = self.schedule, range(self.schedule.num_steps)
        if type(schedule) is SeedSchedule:
            order = torch.arange(self._order.numel(), device=self.device)
            if schedule.shuffle:
                source = stream(schedule.seed, epoch, 0, 0, Purpose.SHUFFLE)
                order = (plain_words(int(source), order) ^ LOWEST).sort(stable=True).indices
            return order, [schedule.span(step, schedule.rank) for step in steps]
        shares = [schedule.share(epoch, step) for step in steps]
        ends = np.cumsum([0, *(len(ids) for ids, _, _ in shares)]).tolist()
        order = np.concatenate([places for _, places, _ in shares])
        totals = [total for _, _, total in shares]
        return torch.from_numpy(order), list(zip(ends[:-1], ends[1:], totals, strict=True))

    def fill(self, batch: PaddedBatch) -> None:
        """Draw the next batch into buffers; only launches kernels, on the current stream.

        Behind the end of the epoch batches are empty.
        """
        hops = self._hops
        num_hops, columns = len(hops.fanouts), self._take(batch)
        hops.enter_seeds(batch.n_id)
        hops.draw(batch.n_id, batch.kept)
        self._seal(batch, columns)
        if hops.each > 1:
            batch.row_ends.copy_(batch.kept.row_ptr[:: hops.each])
        if self._types is not None and batch.blocks[0].src_type is not None:
            torch.index_select(self._types, 0, batch.n_id, out=batch.blocks[0].src_type)
        if self._weights is not None:
            self._weights.fill(batch)
        if self._store is not None and batch.x is not None:
            known = batch.counts[num_hops : num_hops + 1]
            self._store.gather_padded(batch.n_id, known, batch.x, self.row_counts)

    def _take(self, batch: PaddedBatch) -> int:
        """Write the next seeds with their labels, or links; return the labels of each."""
        hops, labels = self._hops, self._labels
        if self._links is not None:
            self._links.take(self._cursor, self._spans, self._order, hops, batch)
            return self._links.pitch
        columns = 0 if labels is None else max(labels[:1].numel(), 1)
        given, y = (self._train, batch.n_id) if labels is None else (labels, batch.y)
        num_hops = len(hops.fanouts)
        _take_kernel[(triton.cdiv(self.envelope.rows[0], _BLOCK),)](
            self._cursor, self._spans, self._order, self._train, given, batch.n_id, batch.input_id,
            batch.seed_weight, y, hops.numbers, hops.streams, hops.table.ranks, hops.table.stamp,
            LABELS=columns, DENSE=hops.table.keys is None, HOPS=num_hops,
            LANES=triton.next_power_of_2(num_hops), PURPOSE=int(self._policy.purpose), BLOCK=_BLOCK,
        )  # fmt: skip
        return columns

    def _seal(self, batch: PaddedBatch, columns: int) -> None:
        """Write padding and numbers of a batch that was drawn, and go on to the next."""
        hops, kept, links, labels = self._hops, batch.kept, self._links, self._labels
        num_hops, unknown = len(hops.fanouts), labels is not None and labels.dtype.is_signed
        most = max(*(hops.each * room for room in self.envelope.rows), *self.envelope.edges)
        _seal_kernel[(programs_for(most, _BLOCK, self.device),)](
            self._cursor, self._spans, hops.numbers,
            hops.numbers if links is None else links.drawn[1:], batch.input_id.numel(),
            batch.counts, batch.now, batch.overflow, batch.labels_now, hops.table.stamp, hops.sizes,
            kept.row_places, kept.edge_places, kept.row_ptr, kept.rows, kept.local,
            kept.row_ptr if kept.positions is None else kept.positions, batch.n_id, batch.input_id,
            batch.seed_weight, batch.n_id if batch.y is None else batch.y, LABELS=columns,
            IGNORE=IGNORED if unknown else 0, POSITIONS=kept.positions is not None, EACH=hops.each,
            HOPS=num_hops, LANES=triton.next_power_of_2(2 * num_hops + 1), BLOCK=_BLOCK,
        )  # fmt: skip


def _check(
    sampler: "DeviceNeighborSampler | DeviceTypedSampler",
    schedule: SeedSchedule | LinkSchedule,
    envelope: Envelope,
    *,
    edge_ids: bool,
) -> None:
    kinds = DeviceNeighborSampler, CapturedNeighborSampler, DeviceExcludingSampler
    typed, links = isinstance(sampler, DeviceTypedSampler), isinstance(schedule, LinkSchedule)
    bounded = not links or min(sampler.fanouts) > 0
    if isinstance(sampler, DeviceTypedSampler):
        bounded = min(map(min, sampler.by_type)) >= 0 and not edge_ids
    plain = (
        bounded
        and (typed or type(sampler) in kinds)
        and sampler.streams.kappa == 1
        and not sampler.streams.layer_dependent
        and type(sampler.topology) is DeviceTopology
    )
    if not plain:
        raise SamplerError(
            "expected uniform neighbours or LABOR-0 in independent batches to pad (of links and "
            f"edge types with bounded fan-outs, without edge ids), found {type(sampler).__name__}; "
            "sample it batch by batch"
        )
    if not links and schedule.largest_share() >= envelope.rows[0]:
        raise SamplerError(
            f"expected an envelope of more rows than the {schedule.largest_share()} seeds of a "
            f"batch, found {envelope.rows[0]}; plan again"
        )
