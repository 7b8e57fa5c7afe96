"""Stacks of GraphSAGE batches: buffers for the kernel, and its result as batches."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from runtime.sampling.matrix_memory import Ledger
from runtime.sampling.matrix_sage import (
    BAD_SEED,
    DONE,
    GROW_STACK,
    GROW_WORKSPACE,
    expand_stack,
    stream_words,
)
from runtime.sampling.matrix_stack import Request, as_batch, join_seeds
from runtime.sampling.minibatch import Block, Dialect, MiniBatch
from runtime.sampling.neighbor import bad_seed
from runtime.sampling.rng import Purpose
from runtime.sampling.workspace import Workspace

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
