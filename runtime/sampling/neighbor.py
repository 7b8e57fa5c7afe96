"""Uniform neighbour sampling without replacement on the CPU, equal to tests/reference bit for bit.

The work is done by `kernels` without the GIL and without locks: every calling thread has its own
workspace, and the batch handed out owns its arrays.

The neighbour sampler's kernel: all hops of one batch in one call, without the GIL.

A hop runs in chunks of rows. A chunk passes through three stages, choose, gather, relabel; each
asks for the cache lines that the next one needs, and works on the chunk before while they arrive.
What one stage leaves for the next lies in two chunks of scratch used in turns, so that it stays in
the first-level cache; wide fan-outs and whole neighbourhoods, whose rows have any length, use the
batch's buffers instead. When a buffer is too small the kernel says how much it needs
and returns; called again with larger buffers it goes on with the hop where it stopped.
"""

import threading
from collections.abc import Sequence
from typing import Any, no_type_check

import numpy as np
from numpy.typing import NDArray

from runtime.errors import SamplerError
from runtime.sampling.checks import (
    RELABEL_BUDGET_BYTES,
    bad_seed,
    check_fanouts,
    check_graph,
    check_seeds,
    fits_densely,
)
from runtime.sampling.choose.uniform import (
    MAX_EDGES,
    MAX_FANOUT,
    choose_lanes,
    choose_rows,
    edge_bound,
    make_lanes,
)
from runtime.sampling.compiled import kernel
from runtime.sampling.minibatch import Block, Dialect, MiniBatch, assemble, copied, steps_between
from runtime.sampling.relabel import add_seeds, gather, relabel_chunk, relabel_range
from runtime.sampling.rng import Purpose, stream
from runtime.sampling.workspace import HOP, Workspace, has_room

CHUNK = 256
"""Edges per chunk, or one row where that is longer."""


@kernel
@no_type_check
def make_scratch(indices):
    """Scratch of `expand_hop`: that of the lanes, and two chunks of positions and of values."""
    return make_lanes(), np.zeros((2, MAX_EDGES), np.int64), np.zeros((2, MAX_EDGES), indices.dtype)


@kernel
@no_type_check
def expand_hop(
    indptr, indices, stream, fanout, table, shift, base, node_ids, first, last, row, edge,
    row_ptr, positions, values, local, keep_positions, scratch,
):  # fmt: skip
    """Sample the rows of nodes first .. last-1; return the edge end and the number of nodes.

    `positions` is filled where `keep_positions` says so, and otherwise of any length for fan-outs
    up to `MAX_FANOUT`.
    """
    if 0 < fanout <= MAX_FANOUT:
        return _expand_narrow(
            indptr, indices, stream, fanout, table, shift, base, node_ids, first, last, row, edge,
            row_ptr, positions, local, keep_positions, scratch,
        )  # fmt: skip
    return _expand_wide(
        indptr, indices, stream, fanout, table, shift, base, node_ids, first, last, row, edge,
        row_ptr, positions, values, local,
    )  # fmt: skip


@kernel
@no_type_check
def _expand_narrow(
    indptr, indices, stream, fanout, table, shift, base, node_ids, first, last, row, edge,
    row_ptr, positions, local, keep_positions, scratch,
):  # fmt: skip
    lanes, both_positions, both_values = scratch
    row_ptr[row] = edge
    known = np.uint64(last)
    i = first
    turn = 0
    # Edges [relabelled, gathered) wait for relabelling, [gathered, edge) for gathering.
    relabelled = gathered = edge
    while relabelled < edge or i < last:
        begin, chosen, waiting = edge, both_positions[turn], both_positions[1 - turn]
        if i < last:
            stop, edge = choose_lanes(
                indptr, indices, stream, fanout, node_ids, i, last, row, edge, row_ptr, chosen,
                lanes,
            )  # fmt: skip
            row += stop - i
            i = stop
        if keep_positions:
            positions[begin:edge] = chosen[: edge - begin]
        read, ready = both_values[turn], both_values[1 - turn]
        gather(indices, waiting, read, 0, begin - gathered, table, shift)
        known = relabel_chunk(
            ready, local, relabelled, gathered, node_ids, known, table, shift, base
        )
        relabelled, gathered = gathered, begin
        turn = 1 - turn
    return edge, np.int64(known)


@kernel
@no_type_check
def _expand_wide(
    indptr, indices, stream, fanout, table, shift, base, node_ids, first, last, row, edge,
    row_ptr, positions, values, local,
):  # fmt: skip
    row_ptr[row] = edge
    known = np.uint64(last)
    i = first
    relabelled = gathered = chosen = edge
    while relabelled < chosen or i < last:
        before = chosen
        i, chosen = choose_rows(
            indptr, indices, stream, fanout, node_ids, i, last, row + i - first, before,
            before + CHUNK, row_ptr, positions,
        )  # fmt: skip
        done, gathered_before = relabelled, gathered
        gather(indices, positions, values, gathered, before, table, shift)
        gathered = before
        known = relabel_range(
            values, local, done, gathered_before, node_ids, known, table, shift, base
        )
        relabelled = gathered_before
    return chosen, np.int64(known)


@kernel
@no_type_check
def expand_hops(
    indptr, indices, streams, fanouts, every_hop, table, shift, base, node_ids, row_ptr,
    positions, values, local, node_ends, row_ends, edge_ends, state, keep_positions,
):  # fmt: skip
    """Sample hop after hop; return True when done, False when a buffer is too small.

    The graph is `indptr`, `indices`; per hop there is a uint64 stream and an int64 fan-out. The
    relabelling table is described in `relabel`. `node_ids` (local to global) starts with the seeds;
    `row_ptr` has one entry per expanded row of all hops and one more; `positions`, `values` and
    `local` one entry per edge of all hops: its place in `indices`, its global and its local source.
    The `*_ends` are totals after each hop, int64 [L + 1], with node_ends[0] set to the number of
    seeds. `state` says where to start (HOP) and, on return, what is needed. Without
    `keep_positions` the contents of `positions` and `values` are anything.
    """
    scratch = make_scratch(indices)
    num_nodes = indptr.shape[0] - 1
    for hop in range(state[HOP], fanouts.shape[0]):
        first = 0 if every_hop or hop == 0 else node_ends[hop - 1]
        last, row, edge = node_ends[hop], row_ends[hop], edge_ends[hop]
        more = edge_bound(indptr, fanouts[hop], node_ids, first, last)
        nodes = min(last + more, num_nodes)
        rows = row + last - first
        if not has_room(
            state, hop, rows, edge + more, nodes, row_ptr, local, node_ids, table, shift
        ):
            return False
        edge_ends[hop + 1], node_ends[hop + 1] = expand_hop(
            indptr, indices, streams[hop], fanouts[hop], table, shift, base, node_ids, first,
            last, row, edge, row_ptr, positions, values, local, keep_positions, scratch,
        )  # fmt: skip
        row_ends[hop + 1] = rows
    return True


class NeighborSampler:
    """Draws up to `fanouts[h]` in-neighbours of every vertex that hop h expands.

    Args:
        indptr: int64 [N + 1], non-decreasing (an opened dataset is validated already).
        indices: int32 or int64 [E], C-contiguous; may be memory-mapped.
        fanouts: Neighbours per hop, the hop next to the seeds first; -1 takes all.
        dialect: Which vertices a hop expands.
        seed: The run's seed.
        edge_ids: Fill each block's `e_id` with positions in `indices`.
        purpose: Stream of the draws; profiling uses another one than training.
        relabel_budget_bytes: Per thread. The dense table is used where it fits, otherwise a hash
            table of the batch's size; the batches are the same.

    Raises:
        SamplerError: fan-outs empty, zero or below -1; arrays of the wrong type or shape.
    """

    first_hop: int = 0
    """Number of the first hop in the streams; other than 0 where another sampler drew those before
    (`cooperative`)."""

    def __init__(
        self,
        indptr: NDArray[np.integer],
        indices: NDArray[np.integer],
        fanouts: Sequence[int],
        *,
        dialect: Dialect = Dialect.FIRST_SEEN,
        seed: int = 0,
        edge_ids: bool = False,
        purpose: Purpose = Purpose.NEIGHBOR,
        relabel_budget_bytes: int = RELABEL_BUDGET_BYTES,
    ) -> None:
        self.fanouts = check_fanouts(fanouts)
        self.indptr, self.indices = check_graph(indptr, indices)
        self.num_nodes = int(self.indptr.shape[0]) - 1
        self.dialect = Dialect(dialect)
        self.seed = seed
        self.edge_ids = edge_ids
        self.purpose = purpose
        self.dense_table = fits_densely(self.num_nodes, relabel_budget_bytes)
        self._fanouts = np.array(self.fanouts, dtype=np.int64)
        self._threads = threading.local()

    @property
    def num_hops(self) -> int:
        """Number of hops, and of blocks."""
        return len(self.fanouts)

    def sample(
        self,
        seeds: NDArray[np.int64],
        *,
        epoch: int,
        step: int,
        input_id: NDArray[np.int64] | None = None,
        global_num_seeds: int | None = None,
    ) -> MiniBatch:
        """Sample the blocks of one batch; any thread may call it.

        Args:
            seeds: int64 [n], distinct; n = 0 gives an empty batch with all its blocks.
            epoch: Epoch number, part of the stream of the draws.
            step: Optimiser step in the epoch, likewise.
            input_id: int64 [n], position of each seed in the training index; 0 .. n-1 if None.
            global_num_seeds: Seeds of the step over all ranks; n if None.

        Raises:
            SamplerError: seeds are no list of node ids, one is out of range, or occurs twice.
        """
        seeds = check_seeds(seeds)
        workspace = self._workspace()
        self._fill(workspace, seeds, epoch, step)
        num_seeds = int(seeds.shape[0])
        return MiniBatch(
            blocks=self._blocks(workspace),
            n_id=copied(workspace.node_ids, int(workspace.node_ends[-1])),
            seeds=seeds,
            input_id=np.arange(num_seeds, dtype=np.int64) if input_id is None else input_id,
            dialect=self.dialect,
            num_sampled_nodes=[num_seeds, *steps_between(workspace.node_ends)],
            num_sampled_edges=steps_between(workspace.edge_ends),
            global_num_seeds=num_seeds if global_num_seeds is None else global_num_seeds,
            epoch=epoch,
            step=step,
        )

    def _blocks(self, workspace: Workspace) -> list[Block]:
        return assemble(workspace, self.dialect, edge_ids=self.edge_ids)

    def workspace_bytes(self) -> int:
        """Bytes held by the calling thread's buffers and relabelling table."""
        return self._workspace().nbytes

    def _workspace(self) -> Workspace:
        workspace = getattr(self._threads, "workspace", None)
        if workspace is None:
            workspace = Workspace(
                self.num_nodes, self.num_hops, self.indices.dtype, dense=self.dense_table
            )
            self._threads.workspace = workspace
        return workspace

    def _fill(self, workspace: Workspace, seeds: NDArray[np.int64], epoch: int, step: int) -> None:
        """Run the kernel, growing the workspace as often as it asks for it."""
        w = workspace
        w.begin(int(seeds.shape[0]))
        base = np.uint64(w.base)
        bad = add_seeds(seeds, self.num_nodes, w.node_ids, w.table, w.shift, base)
        if bad >= 0:
            raise bad_seed(seeds, bad, self.num_nodes)
        hops = range(self.first_hop, self.first_hop + self.num_hops)
        streams = np.array(
            [stream(self.seed, epoch, step, hop, self.purpose) for hop in hops], dtype=np.uint64
        )
        while not self._expand(w, streams):
            w.grow(int(w.state[HOP]))
        w.finish()

    def _expand(self, w: Workspace, streams: NDArray[np.uint64]) -> bool:
        """Sample hop after hop; False where a buffer is too small to go on."""
        return expand_hops(
            self.indptr, self.indices, streams, self._fanouts, self.dialect is Dialect.EVERY_HOP,
            w.table, w.shift, np.uint64(w.base), w.node_ids, w.row_ptr, w.positions, w.values,
            w.local, w.node_ends, w.row_ends, w.edge_ends, w.state, self.edge_ids,
        )  # fmt: skip


def full_sampler(
    indptr: NDArray[np.integer], indices: NDArray[np.integer], num_hops: int, **settings: Any
) -> NeighborSampler:
    """A sampler that takes all in-neighbours at each of `num_hops` hops.

    Args:
        indptr: int64 [N + 1].
        indices: int32 or int64 [E].
        num_hops: Number of layers, at least 1.
        settings: `dialect`, `edge_ids` and so on, as in `NeighborSampler`.

    Raises:
        SamplerError: no hop, or as `NeighborSampler`.
    """
    if num_hops < 1:
        raise SamplerError(f"expected at least one hop, found {num_hops}; give the model a layer")
    return NeighborSampler(indptr, indices, [-1] * num_hops, **settings)
