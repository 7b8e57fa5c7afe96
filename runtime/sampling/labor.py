"""LABOR sampling: as many neighbours as neighbour sampling, of fewer vertices (formulas 5).

Balin and Catalyurek, "Layer-Neighbor Sampling" (NeurIPS 2023). All rows of a hop share one random
number r_t per vertex t, and t is drawn for s where r_t < pi_ts. LABOR-0 takes pi_ts = min(1, k /
d_s); LABOR-i and LABOR-* move probability to vertices that many rows share, at equal variance.

What samplers share that choose a whole hop first and relabel it afterwards.

The choice of a hop needs the vertices known so far and nothing of the hop itself, so it is a step
of its own: a subclass writes positions, this class turns them into blocks.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from runtime.errors import SamplerError
from runtime.sampling.checks import check_edge_weight, read_only
from runtime.sampling.choose.labor import (
    PER_EDGE,
    PER_VERTEX,
    UNIFORM,
    Candidates,
    choose_rows,
    relabel_values,
    weigh_rows,
)
from runtime.sampling.choose.labor_scan import read_chosen, scan_rows
from runtime.sampling.choose.labor_solve import LaborSolver
from runtime.sampling.dependent import Dependence, HopStreams, StreamPolicy
from runtime.sampling.minibatch import Block, Dialect, MiniBatch
from runtime.sampling.neighbor import bad_seed, check_fanouts, check_graph
from runtime.sampling.relabel import add_seeds
from runtime.sampling.rng import Purpose
from runtime.sampling.statistics import Estimator
from runtime.sampling.workspace import EDGES_NEEDED, NODES_NEEDED, ROWS_NEEDED, SPARE, Workspace

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


class Form(StrEnum):
    """How many neighbours a row gets."""

    POISSON = "poisson"
    """Each with its own probability; min(k, d) on average."""
    EXACT_K = "exact_k"
    """The min(k, d) smallest r_t / pi_ts."""


class _Thread(Thread):
    candidates: Candidates | None = None
    chances: NDArray[np.float64] | None = None


class LaborSampler(AbstractHopSampler):
    """LABOR-0, LABOR-i and LABOR-*, Poisson or with exactly k neighbours.

    Args:
        indptr: int64 [N + 1].
        indices: int32 or int64 [E].
        fanouts: k per hop, the hop next to the seeds first; -1 takes all.
        variant: 0, a number of passes, or "star".
        form: Poisson or exactly k.
        estimator: Meaning of each block's `weight`. Plain: None, the layer takes the mean of what
            was drawn. Horvitz-Thompson: A / (a_s pi_ts), a_s the full row's sum of A. Hajek: A /
            pi_ts over its sum in the sample.
        dialect: Which vertices a hop expands.
        seed: The run's seed.
        kappa: Batches that hang together; 1 makes them independent, inf freezes the sample.
        dependence: Smooth, or frozen within kappa batches.
        layer_dependent: All hops share one r_t per vertex.
        steps_per_epoch: Lets the kappa batches run on over the ends of epochs.
        edge_weight: float [E] non-negative, or None; a weight of 0 is never drawn.
        tolerance: LABOR-* ends when a pass gains less, relative to the expected new vertices.
        edge_ids: Fill each block's `e_id` with positions in `indices`.
        relabel_budget_bytes: Per thread and table, as in `NeighborSampler`.

    Raises:
        SamplerError: fan-outs, variant, kappa, weights or arrays cannot be used.
    """

    def __init__(
        self,
        indptr: NDArray[np.integer],
        indices: NDArray[np.integer],
        fanouts: Sequence[int],
        *,
        variant: int | float | str = 0,
        form: str = Form.POISSON,
        estimator: Estimator = Estimator.HAJEK,
        dialect: Dialect = Dialect.EVERY_HOP,
        seed: int = 0,
        kappa: int | float = 1,
        dependence: Dependence = Dependence.SMOOTH,
        layer_dependent: bool = False,
        steps_per_epoch: int | None = None,
        edge_weight: NDArray[np.floating] | None = None,
        tolerance: float = 1e-4,
        edge_ids: bool = False,
        purpose: Purpose = Purpose.VERTEX,
        relabel_budget_bytes: int = RELABEL_BUDGET_BYTES,
    ) -> None:
        streams = StreamPolicy(
            seed=seed,
            purpose=purpose,
            kappa=kappa,
            dependence=dependence,
            layer_dependent=layer_dependent,
            steps_per_epoch=steps_per_epoch,
        )
        super().__init__(
            indptr,
            indices,
            fanouts,
            dialect=dialect,
            streams=streams,
            edge_ids=edge_ids,
            relabel_budget_bytes=relabel_budget_bytes,
        )
        self.variant = check_variant(variant)
        self.form = check_form(form)
        self.estimator = Estimator(estimator)
        self.edge_weight = check_edge_weight(edge_weight, int(self.indices.shape[0]))
        self._solver = LaborSolver(self.variant, check_tolerance(tolerance), self.edge_weight)
        no_weight = read_only(np.zeros(0, dtype=np.float32))
        self._weight = no_weight if self.edge_weight is None else self.edge_weight
        self._threads: _Thread = _Thread()

    def _choose(
        self, w: Workspace, streams: HopStreams, hop: int, first: int, last: int
    ) -> Weights | None:
        if self.variant == 0 and self.edge_weight is None and streams.plain:
            return self._scan(w, streams, hop, first, last)
        return self._solve(w, streams, hop, first, last)

    def _scan(
        self, w: Workspace, streams: HopStreams, hop: int, first: int, last: int
    ) -> Weights | None:
        fanout, exact = self.fanouts[hop], self.form is Form.EXACT_K

        def choose(node: int, row: int, edge: int) -> tuple[int, int]:
            return scan_rows(
                self.indptr, self.indices, streams.first[hop], fanout, exact, w.node_ids, node,
                last, row, edge, w.row_ptr, w.positions, w.values,
            )  # fmt: skip

        self._choose_rows(w, hop, first, last, choose)
        return self._weigh(w, hop, first, last, np.zeros(0, dtype=np.float64))

    def _solve(
        self, w: Workspace, streams: HopStreams, hop: int, first: int, last: int
    ) -> Weights | None:
        fanout, exact = self.fanouts[hop], self.form is Form.EXACT_K
        c = self._candidates()
        c.collect(self.indptr, self.indices, w.node_ids, first, last, streams, hop)
        uniform = self.variant == 0 and self.edge_weight is None
        rule = UNIFORM if uniform else PER_EDGE if self.variant == 0 else PER_VERTEX
        if not uniform:
            self._solver.solve(c, self.indptr[w.node_ids[first:last]], fanout)

        def choose(node: int, row: int, edge: int) -> tuple[int, int]:
            if self._chances().shape[0] < w.positions.shape[0]:
                larger = np.empty(w.positions.shape[0], dtype=np.float64)
                larger[:edge] = self._chances()[:edge]
                self._threads.chances = larger
            return choose_rows(
                self.indptr, self.indices, w.node_ids, first, node, last, c.row_ptr, c.numbers,
                c.words, c.pi, c.scale, self._weight, rule, fanout, exact, w.row_ptr, row,
                w.positions, w.values, self._chances(), edge,
            )  # fmt: skip

        self._choose_rows(w, hop, first, last, choose)
        return self._weigh(w, hop, first, last, self._chances())

    def _weigh(
        self, w: Workspace, hop: int, first: int, last: int, chances: NDArray[np.float64]
    ) -> Weights | None:
        if self.estimator is Estimator.PLAIN:
            return None
        out = np.empty(int(w.edge_ends[hop + 1] - w.edge_ends[hop]), dtype=np.float32)
        weigh_rows(
            self.indptr, w.node_ids, first, last, int(w.row_ends[hop]), w.row_ptr, w.positions,
            chances, self._weight, self.fanouts[hop], self.estimator is Estimator.HAJEK, out,
        )  # fmt: skip
        return out

    def _candidates(self) -> Candidates:
        if self._threads.candidates is None:
            self._threads.candidates = Candidates(
                self.num_nodes, self.indices.dtype, dense=self.dense_table
            )
        return self._threads.candidates

    def _chances(self) -> NDArray[np.float64]:
        if self._threads.chances is None:
            self._threads.chances = np.zeros(0, dtype=np.float64)
        return self._threads.chances


def check_variant(variant: int | float | str) -> int | str:
    """A number of passes, or "star".

    Raises:
        SamplerError: neither.
    """
    if variant == "star":
        return "star"
    if isinstance(variant, int) and variant >= 0:
        return variant
    raise SamplerError(
        f"expected a LABOR variant of 0, a positive number of passes, or 'star', found "
        f"{variant!r}; choose one"
    )


def check_tolerance(tolerance: float) -> float:
    """The tolerance itself.

    Raises:
        SamplerError: below 0 or no number.
    """
    if tolerance >= 0:
        return tolerance
    raise SamplerError(
        f"expected a tolerance of at least 0, found {tolerance}; 1e-4 is usual, 1e-3 faster"
    )


def check_form(form: str) -> Form:
    """The form of that name.

    Raises:
        SamplerError: there is none.
    """
    if form not in list(Form):
        raise SamplerError(
            f"expected a form among {', '.join(Form)}, found {form!r}; choose one of them"
        )
    return Form(form)
