"""Sample uniform neighbours of k stacked batches in one launch, equal to `NeighborSampler`'s.

Q has one 1 per row, so a row of P = QA is a vertex's neighbour list and NORM makes it 1/d all over:
gathering, normalising and drawing by floor(r d) collapse into choosing positions of the list, with
the numbers that `NeighborSampler` draws. Row r of the stack needs nothing but its own batch's
table, so all layers of all batches fit one launch of `frontier.expand_hops`.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, no_type_check

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.sampling.bulk.product import join_seeds
from gnnplan.runtime.sampling.checks import bad_seed
from gnnplan.runtime.sampling.choose.uniform import UniformRows
from gnnplan.runtime.sampling.compiled import kernel
from gnnplan.runtime.sampling.frontier import expand_hops
from gnnplan.runtime.sampling.memory import Ledger
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch, Request, cut_block, make_batch
from gnnplan.runtime.sampling.relabel import add_seeds, begin_batch
from gnnplan.runtime.sampling.rng import GOLDEN, Purpose, mix_kernel
from gnnplan.runtime.sampling.workspace import Workspace

NODES, EDGES, ROWS = 0, 1, 2
"""What is counted: entries of `node_ids`, of `local` and of `row_ptr`."""
DONE, GROW_WORKSPACE, GROW_STACK, BAD_SEED = 0, 1, 2, 3
"""Reasons for which the kernel returns."""


class StackArrays(NamedTuple):
    """Where the batches of a stack end up, one after another."""

    node_ids: NDArray[np.int64]
    local: NDArray[np.int32]
    e_id: NDArray[np.int64]
    row_ptr: NDArray[np.int64]
    starts: NDArray[np.int64]
    """Where each batch begins in these. Shape (k + 1, 3)."""
    known: NDArray[np.int64]
    """Nodes of each batch after each hop. Shape (k, L + 1)."""
    edges: NDArray[np.int64]
    """Edges of each batch after each hop. Shape (k, L + 1)."""
    needed: NDArray[np.int64]


@kernel
@no_type_check
def _sample_batch(rows, streams, every_hop, keep_positions, seeds, w):
    """Sample one batch in the workspace; return whether it is done, why not, and the bad seed."""
    table, num_nodes = w.table, rows.indptr.shape[0] - 1
    small = w.node_ids.shape[0] < seeds.shape[0]
    if small or (table.shift != 0 and table.entries.shape[0] < 2 * seeds.shape[0]):
        return GROW_WORKSPACE, 0
    begin_batch(table, num_nodes)
    w.state[:] = 0
    w.node_ends[0] = seeds.shape[0]
    bad = add_seeds(table, w.node_ids, seeds, num_nodes)
    if bad >= 0:
        table.stamp[0] += seeds.shape[0] + 1
        return BAD_SEED, bad
    if not expand_hops(rows, streams, every_hop, keep_positions, w):
        table.stamp[0] += num_nodes + 1
        return GROW_WORKSPACE, 0
    table.stamp[0] += w.node_ends[streams.shape[0]] + 1
    return DONE, 0


@kernel
@no_type_check
def expand_stack(rows, streams, every_hop, keep_positions, seeds, seed_ends, batch, w, out):
    """Sample batches `batch` .. k-1; return the first that is not done, why, and the bad seed.

    There are uint64 streams [L, k]; `seeds` are those of all batches, `seed_ends` [k + 1]. Every
    batch is sampled in `w`, which stays in the second-level cache, and copied to `out`.
    """
    num_hops = streams.shape[0]
    for b in range(batch, seed_ends.shape[0] - 1):
        mine = seeds[seed_ends[b] : seed_ends[b + 1]]
        why, bad = _sample_batch(rows, streams[:, b].copy(), every_hop, keep_positions, mine, w)
        if why != DONE:
            return b, why, bad
        num_nodes, num_edges = w.node_ends[num_hops], w.edge_ends[num_hops]
        node, edge, row = out.starts[b]
        num_rows = w.row_ends[num_hops] + (num_hops if every_hop else 1)
        out.starts[b + 1, NODES] = node + num_nodes
        out.starts[b + 1, EDGES] = edge + num_edges
        out.starts[b + 1, ROWS] = row + num_rows
        out.needed[:] = out.starts[b + 1]
        if (
            out.needed[NODES] > out.node_ids.shape[0]
            or out.needed[EDGES] > out.local.shape[0]
            or out.needed[ROWS] > out.row_ptr.shape[0]
        ):
            return b, GROW_STACK, 0
        out.node_ids[node : node + num_nodes] = w.node_ids[:num_nodes]
        out.local[edge : edge + num_edges] = w.local[:num_edges]
        if keep_positions:
            out.e_id[edge : edge + num_edges] = w.positions[:num_edges]
        if every_hop:  # the hops count their own edges from 0
            for hop in range(num_hops):
                first, last = w.row_ends[hop], w.row_ends[hop + 1] + 1
                out.row_ptr[row : row + last - first] = w.row_ptr[first:last] - w.edge_ends[hop]
                row += last - first
        else:
            out.row_ptr[row : row + num_rows] = w.row_ptr[:num_rows]
        out.known[b] = w.node_ends
        out.edges[b] = w.edge_ends
    return seed_ends.shape[0] - 1, DONE, 0


@kernel
@no_type_check
def _fill_streams(seed, epochs, steps, purpose, out):
    """Write `rng.stream` of epochs[b], steps[b] (int64) and each hop to out[hop, b], uint64."""
    for hop in range(out.shape[0]):
        for b in range(out.shape[1]):
            state = mix_kernel(np.uint64(seed) + GOLDEN)
            for word in (np.uint64(epochs[b]), np.uint64(steps[b]), np.uint64(hop)):
                state = mix_kernel((state ^ word) + GOLDEN)
            out[hop, b] = mix_kernel((state ^ np.uint64(purpose)) + GOLDEN)


def stack_streams(
    seed: int, purpose: Purpose, num_hops: int, requests: Sequence[Request]
) -> NDArray[np.uint64]:
    """Return `rng.stream` of each hop and request, uint64 [num_hops, k]."""
    epochs = np.array([request.epoch for request in requests], dtype=np.int64)
    steps = np.array([request.step for request in requests], dtype=np.int64)
    words = np.empty((num_hops, len(requests)), dtype=np.uint64)
    _fill_streams(np.uint64(seed % (1 << 64)), epochs, steps, int(purpose), words)
    return words


_MARGIN = 1.05
"""Room beyond what earlier batches took per seed."""


class SageStack:
    """Samples stacks of batches with uniform neighbours, by checked arrays and fan-outs."""

    def __init__(
        self,
        indptr: NDArray[np.integer],
        indices: NDArray[np.integer],
        fanouts: tuple[int, ...],
        *,
        dialect: Dialect,
        seed: int,
        purpose: Purpose,
        edge_ids: bool,
    ) -> None:
        self.rows = UniformRows(indptr, indices, np.array(fanouts, dtype=np.int64))
        self.dialect, self.seed, self.purpose, self.edge_ids = dialect, seed, purpose, edge_ids
        self.num_nodes = int(indptr.shape[0]) - 1
        self._per_seed: NDArray[np.float64] | None = None

    def sample(self, requests: Sequence[Request], w: Workspace, ledger: Ledger) -> list[MiniBatch]:
        """Draw the batches of one stack, in a workspace that nobody else uses meanwhile."""
        seeds, seed_ends = join_seeds(requests)
        ledger.note(seeds.nbytes)
        buffers = _Buffers(len(requests), len(self.rows.fanouts), self.edge_ids, ledger)
        if self._per_seed is not None:
            buffers.grow((_MARGIN * self._per_seed * seeds.shape[0]).astype(np.int64) + 1)
        streams = stack_streams(self.seed, self.purpose, len(self.rows.fanouts), requests)
        every_hop = self.dialect is Dialect.EVERY_HOP
        w.forget_batch()
        done, why = 0, GROW_WORKSPACE
        while why != DONE:
            done, why, bad = expand_stack(
                self.rows, streams, every_hop, self.edge_ids, seeds, seed_ends, done, w.buffers(),
                buffers.arrays(),
            )  # fmt: skip
            if why == BAD_SEED:
                raise bad_seed(requests[done].seeds, bad, self.num_nodes)
            if why == GROW_WORKSPACE:
                w.make_room(int(requests[done].seeds.shape[0]))
            elif why == GROW_STACK:
                buffers.make_room(done, int(seed_ends[done]), int(seed_ends[-1]))
        w.used = 0
        if seeds.shape[0] > 0:
            self._per_seed = buffers.starts[-1] / seeds.shape[0]
        buffers.trim()
        ledger.note(-seeds.nbytes)
        return _unstack(buffers, requests, self.dialect)


class _Buffers:
    def __init__(self, num_batches: int, num_hops: int, edge_ids: bool, ledger: Ledger) -> None:
        self.ledger, self.edge_ids = ledger, edge_ids
        self.node_ids = np.empty(0, dtype=np.int64)
        self.local = np.empty(0, dtype=np.int32)
        self.e_id = np.empty(0, dtype=np.int64)
        self.row_ptr = np.empty(0, dtype=np.int64)
        self.starts = np.zeros((num_batches + 1, 3), dtype=np.int64)
        self.known, self.edges = np.zeros((2, num_batches, num_hops + 1), dtype=np.int64)
        self.needed = np.zeros(3, dtype=np.int64)
        self.counted = {"node_ids": NODES, "local": EDGES, "row_ptr": ROWS}
        if edge_ids:
            self.counted["e_id"] = EDGES

    def arrays(self) -> StackArrays:
        return StackArrays(
            self.node_ids, self.local, self.e_id, self.row_ptr, self.starts, self.known,
            self.edges, self.needed,
        )  # fmt: skip

    def grow(self, sizes: NDArray[np.int64], *, done: int = 0) -> None:
        """Give the arrays `sizes` entries, keeping what the first batches wrote."""
        kept = self.starts[done].tolist()
        for name, kind in self.counted.items():
            old = getattr(self, name)
            new = self.ledger.empty(int(sizes[kind]), old.dtype)
            new[: kept[kind]] = old[: kept[kind]]
            self.ledger.free(old)
            setattr(self, name, new)

    def make_room(self, done: int, seeds_done: int, num_seeds: int) -> None:
        """Grow for the batches that are left, if they are like those that are done."""
        used = self.starts[done]
        left = used / max(seeds_done, 1) * (num_seeds - seeds_done)
        have = np.array([a.shape[0] for a in (self.node_ids, self.local, self.row_ptr)])
        guess = used + (_MARGIN * left).astype(np.int64)
        # Never less than there was: a later batch may need less of one kind and more of another.
        self.grow(np.maximum(np.maximum(self.needed, guess), have), done=done)

    def trim(self) -> None:
        used = self.starts[-1].tolist()
        for name, kind in self.counted.items():
            setattr(self, name, self.ledger.trim(getattr(self, name), used[kind]))


def _unstack(buffers: _Buffers, requests: Sequence[Request], dialect: Dialect) -> list[MiniBatch]:
    starts, known, edges = buffers.starts.tolist(), buffers.known.tolist(), buffers.edges.tolist()
    batches = []
    for b, request in enumerate(requests):
        node, edge, row = starts[b]
        ends, drawn = edges[b], [last - first for first, last in pairwise(edges[b])]
        indices = buffers.local[edge : starts[b + 1][EDGES]]
        e_id = buffers.e_id[edge : starts[b + 1][EDGES]] if buffers.edge_ids else None
        blocks = []
        for hop, num_dst in enumerate(known[b][:-1]):
            indptr = buffers.row_ptr[row : row + num_dst + 1]
            first = 0
            if dialect is Dialect.EVERY_HOP:
                first, row = ends[hop], row + num_dst + 1
            part = slice(first, ends[hop + 1])
            blocks.append(cut_block(known[b][hop + 1], indptr, part, indices, e_id))
        n_id = buffers.node_ids[node : starts[b + 1][NODES]]
        batches.append(make_batch(request, blocks[::-1], n_id, drawn, dialect))
    return batches
