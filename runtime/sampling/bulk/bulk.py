"""Bulk sampling: k batches at once, one launch per layer (Tripathy et al., MLSys 2024).

P = QA, NORM, SAMPLE and EXTRACT run over Q stacked from k batches. A batch does not depend on what
it is stacked with: k = 1 and k = all give equal blocks.

Of uniform neighbours (`SageStack`) Q has one 1 per row, so a row of P = QA is a vertex's neighbour
list and NORM makes it 1/d all over: gathering, normalising and drawing by floor(r d) collapse into
choosing positions of the list, with the numbers that `NeighborSampler` draws. Row r of the stack
needs nothing but its own batch's table, so all layers of all batches fit one launch of
`frontier.expand_hops`. Layer-wise stacks are `layerwise.LayerStack`'s.
"""

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, no_type_check

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import BudgetExceeded, SamplerError
from gnnplan.runtime.sampling.bulk.product import join_seeds
from gnnplan.runtime.sampling.checks import (
    RELABEL_BUDGET_BYTES,
    bad_seed,
    check_fanouts,
    check_graph,
    check_layer_sizes,
    check_seeds,
    fits_densely,
)
from gnnplan.runtime.sampling.choose.layerwise import LayerGraph, Method, Norm
from gnnplan.runtime.sampling.choose.uniform import UniformRows, in_lanes
from gnnplan.runtime.sampling.compiled import kernel
from gnnplan.runtime.sampling.frontier import expand_hops
from gnnplan.runtime.sampling.layerwise import LayerStack, LayerwiseSampler, make_law, policy_of
from gnnplan.runtime.sampling.memory import BulkBytes, Ledger, StackCutter, object_bytes
from gnnplan.runtime.sampling.minibatch import Dialect, MiniBatch, Request, cut_block, make_batch
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from gnnplan.runtime.sampling.relabel import Table, add_seeds, begin_batch
from gnnplan.runtime.sampling.rng import GOLDEN, Purpose, mix_kernel
from gnnplan.runtime.sampling.statistics import Estimator
from gnnplan.runtime.sampling.workspace import Workspace, of_thread

SAGE = "sage"
METHODS = (SAGE, *Method)
_MARGIN = 1.05
"""Room beyond what earlier batches took per seed."""
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


class BulkSampler:
    """Samples stacks of batches.

    - `sage`: uniform neighbours. The blocks are those of `NeighborSampler` with the same seed and
      step.
    - `ladies`, `fastgcn`: by darts; the law is that of `LayerwiseSampler`. `pladies`, and `ladies`
      with replacement, and `fastgcn` draw the very same vertices too.

    Args (others as in `HopSampler` and `LayerwiseSampler`):
        sizes: Fan-outs (`sage`) or vertices per layer, the hop next to the seeds first.
        method: `sage`, `ladies`, `pladies` or `fastgcn`.
        dialect: Which vertices a hop expands; `first_seen` with `sage` only.
        budget_bytes: Most bytes that a stack may take, its results included; k is cut down to fit.
            None: all batches are one stack.
        kept_batches: Batches that the caller keeps beside the next stack, off the budget.
        purpose: Stream of `sage`'s draws.
    """

    def __init__(
        self,
        indptr: NDArray[np.integer],
        indices: NDArray[np.integer],
        sizes: Sequence[int],
        *,
        method: str = SAGE,
        dialect: Dialect = Dialect.EVERY_HOP,
        norm: str = Norm.FRO,
        replace: bool = False,
        estimator: Estimator = Estimator.HORVITZ_THOMPSON,
        edge_weight: NDArray[np.floating] | None = None,
        seed: int = 0,
        edge_ids: bool = False,
        budget_bytes: int | None = None,
        kept_batches: int = 0,
        purpose: Purpose = Purpose.NEIGHBOR,
        relabel_budget_bytes: int = RELABEL_BUDGET_BYTES,
    ) -> None:
        if method not in METHODS:
            raise SamplerError(
                f"expected a bulk method among {', '.join(METHODS)}, found {method!r}; choose one"
            )
        indptr, indices = check_graph(indptr, indices)
        self.method, self.dialect = method, Dialect(dialect)
        self.num_nodes = int(indptr.shape[0]) - 1
        self._cutter = StackCutter(budget_bytes, kept_batches)
        self._dense = fits_densely(self.num_nodes, relabel_budget_bytes)
        self._threads = threading.local()
        self._stack: SageStack | LayerStack
        if method == SAGE:
            if edge_weight is not None or replace:
                raise SamplerError(
                    "expected uniform neighbours without replacement with sage, found edge weights "
                    "or replacement; sample such neighbours batch by batch"
                )
            self._stack = SageStack(
                indptr, indices, check_fanouts(sizes), dialect=self.dialect, seed=seed,
                purpose=purpose, edge_ids=edge_ids,
            )  # fmt: skip
            return
        if self.dialect is not Dialect.EVERY_HOP:
            raise SamplerError(
                f"expected the every_hop dialect with {method}, found {self.dialect}; a layer-wise "
                "sampler draws for all vertices known"
            )
        law = make_law(method, norm, replace=replace, estimator=estimator, by_vertex=False)
        self._stack = LayerStack(
            graph=LayerGraph(indptr, indices, edge_weight, law),
            sizes=check_layer_sizes(sizes, self.num_nodes),
            policy=policy_of(law, seed, None),
            edge_ids=edge_ids,
        )

    @staticmethod
    def of(
        sampler: object, *, budget_bytes: int | None = None, kept_batches: int = 0
    ) -> "BulkSampler":
        """Make a sampler of stacks of the batches that a sampler samples one by one, equal to them.

        It must be of uniform neighbours, or layer-wise.
        """
        if type(sampler) is NeighborSampler:
            return BulkSampler(
                sampler.indptr, sampler.indices, sampler.fanouts, dialect=sampler.dialect,
                seed=sampler.seed, edge_ids=sampler.edge_ids, purpose=sampler.purpose,
                budget_bytes=budget_bytes, kept_batches=kept_batches,
            )  # fmt: skip
        if not isinstance(sampler, LayerwiseSampler):
            raise SamplerError(
                "expected uniform neighbours without replacement, ladies, pladies or fastgcn for "
                f"stacks of batches, found {type(sampler).__name__}; plan with bulk_batches 1"
            )
        graph = sampler.graph
        bulk = BulkSampler(
            graph.indptr, graph.indices, sampler.sizes, method=Method.LADIES,
            budget_bytes=budget_bytes, kept_batches=kept_batches,
        )  # fmt: skip
        bulk.method, bulk._stack = str(graph.law.method), sampler.stack
        return bulk

    def sample_many(
        self,
        seeds: Sequence[NDArray[np.int64]],
        *,
        epoch: int,
        first_step: int = 0,
        input_ids: Sequence[NDArray[np.int64]] | None = None,
        global_num_seeds: Sequence[int] | None = None,
    ) -> list[MiniBatch]:
        """Sample the batches of steps first_step, first_step + 1, ...; any thread may call it.

        The blocks of a stack are views of the same arrays, which live as long as one of them. Seeds
        are distinct within a batch; `input_ids` are their positions in the training index, and
        `global_num_seeds` the seeds of a step over all ranks, per batch.
        """
        requests = [
            Request(
                seeds=check_seeds(ids),
                epoch=epoch,
                step=first_step + i,
                input_id=None if input_ids is None else input_ids[i],
                global_num_seeds=None if global_num_seeds is None else global_num_seeds[i],
            )
            for i, ids in enumerate(seeds)
        ]
        return [batch for stack in self.stacks(requests) for batch in stack]

    def stacks(self, requests: Sequence[Request]) -> Iterator[list[MiniBatch]]:
        """Sample the batches stack by stack; drop one before asking for the next."""
        return self._cutter.stacks(requests, self._sample_stack, _fit_budget)

    def predict_bytes(self, seeds: Sequence[NDArray[np.int64]], *, pilot: int = 8) -> BulkBytes:
        """Predict the bytes of stacks of batches like these, from a pilot of some of them."""
        places = np.unique(np.linspace(0, len(seeds) - 1, min(pilot, len(seeds))).astype(int))
        requests = [Request(seeds=check_seeds(seeds[i]), epoch=0, step=int(i)) for i in places]
        self._sample_stack(requests)  # so that buffers need not grow in the one that counts
        return self._sample_stack(requests)[1]

    def _sample_stack(self, requests: Sequence[Request]) -> tuple[list[MiniBatch], BulkBytes]:
        ledger, scratch = Ledger(), self._scratch()
        batches = self._stack.sample(requests, scratch, ledger)
        positions = sum(r.seeds.nbytes for r in requests if r.input_id is None)
        num_blocks = sum(len(batch.blocks) for batch in batches)
        ledger.note(positions + object_bytes(len(batches), num_blocks))
        return batches, BulkBytes.of(ledger, scratch.nbytes, len(batches))

    def _scratch(self) -> Any:
        stack = self._stack
        if not isinstance(stack, SageStack):
            make = partial(Table, self.num_nodes, dense=self._dense)
        else:
            hops, dtype = len(stack.rows.fanouts), stack.rows.indices.dtype
            chosen = stack.edge_ids or not in_lanes(stack.rows.fanouts)
            make = partial(Workspace, self.num_nodes, hops, dtype, dense=self._dense, chosen=chosen)
        return of_thread(self._threads, "scratch", make)

    def scratch_bytes(self) -> int:
        """Return the bytes that the calling thread keeps between stacks."""
        return self._scratch().nbytes


def _fit_budget(found: BulkBytes, budget_bytes: int) -> int:
    size = found.largest_stack(budget_bytes)
    if size == 0 and found.peak_bytes(1) > budget_bytes:
        batch = found.peak_bytes(1) - found.table_bytes
        raise BudgetExceeded(
            f"expected one batch to fit {budget_bytes} bytes, found {found.table_bytes} (table)"
            f" + {batch} (batch) = {found.peak_bytes(1)}; raise the budget, or lower the batch "
            "size or the fan-outs"
        )
    return size
