"""GraphSAGE over k stacked batches: one launch per layer, equal to `NeighborSampler` edge for edge.

Q has one 1 per row, so a row of P = QA is a vertex's neighbour list and NORM makes it 1/d all over:
gathering, normalising and drawing by floor(r d) collapse into choosing positions of the list,
with the numbers that `NeighborSampler` draws for the same (epoch, step, hop, vertex). EXTRACT drops
the empty columns batch by batch.

Chunks of rows pass through choose, gather, relabel as in `kernels`, but a chunk's scratch is used
again by the third chunk after it and so stays in the first-level cache; only the blocks themselves
are written to memory, and they are the result: nothing is copied.
"""

from typing import no_type_check

import numpy as np
from numpy.typing import NDArray

from runtime.sampling.choose import choose_rows, edge_bound
from runtime.sampling.compiled import kernel
from runtime.sampling.kernels import CHUNK, SPARE
from runtime.sampling.matrix_extract import StackedBlocks
from runtime.sampling.matrix_memory import Ledger
from runtime.sampling.matrix_table import Table, begin, find_or_add
from runtime.sampling.relabel import gather, relabel_dense, relabel_hashed
from runtime.sampling.rng import GOLDEN, Purpose, mix

NOTHING = np.empty(0, dtype=np.int64)
SLOTS = 3
"""Chunks in flight: chosen, gathered, relabelled."""


@kernel
@no_type_check
def _enter(ids, dst, table, shift, base):
    """The vertices known so far become the first sources."""
    for i in range(dst.shape[0]):
        ids[i] = dst[i]
        if shift == 0:
            table[dst[i]] = np.uint32(base + np.uint64(i))
        else:
            find_or_add(table, shift, base, ids, dst[i], np.uint64(i))


@kernel
@no_type_check
def _expand(
    indptr, indices, streams, fanout, dst_nodes, dst_ends, row_starts, table, shift, stamp, width,
    positions, values, row_ptr, edge_ends, local, e_id, nodes, ends,
):  # fmt: skip
    edge, row = 0, 0
    ends[0] = edge_ends[0] = 0
    chunk_first, chunk_size = np.zeros(SLOTS, np.int64), np.zeros(SLOTS, np.int64)
    for b in range(dst_ends.shape[0] - 1):
        dst = dst_nodes[dst_ends[b] : dst_ends[b + 1]]
        ids = nodes[ends[b] :]
        base = begin(table, stamp, ids.shape[0])
        _enter(ids, dst, table, shift, base)
        known = np.uint64(dst.shape[0])
        row_ptr[row] = 0
        i, last, start = row_starts[b], dst_ends[b + 1], edge
        chunk_size[:] = 0
        turn, busy = 0, SLOTS
        while busy > 0:
            slot = turn % SLOTS
            at = positions[slot * width : (slot + 1) * width]
            before = i
            i, size = choose_rows(
                indptr, indices, streams[b], fanout, dst_nodes, i, last, row, 0, CHUNK, row_ptr, at
            )
            for r in range(row + 1, row + 1 + i - before):
                row_ptr[r] += edge - start
            row += i - before
            chunk_first[slot], chunk_size[slot] = edge, size
            for e in range(size if e_id.shape[0] > 0 else 0):
                e_id[edge + e] = at[e]
            edge += size
            slot = (turn + SLOTS - 1) % SLOTS
            there = values[slot * width : (slot + 1) * width]
            gather(
                indices, positions[slot * width : (slot + 1) * width], there, 0, chunk_size[slot],
                table, shift,
            )  # fmt: skip
            slot = (turn + SLOTS - 2) % SLOTS
            there = values[slot * width : (slot + 1) * width]
            out = local[chunk_first[slot] :]
            if shift == 0:
                known = relabel_dense(there, out, 0, chunk_size[slot], ids, known, table, base)
            else:
                known = relabel_hashed(
                    there, out, 0, chunk_size[slot], ids, known, table, shift, base
                )
            chunk_size[slot] = 0
            turn += 1
            busy = SLOTS if i < last else busy - 1
        row += 1
        edge_ends[b + 1] = edge
        ends[b + 1] = ends[b] + np.int64(known)
        stamp[0] += np.int64(known) + 1
    return edge


@kernel
@no_type_check
def batch_edge_bounds(indptr, fanout, nodes, row_starts, ends, out):
    """out[b]: at least the edges that batch b draws; the sum is returned."""
    total = 0
    for b in range(out.shape[0]):
        out[b] = edge_bound(indptr, fanout, nodes, row_starts[b], ends[b + 1])
        total += out[b]
    return total


def step_streams(
    seed: int, epochs: NDArray[np.int64], steps: NDArray[np.int64], hop: int, purpose: Purpose
) -> NDArray[np.uint64]:
    """`rng.stream` of k steps at once; shape (k,)."""
    state = np.zeros(steps.shape, dtype=np.uint64)
    first = np.uint64(seed & ((1 << 64) - 1))
    for word in (first, epochs, steps, np.uint64(hop), np.uint64(purpose)):
        state = mix((state ^ np.asarray(word).astype(np.uint64)) + GOLDEN)
    return state


def padded(nodes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The nodes and some zeros after them, which prefetches read ahead."""
    return np.concatenate([nodes, np.zeros(SPARE, dtype=np.int64)])


def expand_layer(
    indptr: NDArray[np.integer],
    indices: NDArray[np.integer],
    streams: NDArray[np.uint64],
    fanout: int,
    dst: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    widest: int,
    table: Table,
    ledger: Ledger,
    *,
    edge_ids: bool = False,
) -> StackedBlocks:
    """Draw and relabel one layer of all batches.

    Args:
        indptr: int64 [N + 1].
        indices: int32 or int64 [E].
        streams: uint64 [k], one of each batch.
        fanout: Neighbours per vertex, or -1.
        dst: Known nodes, padded; where each batch's first expanded node is, [k]; ends, [k + 1].
        widest: At least the longest row drawn: the fan-out or the largest degree.
        table: For relabelling.
        ledger: Counts the bytes.
        edge_ids: Fill `e_id`.

    Returns:
        The layer; `nodes` is padded, and `row_ptr` has a row per expanded node.
    """
    nodes, row_starts, ends = dst
    num_batches, num_nodes = streams.shape[0], indptr.shape[0] - 1
    bounds = np.empty(num_batches, dtype=np.int64)
    size = int(batch_edge_bounds(indptr, fanout, nodes, row_starts, ends, bounds))
    sources = np.minimum(np.diff(ends) + bounds, num_nodes)
    table.reserve(int(sources.max(initial=0)))
    num_rows = int((ends[1:] - row_starts).sum())
    width = CHUNK + widest + SPARE
    positions = ledger.scratch(SLOTS * width, np.int64)
    values = ledger.scratch(SLOTS * width, indices.dtype)
    out = StackedBlocks(
        dst_ends=ends,
        row_ptr=ledger.empty(num_rows + num_batches, np.int64),
        edge_ends=ledger.empty(num_batches + 1, np.int64),
        indices=ledger.empty(size, np.int32),
        nodes=ledger.empty(int(sources.sum()) + SPARE, np.int64),
        ends=ledger.empty(num_batches + 1, np.int64),
    )
    e_id = ledger.empty(size if edge_ids else 0, np.int64)
    used = _expand(
        indptr, indices, streams, fanout, nodes, ends, row_starts, table.entries, table.shift,
        table.stamp, width, positions, values, out.row_ptr, out.edge_ends, out.indices, e_id,
        out.nodes, out.ends,
    )  # fmt: skip
    ledger.free_scratch()
    total = int(out.ends[-1])
    out.nodes = ledger.trim(out.nodes, total + SPARE)
    out.nodes[total:] = 0
    out.indices = ledger.trim(out.indices, used)
    out.e_id = ledger.trim(e_id, used) if edge_ids else None
    return out


@kernel
@no_type_check
def _append_hop(
    row_ptr, edge_ends, values, row_starts, dst_ends, out_row, out_edge, edge_base, out_ptr, out
):
    """Append one hop's rows of every batch to the batch's rows of the hops inside it."""
    row = 0
    for b in range(dst_ends.shape[0] - 1):
        base = out_edge[b] - edge_base[b]
        for _ in range(dst_ends[b + 1] - row_starts[b]):
            row += 1
            out_row[b] += 1
            out_ptr[out_row[b]] = row_ptr[row] + base
        row += 1
        size = edge_ends[b + 1] - edge_ends[b]
        out[out_edge[b] : out_edge[b] + size] = values[edge_ends[b] : edge_ends[b + 1]]
        out_edge[b] += size


def nested(
    layers: list[StackedBlocks], row_starts: list[NDArray[np.int64]], ledger: Ledger
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray, NDArray | None]:
    """One CSR per batch over the rows of all its hops, for the first_seen dialect.

    Returns:
        Ends of the batches' row pointers [k + 1] and edges [k + 1], the stacked row pointers, the
        local sources, and edge ids where the layers have them.
    """
    counts = [layer.dst_ends[1:] - start for layer, start in zip(layers, row_starts, strict=True)]
    num_batches = counts[0].shape[0]
    ptr_ends, edge_ends = np.zeros((2, num_batches + 1), dtype=np.int64)
    np.cumsum(sum(counts) + 1, out=ptr_ends[1:])
    np.cumsum(sum(np.diff(layer.edge_ends) for layer in layers), out=edge_ends[1:])
    ptr = ledger.empty(int(ptr_ends[-1]), np.int64)
    ptr[ptr_ends[:-1]] = 0
    outs: list[NDArray | None] = []
    for name in ("indices", "e_id"):
        if getattr(layers[0], name) is None:
            outs.append(None)
            continue
        out = ledger.empty(int(edge_ends[-1]), getattr(layers[0], name).dtype)
        rows, edges = ptr_ends[:-1].copy(), edge_ends[:-1].copy()
        for layer, start in zip(layers, row_starts, strict=True):
            part = getattr(layer, name)
            _append_hop(
                layer.row_ptr, layer.edge_ends, part, start, layer.dst_ends, rows, edges,
                edge_ends, ptr, out,
            )  # fmt: skip
            setattr(layer, name, NOTHING)
            ledger.free(part)
        outs.append(out)
    ledger.free(*(layer.row_ptr for layer in layers))
    assert outs[0] is not None
    return ptr_ends, edge_ends, ptr, outs[0], outs[1]
