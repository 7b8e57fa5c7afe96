"""Draw on a GPU what links and typed graphs need: the batches of the CPU samplers, seed for seed.

Links: negatives by the draws of `NegativeSampler`, one lane a negative; the step's own edges are
looked up in the lists of their destinations, and every choice among the edges that are left passes
over those before it (`sampling.exclusion`). Typed graphs: vertex v has the rows v * R .. v * R + R
- 1 of a graph whose lists are sorted by type, and types of one fan-out are drawn together.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, no_type_check

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.sampling.dependent import StreamPolicy
from gnnplan.runtime.sampling.exclusion import TRIES, Candidates, Exclude, excluded_pairs
from gnnplan.runtime.sampling.gpu.choose import (
    NOWHERE,
    SAMPLED,
    choose_some,
    kernel_unit,
    list_of,
    lists_of,
    row_bounds,
    row_ends,
    scan_below,
)
from gnnplan.runtime.sampling.gpu.hops import (
    AbstractDeviceHops,
    DeviceBatch,
    DeviceBlock,
    Drawn,
    Hop,
    HopDraws,
    Rows,
)
from gnnplan.runtime.sampling.gpu.neighbor import DeviceNeighborSampler, room
from gnnplan.runtime.sampling.gpu.relabel import AGE
from gnnplan.runtime.sampling.gpu.rng import (
    bounded,
    key_of,
    signed,
    stream_of,
    value_of,
    write_streams,
)
from gnnplan.runtime.sampling.gpu.segments import whole_rows
from gnnplan.runtime.sampling.gpu.topology import DeviceTopology
from gnnplan.runtime.sampling.minibatch import Request
from gnnplan.runtime.sampling.rng import Purpose, stream

_TILE = (8, 128)
"""Negatives, or rows with edges left out, of a program, and entries of a list at once."""


@triton.jit(do_not_specialize=["base"])
@no_type_check
def _negatives_kernel(
    numbers, ends, links, pool, indptr, places, base, each, POOLED: tl.constexpr,
    PLACES: tl.constexpr, UNIT: tl.constexpr, BYTES: tl.constexpr, TRIES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = at < tl.load(numbers + 1) * each
    link, number = at // each, at % each
    row = ends + link * (each + 2)
    source = tl.load(row, mask=mask, other=0)
    destination = tl.load(row + 1, mask=mask, other=0)
    key = key_of(tl.load(numbers), tl.load(links + link, mask=mask, other=0))
    bound = tl.zeros((ROWS,), tl.int64) + tl.load(numbers + 2)
    node = tl.zeros((ROWS,), tl.int64)
    turn = tl.zeros((ROWS,), tl.int64)
    pending = mask
    while tl.max(pending.to(tl.int32), axis=0) > 0:
        found = bounded(value_of(key, number * TRIES + turn), bound)
        if POOLED:
            found = tl.load(pool + found, mask=pending, other=0)
        node = tl.where(pending, found, node)
        _, degree, address = list_of(indptr, places, base, node, pending, PLACES, BYTES)
        own = node == destination
        degree = tl.where(own, 0, degree)
        stored = tl.zeros((ROWS,), tl.int32)
        for first in range(0, tl.max(degree, axis=0), COLUMNS):
            column = first + tl.arange(0, COLUMNS).to(tl.int64)[None, :]
            inside = (column < degree[:, None]) & pending[:, None]
            pointer = (address[:, None] + column * BYTES).to(tl.pointer_type(UNIT))
            value = tl.load(pointer, mask=inside, other=0).to(tl.int64)
            equal = inside & (value == source[:, None])
            stored = tl.maximum(stored, tl.max(equal.to(tl.int32), axis=1))
        turn += 1
        pending = pending & (own | (stored > 0)) & (turn < TRIES)
    tl.store(row + 2 + number, node, mask=mask)


@triton.jit
@no_type_check
def _pass_over_kernel(
    starts, addresses, counts, first_out, num_out, places, row_ptr, positions, values, num_rows,
    UNIT: tl.constexpr, BYTES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    left_out = tl.load(num_out + row, mask=mask, other=0)
    mine = left_out > 0
    count = tl.load(counts + row, mask=mine, other=0)
    first = tl.load(first_out + row, mask=mine, other=0)
    start = tl.load(starts + row, mask=mine, other=0)
    address = tl.load(addresses + row, mask=mine, other=0)
    edge = tl.load(row_ptr + row, mask=mine, other=0)
    for begin in range(0, tl.max(count, axis=0), COLUMNS):
        column = begin + tl.arange(0, COLUMNS).to(tl.int64)[None, :]
        inside = column < count[:, None]
        at = edge[:, None] + column
        place = tl.load(positions + at, mask=inside, other=0)
        for turn in range(tl.max(left_out, axis=0)):
            passed = tl.load(places + first + turn, mask=turn < left_out, other=NOWHERE)
            place += (passed[:, None] <= place).to(tl.int64)
        tl.store(positions + at, place, mask=inside)
        pointer = address[:, None] + (place - start[:, None]) * BYTES
        value = tl.load(pointer.to(tl.pointer_type(UNIT)), mask=inside, other=0)
        tl.store(values + at, value.to(tl.int64), mask=inside)


@triton.jit
@no_type_check
def take_links_kernel(
    cursor, spans, order, pairs, drawn, ends, links, weight, keys, pool, streams, overflow,
    batch_size, num_nodes, room, PITCH: tl.constexpr, BOTH: tl.constexpr, POOLED: tl.constexpr,
    KEYS: tl.constexpr, HOPS: tl.constexpr, LANES: tl.constexpr, PURPOSE: tl.constexpr,
    NEGATIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the next links, the keys of the step's own edges, and what is drawn by."""
    epoch, step = tl.load(cursor), tl.load(cursor + 1)
    span = spans + 3 * step
    begin, total = tl.load(span), tl.load(span + 2)
    count, first = tl.load(span + 1) - begin, step * batch_size
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mine = at < count
    link = tl.load(order + begin + at, mask=mine, other=0)
    tl.store(links + at, link, mask=mine)
    one = tl.full((BLOCK,), 1, tl.float32)
    tl.store(weight + at, tl.div_rn(one, (at * 0 + tl.maximum(total, 1)).to(tl.float32)), mask=mine)
    for column in range(PITCH):
        node = tl.load(pairs + 2 * link + column, mask=mine & (column < 2), other=NOWHERE)
        tl.store(ends + at * PITCH + column, node, mask=at < room)
    inside = at < total
    pair = pairs + 2 * tl.load(order + first + at, mask=inside, other=0)
    source = tl.load(pair, mask=inside, other=0)
    destination = tl.load(pair + 1, mask=inside, other=0)
    if KEYS:
        key = tl.where(inside, destination * num_nodes + source, NOWHERE)
        tl.store(keys + at, key, mask=at < batch_size)
        if BOTH:
            key = tl.where(inside, source * num_nodes + destination, NOWHERE)
            tl.store(keys + batch_size + at, key, mask=at < batch_size)
    if POOLED:
        tl.store(pool + at, destination, mask=inside)
    if tl.program_id(0) == 0:
        none = step * 0
        word = stream_of(tl.load(cursor + 6), epoch, step, none, none + NEGATIVE)
        tl.store(drawn, word.to(tl.int64, bitcast=True))
        tl.store(drawn + 1, count)
        if POOLED:
            tl.store(drawn + 2, total)
        else:
            tl.store(drawn + 2, none + num_nodes)
        tl.store(overflow, 0)
        write_streams(cursor, streams, HOPS, LANES, PURPOSE)


@triton.jit
@no_type_check
def number_ends_kernel(
    values, order, sums, drawn, nodes, local, ranks, stamp, known, overflow, room,
    PITCH: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write distinct ends as seeds, and of each end its number among them."""
    count = tl.load(drawn + 1) * PITCH
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    number = tl.load(sums + at, mask=mask, other=1) - 1
    node = tl.load(values + at, mask=mask, other=0)
    tl.store(local + tl.load(order + at, mask=mask, other=0), number, mask=mask)
    held = mask & (number < room)
    tl.store(nodes + number, node, mask=held)
    if DENSE:
        tl.store(ranks + node, tl.load(stamp) * AGE + number, mask=held)
    if tl.program_id(0) == 0:
        last = tl.load(sums + count - 1, mask=count > 0, other=0)
        tl.store(known, tl.minimum(last, room))
        if last > room:
            tl.store(overflow, 1)


class DeviceNegatives:
    """Draws the negatives of `NegativeSampler` that avoids edges."""

    def __init__(
        self, topology: DeviceTopology, num_negatives: int, *, candidates: Candidates, seed: int
    ) -> None:
        self.topology, self.num_negatives = topology, num_negatives
        self.candidates, self.seed = candidates, seed

    def draw(
        self,
        pairs: NDArray[np.int64],
        links: NDArray[np.int64],
        *,
        epoch: int,
        step: int,
        batch_destinations: NDArray[np.int64],
    ) -> Tensor:
        """Return the pairs on the device, and behind each its negatives, int64 [n, 2 + q].

        Arguments as in `NegativeSampler.draw`.
        """
        device, pooled = self.topology.counts.device, self.pooled
        candidates = len(batch_destinations) if pooled else self.topology.num_nodes
        source = signed(stream(self.seed, epoch, step, 0, Purpose.NEGATIVE))
        ids = on_device(links, device)
        ends = torch.empty((len(pairs), 2 + self.num_negatives), dtype=torch.int64, device=device)
        ends[:, :2] = on_device(pairs, device)
        numbers = torch.tensor([source, len(pairs), candidates], device=device)
        self.launch(numbers, ends, ids, on_device(batch_destinations, device) if pooled else ids)
        return ends

    @property
    def pooled(self) -> bool:
        """Whether candidates are the batch's destinations."""
        return self.candidates is Candidates.IN_BATCH

    def launch(self, numbers: Tensor, ends: Tensor, links: Tensor, pool: Tensor) -> None:
        """Draw negatives of the first links behind their pairs in `ends`, int64 [n, 2 + q].

        `numbers` are the stream, how many links there are, and the candidates, int64 [3].
        """
        graph, (rows, columns) = self.topology, _TILE
        count = ends.shape[0] * self.num_negatives
        if count:
            _negatives_kernel[(triton.cdiv(count, rows),)](
                numbers, ends, links, pool, *lists_of(graph), self.num_negatives,
                POOLED=self.pooled, PLACES=graph.addresses is not None, TRIES=TRIES, ROWS=rows,
                COLUMNS=columns, **kernel_unit(graph),
            )  # fmt: skip


def on_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array of integers to a device."""
    return torch.from_numpy(np.array(values, dtype=np.int64)).to(device)


@dataclass(frozen=True, slots=True)
class DeviceExcludedEdges:
    """Edges that are left out, by the row they lie in; fields as in `ExcludedEdges`."""

    rows: Tensor
    ends: Tensor
    places: Tensor

    @staticmethod
    def find(
        graph: DeviceTopology, pairs: NDArray[np.int64], exclude: Exclude
    ) -> "DeviceExcludedEdges | None":
        """Look up the edges of some links in their destinations' lists; None where it has none."""
        keys = excluded_pairs(pairs, exclude, graph.num_nodes)
        if keys.size == 0:
            return None
        device = graph.counts.device
        wanted, asked = (
            on_device(np.unique(keys % graph.num_nodes), device),
            on_device(keys, device),
        )
        lists = whole_rows(graph, wanted, asked)
        row = wanted[lists.row_of]
        stored = (_find(asked, lists.values * graph.num_nodes + row)[1]).nonzero().squeeze(1)
        if stored.numel() == 0:
            return None
        rows, counts = torch.unique_consecutive(row[stored], return_counts=True)
        return DeviceExcludedEdges(rows, row_ends(counts), lists.positions[stored])

    def among(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Return of each node where its edges begin among the places, and how many there are."""
        at, found = _find(self.rows, nodes)
        return self.ends[at], torch.where(found, self.ends[at + 1] - self.ends[at], 0)


def _find(ascending: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return a place among ascending numbers for each value, and whether the value is there."""
    at = torch.searchsorted(ascending, values).clamp(max=ascending.numel() - 1)
    return at, ascending[at] == values


class DeviceExcludingSampler(DeviceNeighborSampler):
    """Draws the batches of `ExcludingSampler`; arguments as in `DeviceNeighborSampler`."""

    _excluded: DeviceExcludedEdges | None = None

    def without(self, pairs: NDArray[np.int64], exclude: Exclude) -> "DeviceExcludingSampler":
        """Return the sampler on the graph without the edges of some pairs, int64 [n, 2]."""
        made = copy.copy(self)
        made._excluded = DeviceExcludedEdges.find(self.topology, pairs, exclude)
        return made

    def _draw(self, rows: Tensor, known: list[Tensor], draws: HopDraws) -> Drawn:
        if self._excluded is None:
            return super()._draw(rows, known, draws)
        graph, fanout = self.topology, self.fanouts[draws.hop]
        whole = row_bounds(graph, rows, fanout, passes=1 if fanout < 0 else SAMPLED)
        first, out = self._excluded.among(rows)
        degrees = whole.degrees - out
        counts = degrees if fanout < 0 else degrees.clamp(max=fanout)
        lists = replace(whole, degrees=degrees, counts=counts)
        row_ptr = row_ends(counts)
        edges = room(int(row_ptr[-1]) if fanout < 0 else rows.numel() * fanout, self.device)
        _draw_rows(draws.stream, graph, rows, lists, row_ptr, fanout, edges)
        _pass_over(graph, self._excluded.places, (first, out), lists, row_ptr, edges)
        return Drawn(row_ptr, *edges)


def _draw_rows(
    stream: Tensor, graph: DeviceTopology, nodes: Tensor, lists: Rows, starts: Tensor, fanout: int,
    edges: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Draw up to a fan-out of edges of each row, or all, from `starts` on."""
    if fanout < 0:
        scan_below(stream, graph, lists, -1, starts, edges)
    else:
        choose_some(stream, graph, nodes, lists, starts, fanout, edges)


def _pass_over(
    graph: DeviceTopology, places: Tensor, out: tuple[Tensor, Tensor], lists: Rows, starts: Tensor,
    edges: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Move what was chosen among the edges that are left past those that are out before it."""
    num_rows = lists.starts.numel()
    if num_rows == 0:
        return
    rows, columns = _TILE
    _pass_over_kernel[(triton.cdiv(num_rows, rows),)](
        lists.starts, lists.addresses, lists.counts, *out, places, starts, *edges, num_rows,
        ROWS=rows, COLUMNS=columns, **kernel_unit(graph),
    )  # fmt: skip


class DeviceLinkSampler:
    """Draws batches of links: negatives, the distinct ends as seeds, and their neighbours."""

    def __init__(
        self, sampler: DeviceExcludingSampler, negatives: DeviceNegatives, exclude: Exclude
    ) -> None:
        self.neighbors, self.negatives, self.exclude = sampler, negatives, exclude

    @property
    def topology(self) -> DeviceTopology:
        """Return the graph."""
        return self.neighbors.topology

    def sample(
        self,
        pairs: NDArray[np.int64],
        step_pairs: NDArray[np.int64],
        *,
        epoch: int,
        step: int,
        input_id: NDArray[np.int64],
        global_num_seeds: int,
    ) -> DeviceBatch:
        """Sample the blocks of one rank's links; waits for the number of distinct ends.

        `pairs` are its own, int64 [n, 2], `input_id` their global ids, `step_pairs` those of the
        whole global batch, which no rank finds in the graph.
        """
        ends = self.negatives.draw(
            pairs, input_id, epoch=epoch, step=step, batch_destinations=step_pairs[:, 1]
        )
        seeds, local = torch.unique(ends, return_inverse=True)
        sampler = self.neighbors.without(step_pairs, self.exclude)
        batch = sampler.sample(
            seeds.cpu().numpy(), epoch=epoch, step=step, input_id=input_id,
            global_num_seeds=global_num_seeds,
        )  # fmt: skip
        return replace(batch, links=local.view(ends.shape))


class DeviceTypedSampler(AbstractDeviceHops):
    """Draws the batches of `TypedSampler`.

    Args (others as in `AbstractDeviceHops`):
        topology: Lists sorted by type, a row for each vertex and type (`typed.SortedByType`).
        fanouts: Per edge type its neighbours per hop, as in `TypedSampler`.
        order: Position in the graph of each sorted edge, int64 [E]; needed for edge ids alone.
        node_type: Type of each vertex, int32 [N], or None.
    """

    def __init__(
        self,
        topology: DeviceTopology,
        fanouts: Sequence[Sequence[int]],
        *,
        order: NDArray[np.int64] | None = None,
        node_type: NDArray[np.integer] | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        streams = StreamPolicy(seed=seed, purpose=Purpose.NEIGHBOR)
        super().__init__(topology, [-1] * len(fanouts[0]), streams=streams, **settings)
        self.rows_per_node = len(fanouts)
        self.by_type = [list(hop) for hop in zip(*fanouts, strict=True)]
        self.num_nodes = topology.num_nodes // self.rows_per_node
        self._groups = [self._types_by_fanout(hop) for hop in self.by_type]
        self._order = None if order is None else on_device(order, self.device)
        self.node_type = None
        if node_type is not None:
            self.node_type = torch.from_numpy(np.array(node_type, np.int32)).to(self.device)

    def _types_by_fanout(self, fanouts: Sequence[int]) -> list[tuple[int, Tensor]]:
        """Return each fan-out of a hop with its edge types."""
        types = np.array(fanouts)
        return [
            (int(fanout), on_device(np.flatnonzero(types == fanout), self.device))
            for fanout in np.unique(types)
        ]

    def _draw(self, rows: Tensor, known: list[Tensor], draws: HopDraws) -> Drawn:
        del known
        graph, each = self.topology, self.rows_per_node
        counts = torch.empty((rows.numel(), each), dtype=torch.int64, device=self.device)
        parts: list[tuple[int, Tensor, Tensor, Rows]] = []
        for fanout, types in self._groups[draws.hop]:
            numbers = (rows.unsqueeze(1) * each + types).flatten()
            lists = row_bounds(graph, numbers, fanout, passes=1 if fanout < 0 else SAMPLED)
            counts[:, types] = lists.counts.view(-1, types.numel())
            parts.append((fanout, types, numbers, lists))
        row_ptr = row_ends(counts.flatten())
        starts = row_ptr[:-1].view(-1, each)
        edges = room(self._most_edges(rows, row_ptr, draws.hop), self.device)
        for fanout, types, numbers, lists in parts:
            begins = starts[:, types].flatten()
            _draw_rows(draws.stream, graph, numbers, lists, begins, fanout, edges)
        return Drawn(row_ptr, *edges)

    def _most_edges(self, rows: Tensor, row_ptr: Tensor, hop: int) -> int:
        """Return a bound of a hop's edges; waits for their number where some types take all."""
        groups = self._groups[hop]
        if min(fanout for fanout, _ in groups) < 0:
            return int(row_ptr[-1])
        return rows.numel() * sum(fanout * types.numel() for fanout, types in groups)

    def batch_of(self, request: Request, hops: list[Hop], nodes: list[Tensor]) -> DeviceBatch:
        """Make a batch as `AbstractDeviceHops` does, with the sources' types."""
        batch = super().batch_of(request, hops, nodes)
        if self.node_type is not None:
            batch.blocks[0] = replace(batch.blocks[0], src_type=self.node_type[batch.n_id])
        return batch

    def _block(self, num_src: int, indptr: Tensor, num_edges: int, hop: Hop) -> DeviceBlock:
        block, each = super()._block(num_src, indptr, num_edges, hop), self.rows_per_node
        found = block.e_id
        return replace(
            block,
            num_dst=block.num_dst // each,
            indptr=indptr[::each].contiguous(),
            relation_ptr=indptr,
            e_id=found if found is None or self._order is None else self._order[found],
        )
