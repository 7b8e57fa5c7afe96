"""Choose the edges of many rows at once on a GPU: the same edges in the same order as the CPU's.

`choose_some` is Floyd's method as tests/reference has it, a tile of rows at a time, all the offsets
of a row in registers. `scan_below` is LABOR-0's threshold test (`labor_scan`), or takes rows whole;
a pass that counts and one that writes draw the same words. A list is read at its row's address, in
the device's memory, a peer's or the host's (`gpu.topology`). Streams and numbers of rows are read
from the device, so that a captured graph can change them.
"""

from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnnplan.runtime.sampling.gpu.relabel import (
    AGE,
    FRESH,
    HopEdges,
    PaddedTable,
    chunk_of,
    programs_for,
)
from gnnplan.runtime.sampling.gpu.rng import bounded, key_of, value_of
from gnnplan.runtime.sampling.gpu.topology import DeviceTopology

_BLOCK = 256
_TILE = 1024
SHORT = 256
"""Degree up to which rows are scanned several to a tile; longer ones have a program each."""
SHORT_TILE, LONG_TILE = (16, 32), (1, 1024)
LONGEST = (1 << 32) - 1
SAMPLED = 0
"""Passes over a row of which only the drawn entries are read."""
_UNITS = {torch.int32: tl.int32, torch.int64: tl.int64}


@dataclass(frozen=True, slots=True)
class Rows:
    """Adjacency lists of n nodes, int64 [n] each: places in `indices`, and byte addresses."""

    starts: Tensor
    degrees: Tensor
    counts: Tensor
    """min(degree, fanout), what choosing without replacement draws."""
    addresses: Tensor


@triton.jit
@no_type_check
def count_reads(reads, address, asked, entries, low, high, host_low, host_high):
    """Add the lists at some addresses, and their entries, to the counters of their sources."""
    own = asked & (address >= low) & (address < high)
    tl.atomic_add(reads, tl.sum(own.to(tl.int64), axis=0))
    tl.atomic_add(reads + 1, tl.sum(tl.where(own, entries, 0), axis=0))
    host = asked & (address >= host_low) & (address < host_high)
    tl.atomic_add(reads + 2, tl.sum(host.to(tl.int64), axis=0))
    tl.atomic_add(reads + 3, tl.sum(tl.where(host, entries, 0), axis=0))
    peer = asked & (own == 0) & (host == 0)
    tl.atomic_add(reads + 4, tl.sum(peer.to(tl.int64), axis=0))
    tl.atomic_add(reads + 5, tl.sum(tl.where(peer, entries, 0), axis=0))


@triton.jit(do_not_specialize=["base", "low", "high", "host_low", "host_high"])
@no_type_check
def _bounds_kernel(
    indptr, places, base, low, high, host_low, host_high, nodes, total, starts, degrees, counts,
    addresses, reads, bound, fanout, PLACES: tl.constexpr, BYTES: tl.constexpr,
    PASSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    asked = (at < bound) & (at < tl.load(total))
    node = tl.load(nodes + at, mask=asked, other=0)
    start = tl.load(indptr + node, mask=asked, other=0)
    degree = tl.load(indptr + node + 1, mask=asked, other=0) - start
    if PLACES:
        address = tl.load(places + node, mask=asked, other=0)
    else:
        address = base.to(tl.int64) + start * BYTES
    count = tl.where(fanout < 0, degree, tl.minimum(degree, fanout))
    tl.store(starts + at, start, mask=at < bound)
    tl.store(degrees + at, degree, mask=at < bound)
    tl.store(counts + at, count, mask=at < bound)
    tl.store(addresses + at, address, mask=at < bound)
    entries = count
    if PASSES > 0:
        entries = degree * PASSES
    count_reads(reads, address, asked, entries, low, high, host_low, host_high)


@triton.jit
@no_type_check
def _floyd(
    words, row, mask, key, degree, fanout, GIVEN: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, WIDE)[None, :]
    some = degree > fanout
    chosen = tl.zeros((ROWS, WIDE), tl.int64) + columns
    for i in range(fanout):
        turn = tl.zeros((ROWS,), tl.int64) + i
        if GIVEN:
            word = tl.load(words + row * fanout + i, mask=mask, other=0)
            word = word.to(tl.uint64, bitcast=True)
        else:
            word = value_of(key, turn)
        last = tl.where(some, degree - fanout + i, 0)
        offset = bounded(word, last + 1)
        equal = (chosen == offset[:, None]) & (columns < i)
        taken = tl.max(equal.to(tl.int32), axis=1) > 0
        offset = tl.where(taken, last, offset)
        chosen = tl.where(some[:, None] & (columns == i), offset[:, None], chosen)
    return chosen


@triton.jit
@no_type_check
def _floyd_kernel(
    stream, words, nodes, starts, degrees, addresses, row_ptr, positions, values, num_rows,
    fanout, UNIT: tl.constexpr, BYTES: tl.constexpr, GIVEN: tl.constexpr, EACH: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    degree = tl.load(degrees + row, mask=mask, other=0)
    source = tl.load(stream + row * EACH, mask=mask, other=0)
    key = key_of(source, tl.load(nodes + row, mask=mask & (degree > 0), other=0))
    columns = tl.arange(0, WIDE)[None, :]
    chosen = _floyd(words, row, mask, key, degree, fanout, GIVEN, ROWS, WIDE)
    kept = mask[:, None] & (columns < tl.minimum(degree, fanout)[:, None])
    edge = tl.load(row_ptr + row, mask=mask, other=0)[:, None] + columns
    position = tl.load(starts + row, mask=mask, other=0)[:, None] + chosen
    tl.store(positions + edge, position, mask=kept)
    address = tl.load(addresses + row, mask=mask, other=0)[:, None] + chosen * BYTES
    value = tl.load(address.to(tl.pointer_type(UNIT)), mask=kept, other=0)
    tl.store(values + edge, value.to(tl.int64), mask=kept)


@triton.jit
@no_type_check
def rows_left(before, known, flag):
    """Return the first row of a hop, and how many follow: none once a batch has overflowed."""
    first = tl.load(before)
    return first, tl.where(tl.load(flag) != 0, 0, tl.load(known) - first)


@triton.jit
@no_type_check
def list_of(indptr, places, base, node, mask, PLACES: tl.constexpr, BYTES: tl.constexpr):
    """Return place, length and address of nodes' lists; of nodes that are masked 0 entries."""
    start = tl.load(indptr + node, mask=mask, other=0)
    degree = tl.load(indptr + node + 1, mask=mask, other=0) - start
    if PLACES:
        address = tl.load(places + node, mask=mask, other=0)
    else:
        address = base.to(tl.int64) + start * BYTES
    return start, degree, address


@triton.jit
@no_type_check
def store_total(edges, flag, earlier, total, free):
    """Store how many edges a block has with a hop's; raise the flag where there is no room."""
    if tl.program_id(0) == 0:
        tl.store(edges, earlier + tl.minimum(total, free))
        if total > free:
            tl.store(flag, 1)


@triton.jit(do_not_specialize=["base", "low", "high", "host_low", "host_high"])
@no_type_check
def _count_kernel(
    indptr, places, base, low, high, host_low, host_high, nodes, before, known, flag, reads, sums,
    fanout, PLACES: tl.constexpr, BYTES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    first, num_rows = rows_left(before, known, flag)
    for chunk in range(tl.program_id(0), tl.cdiv(num_rows, CHUNK), tl.num_programs(0)):
        row = tl.arange(0, CHUNK).to(tl.int64) + chunk * CHUNK
        asked = row < num_rows
        node = tl.load(nodes + first + row, mask=asked, other=0)
        _, degree, address = list_of(indptr, places, base, node, asked, PLACES, BYTES)
        count = tl.minimum(degree, fanout)
        tl.store(sums + chunk, tl.sum(count, axis=0))
        count_reads(reads, address, asked, count, low, high, host_low, host_high)


@triton.jit(do_not_specialize=["base", "room"])
@no_type_check
def _choose_kernel(
    stream, indptr, places, base, nodes, before, known, flag, edges_before, edges, room, sums,
    values, ranks, stamp, row_places, edge_places, row_ptr, rows, positions,
    fanout, UNIT: tl.constexpr, BYTES: tl.constexpr, PLACES: tl.constexpr, DENSE: tl.constexpr,
    POSITIONS: tl.constexpr, COPIES: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    first, num_rows = rows_left(before, known, flag)
    num_chunks = tl.cdiv(num_rows, CHUNK)
    lanes = tl.arange(0, CHUNKS)
    parts = tl.load(sums + lanes, mask=lanes < num_chunks, other=0)
    earlier = tl.load(edges_before)
    free = room - earlier
    store_total(edges, flag, earlier, tl.sum(parts, axis=0), free)
    source = tl.load(stream)
    fresh = tl.load(stamp) * AGE + FRESH
    columns = tl.arange(0, WIDE)[None, :]
    for chunk in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
        begin = tl.sum(tl.where(lanes < chunk, parts, 0), axis=0)
        for part in range(0, CHUNK, ROWS):
            row = tl.arange(0, ROWS).to(tl.int64) + chunk * CHUNK + part
            mask = row < num_rows
            node = tl.load(nodes + first + row, mask=mask, other=0)
            start, degree, address = list_of(indptr, places, base, node, mask, PLACES, BYTES)
            chosen = _floyd(
                values, row, mask, key_of(source, node), degree, fanout, False, ROWS, WIDE
            )
            count = tl.minimum(degree, fanout)
            starts = begin + tl.cumsum(count, axis=0) - count
            begin += tl.sum(count, axis=0)
            edge = starts[:, None] + columns
            kept = mask[:, None] & (columns < count[:, None]) & (edge < free)
            pointer = (address[:, None] + chosen * BYTES).to(tl.pointer_type(UNIT))
            value = tl.load(pointer, mask=kept, other=0).to(tl.int64)
            tl.store(values + edge, value, mask=kept)
            if DENSE:
                tl.atomic_min(ranks + value, fresh + edge, mask=kept, sem="relaxed")
            for copy in range(COPIES):
                place = tl.load(edge_places + copy) + earlier + edge
                number = tl.broadcast_to((first + row)[:, None], (ROWS, WIDE))
                tl.store(rows + place, number.to(tl.int32), mask=kept)
                if POSITIONS:
                    tl.store(positions + place, start[:, None] + chosen, mask=kept)
                tl.store(row_ptr + tl.load(row_places + copy) + first + row, earlier + starts, mask)


@triton.jit
@no_type_check
def share_word(fanout, degree):
    """Compute `poisson.share_word`: floor(2^64 fanout / degree) for fanout < degree < 2^32."""
    divisor = degree.to(tl.uint64)
    first = (tl.zeros_like(degree) + fanout).to(tl.uint64) << 32
    return ((first // divisor) << 32) | (((first % divisor) << 32) // divisor)


@triton.jit
@no_type_check
def _scan_kernel(
    stream, starts, degrees, addresses, counts, row_ptr, positions, values, num_rows, fanout,
    above, most, UNIT: tl.constexpr, BYTES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    degree = tl.load(degrees + row, mask=row < num_rows, other=0)
    mine = (row < num_rows) & (degree > above) & (degree <= most)
    degree = tl.where(mine, degree, 0)
    whole = (degree <= fanout) | (tl.zeros_like(degree) + fanout < 0)
    threshold = share_word(fanout, tl.where(whole, 1, degree))
    start = tl.load(starts + row, mask=mine, other=0)
    address = tl.load(addresses + row, mask=mine, other=0)
    source = tl.load(stream)
    edge = tl.zeros((ROWS,), tl.int64)
    if WRITE:
        edge = tl.load(row_ptr + row, mask=mine, other=0)
    for first in range(0, tl.max(degree, axis=0), COLUMNS):
        place = first + tl.arange(0, COLUMNS).to(tl.int64)[None, :]
        inside = place < degree[:, None]
        pointer = (address[:, None] + place * BYTES).to(tl.pointer_type(UNIT))
        value = tl.load(pointer, mask=inside, other=0).to(tl.int64)
        word = value_of(key_of(source, value), tl.zeros_like(value))
        kept = inside & (whole[:, None] | (word < threshold[:, None]))
        if WRITE:
            to = edge[:, None] + tl.cumsum(kept.to(tl.int32), axis=1) - 1
            tl.store(positions + to, start[:, None] + place, mask=kept)
            tl.store(values + to, value, mask=kept)
        edge += tl.sum(kept.to(tl.int64), axis=1)
    if not WRITE:
        tl.store(counts + row, edge, mask=mine)


def row_bounds(
    graph: DeviceTopology,
    nodes: Tensor,
    fanout: int,
    *,
    total: Tensor | None = None,
    passes: int = SAMPLED,
) -> Rows:
    """Return the rows of some nodes, and count their reads.

    The fan-out bounds `counts`; -1 takes all. Of the nodes the first `total` count, int64 [1], the
    others having degree 0. `passes` is how often each row will be scanned, or `SAMPLED`.
    """
    rows = Rows(*(torch.empty_like(nodes) for _ in range(4)))
    if nodes.numel() == 0:
        return rows
    if total is None:
        total = torch.full((1,), nodes.numel(), dtype=torch.int64, device=nodes.device)
    places = graph.indptr if graph.addresses is None else graph.addresses
    _bounds_kernel[(triton.cdiv(nodes.numel(), _BLOCK),)](
        graph.indptr, places, graph.indices.data_ptr(), *graph.own, *graph.host, nodes, total,
        rows.starts, rows.degrees, rows.counts, rows.addresses, graph.counts, nodes.numel(), fanout,
        PLACES=graph.addresses is not None, BYTES=graph.indices.element_size(), PASSES=passes,
        BLOCK=_BLOCK,
    )  # fmt: skip
    return rows


def choose_some(
    stream: Tensor,
    graph: DeviceTopology,
    nodes: Tensor,
    rows: Rows,
    row_ptr: Tensor,
    fanout: int,
    edges: tuple[Tensor, Tensor],
    *,
    words: Tensor | None = None,
) -> None:
    """Fill `edges` with positions and neighbours of up to `fanout` edges per row.

    Args:
        stream: The hop's, int64 [1], as `gpu.rng.signed` gives it; or [n], one for each row.
        graph: Topology.
        nodes: int64 [n].
        rows: Theirs, from `row_bounds`.
        row_ptr: Where each row's edges begin, int64 [n + 1].
        fanout: Edges per row, positive.
        edges: Positions and values, int64, at least row_ptr[n] long.
        words: Words to draw by in place of the stream's own, int64 [n, fanout].
    """
    if nodes.numel() == 0:
        return
    tile = row_tile(fanout)
    _floyd_kernel[(triton.cdiv(nodes.numel(), tile),)](
        stream, stream if words is None else words, nodes, rows.starts, rows.degrees,
        rows.addresses, row_ptr, *edges, nodes.numel(), fanout, **kernel_unit(graph),
        GIVEN=words is not None, EACH=int(stream.numel() > 1), ROWS=tile,
        WIDE=triton.next_power_of_2(fanout),
    )  # fmt: skip


def scan_below(
    stream: Tensor,
    graph: DeviceTopology,
    rows: Rows,
    fanout: int,
    row_ptr: Tensor,
    edges: tuple[Tensor, Tensor] | None,
) -> None:
    """Write the edges of each row that LABOR-0 keeps, in the order of the graph; -1 takes all.

    Without `edges` they are counted, into `row_ptr`, int64 [n].
    """
    num_rows = rows.starts.numel()
    if num_rows == 0:
        return
    for above, most, (tile, columns) in tiles(graph.widest):
        _scan_kernel[(triton.cdiv(num_rows, tile),)](
            stream, rows.starts, rows.degrees, rows.addresses, row_ptr, row_ptr,
            *(edges or (row_ptr, row_ptr)), num_rows, fanout, above, most, **kernel_unit(graph),
            ROWS=tile, COLUMNS=columns, WRITE=edges is not None,
        )  # fmt: skip


def tiles(widest: int) -> list[tuple[int, int, tuple[int, int]]]:
    """Return degrees (above, up to) and tile shape of each launch that rows so long need."""
    found = [(-1, SHORT, SHORT_TILE)]
    return [*found, (SHORT, LONGEST, LONG_TILE)] if widest > SHORT else found


def kernel_unit(graph: DeviceTopology) -> dict[str, Any]:
    """Return the constants of a kernel that reads neighbours at addresses."""
    return {"UNIT": _UNITS[graph.indices.dtype], "BYTES": graph.indices.element_size()}


@dataclass(frozen=True, slots=True)
class WholeRows:
    """Rows with all their edges laid out one after another."""

    rows: Rows
    ptr: Tensor
    row_of: Tensor
    positions: Tensor
    values: Tensor
    widest: int


def whole_rows(graph: DeviceTopology, nodes: Tensor, stream: Tensor) -> WholeRows:
    """Lay out all edges of some nodes' rows; the host waits for their number."""
    rows = row_bounds(graph, nodes, -1, passes=1)
    ptr = row_ends(rows.degrees)
    total = int(ptr[-1])
    positions, values = (
        torch.empty(total, dtype=torch.int64, device=nodes.device) for _ in range(2)
    )
    scan_below(stream, graph, rows, -1, ptr, (positions, values))
    numbers = torch.arange(nodes.numel(), device=nodes.device)
    row_of = torch.repeat_interleave(numbers, rows.degrees, output_size=total)
    return WholeRows(rows, ptr, row_of, positions, values, graph.widest)


def row_ends(counts: Tensor) -> Tensor:
    """Return 0 and the running sums of counts: int64 [n + 1]."""
    ptr = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=ptr[1:])
    return ptr


@dataclass(frozen=True, slots=True)
class HopRows:
    """Rows that a hop expands, whose number is the device's alone."""

    nodes: Tensor
    """All nodes of the batch by number, int64."""
    before: Tensor
    """First node that is expanded, int64 [1]."""
    known: Tensor
    """End of those that are, int64 [1]."""
    bound: int
    """Most rows."""
    sums: Tensor
    """Room for edges by chunk of rows, int64, a power of two."""
    counts: Tensor
    """Room for edges of each row, int64, of rows that are scanned."""
    turns: Tensor
    """Room for edges before each row in its chunk, likewise."""


@dataclass(frozen=True, slots=True)
class BlockEdges:
    """Where the blocks that have a hop's edges keep them; a place in each array for each block."""

    row_places: Tensor
    """Where each block's row ends begin in `row_ptr`, int64 [blocks]."""
    edge_places: Tensor
    """Where its edges begin in the others, int64 [blocks]."""
    row_ptr: Tensor
    rows: Tensor
    """Destination of each edge, int32."""
    local: Tensor
    """Number of each edge's neighbour, int32."""
    positions: Tensor | None
    """Position of each edge in the graph, int64; None: not wanted."""


def lists_of(graph: DeviceTopology) -> tuple[Tensor, Tensor, int]:
    """Return where kernels find the lists of a graph."""
    places = graph.indptr if graph.addresses is None else graph.addresses
    return graph.indptr, places, graph.indices.data_ptr()


def row_tile(fanout: int) -> int:
    """Return how many rows draw so many edges at a time, a power of two."""
    return min(max(_TILE // int(triton.next_power_of_2(max(fanout, 1))), 1), 128)


def choose_edges(
    stream: Tensor,
    graph: DeviceTopology,
    fanout: int,
    hop: HopRows,
    edges: HopEdges,
    table: PaddedTable,
    into: BlockEdges,
) -> None:
    """Draw up to `fanout` edges of each row, as `choose_some`; launches two kernels.

    Edges beyond the room of `edges` raise its flag. Neighbours are entered in a dense table, with
    their first positions.
    """
    rows = row_tile(fanout)
    chunk = chunk_of(hop.bound, hop.sums.numel(), rows)
    grid = (programs_for(hop.bound, chunk, hop.nodes.device),)
    lists, asked = lists_of(graph), (hop.nodes, hop.before, hop.known, edges.flag)
    size = {"PLACES": graph.addresses is not None, "BYTES": graph.indices.element_size()}
    size |= {"CHUNK": chunk}
    _count_kernel[grid](
        *lists, *graph.own, *graph.host, *asked, graph.counts, hop.sums, fanout, **size
    )
    _choose_kernel[grid](
        stream, *lists, *asked, edges.before, edges.total, edges.room, hop.sums, edges.values,
        table.ranks, table.stamp, into.row_places, into.edge_places, into.row_ptr, into.rows,
        into.rows if into.positions is None else into.positions, fanout, **size,
        UNIT=_UNITS[graph.indices.dtype], DENSE=table.keys is None,
        POSITIONS=into.positions is not None, COPIES=into.row_places.numel(),
        CHUNKS=hop.sums.numel(), ROWS=rows, WIDE=triton.next_power_of_2(fanout),
    )  # fmt: skip
