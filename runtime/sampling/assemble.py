"""From a thread's workspace to the blocks of a batch, copied and exactly sized, outermost first."""

import itertools
from typing import Any, no_type_check

import numpy as np
from numpy.typing import NDArray

from runtime.sampling.compiled import kernel
from runtime.sampling.minibatch import Block, Dialect
from runtime.sampling.workspace import Workspace


@kernel
@no_type_check
def _copy_into(source, out):
    for i in range(out.shape[0]):
        out[i] = source[i]


def copied(source: NDArray[Any], count: int) -> NDArray[Any]:
    """The first `count` entries as an array of their own; other threads go on meanwhile."""
    out = np.empty(count, source.dtype)
    _copy_into(source, out)
    return out


def steps_between(ends: NDArray[np.int64]) -> list[int]:
    """Differences of a few neighbouring numbers; np.diff would take 20 times as long."""
    values = ends.tolist()
    return [last - first for first, last in itertools.pairwise(values)]


def assemble(
    workspace: Workspace,
    dialect: Dialect,
    *,
    edge_ids: bool = False,
    weight: NDArray[np.float32] | None = None,
) -> list[Block]:
    """The blocks of the batch that the workspace holds.

    Args:
        workspace: Filled by a sampler's kernels.
        dialect: Which vertices each hop expanded.
        edge_ids: Fill each block's `e_id`.
        weight: float32, one weight per drawn edge of all hops, in order; may be longer.
    """
    if dialect is Dialect.FIRST_SEEN:
        return _nested_blocks(workspace, edge_ids, weight)
    return _hop_blocks(workspace, edge_ids, weight)


def _nested_blocks(w: Workspace, edge_ids: bool, weight: NDArray[np.float32] | None) -> list[Block]:
    """All blocks are prefixes of one CSR over the expanded vertices, in order of appearance."""
    rows, edges = int(w.row_ends[-1]), int(w.edge_ends[-1])
    indptr = copied(w.row_ptr, rows + 1)
    indices = copied(w.local, edges)
    e_id = copied(w.positions, edges) if edge_ids else None
    weight = None if weight is None else copied(weight, edges)
    blocks = []
    for hop in reversed(range(w.node_ends.shape[0] - 1)):
        num_dst, end = int(w.node_ends[hop]), int(w.edge_ends[hop + 1])
        blocks.append(
            Block(
                num_src=int(w.node_ends[hop + 1]),
                num_dst=num_dst,
                indptr=indptr[: num_dst + 1],
                indices=indices[:end],
                e_id=None if e_id is None else e_id[:end],
                weight=None if weight is None else weight[:end],
            )
        )
    return blocks


def _hop_blocks(w: Workspace, edge_ids: bool, weight: NDArray[np.float32] | None) -> list[Block]:
    """One CSR per hop: every vertex known at the hop has a row of its own draws."""
    blocks = []
    for hop in reversed(range(w.node_ends.shape[0] - 1)):
        row, row_end = int(w.row_ends[hop]), int(w.row_ends[hop + 1])
        edge, edge_end = int(w.edge_ends[hop]), int(w.edge_ends[hop + 1])
        blocks.append(
            Block(
                num_src=int(w.node_ends[hop + 1]),
                num_dst=row_end - row,
                indptr=w.row_ptr[row : row_end + 1] - edge,
                indices=copied(w.local[edge:], edge_end - edge),
                e_id=copied(w.positions[edge:], edge_end - edge) if edge_ids else None,
                weight=None if weight is None else copied(weight[edge:], edge_end - edge),
            )
        )
    return blocks
