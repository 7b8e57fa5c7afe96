"""Unique and relabel on a GPU: local ids in order of first appearance, as the CPU gives them.

A hash table with linear probing maps a node to a rank: its local id once it has one, else
`UNNUMBERED` plus the smallest position at which the hop drew it (atomic min). Positions that equal
their node's rank are first appearances; a prefix sum over them numbers the new nodes. The result
does not depend on the order in which programs run. Compare values of atomics have the pointer's
type: a Python number there does nothing in Triton's interpreter.

Padded batches are numbered without a host that waits, and with fewer kernels (`PaddedTable`): their
table may be dense, a rank for each node of the graph; ranks are the lower the later their batch, so
that those of earlier batches need no clearing; and one kernel numbers nodes and edges, by counts of
first appearances chunk by chunk.
"""

from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.sampling.gpu.rng import mix
from gnnplan.runtime.sampling.memory import table_slots

UNNUMBERED = 1 << 48
_NEVER = (1 << 63) - 1
_BLOCK = 256


@triton.jit
@no_type_check
def _enter(keys, value, asked, wrap, LANES: tl.constexpr):
    """Enter values in a hash table; return their slots, of those not asked the spare one."""
    empty = tl.full((LANES,), -1, tl.int64)
    slot = (mix(value.to(tl.uint64)) & wrap.to(tl.uint64)).to(tl.int64)
    # A compare-and-swap takes no mask: idle lanes swap -1 for -1 in the spare slot at the end.
    slot = tl.where(asked, slot, wrap.to(tl.int64) + 1)
    pending = asked
    while tl.max(pending.to(tl.int32), axis=0) > 0:
        held = tl.atomic_cas(keys + slot, empty, value, sem="relaxed")
        pending = pending & (held != -1) & (held != value)
        slot = tl.where(pending, (slot + 1) & wrap, slot)
    return slot


@triton.jit(do_not_specialize=["first"])
@no_type_check
def _insert_kernel(values, total, slots, keys, ranks, wrap, first, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    asked = at < tl.load(total)
    slot = _enter(keys, tl.load(values + at, mask=asked, other=-1), asked, wrap, BLOCK)
    tl.store(slots + at, slot, mask=asked)
    tl.atomic_min(ranks + slot, first + at, mask=asked, sem="relaxed")


@triton.jit(do_not_specialize=["first"])
@no_type_check
def _flag_kernel(slots, total, ranks, flags, bound, first, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    asked = at < tl.load(total)
    slot = tl.load(slots + at, mask=asked, other=0)
    rank = tl.load(ranks + slot, mask=asked, other=0)
    tl.store(flags + at, (asked & (rank == first + at)).to(tl.int32), mask=at < bound)


@triton.jit
@no_type_check
def _number_kernel(
    values, slots, total, ranks, flags, sums, nodes, known, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    asked = at < tl.load(total)
    new = asked & (tl.load(flags + at, mask=asked, other=0) != 0)
    number = tl.load(sums + at, mask=new, other=1) - 1
    tl.store(nodes + number, tl.load(values + at, mask=new, other=0), mask=new)
    rank = tl.load(known) + number
    tl.store(ranks + tl.load(slots + at, mask=new, other=0), rank, mask=new)


@triton.jit
@no_type_check
def _local_kernel(slots, total, ranks, local, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    asked = at < tl.load(total)
    rank = tl.load(ranks + tl.load(slots + at, mask=asked, other=0), mask=asked, other=0)
    tl.store(local + at, rank.to(tl.int32), mask=asked)


@dataclass(frozen=True, slots=True)
class RelabelTable:
    """Keys (-1 where empty) and ranks of a power of two of slots, and one to spare, int64."""

    keys: Tensor
    ranks: Tensor

    @staticmethod
    def empty(slots: int, device: torch.device) -> "RelabelTable":
        """Make a table for half as many nodes as slots."""
        keys = torch.empty(slots + 1, dtype=torch.int64, device=device)
        table = RelabelTable(keys, torch.empty_like(keys))
        table.clear()
        return table

    def clear(self) -> None:
        """Forget all nodes; waits for nothing."""
        self.keys.fill_(-1)
        self.ranks.fill_(_NEVER)

    def insert(self, values: Tensor, total: Tensor, first: int) -> Tensor:
        """Enter the first `total` values; return their slots. Ranks fall to `first` + place."""
        slots = torch.empty_like(values)
        if values.numel():
            wrap = self.keys.numel() - 2
            _insert_kernel[(triton.cdiv(values.numel(), _BLOCK),)](
                values, total, slots, self.keys, self.ranks, wrap, first, BLOCK=_BLOCK
            )
        return slots

    def number(self, values: Tensor, total: Tensor, known: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Number the values that are new from `known` on (int64 [1]); see `DeviceRelabel.add`."""
        bound = values.numel()
        slots = self.insert(values, total, UNNUMBERED)
        flags = torch.empty(bound, dtype=torch.int32, device=values.device)
        nodes = torch.empty_like(values)
        local = torch.empty(bound, dtype=torch.int32, device=values.device)
        if bound == 0:
            return local, nodes, nodes
        grid: Any = (triton.cdiv(bound, _BLOCK),)
        _flag_kernel[grid](slots, total, self.ranks, flags, bound, UNNUMBERED, BLOCK=_BLOCK)
        sums = torch.cumsum(flags, 0, dtype=torch.int64)
        _number_kernel[grid](
            values, slots, total, self.ranks, flags, sums, nodes, known, BLOCK=_BLOCK
        )
        _local_kernel[grid](slots, total, self.ranks, local, BLOCK=_BLOCK)
        return local, nodes, sums


class DeviceRelabel:
    """Local ids of one batch's nodes. Not shared between batches or streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._table: RelabelTable | None = None
        self.num_known = 0

    def add(
        self, values: Tensor, total: Tensor, known_nodes: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Number the values that are new; waits for nothing.

        The caller adds how many were new to `num_known` before the next call. The first `total` of
        the values count; the table is filled again from `known_nodes`, in order, where it must
        grow. Return the local id of each value, int32; the new nodes in order, int64, as many as
        the last of the third, running counts of first appearances, int64.
        """
        table = self._reserve(self.num_known + values.numel(), known_nodes)
        known = torch.full((1,), self.num_known, dtype=torch.int64, device=self._device)
        return table.number(values, total, known)

    def number(self, keys: Tensor, known: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Number keys as `add`; return the new ones too. Waits for how many they are."""
        total = torch.tensor([keys.numel()], device=keys.device)
        local, new, sums = self.add(keys, total, known)
        num_new = int(sums[-1]) if keys.numel() else 0
        self.num_known += num_new
        return local.to(torch.int64), new[:num_new]

    def _reserve(self, num_nodes: int, known_nodes: list[Tensor]) -> RelabelTable:
        slots = table_slots(num_nodes)
        if self._table is None or self._table.keys.numel() <= slots:
            self._table = RelabelTable.empty(slots, self._device)
            known = torch.cat([self._table.keys[:0], *known_nodes])
            self._table.insert(known, torch.tensor([known.numel()], device=self._device), 0)
        return self._table


FRESH = tl.constexpr(1 << 32)
"""Least rank of a node that has no number yet, in the first batch."""
AGE = tl.constexpr(-(1 << 33))
"""Amount by which the ranks of a batch lie above those of the next."""
CHUNK = 1024
"""Least positions that a program numbers at a time."""
_MOST_CHUNKS = 2048
_LANES, _LANES_INTERPRETED = 32, 256
"""Values that a program enters in a hash table at a time: the slowest of them holds up all."""
_PROGRAMS = 16
"""Most programs of a kernel on each multiprocessor."""


@triton.jit
@no_type_check
def _edges_left(before, total, flag):
    """Return how many edges a hop drew: none once a batch has overflowed."""
    return tl.where(tl.load(flag) != 0, 0, tl.load(total) - tl.load(before))


@triton.jit(do_not_specialize=["first"])
@no_type_check
def _enter_kernel(
    values, slots, before, total, flag, keys, ranks, stamp, wrap, first, LANES: tl.constexpr
):
    count = _edges_left(before, total, flag)
    rank = tl.load(stamp) * AGE + first
    for block in range(tl.program_id(0), tl.cdiv(count, LANES), tl.num_programs(0)):
        at = tl.arange(0, LANES).to(tl.int64) + block * LANES
        asked = at < count
        value = tl.load(values + at, mask=asked, other=-1).to(tl.int64)
        slot = _enter(keys, value, asked, wrap, LANES)
        tl.store(slots + at, slot, mask=asked)
        tl.atomic_min(ranks + slot, rank + at, mask=asked, sem="relaxed")


@triton.jit
@no_type_check
def _first_kernel(
    slots, before, total, flag, ranks, stamp, turns, sums, CHUNK: tl.constexpr
):  # fmt: skip
    count = _edges_left(before, total, flag)
    unnumbered = tl.load(stamp) * AGE + FRESH
    for chunk in range(tl.program_id(0), tl.cdiv(count, CHUNK), tl.num_programs(0)):
        at = tl.arange(0, CHUNK).to(tl.int64) + chunk * CHUNK
        asked = at < count
        slot = tl.load(slots + at, mask=asked, other=0).to(tl.int64)
        rank = tl.load(ranks + slot, mask=asked, other=0)
        first = (asked & (rank == unnumbered + at)).to(tl.int32)
        tl.store(turns + at, tl.cumsum(first, axis=0) - first, mask=asked)
        tl.store(sums + chunk, tl.sum(first, axis=0))


@triton.jit(do_not_specialize=["room"])
@no_type_check
def _localise_kernel(
    values, slots, before, total, flag, ranks, stamp, turns, sums, known, known_after, room, nodes,
    local, places, COPIES: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    count = _edges_left(before, total, flag)
    earlier, num_known = tl.load(before), tl.load(known)
    num_chunks = tl.cdiv(count, CHUNK)
    lanes = tl.arange(0, CHUNKS)
    parts = tl.load(sums + lanes, mask=lanes < num_chunks, other=0)
    begins = tl.cumsum(parts, axis=0) - parts
    if tl.program_id(0) == 0:
        after = num_known + tl.sum(parts, axis=0)
        tl.store(known_after, tl.minimum(after, room))
        if after > room:
            tl.store(flag, 1)
    oldest = tl.load(stamp) * AGE
    for chunk in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
        at = tl.arange(0, CHUNK).to(tl.int64) + chunk * CHUNK
        asked = at < count
        slot = tl.load(slots + at, mask=asked, other=0).to(tl.int64)
        # Another program may have numbered the node meanwhile: both forms give the same number.
        code = tl.load(ranks + slot, mask=asked, other=0) - oldest
        fresh = asked & (code >= FRESH)
        first = tl.where(fresh, code - FRESH, 0)
        begin = tl.gather(begins, (first // CHUNK).to(tl.int32), axis=0)
        number = num_known + begin + tl.load(turns + first, mask=fresh, other=0)
        number = tl.where(fresh, number, code)
        mine = fresh & (first == at)
        value = tl.load(values + at, mask=mine, other=0).to(tl.int64)
        tl.store(nodes + number, value, mask=mine & (number < room))
        tl.store(ranks + slot, oldest + number, mask=mine)
        for copy in range(COPIES):
            place = tl.load(places + copy) + earlier + at
            tl.store(local + place, number.to(tl.int32), mask=asked)


def chunks_for(bound: int, least: int) -> int:
    """Return a power of two, at least the chunks of so many positions.

    >>> [chunks_for(bound, 64) for bound in (100, 10000, 1 << 24)]
    [32, 256, 2048]
    """
    chunks = int(triton.next_power_of_2(triton.cdiv(bound, least)))
    return min(max(chunks, 32), _MOST_CHUNKS)


def chunk_of(bound: int, chunks: int, least: int) -> int:
    """Return the positions of each of so many chunks, a power of two.

    >>> [chunk_of(bound, chunks_for(bound, 64), 64) for bound in (100, 10000, 1 << 24)]
    [64, 64, 8192]
    """
    return max(least, int(triton.next_power_of_2(triton.cdiv(bound, chunks))))


def programs_for(bound: int, each: int, device: torch.device) -> int:
    """Return the programs of a grid that strides over so many positions."""
    most = _PROGRAMS * processor_of(device).multiprocessors
    return max(1, min(int(triton.cdiv(bound, each)), most))


@dataclass(frozen=True, slots=True)
class HopEdges:
    """Edges of a hop that await their numbers; all on the device."""

    values: Tensor
    """Neighbours, followed by unused room; at least one entry."""
    slots: Tensor
    """Slots of the neighbours in the table; the neighbours themselves where it is dense."""
    before: Tensor
    """Edges of earlier hops that `total` counts too, int64 [1]."""
    total: Tensor
    room: int
    """Most edges that `total` may count; with more the batch overflows."""
    flag: Tensor
    """Not 0 once the batch has overflowed, int64 [1]."""
    turns: Tensor
    """Room for the number of first appearances before each edge of its chunk, int32."""
    sums: Tensor
    """Room for the number of first appearances of each of a power of two of chunks, int32."""


@dataclass(frozen=True, slots=True)
class NodeNumbers:
    """Where numbers of a hop's nodes and edges go; all on the device."""

    known: Tensor
    """Nodes known before the hop, int64 [1]."""
    known_after: Tensor
    """Room for the number of nodes known after the hop, int64 [1]."""
    room: int
    """Most nodes known after the hop; with more the batch overflows."""
    nodes: Tensor
    """Ids of nodes by number, int64."""
    local: Tensor
    """Number of each edge's neighbour, int32."""
    places: Tensor
    """Where the edges of a batch begin in each copy of `local`, int64 [copies]."""


@dataclass(frozen=True, slots=True)
class PaddedTable:
    """Ranks by slot, int64: of all nodes, or of a hash table's keys."""

    keys: Tensor | None
    """Nodes by slot, int64, -1 where empty, and one slot to spare. None: a node is its own slot."""
    ranks: Tensor
    stamp: Tensor
    """Number of the batch, int64 [1]."""

    @staticmethod
    def hashed(slots: int, device: torch.device) -> "PaddedTable":
        """Make a table for half as many nodes as slots, a power of two."""
        keys = torch.full((slots + 1,), -1, dtype=torch.int64, device=device)
        return PaddedTable(keys, torch.full_like(keys, _NEVER), torch.zeros_like(keys[:1]))

    @staticmethod
    def dense(num_nodes: int, device: torch.device) -> "PaddedTable":
        """Make a table of all nodes of a graph."""
        ranks = torch.full((max(num_nodes, 1),), _NEVER, dtype=torch.int64, device=device)
        return PaddedTable(None, ranks, torch.zeros_like(ranks[:1]))

    def forget(self) -> None:
        """Forget all nodes and batches; waits for nothing."""
        self.ranks.fill_(_NEVER)
        self.stamp.zero_()

    def enter(self, edges: HopEdges, first: int = FRESH.value) -> None:
        """Enter values in a hash table, and write their slots; ranks fall to `first` + place."""
        assert self.keys is not None
        bound, device = edges.values.numel(), edges.values.device
        lanes = _LANES if processor_of(device).captures else _LANES_INTERPRETED
        wrap = self.keys.numel() - 2
        launch: Any = _enter_kernel[(programs_for(bound, lanes, device),)]
        launch(
            edges.values, edges.slots, edges.before, edges.total, edges.flag, self.keys, self.ranks,
            self.stamp, wrap, first, LANES=lanes, num_warps=max(lanes // 64, 1),
        )  # fmt: skip

    def number_edges(self, edges: HopEdges, into: NodeNumbers) -> None:
        """Number the nodes that are new, in order, and the edges; launches two kernels."""
        bound, device = edges.values.numel(), edges.values.device
        chunk = chunk_of(bound, edges.sums.numel(), CHUNK)
        grid = (programs_for(bound, chunk, device),)
        hop = (edges.before, edges.total, edges.flag)
        _first_kernel[grid](
            edges.slots, *hop, self.ranks, self.stamp, edges.turns, edges.sums, CHUNK=chunk
        )
        _localise_kernel[grid](
            edges.values, edges.slots, *hop, self.ranks, self.stamp, edges.turns, edges.sums,
            into.known, into.known_after, into.room, into.nodes, into.local, into.places,
            COPIES=into.places.numel(), CHUNKS=edges.sums.numel(), CHUNK=chunk,
        )  # fmt: skip
