"""Draw batches on a GPU without a wait of the host, into buffers of fixed, padded sizes.

An epoch's order of seeds lies on the device, and a counter there says which batch is next. So the
same launches, or a CUDA graph of them replayed, draw one batch after the other: the sampler's own,
with the same nodes and edges in the same order. How many rows and edges a batch has stays on the
device; kernels take their bounds from there. What a batch does not use is padding: rows without
edges, and edges that join padding rows.

A batch that needs more than its `Envelope` overflows: it is left empty, and its step is noted for
the host, which may look seldom and draw it again by the sampler.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, no_type_check

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.sampling.gpu.choose import BlockEdges
from gnnplan.runtime.sampling.gpu.neighbor import (
    CapturedNeighborSampler,
    DeviceNeighborSampler,
    PaddedHops,
)
from gnnplan.runtime.sampling.gpu.relabel import AGE, programs_for
from gnnplan.runtime.sampling.gpu.rng import LOWEST, plain_words, signed, stream_of
from gnnplan.runtime.sampling.gpu.topology import DeviceTopology
from gnnplan.runtime.sampling.memory import DENSE_BYTES, Envelope
from gnnplan.runtime.sampling.minibatch import IGNORED, Dialect
from gnnplan.runtime.sampling.rng import Purpose, stream
from gnnplan.runtime.sampling.seeds import SeedSchedule

if TYPE_CHECKING:
    from gnnplan.runtime.features.device_store import DeviceFeatureStore

_BLOCK = 512
_MOST_MISSED = 1 << 14
"""Overflowed batches that are noted until the host looks."""


@dataclass(frozen=True, slots=True)
class PaddedBlock:
    """One layer's rectangular adjacency in padded sizes, on the device."""

    num_src: int
    num_dst: int
    indptr: Tensor
    """int64 [num_dst + 1]; rows of padding have no edges."""
    indices: Tensor
    """int32, as many as the envelope has edges; of padding `num_src` - 1."""
    dst: Tensor
    """Destination of each edge, int32; of padding `num_dst` - 1."""
    e_id: Tensor | None
    """Position of each edge in the graph, int64, of padding 0; None: not wanted."""
    num_src_now: Tensor
    """Sources without padding, int64 [1]."""
    num_dst_now: Tensor
    """Destinations without padding, int64 [1]."""
    num_edges_now: Tensor
    """Edges without padding, int64 [1]."""


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Buffers of one batch, which each draw fills anew; all on the device."""

    blocks: list[PaddedBlock]
    """Outermost first."""
    n_id: Tensor
    """Nodes, seeds first, int64; of padding 0."""
    input_id: Tensor
    """Position of each seed in the training index, int64; of padding 0."""
    x: Tensor | None
    """Feature rows of `n_id`; of padding 0."""
    y: Tensor | None
    """Labels of the seeds; of padding `IGNORED`, as of seeds whose label is unknown."""
    seed_weight: Tensor
    """1 / seeds of the step over all ranks, float32; of padding 0."""
    counts: Tensor
    """Nodes known after 0 .. L hops, then edges of the blocks of hops 1 .. L, int64 [2 L + 1]."""
    now: Tensor
    """Epoch, step, seeds of this rank, seeds of all, int64 [4]."""
    overflow: Tensor
    """1 where the batch needed more than the envelope, int64 [1]."""
    kept: BlockEdges
    """Where the edges of all blocks lie one after another."""


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
        hop = tl.arange(0, LANES).to(tl.int64)
        same = hop * 0
        word = stream_of(
            same + tl.load(cursor + 3), same + tl.load(cursor + 4),
            same + tl.load(cursor + 5) + step, hop, same + PURPOSE,
        )  # fmt: skip
        tl.store(streams + hop, word.to(tl.int64, bitcast=True), mask=hop < HOPS)


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
    cursor, spans, missed, most_missed, numbers, counts, now, overflow, stamp, sizes, row_places,
    edge_places, row_ptr, rows, local, positions, nodes, input_id, weight, y, LABELS: tl.constexpr,
    IGNORE: tl.constexpr, POSITIONS: tl.constexpr, HOPS: tl.constexpr, LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    bad = tl.load(numbers + 2 * HOPS + 1) != 0
    for hop in range(HOPS):
        num_dst = tl.where(bad, 0, tl.load(numbers + hop))
        num_edges = tl.where(bad, 0, tl.load(numbers + HOPS + 1 + hop))
        room, src_room = tl.load(sizes + hop), tl.load(sizes + hop + 1)
        edge_room = tl.load(sizes + HOPS + 1 + hop)
        _pad(row_ptr + tl.load(row_places + hop), num_edges, num_dst, room + 1, BLOCK)
        place = tl.load(edge_places + hop)
        _pad(local + place, (src_room - 1).to(tl.int32), num_edges, edge_room, BLOCK)
        _pad(rows + place, (room - 1).to(tl.int32), num_edges, edge_room, BLOCK)
        if POSITIONS:
            _pad(positions + place, 0, num_edges, edge_room, BLOCK)
    num_seeds = tl.where(bad, 0, tl.load(numbers))
    seed_room = tl.load(sizes)
    _pad(nodes, 0, tl.where(bad, 0, tl.load(numbers + HOPS)), tl.load(sizes + HOPS), BLOCK)
    _pad(input_id, 0, num_seeds, seed_room, BLOCK)
    _pad(weight, 0.0, num_seeds, seed_room, BLOCK)
    if LABELS > 0:
        _pad(y, IGNORE, num_seeds * LABELS, seed_room * LABELS, BLOCK)
    if tl.program_id(0) == 0:
        lane = tl.arange(0, LANES)
        number = tl.where(bad, 0, tl.load(numbers + lane, mask=lane <= 2 * HOPS, other=0))
        tl.store(counts + lane, number, mask=lane <= 2 * HOPS)
        epoch, step = tl.load(cursor), tl.load(cursor + 1)
        tl.store(now, epoch)
        tl.store(now + 1, step)
        tl.store(now + 2, num_seeds)
        tl.store(now + 3, tl.load(spans + 3 * step + 2))
        tl.store(overflow, bad.to(tl.int64))
        known = tl.load(missed)
        tl.store(missed + 1 + 2 * known, epoch, mask=bad & (known < most_missed))
        tl.store(missed + 2 + 2 * known, step, mask=bad & (known < most_missed))
        tl.store(missed, known + bad.to(tl.int64))
        tl.store(cursor + 1, tl.minimum(step + 1, tl.load(cursor + 2)))
        tl.store(stamp, tl.load(stamp) + 1)


class PaddedDraws:
    """Draws the batches of one rank, one after the other, into padded buffers.

    One stream and one thread at a time. The sampler draws uniform neighbours or LABOR-0, in
    independent batches.

    Args:
        sampler: Whose batches are drawn.
        schedule: Who gets which seeds.
        envelope: Sizes of the buffers.
        store: Rows that batches come with, all addressable by the device; None: none.
        row_dtype: Type of the rows in batches: float32, float16 or bfloat16.
        labels: Labels of all nodes, [N] or [N, classes]; None: none.
        edge_ids: Batches come with positions of edges in the graph.
        dense_bytes: Most bytes of a rank for each node of the graph; else nodes are hashed.

    Raises:
        SamplerError: batches of that kind are not drawn in padded form.
    """

    def __init__(
        self,
        sampler: DeviceNeighborSampler,
        schedule: SeedSchedule,
        envelope: Envelope,
        *,
        store: "DeviceFeatureStore | None" = None,
        labels: NDArray[Any] | None = None,
        row_dtype: torch.dtype = torch.float32,
        edge_ids: bool = False,
        dense_bytes: int = DENSE_BYTES,
    ) -> None:
        _check(sampler, schedule, envelope)
        self.device, self.sampler = sampler.device, sampler
        self.schedule, self.envelope = schedule, envelope
        self._policy = sampler.streams
        self._edge_ids, self._row_dtype = edge_ids, row_dtype
        self._hops = PaddedHops(
            sampler.topology, sampler.fanouts, envelope, self.device,
            every_hop=sampler.dialect is Dialect.EVERY_HOP, method=sampler.method,
            dense_bytes=dense_bytes,
        )  # fmt: skip
        if store is not None:
            store.check_padded()
        self._store = store
        integers = self._hops.integers
        self.row_counts = integers(1) if store is None else store.new_counts()
        """Rows gathered so far by source, as `DeviceFeatureStore.named` takes them."""
        self._next: tuple[int, int] | None = None
        # Epoch, step, steps, seed; epoch and first step of the streams.
        self._cursor = integers(6)
        self._missed = integers(1 + 2 * _MOST_MISSED)
        self._spans = integers(3 * (schedule.num_steps + 1))
        self._order = integers(len(schedule.train_idx))
        train = schedule.train_idx
        self._train = torch.from_numpy(np.array(train)).to(self.device)
        self._labels = None
        if labels is not None:
            self._labels = torch.from_numpy(np.array(labels[train])).to(self.device)

    @property
    def launches(self) -> int:
        """Return how many kernels `fill` launches."""
        gathers = 0 if self._store is None else self._store.num_launches
        return 2 + self._hops.launches + gathers

    def new_batch(self) -> PaddedBatch:
        """Make the buffers of one batch; `fill` draws into them."""
        rows, edges, device = self.envelope.rows, self.envelope.edges, self.device
        row_places = np.cumsum([0, *(room + 1 for room in rows[:-1])]).tolist()
        edge_places = np.cumsum([0, *edges]).tolist()
        integers = self._hops.integers
        kept = BlockEdges(
            row_places=torch.tensor(row_places[:-1], device=device),
            edge_places=torch.tensor(edge_places[:-1], device=device),
            row_ptr=integers(row_places[-1]),
            rows=torch.zeros(edge_places[-1], dtype=torch.int32, device=device),
            local=torch.zeros(edge_places[-1], dtype=torch.int32, device=device),
            positions=integers(edge_places[-1]) if self._edge_ids else None,
        )
        counts, labels = integers(2 * len(edges) + 1), self._labels
        y = None if labels is None else labels.new_zeros((rows[0], *labels.shape[1:]))
        x = None if self._store is None else self._store.empty(rows[-1], self._row_dtype).zero_()
        blocks: list[PaddedBlock] = []
        for hop in reversed(range(len(edges))):
            row, edge = (slice(p[hop], p[hop + 1]) for p in (row_places, edge_places))
            positions = kept.positions
            blocks.append(
                PaddedBlock(
                    num_src=rows[hop + 1],
                    num_dst=rows[hop],
                    indptr=kept.row_ptr[row],
                    indices=kept.local[edge],
                    dst=kept.rows[edge],
                    e_id=None if positions is None else positions[edge],
                    num_src_now=counts[hop + 1 : hop + 2],
                    num_dst_now=counts[hop : hop + 1],
                    num_edges_now=counts[len(edges) + 1 + hop : len(edges) + 2 + hop],
                )
            )
        return PaddedBatch(
            blocks=blocks,
            n_id=integers(rows[-1]),
            input_id=integers(rows[0]),
            x=x,
            y=y,
            seed_weight=torch.zeros(rows[0], dtype=torch.float32, device=device),
            counts=counts,
            now=integers(4),
            overflow=integers(1),
            kept=kept,
        )

    def begin_epoch(self, epoch: int, step: int = 0) -> None:
        """Deal the seeds of an epoch; the next batch is that of a step."""
        order, spans = self._deal(epoch)
        self._order[: order.numel()].copy_(order)
        self._spans[: 3 * len(spans)].copy_(torch.tensor(spans).flatten())
        self._hops.table.forget()
        per_epoch = self._policy.steps_per_epoch
        source = (epoch, 0) if per_epoch is None else (0, epoch * per_epoch)
        seed = signed(self._policy.seed % (1 << 64))
        numbers = [epoch, step, self.schedule.num_steps, seed, *source]
        self._cursor.copy_(torch.tensor(numbers))

    def seek(self, step: int) -> None:
        """Let the next batch be that of a step of the same epoch; waits for nothing."""
        self._cursor[1:2].fill_(step)

    def expect(self, epoch: int, step: int) -> None:
        """Make sure that the next batch is that of a step, which is then drawn."""
        if self._next is None or self._next[0] != epoch:
            self.begin_epoch(epoch, step)
        elif self._next[1] != step:
            self.seek(step)
        self._next = (epoch, step + 1)

    def expect_none(self) -> None:
        """Let what is drawn next be an empty batch, of no step."""
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
        if type(schedule) is SeedSchedule and schedule.shuffle:
            source = stream(schedule.seed, epoch, 0, 0, Purpose.SHUFFLE)
            ids = torch.arange(self._order.numel(), device=self.device)
            order = (plain_words(int(source), ids) ^ LOWEST).sort(stable=True).indices
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
        hops, kept, labels = self._hops, batch.kept, self._labels
        num_hops, device = len(hops.fanouts), self.device
        columns = 0 if labels is None else max(labels[:1].numel(), 1)
        given, y = (self._train, batch.n_id) if labels is None else (labels, batch.y)
        dense = hops.table.keys is None
        _take_kernel[(triton.cdiv(self.envelope.rows[0], _BLOCK),)](
            self._cursor, self._spans, self._order, self._train, given, batch.n_id, batch.input_id,
            batch.seed_weight, y, hops.numbers, hops.streams, hops.table.ranks, hops.table.stamp,
            LABELS=columns, DENSE=dense, HOPS=num_hops,
            LANES=triton.next_power_of_2(num_hops), PURPOSE=int(self._policy.purpose), BLOCK=_BLOCK,
        )  # fmt: skip
        hops.enter_seeds(batch.n_id)
        hops.draw(batch.n_id, kept)
        signed_labels = labels is not None and labels.dtype.is_signed
        most = max(*self.envelope.rows, *self.envelope.edges)
        _seal_kernel[(programs_for(most, _BLOCK, device),)](
            self._cursor, self._spans, self._missed, _MOST_MISSED, hops.numbers, batch.counts,
            batch.now, batch.overflow, hops.table.stamp, hops.sizes, kept.row_places,
            kept.edge_places, kept.row_ptr, kept.rows, kept.local,
            kept.row_ptr if kept.positions is None else kept.positions, batch.n_id, batch.input_id,
            batch.seed_weight, y, LABELS=columns, IGNORE=IGNORED if signed_labels else 0,
            POSITIONS=kept.positions is not None, HOPS=num_hops,
            LANES=triton.next_power_of_2(2 * num_hops + 1), BLOCK=_BLOCK,
        )  # fmt: skip
        if self._store is not None and batch.x is not None:
            known = batch.counts[num_hops : num_hops + 1]
            self._store.gather_padded(batch.n_id, known, batch.x, self.row_counts)

    def capture(self, batch: PaddedBatch) -> Callable[[], None]:
        """Return what draws the next batch into buffers: a graph of kernels, replayed at once.

        Without CUDA it is `fill`. The counters are put back to where they were.
        """
        if not processor_of(self.device).captures:
            return partial(self.fill, batch)
        moved = (self._cursor, self._missed, self._hops.topology.counts, self.row_counts)
        before = [each.clone() for each in moved]
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self.fill(batch)
        torch.cuda.current_stream(self.device).wait_stream(side)
        for each, value in zip(moved, before, strict=True):
            each.copy_(value)
        graph = torch.cuda.CUDAGraph()
        # What other threads do meanwhile is theirs, and no part of the graph.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.fill(batch)
        return graph.replay

    def missed(self) -> list[tuple[int, int]]:
        """Return epoch and step of the batches that overflowed since the last call; waits.

        Raises:
            SamplerError: there were more than are noted.
        """
        count, *noted = self._missed.tolist()
        self._missed[:1].zero_()
        if count > _MOST_MISSED:
            raise SamplerError(
                f"expected at most {_MOST_MISSED} batches beyond the envelope between two looks, "
                f"found {count}; plan a larger envelope"
            )
        return list(zip(noted[: 2 * count : 2], noted[1 : 2 * count : 2], strict=True))


def _check(sampler: DeviceNeighborSampler, schedule: SeedSchedule, envelope: Envelope) -> None:
    plain = (
        type(sampler) in (DeviceNeighborSampler, CapturedNeighborSampler)
        and sampler.streams.kappa == 1
        and not sampler.streams.layer_dependent
        and type(sampler.topology) is DeviceTopology
    )
    if not plain:
        raise SamplerError(
            "expected uniform neighbours or LABOR-0 in independent batches to pad, found "
            f"{type(sampler).__name__}; sample it batch by batch"
        )
    if schedule.largest_share() >= envelope.rows[0]:
        raise SamplerError(
            f"expected an envelope of more rows than the {schedule.largest_share()} seeds of a "
            f"batch, found {envelope.rows[0]}; plan again"
        )
