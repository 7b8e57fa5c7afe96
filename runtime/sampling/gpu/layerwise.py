"""LADIES, PLADIES and FastGCN on a GPU, k batches at once: `LayerwiseSampler`'s batches.

P = QA, NORM, SAMPLE and EXTRACT (Tripathy et al., MLSys 2024) over the stacked rows of k batches:
one launch of every step per layer, whatever k is. A vertex of batch b is the key b N + v of one
relabelling table per layer, which numbers the candidates; a batch's candidates lie side by side,
in the order in which the CPU finds them. A single batch is a stack of one. The laws of drawing are
`choose.layerwise`'s; factors agree to the last places of logarithms and sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.sampling.checks import check_layer_sizes
from gnnplan.runtime.sampling.choose.layerwise import PATIENCE, Law, Method, Norm, check_boost
from gnnplan.runtime.sampling.dependent import HopStreams, StreamPolicy
from gnnplan.runtime.sampling.gpu.choose import row_ends
from gnnplan.runtime.sampling.gpu.hops import (
    DeviceBatch,
    DeviceBlock,
    as_device_batch,
    seeds_on_device,
)
from gnnplan.runtime.sampling.gpu.relabel import DeviceRelabel
from gnnplan.runtime.sampling.gpu.rng import StackStreams, unit
from gnnplan.runtime.sampling.gpu.segments import (
    NEVER,
    WholeRows,
    prefix_sums,
    segment_counts,
    segment_sums,
    smallest,
    upper_bounds,
    water_levels,
    whole_rows,
)
from gnnplan.runtime.sampling.gpu.stack import EVERY, owners
from gnnplan.runtime.sampling.gpu.topology import DeviceTopology
from gnnplan.runtime.sampling.layerwise import make_law, policy_of
from gnnplan.runtime.sampling.minibatch import Dialect, Request, RequestSampler
from gnnplan.runtime.sampling.neighbor import Boost
from gnnplan.runtime.sampling.statistics import Estimator


@dataclass(frozen=True, slots=True)
class Candidates:
    """Probability rows side by side: one per batch, or one that all share."""

    ptr: Tensor
    batch: Tensor
    """Batch of each entry; empty where all share one row."""
    ids: Tensor
    values: Tensor
    sums: Tensor | None = None
    """Prefix sums of the row that all batches share; None: each has a row of its own."""

    def normalised(self) -> "Candidates":
        """Divide each batch's row by its sum; empty rows stay."""
        total = segment_sums(self.ptr, self.values)
        total = torch.where(total > 0, total, 1.0)[self.batch]
        return Candidates(self.ptr, self.batch, self.ids, self.values / total)

    @property
    def widest(self) -> int:
        """Return at least the length of the longest row."""
        return self.ids.numel()

    def bounds(self, num_batches: int) -> tuple[Tensor, Tensor]:
        """Return where each batch's row begins and ends."""
        if self.sums is None:
            return self.ptr[:-1], self.ptr[1:]
        return self.ptr[:1].expand(num_batches), self.ptr[1:].expand(num_batches)

    def picked(self, batch: Tensor, places: Tensor, factor: Tensor) -> "Picked":
        """Return the vertices of some entries."""
        return Picked(batch, self.ids[places], factor)


class Picked(NamedTuple):
    """Vertices drawn."""

    batch: Tensor
    ids: Tensor
    factor: Tensor
    """1 / pi, float64 (with replacement: hits / (size p))."""

    def in_order(self) -> "Picked":
        """Return them by batch, then by node."""
        order = torch.argsort(self.ids, stable=True)
        order = order[torch.argsort(self.batch[order], stable=True)]
        return Picked(self.batch[order], self.ids[order], self.factor[order])


def draw_layers(found: Candidates, law: Law, streams: StackStreams, size: int) -> Picked:
    """Draw one layer of every batch, `size` vertices each, from normalised probabilities."""
    if law.uses_darts:
        return _by_darts(found, law, streams, size).in_order()
    words = streams.words(found.batch, found.ids)
    if law.method is Method.LADIES:
        marks, factor = _first(found, -torch.log(1.0 - unit(words)) / found.values, size)
    elif law.replace:
        marks, factor = _hits(found, streams, words, size)
    else:
        marks, factor = _poisson(found, words, size)
    places = torch.nonzero(marks).flatten()
    return found.picked(found.batch[places], places, factor[places]).in_order()


def _is_whole(rows: Candidates, size: int) -> Tensor:
    return segment_counts(rows.ptr, rows.values > 0) <= size


def _first(rows: Candidates, times: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Mark the `size` smallest times of each row, with 1 / (1 - exp(-p tau)), tau the next one."""
    whole = _is_whole(rows, size)
    keys = torch.where(rows.values > 0, times.abs().view(torch.int64), NEVER)
    wanted = torch.where(whole, 0, size + 1)
    _, tau = smallest(rows.ptr, rows.batch, keys, wanted, rows.widest)
    marks, _ = smallest(rows.ptr, rows.batch, keys, torch.where(whole, 0, size), rows.widest)
    in_whole = whole[rows.batch]
    beaten = tau.view(torch.float64)[rows.batch]
    factor = torch.where(in_whole, 1.0, -1.0 / torch.expm1(-rows.values * beaten))
    return (rows.values > 0) & (in_whole | marks), factor


def _poisson(rows: Candidates, words: Tensor, size: int) -> tuple[Tensor, Tensor]:
    whole = _is_whole(rows, size)
    level = water_levels(rows.ptr, rows.values, torch.where(whole, 0, size), rows.widest)
    pi = torch.clamp(level[rows.batch] * rows.values, max=1.0)
    pi = torch.where(whole[rows.batch], 1.0, pi)
    return (rows.values > 0) & (unit(words) < pi), 1.0 / pi


def _hits(
    rows: Candidates, streams: StackStreams, words: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Count points of a Poisson process in [0, size p); waits once per round of points."""
    expected = size * rows.values
    now = -torch.log(1.0 - unit(words))
    hits = torch.zeros(now.shape, dtype=torch.int64, device=now.device)
    active = torch.nonzero((now < expected) & (rows.values > 0)).flatten()
    while active.numel():
        hits[active] += 1
        more = streams.words(rows.batch[active], rows.ids[active], hits[active])
        now[active] -= torch.log(1.0 - unit(more))
        active = active[now[active] < expected[active]]
    return hits > 0, hits.to(torch.float64) / expected


def _by_darts(found: Candidates, law: Law, streams: StackStreams, size: int) -> Picked:
    """Throw darts numbered per batch, all at once, and count up to where the CPU stops.

    What it takes grows with the darts, not with the entries of a row that all batches share.
    """
    device, num_batches = found.ids.device, streams.first.numel()
    begins, ends = found.bounds(num_batches)
    able, sums = ends - begins, found.sums
    if sums is None:
        able = segment_counts(found.ptr, found.values > 0)
        sums = prefix_sums(found.ptr, found.values, found.widest)
    num_darts = size if law.replace else PATIENCE * size + 64
    thrower = torch.arange(num_batches, device=device).repeat_interleave(num_darts)
    darts, row_ids = torch.arange(num_darts, device=device).repeat(num_batches), thrower * 0
    able_dart = able[thrower] > 0
    owner, goals = thrower[able_dart], unit(streams.words(thrower, row_ids, 2 * darts))[able_dart]
    low, end = begins[owner], ends[owner]
    total = sums[end - 1]
    goals = torch.minimum(goals * total, torch.nextafter(total, torch.full_like(total, -1.0)))
    hit = upper_bounds(sums, low, end - 1, goals)
    # Of darts that hit the same entry the first is kept: the order is stable.
    entries, order = torch.sort(owner * found.ids.numel() + hit, stable=True)
    fresh = torch.ones(entries.shape, dtype=torch.bool, device=device)
    fresh[1:] = entries[1:] != entries[:-1]
    if law.replace:
        places, batch = hit[order[fresh]], owner[order[fresh]]
        counts = torch.bincount(torch.cumsum(fresh, 0) - 1)
        return found.picked(batch, places, counts.to(torch.float64) / (size * found.values[places]))
    # Darts arrive at rate 1.
    waits = -torch.log(1.0 - unit(streams.words(thrower, row_ids, 2 * darts + 1)))
    arrivals = torch.cumsum(waits.view(num_batches, num_darts), 1)
    times = arrivals.flatten()[able_dart]
    is_first = torch.zeros_like(fresh)
    is_first[order[fresh]] = True
    row_bounds = row_ends(torch.bincount(owner, minlength=num_batches))
    rank = segment_rank(row_bounds, owner, is_first)
    whole, enough = able <= size, segment_counts(row_bounds, is_first) > size
    now = torch.zeros(num_batches, dtype=torch.float64, device=device)
    last = is_first & (rank == size + 1)
    now[owner[last]] = times[last]
    taken = is_first & (rank <= size) & (enough & ~whole)[owner]
    places, batch = hit[taken], owner[taken]
    factor = -1.0 / torch.expm1(-found.values[places] * now[batch])
    parts = [found.picked(batch, places, factor), _whole_rows(found, whole, size)]
    late = torch.nonzero(~enough & ~whole).flatten().tolist()
    moved = streams.mixed() if late else streams
    for number in late:
        mine = is_first & (owner == number)
        hits = (hit[mine], times[mine])
        row = range(int(begins[number]), int(ends[number]))
        parts.append(_race_on(found, row, number, moved, arrivals[number, -1], hits, size))
    return Picked(*map(torch.cat, zip(*parts, strict=True)))


def _whole_rows(found: Candidates, whole: Tensor, size: int) -> Picked:
    """Take all entries of the rows that have no more than are drawn."""
    if found.sums is None:
        places = torch.nonzero(whole[found.batch] & (found.values > 0)).flatten()
        batch = found.batch[places]
    else:
        width = found.widest if found.widest <= size else 0
        batch = torch.arange(whole.numel(), device=whole.device).repeat_interleave(width)
        places = torch.arange(width, device=whole.device).repeat(whole.numel())
    return found.picked(batch, places, torch.ones_like(batch, dtype=torch.float64))


RACED = 1 << 18
"""Entries of a row that race at once: a row as long as the graph takes no more memory."""


def _race_on(
    found: Candidates,
    row: range,
    batch: int,
    streams: StackStreams,
    ended: Tensor,
    hits: tuple[Tensor, Tensor],
    size: int,
) -> Picked:
    """Let entries of a batch's row not yet hit race on from the last dart, which hit too few.

    `hits` are those that were hit, and when first. Among equals the earlier entry is taken.
    """
    (hit, hit_times), (places, best) = hits, (hits[0][:0], hits[1][:0])
    for first in range(row.start, row.stop, RACED):
        some = torch.arange(first, min(row.stop, first + RACED), device=places.device)
        values = found.values[some]
        words = streams.words(torch.full_like(some, batch), found.ids[some])
        times = ended - torch.log(1.0 - unit(words)) / values
        times = torch.where(values > 0, times, torch.inf)
        inside = (hit >= first) & (hit < first + RACED)
        times[hit[inside] - first] = hit_times[inside]
        best, order = torch.sort(torch.cat([best, times]), stable=True)
        best, places = best[: size + 1], torch.cat([places, some])[order[: size + 1]]
    places, beaten = places[:size], best[size]
    factor = -1.0 / torch.expm1(-found.values[places] * beaten)
    return found.picked(torch.full_like(places, batch), places, factor)


def segment_rank(ends: Tensor, owner: Tensor, marks: Tensor) -> Tensor:
    """Count the marks of its own row that each entry has up to and with itself; int64."""
    before = torch.zeros(marks.numel() + 1, dtype=torch.int64, device=marks.device)
    torch.cumsum(marks, 0, out=before[1:])
    return before[1:] - before[ends[:-1]][owner]


def _column_sums(numbers: Tensor, entries: Tensor | None, count: int) -> Tensor:
    """Sum the entries (None: 1) of each column, in the order of the graph; float64 [count]."""
    lengths = torch.bincount(numbers, minlength=count)
    if entries is None:
        return lengths.to(torch.float64)
    return segment_sums(row_ends(lengths), entries[torch.argsort(numbers, stable=True)])


@dataclass(slots=True)
class StackedLayer:
    """One layer of k batches; batch b has what lies from ends[b] to ends[b + 1]."""

    dst_ends: Tensor
    row_ptr: Tensor
    indices: Tensor
    ends: Tensor
    e_id: Tensor
    weight: Tensor | None


def unstacked(
    layers: Sequence[StackedLayer],
    nodes: Tensor,
    requests: Sequence[Request],
    own: slice = EVERY,
    *,
    edge_ids: bool,
) -> list[DeviceBatch]:
    """Cut the batches `requests[own]` out of a stack, whose last layer has these alone.

    Their blocks are views of its layers. Waits once per layer.
    """
    cuts = [_cuts(layer)[own] for layer in layers[:-1]] + [_cuts(layer) for layer in layers[-1:]]
    batches: list[DeviceBatch] = []
    for b, request in enumerate(requests[own]):
        blocks: list[DeviceBlock] = []
        for layer, parts in zip(reversed(layers), reversed(cuts), strict=True):
            dst, src, edges = parts[b]
            blocks.append(
                DeviceBlock(
                    num_src=src.stop - src.start,
                    num_dst=dst.stop - dst.start,
                    indptr=layer.row_ptr[dst.start : dst.stop + 1] - edges.start,
                    indices=layer.indices[edges],
                    e_id=layer.e_id[edges] if edge_ids else None,
                    weight=None if layer.weight is None else layer.weight[edges],
                )
            )
        drawn = [parts[b][2].stop - parts[b][2].start for parts in cuts]
        n_id = nodes[cuts[-1][b][1]]
        batches.append(as_device_batch(request, blocks, n_id, drawn, Dialect.EVERY_HOP))
    return batches


def _cuts(layer: StackedLayer) -> list[list[slice]]:
    """Return each batch's part of the destinations, of the sources and of the edges."""
    ends = [layer.dst_ends, layer.ends, layer.row_ptr[layer.dst_ends]]
    first, *others = torch.stack(ends).T.tolist()
    found: list[list[slice]] = []
    for last in others:
        found.append([slice(*pair) for pair in zip(first, last, strict=True)])
        first = last
    return found


class DeviceLayerwiseSampler(RequestSampler[DeviceBatch]):
    """Draws `sizes[h]` vertices for all destinations of hop h of a batch together.

    Arguments are `LayerwiseSampler`'s; with `by_vertex` False, LADIES without replacement throws
    darts, as `BulkSampler` does.
    """

    dialect = Dialect.EVERY_HOP

    def __init__(
        self,
        topology: DeviceTopology,
        sizes: Sequence[int],
        *,
        device: torch.device,
        method: str = Method.LADIES,
        norm: str = Norm.FRO,
        replace: bool = False,
        estimator: Estimator = Estimator.HORVITZ_THOMPSON,
        edge_weight: NDArray[np.floating] | None = None,
        seed: int = 0,
        policy: StreamPolicy | None = None,
        boost: Boost | None = None,
        by_vertex: bool = True,
        edge_ids: bool = False,
    ) -> None:
        self.law = make_law(method, norm, replace=replace, estimator=estimator, by_vertex=by_vertex)
        check_boost(self.law, boost)
        self.topology, self.device = topology, device
        self.num_nodes = topology.num_nodes
        self.sizes = check_layer_sizes(sizes, self.num_nodes)
        self.num_hops = len(self.sizes)
        self.streams = policy_of(self.law, seed, policy)
        self.edge_ids = edge_ids
        self._weight = topology.hold_weights(edge_weight, device)
        self._boost = boost
        self._ring = None if boost is None else torch.from_numpy(np.array(boost.ring)).to(device)
        self._fixed = self._whole_graph() if self.law.method is Method.FASTGCN else None

    def _sample(self, request: Request) -> DeviceBatch:
        return self.sample_stack([request])[0]

    def sample_stack(self, requests: Sequence[Request], own: slice = EVERY) -> list[DeviceBatch]:
        """Sample the batches `requests[own]` of a stack; their blocks are views of its tensors."""
        nodes, ends = seeds_on_device([r.seeds for r in requests], self.num_nodes, self.device)
        steps = [self.streams.streams(r.epoch, r.step, self.num_hops) for r in requests]
        layers: list[StackedLayer] = []
        for hop in range(self.num_hops):
            graph, weight = self.topology.lists_of(nodes, self._weight)
            if hop == self.num_hops - 1 and own.step > 1:
                mine = owners(ends) % own.step == own.start
                nodes, ends, steps = nodes[mine], row_ends(ends.diff()[own]), steps[own]
            layer, nodes = self._layer(hop, (graph, weight), nodes, ends, steps)
            ends = layer.ends
            layers.append(layer)
        return unstacked(layers, nodes, requests, own, edge_ids=self.edge_ids)

    def _layer(
        self,
        hop: int,
        lists: tuple[DeviceTopology, Tensor | None],
        nodes: Tensor,
        ends: Tensor,
        steps: Sequence[HopStreams],
    ) -> tuple[StackedLayer, Tensor]:
        """Draw one layer; return the nodes of the next too, destinations before new ones."""
        graph, weight = lists
        batch_of = owners(ends)
        stream = torch.zeros(1, dtype=torch.int64, device=self.device)  # whole rows draw nothing
        whole = whole_rows(graph, nodes, stream)
        weight = None if weight is None else weight[whole.positions].to(torch.float64)
        edge_batch = batch_of[whole.row_of]
        table, keys = DeviceRelabel(self.device), edge_batch * self.num_nodes + whole.values
        numbers, columns = table.number(keys, [])
        found = self._fixed
        if found is None:
            found = self._prefer_local(self._candidates(weight, numbers, columns, len(steps)), hop)
        streams = StackStreams.of(steps, hop, self.device)
        picked = draw_layers(found, self.law, streams, self.sizes[hop])
        drawn_numbers, drawn_new = table.number(
            picked.batch * self.num_nodes + picked.ids, [columns]
        )
        known = [columns, drawn_new]
        dst_numbers, _ = table.number(batch_of * self.num_nodes + nodes, known)
        factor = torch.zeros(table.num_known, dtype=torch.float64, device=self.device)
        factor[drawn_numbers] = picked.factor
        fresh = torch.ones(table.num_known, dtype=torch.bool, device=self.device)
        fresh[dst_numbers] = False
        new = fresh[drawn_numbers]
        new_batch, new_ids = picked.batch[new], picked.ids[new]
        num_batches = len(steps)
        num_dst = ends[1:] - ends[:-1]
        num_new = torch.bincount(new_batch, minlength=num_batches)
        new_ends, next_ends = row_ends(num_new), row_ends(num_dst + num_new)
        local = torch.zeros(table.num_known, dtype=torch.int64, device=self.device)
        local[dst_numbers] = torch.arange(nodes.numel(), device=self.device) - ends[batch_of]
        rank = torch.arange(new_ids.numel(), device=self.device) - new_ends[new_batch]
        local[drawn_numbers[new]] = num_dst[new_batch] + rank
        kept = factor[numbers] > 0
        if weight is not None:
            kept &= weight > 0
        row_ptr = row_ends(segment_counts(whole.ptr, kept))
        layer = StackedLayer(
            dst_ends=ends,
            row_ptr=row_ptr,
            indices=local[numbers[kept]].to(torch.int32),
            ends=next_ends,
            e_id=graph.edge_ids(whole.positions[kept]),
            weight=self._weights(whole, weight, factor[numbers], kept, row_ptr),
        )
        following = torch.empty(nodes.numel() + new_ids.numel(), dtype=torch.int64).to(self.device)
        following[next_ends[batch_of] + local[dst_numbers]] = nodes
        following[next_ends[new_batch] + num_dst[new_batch] + rank] = new_ids
        return layer, following

    def _candidates(
        self, weight: Tensor | None, numbers: Tensor, columns: Tensor, num_batches: int
    ) -> Candidates:
        entries, count2 = weight, self.law.norm is Norm.COUNT2
        if entries is not None and not count2:
            entries = entries * entries
        sums = _column_sums(numbers, entries, columns.numel())
        batch = torch.div(columns, self.num_nodes, rounding_mode="floor")
        ptr = row_ends(torch.bincount(batch, minlength=num_batches))
        ids, values = columns - batch * self.num_nodes, sums * sums if count2 else sums
        return Candidates(ptr, batch, ids, values).normalised()

    def _whole_graph(self) -> Candidates:
        """Return FastGCN's one row: sum_s A_ts^2 over the whole graph.

        No more than what it keeps is held meanwhile: 24 bytes per node.
        """
        total = torch.zeros(self.num_nodes, dtype=torch.float64, device=self.device)
        total = self.topology.sum_columns(self._weight, total, self._add_squares)
        ids = torch.nonzero(total).flatten()
        values, ptr = total[ids], torch.tensor([0, ids.numel()], device=self.device)
        del total
        values /= segment_sums(ptr, values)
        return Candidates(ptr, ptr[:0], ids, values, prefix_sums(ptr, values, ids.numel()))

    def _add_squares(self, total: Tensor, indices: Tensor, weight: Tensor | None) -> None:
        """Add the squared entries of some rows to their columns' sums, in a fixed order."""
        columns = indices.to(self.device, torch.int64)
        if weight is None:  # counts, which are exact in any order
            total.index_add_(0, columns, torch.ones_like(columns, dtype=torch.float64))
            return
        order = torch.argsort(columns, stable=True)
        found, lengths = torch.unique_consecutive(columns[order], return_counts=True)
        squares = weight[order].to(torch.float64) ** 2
        total[found] += segment_sums(row_ends(lengths), squares)

    def _prefer_local(self, found: Candidates, hop: int) -> Candidates:
        if self._boost is None or self._ring is None:
            return found
        near = self._ring[found.ids] <= self.num_hops - 1 - hop
        boost = torch.ones(near.shape, dtype=torch.float64, device=near.device)
        boost.masked_fill_(near, self._boost.factor)
        return Candidates(found.ptr, found.batch, found.ids, found.values * boost).normalised()

    def _weights(
        self, whole: WholeRows, weight: Tensor | None, factor: Tensor, kept: Tensor, ptr: Tensor
    ) -> Tensor | None:
        if self.law.estimator is Estimator.PLAIN:
            return None
        raw = factor[kept] if weight is None else weight[kept] * factor[kept]
        raw = raw.to(torch.float32).to(torch.float64)
        if self.law.estimator is Estimator.HAJEK:
            total = segment_sums(ptr, raw)
        elif weight is None:
            total = whole.rows.degrees.to(torch.float64)
        else:
            total = segment_sums(whole.ptr, weight)
        return (raw / total[whole.row_of[kept]]).to(torch.float32)
