"""GraphSAGE over k stacked batches in one launch, equal to `NeighborSampler` edge for edge.

Q has one 1 per row, so a row of P = QA is a vertex's neighbour list and NORM makes it 1/d all over:
gathering, normalising and drawing by floor(r d) collapse into choosing positions of the list,
with the numbers that `NeighborSampler` draws for the same (epoch, step, hop, vertex). EXTRACT drops
the empty columns of each batch. Row r of the stack needs nothing but its own batch's table, so all
layers of all batches fit one launch.

The hops themselves are `kernels.expand_hops`, in the workspace of a per-batch sampler: it stays in
the second-level cache, and a batch that is done is copied once to the end of the stack.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import no_type_check

import numpy as np
from numpy.typing import NDArray

from runtime.sampling.bulk.memory import Ledger
from runtime.sampling.bulk.stack import Request, as_batch, join_seeds
from runtime.sampling.compiled import kernel
from runtime.sampling.minibatch import Block, Dialect, MiniBatch
from runtime.sampling.neighbor import bad_seed, expand_hops
from runtime.sampling.relabel import add_seeds
from runtime.sampling.rng import GOLDEN, Purpose, mix_kernel
from runtime.sampling.workspace import Workspace

NODES, EDGES, ROWS = 0, 1, 2
"""What is counted: entries of `node_ids`, of `local` and of `row_ptr`."""
DONE, GROW_WORKSPACE, GROW_STACK, BAD_SEED = 0, 1, 2, 3
"""Why the kernel returned."""

_ENTRIES = 1 << 32


@kernel
@no_type_check
def expand_stack(
    indptr, indices, streams, fanouts, every_hop, keep_positions, seeds, seed_ends, batch, stamp,
    workspace, node_ids, local, e_id, row_ptr, starts, known, edges, needed,
):  # fmt: skip
    """Sample batches `batch` .. k-1; return the first that is not done, why, and the bad seed.

    The graph is `indptr`, `indices`; there are uint64 streams [L, k] and int64 fan-outs [L].
    `seeds` are those of all batches, `seed_ends` [k + 1]. `workspace` holds a `Workspace`'s arrays,
    `stamp` [1] the next base of its table. The result is `node_ids`, `local`, `row_ptr` and, with
    `keep_positions`, `e_id`, batch after batch: `starts` [k + 1, 3] says where each begins, `known`
    and `edges` [k, L + 1] are a batch's totals after each hop. `needed` [3] says on return what the
    result must hold.
    """
    num_nodes, num_hops = indptr.shape[0] - 1, fanouts.shape[0]
    shift, table, ids, rows, positions, values, drawn, node_ends, row_ends, edge_ends, state = (
        workspace
    )
    for b in range(batch, seed_ends.shape[0] - 1):
        mine = seeds[seed_ends[b] : seed_ends[b + 1]]
        if ids.shape[0] < mine.shape[0] or (shift != 0 and table.shape[0] < 2 * mine.shape[0]):
            return b, GROW_WORKSPACE, 0
        if stamp[0] + num_nodes + 1 >= _ENTRIES:
            table[:] = 0
            stamp[0] = 1
        base = np.uint64(stamp[0])
        state[:] = 0
        node_ends[0] = mine.shape[0]
        bad = add_seeds(mine, num_nodes, ids, table, shift, base)
        if bad >= 0:
            stamp[0] += mine.shape[0] + 1
            return b, BAD_SEED, bad
        if not expand_hops(
            indptr, indices, streams[:, b].copy(), fanouts, every_hop, table, shift, base, ids,
            rows, positions, values, drawn, node_ends, row_ends, edge_ends, state, keep_positions,
        ):  # fmt: skip
            stamp[0] += num_nodes + 1
            return b, GROW_WORKSPACE, 0
        stamp[0] += node_ends[num_hops] + 1
        node, edge, row = starts[b]
        num_rows = row_ends[num_hops] + (num_hops if every_hop else 1)
        starts[b + 1, NODES] = node + node_ends[num_hops]
        starts[b + 1, EDGES] = edge + edge_ends[num_hops]
        starts[b + 1, ROWS] = row + num_rows
        needed[:] = starts[b + 1]
        if (
            needed[NODES] > node_ids.shape[0]
            or needed[EDGES] > local.shape[0]
            or needed[ROWS] > row_ptr.shape[0]
        ):
            return b, GROW_STACK, 0
        node_ids[node : starts[b + 1, NODES]] = ids[: node_ends[num_hops]]
        local[edge : starts[b + 1, EDGES]] = drawn[: edge_ends[num_hops]]
        if keep_positions:
            e_id[edge : starts[b + 1, EDGES]] = positions[: edge_ends[num_hops]]
        if every_hop:  # the hops count their own edges from 0
            for hop in range(num_hops):
                first, last = row_ends[hop], row_ends[hop + 1] + 1
                row_ptr[row : row + last - first] = rows[first:last] - edge_ends[hop]
                row += last - first
        else:
            row_ptr[row : row + num_rows] = rows[:num_rows]
        known[b] = node_ends
        edges[b] = edge_ends
    return seed_ends.shape[0] - 1, DONE, 0


@kernel
@no_type_check
def stream_words(seed, epochs, steps, purpose, out):
    """`rng.stream` of all hops and steps: uint64 out[hop, b] of epochs[b], steps[b] (int64)."""
    for hop in range(out.shape[0]):
        for b in range(out.shape[1]):
            state = mix_kernel(np.uint64(seed) + GOLDEN)
            for word in (np.uint64(epochs[b]), np.uint64(steps[b]), np.uint64(hop)):
                state = mix_kernel((state ^ word) + GOLDEN)
            out[hop, b] = mix_kernel((state ^ np.uint64(purpose)) + GOLDEN)


_MARGIN = 1.05
"""Room beyond what earlier batches took per seed."""


class SageStack:
    """Samples stacks of batches with uniform neighbours.

    Args:
        indptr: int64 [N + 1], plain and read-only.
        indices: int32 or int64 [E].
        fanouts: Checked fan-outs.
        dialect: Which vertices a hop expands.
        seed: The run's seed.
        purpose: Stream of the draws.
        edge_ids: Fill each block's `e_id`.
    """

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
        self.indptr, self.indices = indptr, indices
        self.fanouts = np.array(fanouts, dtype=np.int64)
        self.dialect, self.seed, self.purpose, self.edge_ids = dialect, seed, purpose, edge_ids
        self.num_nodes = int(indptr.shape[0]) - 1
        self._per_seed: NDArray[np.float64] | None = None

    def sample(self, requests: Sequence[Request], w: Workspace, ledger: Ledger) -> list[MiniBatch]:
        """The batches of one stack, sampled in a workspace that nobody else uses meanwhile.

        Raises:
            SamplerError: a seed is out of range, or occurs twice in its batch.
        """
        seeds, seed_ends = join_seeds(requests)
        ledger.note(seeds.nbytes)
        buffers = _Buffers(len(requests), len(self.fanouts), self.edge_ids, ledger)
        if self._per_seed is not None:
            buffers.grow((_MARGIN * self._per_seed * seeds.shape[0]).astype(np.int64) + 1)
        streams = self._streams(requests)
        every_hop = self.dialect is Dialect.EVERY_HOP
        stamp = np.array([w.base + w.used], dtype=np.int64)
        w.used = w.num_nodes + 1  # until all is well
        done, why = 0, GROW_WORKSPACE
        while why != DONE:
            done, why, bad = expand_stack(
                self.indptr, self.indices, streams, self.fanouts, every_hop, self.edge_ids, seeds,
                seed_ends, done, stamp, w.arrays(), buffers.node_ids, buffers.local, buffers.e_id,
                buffers.row_ptr, buffers.starts, buffers.known, buffers.edges, buffers.needed,
            )  # fmt: skip
            w.base = int(stamp[0])
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

    def _streams(self, requests: Sequence[Request]) -> NDArray[np.uint64]:
        """Shape (L, k)."""
        epochs = np.array([request.epoch for request in requests], dtype=np.int64)
        steps = np.array([request.step for request in requests], dtype=np.int64)
        words = np.empty((len(self.fanouts), len(requests)), dtype=np.uint64)
        stream_words(np.uint64(self.seed % (1 << 64)), epochs, steps, int(self.purpose), words)
        return words


class _Buffers:
    """The result arrays of a stack, which grow until the last batch has room."""

    def __init__(self, num_batches: int, num_hops: int, edge_ids: bool, ledger: Ledger) -> None:
        self.ledger, self.edge_ids = ledger, edge_ids
        self.node_ids = np.empty(0, dtype=np.int64)
        self.local = np.empty(0, dtype=np.int32)
        self.e_id = np.empty(0, dtype=np.int64)
        self.row_ptr = np.empty(0, dtype=np.int64)
        self.starts = np.zeros((num_batches + 1, 3), dtype=np.int64)
        self.known, self.edges = np.zeros((2, num_batches, num_hops + 1), dtype=np.int64)
        self.needed = np.zeros(3, dtype=np.int64)

    def grow(self, sizes: NDArray[np.int64], *, done: int = 0) -> None:
        """Give the arrays `sizes` entries, keeping what the first batches wrote."""
        kept = self.starts[done].tolist()
        for name, kind in (("node_ids", 0), ("local", 1), ("e_id", 1), ("row_ptr", 2)):
            if name == "e_id" and not self.edge_ids:
                continue
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
        """Give back what was not used."""
        used = self.starts[-1].tolist()
        self.node_ids = self.ledger.trim(self.node_ids, used[0])
        self.local = self.ledger.trim(self.local, used[1])
        self.row_ptr = self.ledger.trim(self.row_ptr, used[2])
        if self.edge_ids:
            self.e_id = self.ledger.trim(self.e_id, used[1])


def _unstack(buffers: _Buffers, requests: Sequence[Request], dialect: Dialect) -> list[MiniBatch]:
    """The batches as views of the buffers."""
    starts, known, edges = buffers.starts.tolist(), buffers.known.tolist(), buffers.edges.tolist()
    cut = _hop_blocks if dialect is Dialect.EVERY_HOP else _nested_blocks
    batches = []
    for b, request in enumerate(requests):
        node, edge, row = starts[b]
        node_end, edge_end, row_end = starts[b + 1]
        indptr, indices = buffers.row_ptr[row:row_end], buffers.local[edge:edge_end]
        e_id = buffers.e_id[edge:edge_end] if buffers.edge_ids else None
        blocks = cut(indptr, indices, e_id, known[b], edges[b])
        n_id = buffers.node_ids[node:node_end]
        drawn = [last - first for first, last in pairwise(edges[b])]
        batches.append(as_batch(request, blocks[::-1], n_id, drawn, dialect))
    return batches


def _hop_blocks(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    e_id: NDArray[np.int64] | None,
    known: list[int],
    edges: list[int],
) -> list[Block]:
    """One CSR per hop."""
    blocks, row = [], 0
    for hop, num_dst in enumerate(known[:-1]):
        first, last = edges[hop], edges[hop + 1]
        blocks.append(
            Block(
                num_src=known[hop + 1],
                num_dst=num_dst,
                indptr=indptr[row : row + num_dst + 1],
                indices=indices[first:last],
                e_id=None if e_id is None else e_id[first:last],
            )
        )
        row += num_dst + 1
    return blocks


def _nested_blocks(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    e_id: NDArray[np.int64] | None,
    known: list[int],
    edges: list[int],
) -> list[Block]:
    """Prefixes of one CSR."""
    return [
        Block(
            num_src=known[hop + 1],
            num_dst=num_dst,
            indptr=indptr[: num_dst + 1],
            indices=indices[: edges[hop + 1]],
            e_id=None if e_id is None else e_id[: edges[hop + 1]],
        )
        for hop, num_dst in enumerate(known[:-1])
    ]
