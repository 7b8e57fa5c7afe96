"""Hold a sampled mini-batch: L blocks, outermost first, and the ids behind them.

Two dialects say which vertices a hop expands. `first_seen` (PyG's): a vertex is expanded once, at
the hop where it first appears, and an outer block contains the edges of the inner ones, so all
blocks are prefixes of one CSR. `every_hop` (DGL's; formulas 5.6): S^(l+1) = S^l united with N(S^l),
every destination of a hop draws afresh.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar, no_type_check

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.sampling.checks import check_seeds
from gnnplan.runtime.sampling.compiled import kernel
from gnnplan.runtime.sampling.workspace import Workspace

B = TypeVar("B")

IGNORED = -100
"""Label of padding: negative labels are unknown ones, which losses leave out."""


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class RowExchange:
    """How the rows of a cooperative block's sources come together.

    Sources are this rank's own vertices of the next frontier, in its order, then those that other
    ranks own, rank 0's first: own rows, followed by what one all-to-all delivers, without a copy.
    """

    ids: Any
    """Global ids of the block's sources, shape (num_src,): int64, on the host or a rank's GPU."""
    num_own: int
    """Own vertices S_p^(l+1) of the hop's next frontier: rows that this rank computes or loads."""
    send_rows: Any
    """Own rows to send, int64 where `ids` are, those for rank 0 first; one that several ranks want
    comes several times."""
    send_counts: list[int]
    """Rows to send to each rank."""
    receive_counts: list[int]
    """Rows to receive from each rank."""
    num_touched: int
    """Size of S~_p^(l+1) (formulas 5.6): vertices expanded so far, and those that they drew."""

    @property
    def num_remote(self) -> int:
        """Return the number of rows that other ranks own."""
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
    """Begin of each row's edges, and the end of the last; shape (num_dst + 1,)."""
    indices: NDArray[np.int32]
    """Local ids below num_src, shape (num_edges,)."""
    e_id: NDArray[np.int64] | None = None
    """Position of each edge in the graph's `indices`, shape (num_edges,)."""
    weight: NDArray[np.float32] | None = None
    """Weights of sum_j weight_j x_j, shape (num_edges,). None: the layer takes the plain mean."""
    relation_ptr: NDArray[np.int64] | None = None
    """Typed graphs: edges of type r of destination i are those from relation_ptr[i * R + r] to
    relation_ptr[i * R + r + 1]. Shape (num_dst * R + 1,)."""
    src_type: NDArray[np.int32] | None = None
    """Typed graphs, outermost block: type of each source. Shape (num_src,)."""

    @property
    def num_edges(self) -> int:
        """Return the number of sampled edges."""
        return int(self.indptr[self.num_dst])


@dataclass(kw_only=True, slots=True)
class MiniBatch:
    """A sampled mini-batch; later stages fill `x`, `y` and `counters`."""

    blocks: list[Block]
    """Blocks, the outermost (next to the input features) first."""
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
    """Seeds (or positive links) of this step over all ranks: the loss is a local sum over this
    number."""
    links: NDArray[np.int64] | None = None
    """Positions in `seeds` of the pairs to score: source, destination, then each link's negative
    destinations. Shape (num_links, 2 + num_negatives); None: no links."""
    exchanges: list[RowExchange] = field(default_factory=list[RowExchange])
    """Cooperative batches: where the rows of each block's sources come from. `n_id` then starts
    with the outermost block's sources alone."""
    epoch: int = 0
    step: int = 0
    x: Any = None
    """Feature rows of n_id (a torch tensor), filled by the gather stage."""
    y: Any = None
    """Labels of the seeds (a torch tensor), filled by the batch stage."""
    device_blocks: Any = None
    """Blocks where the model runs (`models.adjacency.TorchBlock`), filled by the batch stage off
    the CPU."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Elapsed seconds of each loader stage this batch went through."""
    rows_by_source: dict[str, int] = field(default_factory=dict)
    """Feature rows read, by source (own, host, peer, disk, ...)."""
    bytes_by_source: dict[str, int] = field(default_factory=dict)
    lists_by_source: dict[str, int] = field(default_factory=dict)
    """Adjacency lists visited, by source (own, host, disk), where the plan places topology."""
    list_bytes_by_source: dict[str, int] = field(default_factory=dict)
    """Bytes of offsets and neighbour ids read for them."""

    if not TYPE_CHECKING:  # it would be an attribute of any name to type checkers

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}: a batch of blocks has "
                "blocks, n_id, seeds, x and y; PlannedLoader(blocks=False) hands out PyG's Data, "
                "with columns of yours by its node_data and edge_data"
            )

    @property
    def num_seeds(self) -> int:
        """Return the number of seeds of this rank."""
        return int(self.seeds.shape[0])

    @property
    def num_edges(self) -> int:
        """Return the edges drawn over all hops (an edge in nested blocks counts once)."""
        return sum(self.num_sampled_edges)


@kernel
@no_type_check
def _copy_into(source, out):
    for i in range(out.shape[0]):
        out[i] = source[i]


def copied(source: NDArray[Any], count: int) -> NDArray[Any]:
    """Copy the first `count` entries; other threads go on meanwhile."""
    out = np.empty(count, source.dtype)
    _copy_into(source, out)
    return out


def steps_between(ends: NDArray[np.int64]) -> list[int]:
    """Return differences of a few neighbouring numbers; np.diff would take 20 times as long."""
    values = ends.tolist()
    return [last - first for first, last in itertools.pairwise(values)]


def cut_block(
    num_src: int,
    indptr: NDArray[np.int64],
    edges: slice,
    indices: NDArray[np.int32],
    e_id: NDArray[np.int64] | None = None,
    weight: NDArray[np.float32] | None = None,
) -> Block:
    """Make a block of views: its row pointer, and a stretch of a batch's edges."""
    return Block(
        num_src=num_src,
        num_dst=indptr.shape[0] - 1,
        indptr=indptr,
        indices=indices[edges],
        e_id=None if e_id is None else e_id[edges],
        weight=None if weight is None else weight[edges],
    )


def assemble(
    w: Workspace,
    dialect: Dialect,
    *,
    edge_ids: bool = False,
    weight: NDArray[np.float32] | None = None,
) -> list[Block]:
    """Copy the blocks of the batch that a workspace holds, outermost first.

    `weight` has one float32 per drawn edge of all hops, in order; it may be longer.
    """
    # As lists: an entry of an array is a new object each time it is read.
    node_ends, row_ends, edge_ends = w.node_ends.tolist(), w.row_ends.tolist(), w.edge_ends.tolist()
    rows, edges = row_ends[-1], edge_ends[-1]
    nested = dialect is Dialect.FIRST_SEEN
    row_ptr = copied(w.row_ptr, rows + 1) if nested else w.row_ptr
    indices = copied(w.local, edges)
    e_id = copied(w.positions, edges) if edge_ids else None
    weight = None if weight is None else copied(weight, edges)
    blocks = []
    for hop in reversed(range(len(node_ends) - 1)):
        first = 0 if nested else hop
        edge = slice(edge_ends[first], edge_ends[hop + 1])
        indptr = row_ptr[row_ends[first] : row_ends[hop + 1] + 1]
        indptr = indptr if nested else indptr - edge.start
        blocks.append(cut_block(node_ends[hop + 1], indptr, edge, indices, e_id, weight))
    return blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What one batch is drawn for."""

    seeds: NDArray[np.int64]
    epoch: int
    step: int
    input_id: NDArray[np.int64] | None = None
    global_num_seeds: int | None = None


class RequestSampler(ABC, Generic[B]):
    """A sampler that draws each batch from one `Request`."""

    @abstractmethod
    def _sample(self, request: Request) -> B: ...

    def sample(
        self,
        seeds: NDArray[np.int64],
        *,
        epoch: int,
        step: int,
        input_id: NDArray[np.int64] | None = None,
        global_num_seeds: int | None = None,
    ) -> B:
        """Sample the blocks of one batch; any thread may call it.

        Args:
            seeds: Distinct node ids, int64 [n]; n = 0 gives an empty batch with all its blocks.
            epoch: Epoch number, part of the stream of the draws.
            step: Optimiser step within the epoch, likewise.
            input_id: Position of each seed in the training index, int64 [n]; 0 .. n-1 if None.
            global_num_seeds: Seeds of the step over all ranks; n if None.

        Raises:
            SamplerError: seeds are no list of node ids, one is out of range, or occurs twice.
        """
        return self._sample(
            Request(
                seeds=check_seeds(seeds),
                epoch=epoch,
                step=step,
                input_id=input_id,
                global_num_seeds=global_num_seeds,
            )
        )


def describe_batch(
    request: Request, blocks: Sequence[Any], edges_drawn: list[int], dialect: Dialect
) -> dict[str, Any]:
    """Return the fields of a batch that are alike on cores and on a GPU, beside its arrays."""
    num_seeds = int(request.seeds.shape[0])
    total, input_id = request.global_num_seeds, request.input_id
    fresh = [block.num_src - block.num_dst for block in reversed(blocks)]
    return {
        "seeds": request.seeds,
        "input_id": np.arange(num_seeds, dtype=np.int64) if input_id is None else input_id,
        "dialect": dialect,
        "num_sampled_nodes": [num_seeds, *fresh],
        "num_sampled_edges": edges_drawn,
        "global_num_seeds": num_seeds if total is None else total,
        "epoch": request.epoch,
        "step": request.step,
    }


def make_batch(
    request: Request,
    blocks: list[Block],
    n_id: NDArray[np.int64],
    edges_drawn: list[int],
    dialect: Dialect,
) -> MiniBatch:
    """Make a batch from its blocks, outermost first, and the edges drawn per hop."""
    alike = describe_batch(request, blocks, edges_drawn, dialect)
    return MiniBatch(blocks=blocks, n_id=n_id, **alike)
