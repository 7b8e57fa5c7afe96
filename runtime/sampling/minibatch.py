"""The one object every stage passes on: L blocks, outermost first, and the ids behind them.

Two dialects exist and are always named. `first_seen` (PyG's): a vertex is expanded once, at the
hop where it first appears, and an outer block contains the edges of the inner ones, so all blocks
are prefixes of one CSR. `every_hop` (DGL's; formulas 5.6): S^(l+1) = S^l united with N(S^l), every
destination of a hop draws afresh.

What a rank keeps of one hop's exchange of ids, so that rows can take the same way later.

A cooperative block's sources are this rank's own vertices of the next frontier, in the owner's
order, and behind them those that other ranks own, the ones of rank 0 first. So the rows of a
block's sources are the rank's own rows followed by what one all-to-all delivers, without a copy.
"""

import itertools
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, no_type_check

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.sampling.compiled import kernel
from gnnplan.runtime.sampling.workspace import Workspace


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class RowExchange:
    """How the rows of one block's sources come together."""

    ids: NDArray[np.int64]
    """Global ids of the block's sources: own vertices, then the remote ones by rank. [num_src]"""
    num_own: int
    """Own vertices S_p^(l+1) of the hop's next frontier: rows that this rank computes or loads."""
    send_rows: NDArray[np.int64]
    """Own rows to send, those for rank 0 first; a row that several want comes several times."""
    send_counts: list[int]
    """Rows to send to each rank."""
    receive_counts: list[int]
    """Rows to receive from each rank."""
    num_touched: int
    """Size of S~_p^(l+1) (formulas 5.6): the vertices expanded so far and those that they drew."""

    @property
    def num_remote(self) -> int:
        """Rows that other ranks own."""
        return self.ids.shape[0] - self.num_own


class Dialect(StrEnum):
    """Which vertices a hop expands."""

    FIRST_SEEN = "first_seen"
    EVERY_HOP = "every_hop"


@dataclass(kw_only=True, slots=True)
class Block:
    """One layer's bipartite graph: destinations are the first `num_dst` of the `num_src` sources.

    `indices[indptr[i]:indptr[i+1]]` are the local source ids that destination i aggregates from.
    """

    num_src: int
    num_dst: int
    indptr: NDArray[np.int64]
    """Shape (num_dst + 1,)."""
    indices: NDArray[np.int32]
    """Shape (num_edges,); local ids below num_src."""
    e_id: NDArray[np.int64] | None = None
    """Shape (num_edges,); position of each edge in the graph's `indices`."""
    weight: NDArray[np.float32] | None = None
    """Shape (num_edges,); the layer computes sum_j weight_j x_j. None: the plain mean."""
    relation_ptr: NDArray[np.int64] | None = None
    """Typed graphs: the edges of type r of destination i are those from relation_ptr[i * R + r] to
    relation_ptr[i * R + r + 1]. Shape (num_dst * R + 1,)."""
    src_type: NDArray[np.int32] | None = None
    """Typed graphs, outermost block: type of each source. Shape (num_src,)."""

    @property
    def num_edges(self) -> int:
        """Number of sampled edges."""
        return int(self.indptr[self.num_dst])


@dataclass(kw_only=True, slots=True)
class MiniBatch:
    """A sampled mini-batch; later stages fill `x`, `y` and `counters`."""

    blocks: list[Block]
    """Outermost (next to the input features) first."""
    n_id: NDArray[np.int64]
    """Global ids of the outermost block's sources, seeds first. Shape (num_input,)."""
    seeds: NDArray[np.int64]
    """Global ids of this rank's seeds. Shape (num_seeds,)."""
    input_id: NDArray[np.int64]
    """Position of each seed in the training index. Shape (num_seeds,)."""
    dialect: Dialect
    num_sampled_nodes: list[int]
    """New vertices per hop, seeds first; length L + 1 (first_seen) and sums to len(n_id)."""
    num_sampled_edges: list[int]
    """Edges drawn per hop, length L."""
    global_num_seeds: int = 0
    """Seeds (for links: positive links) of this optimiser step over all ranks: the loss is a local
    sum over this number."""
    links: NDArray[np.int64] | None = None
    """Positions in `seeds` of the pairs to score, or None: source, destination, then the negative
    destinations of each link. Shape (num_links, 2 + num_negatives)."""
    exchanges: list[RowExchange] = field(default_factory=list[RowExchange])
    """Cooperative batches only, per block: where the rows of its sources come from. `n_id` then
    starts with the outermost block's sources alone."""
    epoch: int = 0
    step: int = 0
    x: Any = None
    """Feature rows of n_id (a torch tensor), filled by the gather stage."""
    y: Any = None
    """Labels of the seeds (a torch tensor), filled by the batch stage."""
    device_blocks: Any = None
    """The blocks where the model runs (`models.adjacency.TorchBlock`), filled by the batch stage
    where that is not the CPU."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Elapsed seconds of each loader stage this batch went through."""
    rows_by_source: dict[str, int] = field(default_factory=dict)
    """Feature rows read, by source (own, host, peer, disk, ...)."""
    bytes_by_source: dict[str, int] = field(default_factory=dict)
    lists_by_source: dict[str, int] = field(default_factory=dict)
    """Adjacency lists visited, by source (own, host, disk), where the plan places topology."""
    list_bytes_by_source: dict[str, int] = field(default_factory=dict)
    """Bytes of offsets and neighbour ids read for them."""

    @property
    def num_seeds(self) -> int:
        """Number of seeds of this rank."""
        return int(self.seeds.shape[0])

    @property
    def num_edges(self) -> int:
        """Edges drawn over all hops (an edge in nested blocks counts once)."""
        return sum(self.num_sampled_edges)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the caller says about one batch."""

    seeds: NDArray[np.int64]
    epoch: int
    step: int
    input_id: NDArray[np.int64] | None = None
    global_num_seeds: int | None = None


def make_batch(
    request: Request,
    blocks: list[Block],
    n_id: NDArray[np.int64],
    edges_drawn: list[int],
    dialect: Dialect,
) -> MiniBatch:
    """Make a batch from its blocks, outermost first, and the edges drawn per hop."""
    num_seeds = int(request.seeds.shape[0])
    total, input_id = request.global_num_seeds, request.input_id
    fresh = [block.num_src - block.num_dst for block in reversed(blocks)]
    return MiniBatch(
        blocks=blocks,
        n_id=n_id,
        seeds=request.seeds,
        input_id=np.arange(num_seeds, dtype=np.int64) if input_id is None else input_id,
        dialect=dialect,
        num_sampled_nodes=[num_seeds, *fresh],
        num_sampled_edges=edges_drawn,
        global_num_seeds=num_seeds if total is None else total,
        epoch=request.epoch,
        step=request.step,
    )
