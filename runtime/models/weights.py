"""Edge weights of a batch's blocks, so that every layer computes sum_j weight_j x_j.

Write D_i for the full in-degree of i, k_i for the edges drawn of it, and w_ij for the sampler's
estimator of the mean (1 / k_i where it gives none), so that sum_j w_ij x_j estimates the mean over
i's D_i neighbours and D_i w_ij their sum.

SAGE (mean)   the block as it is: w_ij, or None for the plain mean.
GAT           the block as it is, without estimator weights.
GCN, full     D_i w_ij / sqrt(d_i d_j) and the self term 1 / d_i, where d counts, in the full graph,
              the neighbours other than oneself plus one self-loop (Kipf and Welling, ICLR 2017).
              Unbiased for the full-graph layer wherever w is unbiased for the mean.
GCN, sampled  the same with degrees counted in the sampled subgraph: what PyG's GCNConv does to a
              sampled edge_index.

A GPU's blocks are weighted by torch operations with the same numbers: products are taken in the
order of the loops, and roots and quotients are correctly rounded on both.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, no_type_check

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnnplan.runtime.errors import InputError
from gnnplan.runtime.models.adjacency import TorchBlock, insert_self_loops
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.processor import square_root
from gnnplan.runtime.sampling.minibatch import Block, Dialect, MiniBatch

if TYPE_CHECKING:  # code without Triton names this type too
    from gnnplan.runtime.sampling.gpu.hops import PaddedBatch

_jit: Any = numba.njit(cache=True, nogil=True, error_model="numpy")
_WEIGHED = 512
"""Nodes, or edges, that a program gives weights at a time."""


@_jit
@no_type_check
def _count_self_loops(indptr, indices, loops):
    total = 0
    for i in range(loops.shape[0]):
        for e in range(indptr[i], indptr[i + 1]):
            if indices[e] == i:
                loops[i] += 1
        total += loops[i]
    return total


def count_self_loops(indptr: NDArray[Any], indices: NDArray[Any]) -> NDArray[np.int32] | None:
    """Count each vertex's self-loops in a CSC graph, (num_nodes,); None where there are none."""
    loops = np.zeros(indptr.shape[0] - 1, np.int32)
    return loops if _count_self_loops(indptr, indices, loops) else None


def count_degrees(
    indptr: NDArray[Any], indices: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int32] | None]:
    """Count each vertex's neighbours, int64 (num_nodes,), and of these its self-loops, as above."""
    return indptr[1:] - indptr[:-1], count_self_loops(indptr, indices)


@_jit
@no_type_check
def _gcn_block(indptr, indices, e_id, weight, full, inverse_root, out_indptr, arrays):
    """Write the block's edges but self-loops, then one self-loop per row, with GCN's weights."""
    out_indices, out_e_id, out_weight = arrays
    position = 0
    out_indptr[0] = 0
    for i in range(indptr.shape[0] - 1):
        first, last = indptr[i], indptr[i + 1]
        drawn = np.float32(last - first)
        for e in range(first, last):
            j = indices[e]
            if j == i:
                continue
            mean = weight[e] if weight.shape[0] > 0 else np.float32(1) / drawn
            out_indices[position] = j
            out_weight[position] = full[i] * mean * inverse_root[i] * inverse_root[j]
            if out_e_id.shape[0] > 0:
                out_e_id[position] = e_id[e]
            position += 1
        out_indices[position] = i
        out_weight[position] = inverse_root[i] * inverse_root[i]
        if out_e_id.shape[0] > 0:
            out_e_id[position] = -1
        position += 1
        out_indptr[i + 1] = position
    return position


def _with_gcn_weights(
    block: Block, full: NDArray[np.float32], inverse_root: NDArray[np.float32]
) -> Block:
    num_edges = block.num_edges
    capacity = num_edges + block.num_dst
    indptr = np.empty(block.num_dst + 1, np.int64)
    indices = np.empty(capacity, np.int32)
    e_id = np.empty(capacity if block.e_id is not None else 0, np.int64)
    weight = np.empty(capacity, np.float32)
    length = _gcn_block(
        block.indptr[: block.num_dst + 1],
        block.indices,
        np.empty(0, np.int64) if block.e_id is None else block.e_id,
        np.empty(0, np.float32) if block.weight is None else block.weight,
        full,
        inverse_root,
        indptr,
        (indices, e_id, weight),
    )
    return Block(
        num_src=block.num_src,
        num_dst=block.num_dst,
        indptr=indptr,
        indices=indices[:length],
        e_id=None if block.e_id is None else e_id[:length],
        weight=weight[:length],
    )


@_jit
@no_type_check
def _drawn_without_self(indptr, indices, neighbours):
    for i in range(indptr.shape[0] - 1):
        for e in range(indptr[i], indptr[i + 1]):
            if indices[e] != i:
                neighbours[i] += 1


def _sampled_degrees(batch: MiniBatch, block: Block) -> tuple[NDArray[np.float32], ...]:
    # first_seen blocks are nested: the subgraph PyG's layers see is the outermost block.
    reference = batch.blocks[0] if batch.dialect == Dialect.FIRST_SEEN else block
    neighbours = np.zeros(block.num_src, np.int32)  # float32 would count to 2^24 alone
    counted = min(reference.num_dst, block.num_src)
    _drawn_without_self(reference.indptr[: counted + 1], reference.indices, neighbours)
    drawn = np.diff(block.indptr[: block.num_dst + 1]).astype(np.float32)
    return drawn, (1 / np.sqrt(neighbours.astype(np.float32) + 1)).astype(np.float32)


def _full_degrees(
    batch: MiniBatch, block: Block, degree: NDArray[Any], loops: NDArray[Any] | None
) -> tuple[NDArray[np.float32], ...]:
    n_id = batch.n_id[: block.num_src]
    full = degree[n_id].astype(np.float32)
    neighbours = full if loops is None else full - loops[n_id]
    return full, (1 / np.sqrt(neighbours + 1)).astype(np.float32)


def refuse_attention(workload: Workload, weighted: list[bool]) -> None:
    """Raise InputError for GAT over blocks some of which hold an estimator's weights."""
    if workload.model == "gat" and any(weighted):
        raise InputError(
            "model gat: expected a sampler without edge weights (attention has no unbiased "
            "weighted form), found weighted blocks; use the neighbor sampler or another model"
        )


def fill_weights(
    batch: MiniBatch,
    workload: Workload,
    degree: NDArray[Any] | None = None,
    *,
    self_loops: NDArray[Any] | None = None,
) -> MiniBatch:
    """Replace the batch's blocks by blocks that hold the model's edge weights; return the batch.

    Args:
        batch: a sampled batch whose `n_id` starts with each block's sources.
        workload: names the model and `gcn_norm`.
        degree: full in-degree of every vertex, self-loops included, (num_nodes,); for GCN with
            `gcn_norm="full"`.
        self_loops: self-loops of every vertex (`count_self_loops`), or None where there are none.
    """
    refuse_attention(workload, [block.weight is not None for block in batch.blocks])
    if workload.model != "gcn":
        return batch
    if workload.gcn_norm == "sampled":
        degrees = [_sampled_degrees(batch, block) for block in batch.blocks]
    elif degree is None:
        raise InputError(
            "gcn_norm full: expected the full graph's degrees, found none; pass degree or use "
            "gcn_norm sampled"
        )
    else:
        degrees = [_full_degrees(batch, block, degree, self_loops) for block in batch.blocks]
    batch.blocks = [
        _with_gcn_weights(block, *pair) for block, pair in zip(batch.blocks, degrees, strict=True)
    ]
    return batch


def gcn_blocks(
    blocks: list[TorchBlock], degrees: list[tuple[Tensor, Tensor]], *, may_loop: bool = True
) -> list[TorchBlock]:
    """Give blocks of torch tensors, outermost first, one self-loop per row and GCN's weights.

    `degrees` has for each block the full in-degrees of its destinations and 1 / sqrt(d) of its
    sources, both float32. `may_loop=False` says that no drawn edge is a self-loop.
    """
    return [
        _gcn_block_device(block, full, inverse_root, may_loop=may_loop)
        for block, (full, inverse_root) in zip(blocks, degrees, strict=True)
    ]


def full_degrees(
    block: TorchBlock, n_id: Tensor, degree: Tensor, loops: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return degrees in the full graph, for gcn_norm full.

    `n_id` has the global ids of the block's sources first; `degree` [N] counts self-loops, and
    `loops` [N] those alone (None: the graph has none).
    """
    nodes = n_id[: block.num_src]
    full = degree[nodes].float()
    # In float64, as numpy subtracts int32 from float32: else roots would be rounded differently.
    neighbours = full if loops is None else full.double() - loops[nodes].double()
    return full, _inverse_root(neighbours)


def sampled_degrees(block: TorchBlock, outermost: TorchBlock | None) -> tuple[Tensor, Tensor]:
    """Return degrees in the sampled subgraph, for gcn_norm sampled.

    `outermost` is the block that holds the whole subgraph (dialect first_seen); None: `block`.
    """
    reference = block if outermost is None else outermost
    row = reference.row_of_edge()
    other = (reference.indices != row).int()  # float32 would count to 2^24 alone
    if reference.dst is not None:  # edges of padding count nowhere
        last = reference.indptr[-1:]
        other = other * (torch.arange(reference.num_edges, device=last.device) < last)
    counts = other.new_zeros(reference.num_dst).index_add_(0, row, other)
    neighbours = row.new_zeros(block.num_src, dtype=torch.float32)
    counted = min(reference.num_dst, block.num_src)
    neighbours[:counted] = counts[:counted]
    return block.indptr.diff().float(), _inverse_root(neighbours)


def _inverse_root(neighbours: Tensor) -> Tensor:
    return (1 / square_root(neighbours + 1)).float()


def _gcn_block_device(
    block: TorchBlock, full: Tensor, inverse_root: Tensor, *, may_loop: bool
) -> TorchBlock:
    row, source = block.row_of_edge(), block.indices.long()
    if block.weight is None:
        drawn = block.indptr.diff().float()
        mean = (1 / drawn)[row]
    else:
        mean = block.weight
    weight = full[row] * mean * inverse_root[row] * inverse_root[source]
    inserted = insert_self_loops(block, may_loop=may_loop)
    edges, padded = inserted.block.num_edges, block.live is not None
    # One place more takes what of a padded block stays out.
    filled = weight.new_zeros(edges + 1) if padded else weight.new_empty(edges)
    filled[inserted.edges] = weight if inserted.kept is None else weight[inserted.kept]
    own = inverse_root[: block.num_dst]
    filled[inserted.loops] = own * own
    inserted.block.weight = filled[:edges]
    return inserted.block


class PaddedGcn:
    """Gives padded batches self-loops and GCN's weights, those of `gcn_blocks`.

    Args:
        degree: Full in-degrees [N], self-loops included, for gcn_norm full; None: sampled.
        loops: Self-loops [N]; None: the graph has none, or degrees are sampled.
        nested: The outermost block holds the whole subgraph (dialect first_seen).
        may_loop: A drawn edge may be a self-loop.
    """

    def __init__(
        self, degree: Tensor | None, loops: Tensor | None, *, nested: bool, may_loop: bool
    ) -> None:
        self._degree, self._loops, self._may_loop = degree, loops, may_loop
        # One root per node serves all blocks, but where each block has degrees of its own.
        self._shared = nested or degree is not None
        self._places: list[int] = []

    @property
    def launches(self) -> int:
        """Return how many kernels `fill` launches."""
        return 4 if self._may_loop else 2

    def prepare(self, batch: "PaddedBatch") -> "PaddedBatch":
        """Return the batch with room for blocks with weights."""
        from gnnplan.runtime.sampling.gpu.hops import BlockEdges

        if not self._places:
            self._make_room(batch)
        kept, places = batch.kept, self._places
        looped = BlockEdges(
            row_places=kept.row_places,
            edge_places=self._new_places,
            row_ptr=torch.zeros_like(kept.row_ptr),
            rows=kept.rows.new_zeros(places[-1]),
            local=kept.local.new_zeros(places[-1]),
            weight=torch.zeros(places[-1], dtype=torch.float32, device=kept.rows.device),
        )
        made, row = list(batch.blocks), 0
        for hop, block in enumerate(reversed(batch.blocks)):
            edge = slice(places[hop], places[hop + 1])
            assert looped.weight is not None
            made[-1 - hop] = replace(
                block,
                indptr=looped.row_ptr[row : row + block.num_dst + 1],
                indices=looped.local[edge],
                dst=looped.rows[edge],
                weight=looped.weight[edge],
            )
            row += block.num_dst + 1
        return replace(batch, blocks=made, looped=looped)

    def _make_room(self, batch: "PaddedBatch") -> None:
        """Make what the weights of every batch pass through, in the sizes of this one."""
        blocks, device = batch.blocks[::-1], batch.n_id.device
        rows = [blocks[0].num_dst, *(block.num_src for block in blocks)]
        edges = [block.indices.numel() for block in blocks]
        begins = [0 if self._shared else sum(rows[1 : hop + 1]) for hop in range(len(edges))]
        sizes = [drawn + own for drawn, own in zip(edges, rows, strict=False)]
        self._places = [sum(sizes[:hop]) for hop in range(len(sizes) + 1)]
        self._sizes, self._root_places, self._new_places = (
            torch.tensor(each, device=device) for each in ([*rows, *edges], begins, self._places)
        )
        self._full = torch.zeros(rows[-1], device=device)
        self._roots = torch.zeros(begins[-1] + rows[-1], device=device)
        # Whether each edge is no self-loop, and how many before it are none.
        self._others = torch.zeros(sum(edges), dtype=torch.bool, device=device)
        self._stays = torch.zeros(sum(edges) + 1, dtype=torch.int64, device=device)

    def fill(self, batch: "PaddedBatch") -> None:
        """Add self-loops and weights to the edges drawn; only launches kernels."""
        from gnnplan.runtime.models.aggregate_triton import root_kernel, weigh_kernel
        from gnnplan.runtime.sampling.gpu.relabel import programs_for

        kept, looped, none = batch.kept, batch.looped, batch.counts
        assert looped is not None
        if self._may_loop:
            torch.ne(kept.local, kept.rows, out=self._others)
            torch.cumsum(self._others, 0, dtype=torch.int64, out=self._stays[1:])
        hops, device = len(batch.blocks), none.device
        kind: dict[str, Any] = {
            "FULL": self._degree is not None, "LOOPS": self._may_loop, "HOPS": hops,
            "BLOCK": _WEIGHED,
        }  # fmt: skip
        drawn = (kept.row_places, kept.row_ptr, kept.edge_places, self._stays)
        programs = programs_for(batch.blocks[0].num_src, _WEIGHED, device)
        root_kernel[(programs, 1 if self._shared else hops)](
            batch.n_id, batch.counts, none if self._degree is None else self._degree,
            none if self._loops is None else self._loops, *drawn, self._root_places, self._full,
            self._roots, **kind, NESTED=self._shared,
        )  # fmt: skip
        programs = programs_for(max(b.indices.numel() for b in batch.blocks), _WEIGHED, device)
        weigh_kernel[(programs, hops)](
            batch.counts, self._sizes, *drawn, kept.rows, kept.local, self._root_places,
            self._new_places, self._full, self._roots, looped.row_ptr, looped.rows, looped.local,
            looped.weight, **kind,
        )  # fmt: skip
