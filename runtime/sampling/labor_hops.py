"""What samplers share that choose a whole hop first and relabel it afterwards.

The choice of a hop needs the vertices known so far and nothing of the hop itself, so it is a step
of its own: a subclass writes positions, this class turns them into blocks.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.sampling.dependent import HopStreams, StreamPolicy
from runtime.sampling.hop_room import EDGES_NEEDED, NODES_NEEDED, ROWS_NEEDED, SPARE
from runtime.sampling.labor_candidates import relabel_values
from runtime.sampling.labor_scan import read_chosen
from runtime.sampling.minibatch import Block, Dialect, MiniBatch
from runtime.sampling.neighbor import bad_seed, check_fanouts, check_graph
from runtime.sampling.relabel import add_seeds
from runtime.sampling.workspace import Workspace

Weights = NDArray[np.float32]
RELABEL_BUDGET_BYTES = 1 << 30
_LARGEST_TABLE_BYTES = 4 * (1 << 32) // 3


class Thread(threading.local):
    """What one thread keeps: its workspace and whatever a subclass adds."""

    workspace: Workspace | None = None


class AbstractHopSampler(ABC):
    """Samples hop by hop: choose, then relabel.

    Args:
        indptr: int64 [N + 1].
        indices: int32 or int64 [E].
        fanouts: Neighbours per hop, the hop next to the seeds first; -1 takes all.
        dialect: Which vertices a hop expands.
        streams: Which streams the steps draw from.
        edge_ids: Fill each block's `e_id`.
        relabel_budget_bytes: Per thread and table, as in `NeighborSampler`.

    Raises:
        SamplerError: fan-outs empty, zero or below -1; arrays of the wrong type or shape.
    """

    first_hop: int = 0
    """Number of the first hop in the streams, as in `NeighborSampler`."""

    def __init__(
        self,
        indptr: NDArray[np.integer],
        indices: NDArray[np.integer],
        fanouts: Sequence[int],
        *,
        dialect: Dialect,
        streams: StreamPolicy,
        edge_ids: bool,
        relabel_budget_bytes: int,
    ) -> None:
        self.fanouts = check_fanouts(fanouts)
        self.indptr, self.indices = check_graph(indptr, indices)
        self.num_nodes = int(self.indptr.shape[0]) - 1
        self.dialect = Dialect(dialect)
        self.streams = streams
        self.edge_ids = edge_ids
        self.dense_table = 4 * self.num_nodes <= min(relabel_budget_bytes, _LARGEST_TABLE_BYTES)
        self._threads = Thread()

    @property
    def num_hops(self) -> int:
        """Number of hops, and of blocks."""
        return len(self.fanouts)

    @abstractmethod
    def _choose(
        self, w: Workspace, streams: HopStreams, hop: int, first: int, last: int
    ) -> Weights | None:
        """Choose the edges of the rows of nodes first .. last-1, and weigh them if they are."""

    def sample(
        self,
        seeds: NDArray[np.int64],
        *,
        epoch: int,
        step: int,
        input_id: NDArray[np.int64] | None = None,
        global_num_seeds: int | None = None,
    ) -> MiniBatch:
        """Sample the blocks of one batch; any thread may call it. As `NeighborSampler.sample`."""
        seeds = np.ascontiguousarray(seeds, dtype=np.int64)
        w = self._workspace()
        streams = self.streams.streams(epoch, step, self.num_hops, self.first_hop)
        weights = self._fill(w, seeds, streams)
        num_seeds = int(seeds.shape[0])
        return MiniBatch(
            blocks=self._blocks(w, weights),
            n_id=w.node_ids[: w.node_ends[-1]].copy(),
            seeds=seeds,
            input_id=np.arange(num_seeds, dtype=np.int64) if input_id is None else input_id,
            dialect=self.dialect,
            num_sampled_nodes=[num_seeds, *np.diff(w.node_ends).tolist()],
            num_sampled_edges=np.diff(w.edge_ends).tolist(),
            global_num_seeds=num_seeds if global_num_seeds is None else global_num_seeds,
            epoch=epoch,
            step=step,
        )

    def _workspace(self) -> Workspace:
        if self._threads.workspace is None:
            self._threads.workspace = Workspace(
                self.num_nodes, self.num_hops, self.indices.dtype, dense=self.dense_table
            )
        return self._threads.workspace

    def _fill(
        self, w: Workspace, seeds: NDArray[np.int64], streams: HopStreams
    ) -> list[Weights | None]:
        w.begin(int(seeds.shape[0]))
        bad = add_seeds(seeds, self.num_nodes, w.node_ids, w.table, w.shift, np.uint64(w.base))
        if bad >= 0:
            raise bad_seed(seeds, bad, self.num_nodes)
        weights: list[Weights | None] = []
        for hop in range(self.num_hops):
            every_hop = self.dialect is Dialect.EVERY_HOP
            first = 0 if every_hop or hop == 0 else int(w.node_ends[hop - 1])
            last = int(w.node_ends[hop])
            weights.append(self._choose(w, streams, hop, first, last))
            self._relabel(w, hop)
        w.finish()
        return weights

    def _choose_rows(
        self,
        w: Workspace,
        hop: int,
        first: int,
        last: int,
        choose: Callable[[int, int, int], tuple[int, int]],
    ) -> None:
        """Call choose(node, row, edge) until it has done the rows of nodes first .. last-1.

        It fills positions and values, and returns the first node whose row is left, for want of
        room, and the edge end. Afterwards the ends of rows and edges stand in the workspace.
        """
        row, edge = int(w.row_ends[hop]), int(w.edge_ends[hop])
        w.row_ends[hop + 1] = row + last - first
        w.node_ends[hop + 1] = last
        w.state[ROWS_NEEDED] = row + last - first + 1
        w.state[EDGES_NEEDED] = edge + SPARE
        w.state[NODES_NEEDED] = last + SPARE
        w.grow(hop)
        w.row_ptr[row] = edge
        node = first
        while True:
            node, edge = choose(node, row + node - first, edge)
            w.edge_ends[hop + 1] = edge
            if node == last:
                return
            start, stop = self.indptr[w.node_ids[node]], self.indptr[w.node_ids[node] + 1]
            w.state[EDGES_NEEDED] = max(2 * edge, edge + int(stop - start) + SPARE)
            w.grow(hop + 1)
            read_chosen(self.indices, w.positions, w.values, int(w.edge_ends[hop]), edge)

    def _relabel(self, w: Workspace, hop: int) -> None:
        begin, end = int(w.edge_ends[hop]), int(w.edge_ends[hop + 1])
        known = int(w.node_ends[hop])
        w.state[NODES_NEEDED] = min(known + end - begin, self.num_nodes) + SPARE
        w.grow(hop)
        w.node_ends[hop + 1] = relabel_values(
            w.values, w.local, begin, end, w.node_ids, known, w.table, w.shift, np.uint64(w.base)
        )

    def _blocks(self, w: Workspace, weights: list[Weights | None]) -> list[Block]:
        """Copy the batch out of the workspace, exactly sized, as blocks, outermost first.

        In the first_seen dialect they are prefixes of one CSR, otherwise one CSR per hop.
        """
        nested = self.dialect is Dialect.FIRST_SEEN
        given = [part for part in weights if part is not None]
        whole = np.concatenate(given) if nested and given else None
        rows, edges = w.row_ends.tolist(), w.edge_ends.tolist()
        shared = (w.row_ptr[: rows[-1] + 1].copy(), w.local[: edges[-1]].copy())
        places = w.positions[: edges[-1]].copy() if self.edge_ids else None
        blocks = []
        for hop in reversed(range(self.num_hops)):
            row, edge = (0, 0) if nested else (rows[hop], edges[hop])
            row_end, edge_end = rows[hop + 1], edges[hop + 1]
            weight = whole if nested else weights[hop]
            blocks.append(
                Block(
                    num_src=int(w.node_ends[hop + 1]),
                    num_dst=row_end - row,
                    indptr=shared[0][row : row_end + 1] - (0 if nested else edge),
                    indices=shared[1][edge:edge_end],
                    e_id=None if places is None else places[edge:edge_end],
                    weight=None if weight is None else weight[: edge_end - edge],
                )
            )
        return blocks
