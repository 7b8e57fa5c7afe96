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

from typing import Any, no_type_check

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

_jit: Any = numba.njit(cache=True, nogil=True, error_model="numpy")


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
            out_e_id[position] = e_id[e] if e_id.shape[0] > 0 else -1
            position += 1
        out_indices[position] = i
        out_weight[position] = inverse_root[i] * inverse_root[i]
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
    e_id = np.empty(capacity, np.int64)
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
    neighbours = np.zeros(block.num_src, np.float32)
    counted = min(reference.num_dst, block.num_src)
    _drawn_without_self(reference.indptr[: counted + 1], reference.indices, neighbours)
    drawn = np.diff(block.indptr[: block.num_dst + 1]).astype(np.float32)
    return drawn, (1 / np.sqrt(neighbours + 1)).astype(np.float32)


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
    other = (reference.indices != row).float()
    if reference.dst is not None:  # edges of padding count nowhere
        last = reference.indptr[-1:]
        other = other * (torch.arange(reference.num_edges, device=last.device) < last)
    counts = other.new_zeros(reference.num_dst).index_add_(0, row, other)
    neighbours = other.new_zeros(block.num_src)
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
