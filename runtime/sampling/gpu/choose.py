"""Choose the edges of many rows at once on a GPU: the same edges in the same order as the CPU's.

`choose_some` is Floyd's method as tests/reference has it, a tile of rows at a time, all the offsets
of a row in registers. `scan_below` is LABOR-0's threshold test (`scan_rows`), or takes rows whole;
a pass that counts and one that writes draw the same words. A list is read at its row's address, in
the device's memory, a peer's or the host's (`gpu.topology`). Streams and numbers of rows are read
from the device, so that a captured graph can change them.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from gnnplan.runtime.sampling.gpu.hops import BlockEdges, HopRows, Rows
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
NOWHERE = tl.constexpr(1 << 62)
"""Place behind every list, and key behind every key."""
SAMPLED = 0
"""Passes over a row of which only the drawn entries are read."""
_UNITS = {torch.int32: tl.int32, torch.int64: tl.int64}


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
    start, degree, address = list_of(indptr, places, base, node, asked, PLACES, BYTES)
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
    words, row, mask, key, degree, limit, fanout, GIVEN: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Return offsets of up to `limit` edges of each row; `fanout` is the most of the limits."""
    columns = tl.arange(0, WIDE)[None, :]
    some = degree > limit
    chosen = tl.zeros((ROWS, WIDE), tl.int64) + columns
    for i in range(fanout):
        turn = tl.zeros((ROWS,), tl.int64) + i
        if GIVEN:
            word = tl.load(words + row * fanout + i, mask=mask, other=0)
            word = word.to(tl.uint64, bitcast=True)
        else:
            word = value_of(key, turn)
        last = tl.where(some, degree - limit + i, 0)
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
    chosen = _floyd(words, row, mask, key, degree, fanout, fanout, GIVEN, ROWS, WIDE)
    kept = mask[:, None] & (columns < tl.minimum(degree, fanout)[:, None])
    edge = tl.load(row_ptr + row, mask=mask, other=0)[:, None] + columns
    position = tl.load(starts + row, mask=mask, other=0)[:, None] + chosen
    tl.store(positions + edge, position, mask=kept)
    address = tl.load(addresses + row, mask=mask, other=0)[:, None] + chosen * BYTES
    value = tl.load(address.to(tl.pointer_type(UNIT)), mask=kept, other=0)
    tl.store(values + edge, value.to(tl.int64), mask=kept)


@triton.jit
@no_type_check
def rows_left(before, known, flag, EACH: tl.constexpr = 1):
    """Return the first row of a hop, and how many follow: none once a batch has overflowed."""
    first = tl.load(before) * EACH
    return first, tl.where(tl.load(flag) != 0, 0, tl.load(known) * EACH - first)


@triton.jit
@no_type_check
def _list_number(nodes, row, mask, EACH: tl.constexpr):
    """Return a row's list: its node's, or the one of its node and edge type."""
    return tl.load(nodes + row // EACH, mask=mask, other=0) * EACH + row % EACH


@triton.jit
@no_type_check
def _limit_of(limits, fanout, row, mask, EACH: tl.constexpr):
    """Return the most edges of each row: the hop's, or those of its edge type."""
    found = row * 0 + fanout
    if EACH > 1:
        found = tl.load(limits + row % EACH, mask=mask, other=0)
    return found


@triton.jit
@no_type_check
def keys_below(keys, wanted, mask, count, STEPS: tl.constexpr):
    """Return how many of `count` ascending keys are below each wanted one; count < 2^STEPS."""
    below = wanted * 0
    for step in tl.static_range(STEPS):
        tried = below + (1 << (STEPS - 1 - step))
        key = tl.load(keys + tried - 1, mask=mask & (tried <= count), other=0)
        below = tl.where((tried <= count) & (key < wanted), tried, below)
    return below


@triton.jit
@no_type_check
def _left_out(keys, num_keys, ends, num_nodes, node, mask, STEPS: tl.constexpr):
    """Return where edges of each node that are left out begin, and how many there are."""
    at = keys_below(keys, node * num_nodes, mask, num_keys, STEPS)
    mine = mask & (at < num_keys)
    mine = mine & (tl.load(keys + at, mask=mine, other=0) // num_nodes == node)
    first = tl.load(ends + at, mask=mine, other=0)
    return first, tl.load(ends + at + 1, mask=mine, other=0) - first


@triton.jit
@no_type_check
def store_total(edges, flag, earlier, total, free):
    """Store how many edges a block has with a hop's; raise the flag where there is no room."""
    if tl.program_id(0) == 0:
        tl.store(edges, earlier + tl.minimum(total, free))
        if total > free:
            tl.store(flag, 1)


@triton.jit
@no_type_check
def put_edges(
    edge, value, position, owner, kept, fresh, earlier, values, ranks, edge_places, rows, positions,
    DENSE: tl.constexpr, POSITIONS: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Write edges of some rows where their hop numbers them, and into the blocks that have them."""
    tl.store(values + edge, value, mask=kept)
    if DENSE:
        tl.atomic_min(ranks + value, fresh + edge, mask=kept, sem="relaxed")
    for copy in range(COPIES):
        place = tl.load(edge_places + copy) + earlier + edge
        tl.store(rows + place, (value * 0 + owner[:, None]).to(tl.int32), mask=kept)
        if POSITIONS:
            tl.store(positions + place, position, mask=kept)


@triton.jit(do_not_specialize=["base", "low", "high", "host_low", "host_high"])
@no_type_check
def _count_kernel(
    indptr, places, base, low, high, host_low, host_high, nodes, before, known, flag, keys, ends,
    num_keys, num_nodes, limits, fanout, reads, sums, PLACES: tl.constexpr, BYTES: tl.constexpr,
    EACH: tl.constexpr, STEPS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    first, num_rows = rows_left(before, known, flag, EACH)
    for chunk in range(tl.program_id(0), tl.cdiv(num_rows, CHUNK), tl.num_programs(0)):
        row = tl.arange(0, CHUNK).to(tl.int64) + chunk * CHUNK
        asked = row < num_rows
        node = _list_number(nodes, first + row, asked, EACH)
        _, degree, address = list_of(indptr, places, base, node, asked, PLACES, BYTES)
        if STEPS > 0:
            degree -= _left_out(keys, num_keys, ends, num_nodes, node, asked, STEPS)[1]
        limit = _limit_of(limits, fanout, first + row, asked, EACH)
        count = tl.minimum(degree, limit)
        tl.store(sums + chunk, tl.sum(count, axis=0))
        count_reads(reads, address, asked, count, low, high, host_low, host_high)


@triton.jit(do_not_specialize=["base", "room"])
@no_type_check
def _choose_kernel(
    stream, indptr, places, base, nodes, before, known, flag, keys, ends, num_keys, num_nodes,
    limits, fanout, out_places, edges_before, edges, room, sums, values, ranks, stamp, row_places,
    edge_places, row_ptr, rows, positions, UNIT: tl.constexpr, BYTES: tl.constexpr,
    PLACES: tl.constexpr, DENSE: tl.constexpr, POSITIONS: tl.constexpr, EACH: tl.constexpr,
    STEPS: tl.constexpr, COPIES: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    first, num_rows = rows_left(before, known, flag, EACH)
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
            node = _list_number(nodes, first + row, mask, EACH)
            limit = _limit_of(limits, fanout, first + row, mask, EACH)
            start, degree, address = list_of(indptr, places, base, node, mask, PLACES, BYTES)
            if STEPS > 0:
                out, num_out = _left_out(keys, num_keys, ends, num_nodes, node, mask, STEPS)
                degree -= num_out
            chosen = _floyd(
                values, row, mask, key_of(source, node), degree, limit, fanout, False, ROWS, WIDE
            )
            if STEPS > 0:
                for turn in range(tl.max(num_out, axis=0)):
                    passed = tl.load(out_places + out + turn, mask=turn < num_out, other=NOWHERE)
                    chosen += ((passed - start)[:, None] <= chosen).to(tl.int64)
            count = tl.minimum(degree, limit)
            starts = begin + tl.cumsum(count, axis=0) - count
            begin += tl.sum(count, axis=0)
            edge = starts[:, None] + columns
            kept = mask[:, None] & (columns < count[:, None]) & (edge < free)
            pointer = (address[:, None] + chosen * BYTES).to(tl.pointer_type(UNIT))
            value = tl.load(pointer, mask=kept, other=0).to(tl.int64)
            put_edges(
                edge, value, start[:, None] + chosen, (first + row) // EACH, kept, fresh, earlier,
                values, ranks, edge_places, rows, positions, DENSE, POSITIONS, COPIES,
            )  # fmt: skip
            for copy in range(COPIES):
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
def read_and_keep(
    source, address, place, degree, whole, threshold, UNIT: tl.constexpr, BYTES: tl.constexpr
):
    """Read entries of lists; return them, and which LABOR-0 keeps: all of rows taken whole."""
    inside = place < degree[:, None]
    pointer = (address[:, None] + place * BYTES).to(tl.pointer_type(UNIT))
    value = tl.load(pointer, mask=inside, other=0).to(tl.int64)
    word = value_of(key_of(source, value), tl.zeros_like(value))
    return value, inside & (whole[:, None] | (word < threshold[:, None]))


@triton.jit
@no_type_check
def share_of(degree, fanout):
    """Return which rows are taken whole, and the others' threshold."""
    whole = (degree <= fanout) | (tl.zeros_like(degree) + fanout < 0)
    return whole, share_word(fanout, tl.where(whole, 1, degree))


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
    whole, threshold = share_of(degree, fanout)
    start = tl.load(starts + row, mask=mine, other=0)
    address = tl.load(addresses + row, mask=mine, other=0)
    source = tl.load(stream)
    edge = tl.zeros((ROWS,), tl.int64)
    if WRITE:
        edge = tl.load(row_ptr + row, mask=mine, other=0)
    for first in range(0, tl.max(degree, axis=0), COLUMNS):
        place = first + tl.arange(0, COLUMNS).to(tl.int64)[None, :]
        value, kept = read_and_keep(source, address, place, degree, whole, threshold, UNIT, BYTES)
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
    _bounds_kernel[(triton.cdiv(nodes.numel(), _BLOCK),)](
        *lists_of(graph), *graph.own, *graph.host, nodes, total, rows.starts, rows.degrees,
        rows.counts, rows.addresses, graph.counts, nodes.numel(), fanout,
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


def row_ends(counts: Tensor) -> Tensor:
    """Return 0 and the running sums of counts: int64 [n + 1]."""
    ptr = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=ptr[1:])
    return ptr


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
    rows, bound = row_tile(fanout), hop.bound * hop.each
    chunk = chunk_of(bound, hop.sums.numel(), rows)
    grid = (programs_for(bound, chunk, hop.nodes.device),)
    lists, asked = lists_of(graph), (hop.nodes, hop.before, hop.known, edges.flag)
    out, none = hop.left_out, hop.sums
    keys, ends, places = (none, none, none) if out is None else (out.keys, out.ends, out.places)
    drawn = (keys, ends, keys.numel(), graph.num_nodes)
    limits = (none if hop.limits is None else hop.limits, fanout)
    size = {
        "PLACES": graph.addresses is not None, "BYTES": graph.indices.element_size(),
        "EACH": hop.each, "STEPS": 0 if out is None else keys.numel().bit_length(), "CHUNK": chunk,
    }  # fmt: skip
    _count_kernel[grid](
        *lists, *graph.own, *graph.host, *asked, *drawn, *limits, graph.counts, hop.sums, **size
    )
    _choose_kernel[grid](
        stream, *lists, *asked, *drawn, *limits, places, edges.before, edges.total, edges.room,
        hop.sums, edges.values, table.ranks, table.stamp, into.row_places, into.edge_places,
        into.row_ptr, into.rows, into.rows if into.positions is None else into.positions, **size,
        UNIT=_UNITS[graph.indices.dtype], DENSE=table.keys is None,
        POSITIONS=into.positions is not None, COPIES=into.row_places.numel(),
        CHUNKS=hop.sums.numel(), ROWS=rows, WIDE=triton.next_power_of_2(fanout),
    )  # fmt: skip
