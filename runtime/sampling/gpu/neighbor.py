"""Neighbour sampling and LABOR-0 on a GPU: the batches of the CPU samplers, seed for seed.

The topology lies in the device's memory, in page-locked host memory, or its hot rows in the first
and the rest in the second (`gpu.topology`). LABOR's other forms are `gpu.labor`'s.

A batch takes many small kernels per hop, and the host's part of each costs more than the kernel. So
batches of one size can be drawn by one CUDA graph: every hop runs over buffers of the most that it
can hold, and numbers of rows, edges and nodes stay on the device until the end. Without CUDA the
same steps run one by one.
"""

import itertools
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.sampling.checks import refuse_bad_seeds
from gnnplan.runtime.sampling.dependent import HopStreams, StreamPolicy
from gnnplan.runtime.sampling.gpu.choose import (
    choose_edges,
    choose_some,
    row_bounds,
    row_ends,
    row_tile,
    scan_below,
)
from gnnplan.runtime.sampling.gpu.hops import (
    AbstractDeviceHops,
    BlockEdges,
    Drawn,
    Hop,
    HopDraws,
    HopRows,
    LeftOut,
)
from gnnplan.runtime.sampling.gpu.relabel import (
    CHUNK,
    HopEdges,
    NodeNumbers,
    PaddedTable,
    RelabelTable,
    chunks_for,
)
from gnnplan.runtime.sampling.gpu.rng import hop_words, signed
from gnnplan.runtime.sampling.gpu.topology import DeviceTopology
from gnnplan.runtime.sampling.memory import (
    DENSE_BYTES,
    Envelope,
    known_bounds,
    may_capture,
    table_slots,
)
from gnnplan.runtime.sampling.minibatch import Dialect
from gnnplan.runtime.sampling.rng import Purpose

SCANS = 2
"""Passes of LABOR-0 over a row: one counts, one writes."""


class Method(StrEnum):
    """Which edges a row draws."""

    NEIGHBOR = "neighbor"
    """Uniformly without replacement, as `NeighborSampler`."""
    LABOR = "labor"
    """LABOR-0, Poisson, plain mean, as `LaborSampler`."""


class DeviceNeighborSampler(AbstractDeviceHops):
    """Draws the batches of the CPU sampler of the same name, fan-outs and seed.

    Args (others as in `AbstractDeviceHops`):
        method: How a row draws.
        streams: Fields of `StreamPolicy`: seed, kappa, dependence and others.
    """

    def __init__(
        self,
        topology: DeviceTopology,
        fanouts: Sequence[int],
        *,
        device: torch.device,
        method: str = Method.NEIGHBOR,
        dialect: Dialect = Dialect.FIRST_SEEN,
        edge_ids: bool = False,
        **streams: Any,
    ) -> None:
        self.method = Method(method)
        labor = self.method is Method.LABOR
        policy = StreamPolicy(purpose=Purpose.VERTEX if labor else Purpose.NEIGHBOR, **streams)
        if labor and policy.kappa != 1:
            raise SamplerError(
                f"expected kappa 1 with method labor here, found {policy.kappa}; dependent batches "
                "of LABOR are DeviceLaborSampler's"
            )
        super().__init__(
            topology, fanouts, device=device, streams=policy, dialect=dialect, edge_ids=edge_ids
        )

    def _draw(self, rows: Tensor, known: list[Tensor], draws: HopDraws) -> Drawn:
        del known
        fanout = self.fanouts[draws.hop]
        if self.method is Method.LABOR or fanout < 0:
            below = fanout if self.method is Method.LABOR else -1
            return scan_rows(self.topology, rows, below, draws.stream)
        words = None
        if not draws.streams.plain:
            turns = torch.arange(fanout, device=self.device).repeat(rows.numel())
            words = hop_words(draws.streams, draws.hop, rows.repeat_interleave(fanout), turns)
        return choose_rows(self.topology, rows, fanout, draws.stream, words=words)


def choose_rows(
    graph: DeviceTopology, rows: Tensor, fanout: int, stream: Tensor, *,
    total: Tensor | None = None, words: Tensor | None = None,
) -> Drawn:  # fmt: skip
    """Return up to `fanout` edges of each row, or of the first `total`, as `choose_some` draws."""
    lists = row_bounds(graph, rows, fanout, total=total)
    row_ptr = row_ends(lists.counts)
    edges = room(rows.numel() * fanout, rows.device)
    choose_some(stream, graph, rows, lists, row_ptr, fanout, edges, words=words)
    return Drawn(row_ptr, *edges)


def scan_rows(graph: DeviceTopology, rows: Tensor, fanout: int, stream: Tensor) -> Drawn:
    """Return LABOR-0's edges of some rows, or with a fan-out of -1 all; waits for their number."""
    lists = row_bounds(graph, rows, fanout, passes=1 if fanout < 0 else SCANS)
    if fanout >= 0:
        scan_below(stream, graph, lists, fanout, lists.counts, None)
    row_ptr = row_ends(lists.counts)
    edges = room(int(row_ptr[-1]), rows.device)
    scan_below(stream, graph, lists, fanout, row_ptr, edges)
    return Drawn(row_ptr, *edges)


def room(num_edges: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Make room for positions and values."""
    positions = torch.empty(num_edges, dtype=torch.int64, device=device)
    return positions, torch.empty_like(positions)


@dataclass(frozen=True, slots=True)
class _HopBuffers:
    row_ptr: Tensor
    positions: Tensor
    local: Tensor
    new: Tensor


class CapturedNeighborSampler(DeviceNeighborSampler):
    """Draws `DeviceNeighborSampler`'s batches; up to `batch_size` seeds by one CUDA graph.

    Larger batches, and empty ones, are drawn kernel by kernel. Buffers belong to
    the sampler, so it serves one stream and one thread at a time (others wait); what a batch holds
    is copied out of them. Fan-outs that take all neighbours are refused: nothing bounds them.
    """

    def __init__(
        self,
        topology: DeviceTopology,
        fanouts: Sequence[int],
        *,
        device: torch.device,
        batch_size: int,
        dialect: Dialect = Dialect.FIRST_SEEN,
        seed: int = 0,
        edge_ids: bool = False,
    ) -> None:
        super().__init__(
            topology, fanouts, device=device, dialect=dialect, seed=seed, edge_ids=edge_ids
        )
        if not may_capture(self.fanouts, batch_size):
            raise SamplerError(
                f"expected positive fan-outs and a batch size to capture, found "
                f"{list(self.fanouts)} and {batch_size}; sample with DeviceNeighborSampler"
            )
        self.batch_size = batch_size
        bounds = self._bounds()
        self._seeds = torch.zeros(batch_size, dtype=torch.int64, device=device)
        # The hops' streams, and behind them the number of seeds: one upload a batch.
        self._uploaded = torch.zeros(self.num_hops + 1, dtype=torch.int64, device=device)
        self._streams, self._count = self._uploaded.split([self.num_hops, 1])
        self._table = RelabelTable.empty(table_slots(bounds[-1]), device)
        # One entry more takes what lies beyond a hop's new nodes.
        self._nodes = torch.zeros(bounds[-1] + 1, dtype=torch.int64, device=device)
        self._buffers: list[_HopBuffers] = []
        self._ends = torch.zeros(2 * self.num_hops, dtype=torch.int64, device=device)
        self._graph: Any = None
        self._lock = threading.Lock()

    @staticmethod
    def of(sampler: object, batch_size: int) -> "CapturedNeighborSampler":
        """Make a sampler of the same batches; it must be of uniform, independent neighbours."""
        if (
            not isinstance(sampler, DeviceNeighborSampler)
            or type(sampler) is not DeviceNeighborSampler
            or sampler.method is not Method.NEIGHBOR
            or sampler.streams.kappa != 1
        ):
            raise SamplerError(
                "expected uniform neighbours in independent batches to capture, found "
                f"{type(sampler).__name__}; sample it kernel by kernel"
            )
        return CapturedNeighborSampler(
            sampler.topology, sampler.fanouts, device=sampler.device, batch_size=batch_size,
            dialect=sampler.dialect, seed=sampler.seed, edge_ids=sampler.edge_ids,
        )  # fmt: skip

    def _bounds(self) -> list[int]:
        every_hop = self.dialect is Dialect.EVERY_HOP
        return known_bounds(self.batch_size, self.fanouts, self.num_nodes, every_hop=every_hop)

    @property
    def buffer_bytes(self) -> int:
        """Return the bytes of the buffers; 0 of a hop's before the first batch."""
        held = [self._seeds, self._nodes, self._table.keys, self._table.ranks]
        for hop in self._buffers:
            held += [hop.row_ptr, hop.positions, hop.local, hop.new]
        return sum(t.numel() * t.element_size() for t in held)

    def _hops(
        self, seeds: NDArray[np.int64], streams: HopStreams
    ) -> tuple[list[Hop], list[Tensor]]:
        count = seeds.shape[0]
        if not 0 < count <= self.batch_size:
            return super()._hops(seeds, streams)
        refuse_bad_seeds(seeds, self.num_nodes)
        self._seeds[:count].copy_(torch.from_numpy(np.array(seeds)))
        self._uploaded.copy_(torch.tensor([*(signed(s) for s in streams.first), count]))
        self._run()
        return self._results(count)

    def _alone(self) -> AbstractContextManager[object]:
        return self._lock

    def prepare(self) -> None:
        """Capture the graph now, from any seeds, before other threads use the device.

        Raises:
            RuntimeError: the device refuses it, or has no room for the buffers.
        """
        if processor_of(self.device).captures and self._graph is None:
            self._graph = self._capture()

    def _run(self) -> None:
        if not processor_of(self.device).captures:
            self._steps()
            return
        self.prepare()
        self._graph.replay()

    def _capture(self) -> Any:
        """Return the graph; a run before it compiles the kernels, and its reads are not counted."""
        counts = self.topology.counts.clone()
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self._steps()
        torch.cuda.current_stream(self.device).wait_stream(side)
        self.topology.counts.copy_(counts)
        graph = torch.cuda.CUDAGraph()
        # What other threads do meanwhile is theirs, and no part of the graph.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._steps()
        return graph

    def _steps(self) -> None:
        self._table.clear()
        total = self._count.clone()
        known = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._table.number(self._seeds, total, known)
        known = total
        rows, count = self._seeds, total
        self._enter(self._seeds, torch.zeros_like(known), total)
        hops: list[_HopBuffers] = []
        bounds = self._bounds()
        for hop, fanout in enumerate(self.fanouts):
            if self.dialect is Dialect.EVERY_HOP:
                rows, count = self._nodes[: bounds[hop]], known
            stream = self._streams[hop : hop + 1]
            drawn = choose_rows(self.topology, rows, fanout, stream, total=count)
            local, new, sums = self._table.number(drawn.values, drawn.row_ptr[-1:], known)
            fresh = sums[-1:]
            # No more nodes are new than the graph has.
            new = new[: min(new.numel(), self.num_nodes)]
            self._enter(new, known, fresh)
            self._ends[2 * hop : 2 * hop + 1].copy_(drawn.row_ptr[-1:])
            self._ends[2 * hop + 1 : 2 * hop + 2].copy_(fresh)
            hops.append(_HopBuffers(drawn.row_ptr, drawn.positions, local, new))
            rows, count, known = new, fresh, known + fresh
        self._buffers = hops

    def _enter(self, new: Tensor, known: Tensor, fresh: Tensor) -> None:
        """Put a hop's new nodes behind those known, where every hop expands all of them."""
        if self.dialect is Dialect.EVERY_HOP:
            place = torch.arange(new.numel(), device=self.device)
            spare = self._nodes.numel() - 1
            self._nodes.scatter_(0, torch.where(place < fresh, known + place, spare), new)

    def _results(self, num_seeds: int) -> tuple[list[Hop], list[Tensor]]:
        """Cut the hops out of the buffers; return them, and the nodes that each added.

        Waits once. A batch's ids and nested blocks are joined from them and so copied; others are
        copied.
        """
        ends = self._ends.tolist()
        hops: list[Hop] = []
        nodes = [self._seeds[:num_seeds]]
        alone = self.dialect is Dialect.EVERY_HOP
        num_known = num_rows = num_seeds
        for buffers, num_edges, num_new in zip(self._buffers, ends[::2], ends[1::2], strict=True):
            rows = num_known if self.dialect is Dialect.EVERY_HOP else num_rows
            hops.append(
                Hop(
                    row_ptr=_part(buffers.row_ptr, rows + 1, copied=alone),
                    positions=_part(buffers.positions, num_edges, copied=alone and self.edge_ids),
                    local=_part(buffers.local, num_edges, copied=alone),
                    weight=None,
                    num_edges=num_edges,
                )
            )
            nodes.append(buffers.new[:num_new])
            num_known, num_rows = num_known + num_new, num_new
        return hops, nodes


def _part(buffer: Tensor, count: int, *, copied: bool) -> Tensor:
    return buffer[:count].clone() if copied else buffer[:count]


class PaddedHops:
    """Draws the hops of a batch behind the seeds in its buffers; holds room for the work between.

    Args:
        topology: Graph.
        fanouts: Most neighbours of each hop, or of LABOR-0 on average; -1 takes all.
        envelope: Sizes of the buffers.
        device: Where the kernels run.
        every_hop: Every hop expands all nodes that are known; blocks do not nest.
        method: How a row draws.
        by_type: Neighbours of each edge type, hop by hop, [L][R]; a node then has R rows.
        left_out: Edges that no hop draws.
        dense_bytes: Most bytes of a rank for each node; else nodes are hashed.
    """

    def __init__(
        self,
        topology: DeviceTopology,
        fanouts: Sequence[int],
        envelope: Envelope,
        device: torch.device,
        *,
        every_hop: bool,
        method: Method = Method.NEIGHBOR,
        by_type: Sequence[Sequence[int]] = (),
        left_out: LeftOut | None = None,
        dense_bytes: int = DENSE_BYTES,
    ) -> None:
        fanouts = [max(each) for each in by_type] or fanouts
        nested = not every_hop
        falls = any(after < before for before, after in itertools.pairwise(envelope.edges))
        if envelope.num_hops != len(fanouts) or 0 in fanouts or (nested and falls):
            raise SamplerError(
                f"expected an envelope of fan-outs that are not 0, hop by hop, found {envelope} "
                f"for fan-outs {list(fanouts)}; plan again"
            )
        self.topology, self.envelope, self.device = topology, envelope, device
        self.fanouts, self.nested, self._method = fanouts, nested, method
        self._limits = [torch.tensor(each, device=device) for each in by_type]
        self.each, self._left_out = len(by_type[0]) if by_type else 1, left_out
        hops, num_nodes = len(fanouts), topology.num_nodes // self.each
        self.numbers = self.integers(2 * hops + 3)
        """Nodes after 0 .. L hops, edges of the L blocks, flag of overflow, and a zero."""
        self.streams = self.integers(hops)
        self.sizes = torch.tensor([*envelope.rows, *envelope.edges], device=device)
        most = max(envelope.edges)
        if 8 * num_nodes <= dense_bytes:
            self.table = PaddedTable.dense(num_nodes, device)
        else:
            self.table = PaddedTable.hashed(table_slots(envelope.most_entered), device)
        self._values = torch.empty(most, dtype=topology.indices.dtype, device=device)
        hashed = self.table.keys is not None
        self._slots = self.integers(most) if hashed else self._values
        self._seed_slots = self.integers(envelope.rows[0] if hashed else 1)
        self._turns = torch.empty(most, dtype=torch.int32, device=device)
        self._row_sums = [
            self.integers(chunks_for(self.each * room, row_tile(fanout)))
            for room, fanout in zip(envelope.rows, self.fanouts, strict=False)
        ]
        scanned = [
            room for room, f in zip(envelope.rows, self.fanouts, strict=False) if self._scans(f)
        ]
        self._counts, self._starts = (self.integers(max(scanned, default=1)) for _ in range(2))
        self._edge_sums = [
            torch.empty(chunks_for(room, CHUNK), dtype=torch.int32, device=device)
            for room in envelope.edges
        ]

    def integers(self, count: int) -> Tensor:
        """Return zeros, int64."""
        return torch.zeros(count, dtype=torch.int64, device=self.device)

    def _number(self, place: int) -> Tensor:
        """Return one of the numbers; -1 is the zero, -2 the flag."""
        return self.numbers[place % self.numbers.numel()].view(1)

    def edges_of(self, hop: int) -> HopEdges:
        """Return the room in which a hop's edges await their numbers."""
        hops, zero = len(self.fanouts), self._number(-1)
        room = self.envelope.edges[hop]
        return HopEdges(
            values=self._values[:room],
            slots=self._slots[:room],
            before=self._number(hops + hop) if self.nested and hop else zero,
            total=self._number(hops + 1 + hop),
            room=room,
            flag=self._number(-2),
            turns=self._turns,
            sums=self._edge_sums[hop],
        )

    def rows_of(self, hop: int, nodes: Tensor) -> HopRows:
        """Return the rows that a hop expands."""
        before = self._number(hop - 1) if self.nested and hop else self._number(-1)
        room = self.envelope.rows[hop]
        return HopRows(
            nodes, before, self._number(hop), room, self._row_sums[hop], self._counts, self._starts,
            self.each, self._limits[hop] if self._limits else None, self._left_out,
        )  # fmt: skip

    def _scans(self, fanout: int) -> bool:
        return self._method is Method.LABOR or fanout < 0

    def enter_seeds(self, nodes: Tensor) -> None:
        """Enter the seeds in a hash table; those of a dense one are entered as they are taken."""
        if self.table.keys is None:
            return
        self.table.keys.fill_(-1)
        room, zero = self.envelope.rows[0], self._number(-1)
        seeds = replace(
            self.edges_of(0), values=nodes[:room], slots=self._seed_slots, before=zero,
            total=self._number(0), flag=zero,
        )  # fmt: skip
        self.table.enter(seeds, 0)

    def draw(self, nodes: Tensor, kept: BlockEdges) -> None:
        """Draw and number all hops; only launches kernels."""
        from gnnplan.runtime.sampling.gpu.labor import scan_edges

        hops = len(self.fanouts)
        for hop, fanout in enumerate(self.fanouts):
            edges, rows = self.edges_of(hop), self.rows_of(hop, nodes)
            blocks = slice(hop, hops if self.nested else hop + 1)
            into = replace(
                kept, row_places=kept.row_places[blocks], edge_places=kept.edge_places[blocks]
            )
            choose = scan_edges if self._scans(fanout) else choose_edges
            stream = self.streams[hop : hop + 1]
            choose(stream, self.topology, fanout, rows, edges, self.table, into)
            if self.table.keys is not None:
                self.table.enter(edges)
            after, room = self._number(hop + 1), self.envelope.rows[hop + 1] - 1
            numbers = NodeNumbers(rows.known, after, room, nodes, kept.local, into.edge_places)
            self.table.number_edges(edges, numbers)

    @property
    def launches(self) -> int:
        """Return how many kernels the hops of a batch take."""
        from gnnplan.runtime.sampling.gpu.labor import scan_launches

        hashed, scans = self.table.keys is not None, scan_launches(self.topology)
        draws = sum(scans if self._scans(fanout) else 2 for fanout in self.fanouts)
        return draws + (2 + hashed) * len(self.fanouts) + 2 * hashed
