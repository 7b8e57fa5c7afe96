"""Validation and test, of nodes and of links: exact layer-wise inference, or sampling.

On a GPU rows of features come from the device's store as far as that reads them in place, and
layers' outputs of one rank alone stay in its GPU's memory where that has room.

Exact inference splits each layer's vertices over the ranks by edges, and the ranks exchange the
layer's output (`LayerTable`). A plan that fills its budget is evaluated in smaller pieces, with
outputs in a file (`evaluation_room`); a piece for which a GPU has no room is halved (DEC-192).

Link prediction ranks a true destination among drawn ones. The encoder runs once for the ends of all
links and negatives, then the ranks share the links. A link's negatives depend on its position in
the split alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import DatasetError, InputError
from gnnplan.runtime.features.cache import CachedFeatureStore
from gnnplan.runtime.features.device_store import DeviceFeatureStore
from gnnplan.runtime.features.gather import gather_rows
from gnnplan.runtime.features.store import TypedFeatureStore
from gnnplan.runtime.features.tier import AbstractFeatureStore, SparseHost
from gnnplan.runtime.graph.dataset import Graph, is_typed
from gnnplan.runtime.models.adjacency import TorchBlock, torch_block, torch_blocks
from gnnplan.runtime.models.kernels import FullNeighbourhoods, count_work, vertices_per_layer
from gnnplan.runtime.models.metrics import Metric, metric_of
from gnnplan.runtime.models.weights import count_self_loops, fill_weights
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.processor import processor_of
from gnnplan.runtime.sampling.exclusion import NegativeSampler
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from gnnplan.runtime.sampling.rng import Purpose
from gnnplan.runtime.sampling.typed import SortedByType, TypedSampler, typed_sampler
from gnnplan.runtime.train.evaluation_room import (
    MOST_CHUNK_BYTES,
    TABLES,
    most_sampled_bytes,
    sampled_bytes,
)
from gnnplan.runtime.train.layer_table import (
    DeviceLayerTable,
    LayerTable,
    TableRoom,
    make_layer_table,
    written_bytes,
)

Reader = Callable[[NDArray[np.int64], NDArray[np.float32]], object]
_SAMPLED_BATCH = 1024
_EXACT_BATCH = 128
"""Seeds per batch of a model that cannot run layer by layer: batches of whole L-hops."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Metric over all ranks."""

    metric: str
    """Name: accuracy, micro_f1, roc_auc or mrr."""
    value: float
    """Value; NaN where nothing was counted."""
    count: int
    """Number of vertices with a known label, or of links."""
    note: str = field(default="", compare=False)
    """What this rank had to do for want of memory; empty where all went as its room said."""


def evaluate(
    model: nn.Module,
    graph: Graph,
    store: AbstractFeatureStore | None,
    ids: NDArray[np.int64],
    *,
    workload: Workload,
    fanouts: list[int] | None = None,
    comm: Communicator | None = None,
    chunk_bytes: int = MOST_CHUNK_BYTES,
    table_bytes: int | None = None,
    device_table_bytes: int = 0,
    epoch: int = 0,
    scratch: Path | None = None,
    lists: SortedByType | None = None,
    where: str = "evaluation",
) -> Score:
    """Score the model on vertices `ids` (n,); every rank calls it with the same ones.

    Without `fanouts` the logits are those of the full graph: layer by layer where the model has
    `num_layers` layers and forward_layer(layer, x, block), else on whole L-hop neighbourhoods. The
    model keeps its mode.

    Args:
        model: forward(x, blocks) -> logits.
        graph: Dataset, from whose mapping ranks read features.
        store: Reader of features: a GPU's for rows that it reads in place, another one for one rank
            alone, since with several it may be collective, and the loader's threads may be reading
            through it.
        ids: Vertices to score.
        workload: The model's weights, layers and seed.
        fanouts: Fan-outs of sampled evaluation, first hop first.
        comm: All ranks; None: this process alone.
        chunk_bytes: Most bytes of a piece's input rows; one vertex with more neighbours passes it.
        table_bytes: Most bytes of a layer's output in a rank's own memory; a larger one is a file.
        device_table_bytes: Most bytes of one in the GPU's memory; a larger one is the host's.
        epoch: Epoch of the stream of sampled draws.
        scratch: Folder of layer outputs in files; None: the system's temporary one.
        lists: A typed graph's lists by type, where they are sorted already.
        where: What is scored, for errors: "epoch 3, validation".
    """
    metric = metric_of(graph.task)
    if graph.y is None:
        raise DatasetError(f"{graph.name}: expected labels (y.npy) to evaluate with, found none")
    run = Evaluation(
        model=model, graph=graph, store=store, workload=workload, comm=comm, metric=metric,
        chunk_bytes=chunk_bytes, table_bytes=table_bytes, device_table_bytes=device_table_bytes,
        scratch=scratch, lists=lists,
    )  # fmt: skip
    run.run(ids, fanouts, epoch)
    value, count = metric.compute(comm, where)
    return Score(metric=metric.name, value=value, count=count, note=run.note)


def reader_of(graph: Graph, store: AbstractFeatureStore | None) -> Reader:
    """Return the reader of rows: the store without its cache, or the dataset's own arrays.

    A cache would keep what evaluation reads, and training would find other rows there.
    """
    if store is not None:
        return store.below.read if isinstance(store, CachedFeatureStore) else store.read
    if graph.x_by_type:
        return TypedFeatureStore(graph).read
    if graph.x is not None:
        table = graph.x
        return lambda ids, out: gather_rows(table, ids, out)
    if graph.x_csr is None:
        raise DatasetError(f"{graph.name}: expected features to evaluate with, found none")
    csr = graph.x_csr
    return SparseHost(csr.indptr, csr.indices, csr.data, graph.feature_dim).take


@dataclass(kw_only=True)
class Evaluation:
    """One pass of a model over vertices; `count` gets the outputs of each piece."""

    model: nn.Module
    graph: Graph
    store: AbstractFeatureStore | None = None
    """Reader of features: a GPU's, or for one rank alone any; with several it may be collective."""
    workload: Workload
    comm: Communicator | None
    metric: Metric
    chunk_bytes: int = MOST_CHUNK_BYTES
    table_bytes: int | None = None
    device_table_bytes: int = 0
    scratch: Path | None = None
    lists: SortedByType | None = None
    """A typed graph's lists by type; None sorts them."""
    note: str = ""
    """See `Score.note`."""

    def __post_init__(self) -> None:
        self.device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        on_gpu = processor_of(self.device).is_gpu
        self.rows = self.store if isinstance(self.store, DeviceFeatureStore) and on_gpu else None
        alone = self.size == 1 and self.rows is None
        self.read = reader_of(self.graph, self.store if alone else None)
        self.room = TableRoom(
            host_bytes=self.table_bytes,
            device=self.device if on_gpu else None,
            device_bytes=self.device_table_bytes,
        )

    def run(self, ids: NDArray[np.int64], fanouts: list[int] | None, epoch: int = 0) -> bool:
        """Compute the outputs of the vertices; return whether it was done layer by layer.

        Raises:
            torch.OutOfMemoryError: even one vertex finds no room.
        """
        model = self.model
        layered = fanouts is None and hasattr(model, "forward_layer")
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                if layered:
                    self.layer_by_layer(ids)
                elif fanouts is not None:
                    self.by_sampling(ids, fanouts, _SAMPLED_BATCH, epoch)
                else:
                    self.by_sampling(ids, [-1] * self.workload.num_layers, _EXACT_BATCH, epoch)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"expected room on {self.device} to evaluate one vertex with the neighbours "
                f"that its layer or sampler takes, found too little ({error}); fewer by "
                "--eval-fanouts, or none by --eval-every 0"
            ) from None
        finally:
            model.train(was_training)
        return layered

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return 0 if self.comm is None else self.comm.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.comm is None else self.comm.size

    def by_sampling(
        self, ids: NDArray[np.int64], fanouts: list[int], batch_size: int, epoch: int
    ) -> None:
        """Score this rank's share of the vertices in sampled batches.

        They are of `batch_size` seeds where the room is sure to hold them, else small at first: a
        batch is as large as it is once it is drawn.
        """
        sampler, fill = self._sampler(fanouts), self._weights(self.workload)
        mine = np.unique(ids)[self.rank :: self.size]
        room, width = most_sampled_bytes(self.chunk_bytes), self.graph.feature_dim

        def score(seeds: NDArray[np.int64]) -> bool:
            # Draws depend on the vertex, not on the step: any split over ranks draws the same.
            batch = fill(sampler.sample(seeds, epoch=epoch, step=0))
            taken = sampled_bytes(batch.n_id.shape[0], batch.num_edges, width)
            if taken > room and len(seeds) > 1:
                return False
            x = self._features(batch.n_id)
            blocks = [block.to(self.device) for block in torch_blocks(batch)]
            self.count(self.model(x, blocks), seeds)
            return True

        first = batch_size
        if sampled_bytes(self.graph.num_nodes, self.graph.num_edges, width) > room:
            edges = most_edges_of_seed(sampler)
            first = int(min(batch_size, max(1, room // sampled_bytes(1 + edges, edges, width))))
        self.run_in_pieces(mine, np.arange(1, mine.shape[0] + 1), batch_size, score, first)

    def run_in_pieces(
        self,
        ids: NDArray[np.int64],
        work: NDArray[np.int64],
        most: int,
        run: Callable[[NDArray[np.int64]], bool],
        begin: int | None = None,
    ) -> None:
        """Run on vertices in pieces of at most `most` work, one vertex at the least.

        With `begin` the first piece is of that work, and each next one of twice as much. A piece
        that finds no room, or is too large as `run` says, is halved, and none behind it is larger.
        `work` holds the running sums of the vertices' work.

        Raises:
            torch.OutOfMemoryError: one vertex finds no room.
        """
        first, size = 0, most if begin is None else begin
        while first < ids.shape[0]:
            done = int(work[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(work, done + size, side="right")))
            if self._finds_room(ids[first:last], run):
                first, size = last, min(most, 2 * size)
            else:
                size = most = max(1, (int(work[last - 1]) - done) // 2)

    def _finds_room(self, ids: NDArray[np.int64], run: Callable[[NDArray[np.int64]], bool]) -> bool:
        try:
            return run(ids)
        except torch.OutOfMemoryError:
            if len(ids) == 1:
                raise
            self.note = (
                f"validation and test go on in smaller pieces: rank {self.rank} found no room on "
                f"{self.device} for {len(ids):,} vertices at once"
            )
            return False

    def _sampler(self, fanouts: list[int]) -> NeighborSampler:
        graph, workload = self.graph, self.workload
        if is_typed(workload):
            lists, purpose = self.lists, Purpose.CALIBRATION
            return typed_sampler(graph, workload, fanouts, lists=lists, purpose=purpose)
        return NeighborSampler(
            graph.indptr, graph.indices, fanouts, seed=workload.seed, purpose=Purpose.CALIBRATION
        )

    def layer_by_layer(self, ids: NDArray[np.int64]) -> None:
        """Run each layer over all vertices the next one needs; score the last layer's rows."""
        graph, num_layers = self.graph, self.workload.num_layers
        # Over full neighbourhoods the sampled subgraph is the graph: full degrees are the norm.
        fill = self._weights(replace(self.workload, gcn_norm="full"))
        neighbourhoods = FullNeighbourhoods(graph.indptr, graph.indices)
        table: LayerTable | DeviceLayerTable | None = None
        layers = vertices_per_layer(graph.indptr, graph.indices, ids, num_layers)
        for layer, rows in enumerate(layers):
            following: LayerTable | DeviceLayerTable | None = None
            parts = split_by_edges(rows, graph.indptr, self.size)
            width = graph.feature_dim if table is None else table.rows.shape[1]
            last = layer == num_layers - 1
            # The last layer's outputs are scored and dropped: no table needs their width.
            out_width = width if last else self._width_after(layer, width)
            if not last:
                ahead = layers[layer:-1][: TABLES if table is None else 1]
                need = sum(written_bytes(len(e), graph.num_nodes, out_width) for e in ahead)
                following = make_layer_table(
                    graph.num_nodes, out_width, self.comm, self.scratch, self.room, need
                )
            most_edges = self.chunk_bytes // (4 * max(width, out_width))
            mine = parts[self.rank]
            piece = partial(self._run_layer, layer, table, following, fill, neighbourhoods)
            self.run_in_pieces(mine, count_work(mine, graph.indptr), most_edges, piece)
            if following is not None:
                following.exchange(parts)
            if table is not None:
                table.close()
            table = following

    def _run_layer(
        self,
        layer: int,
        table: LayerTable | DeviceLayerTable | None,
        following: LayerTable | DeviceLayerTable | None,
        fill: Callable[[MiniBatch], MiniBatch],
        neighbourhoods: FullNeighbourhoods,
        ids: NDArray[np.int64],
    ) -> bool:
        """Compute a layer of some vertices from one table into the next, or into the score."""
        batch = fill(neighbourhoods.batch(ids))
        x = self._inputs(batch.n_id, table)
        out = self._forward_layer(layer, x, torch_block(batch.blocks[0]).to(self.device))
        if following is None:
            self.count(out, ids)
        else:
            following.put(ids, out)
        return True

    def _forward_layer(self, layer: int, x: Tensor, block: TorchBlock) -> Tensor:
        forward_layer: Callable[[int, Tensor, TorchBlock], Tensor] = self.model.forward_layer  # pyright: ignore[reportAssignmentType]
        return forward_layer(layer, x, block)

    def _width_after(self, layer: int, width: int) -> int:
        """Return the columns of a layer's output, from a block without vertices."""
        empty = TorchBlock(
            num_src=0,
            num_dst=0,
            indptr=torch.zeros(1, dtype=torch.int64),
            indices=torch.empty(0, dtype=torch.int32),
            weight=torch.empty(0) if self.workload.model == "gcn" else None,
        ).to(self.device)
        return self._forward_layer(layer, torch.empty(0, width, device=self.device), empty).shape[1]

    def _weights(self, workload: Workload) -> Callable[[MiniBatch], MiniBatch]:
        graph = self.graph
        if workload.model != "gcn" or workload.gcn_norm != "full":
            return lambda batch: fill_weights(batch, workload)
        degree = np.diff(graph.indptr)
        loops = count_self_loops(graph.indptr, graph.indices)
        return lambda batch: fill_weights(batch, workload, degree, self_loops=loops)

    def _features(self, n_id: NDArray[np.int64]) -> Tensor:
        if self.rows is not None:
            return self._looked_up(self.rows, n_id)
        x = np.empty((n_id.shape[0], self.graph.feature_dim), np.float32)
        self.read(n_id, x)
        return torch.from_numpy(x).to(self.device)

    def _looked_up(self, store: DeviceFeatureStore, n_id: NDArray[np.int64]) -> Tensor:
        """Return rows of the GPU's store; the host reads what that does not read in place."""
        rows, elsewhere = store.look_up(torch.from_numpy(np.array(n_id)).to(self.device))
        places = elsewhere.cpu().numpy()
        if places.size:
            x = np.empty((places.size, self.graph.feature_dim), np.float32)
            self.read(n_id[places], x)
            rows.index_copy_(0, elsewhere, torch.from_numpy(x).to(self.device))
        return rows

    def _inputs(
        self, n_id: NDArray[np.int64], table: LayerTable | DeviceLayerTable | None
    ) -> Tensor:
        return self._features(n_id) if table is None else table.take(n_id, self.device)

    def count(self, logits: Tensor, ids: NDArray[np.int64]) -> None:
        """Score some of this rank's vertices."""
        assert self.graph.y is not None
        y = torch.from_numpy(np.array(self.graph.y[ids]))
        self.metric.update(logits.cpu(), y)


def most_edges_of_seed(sampler: NeighborSampler) -> float:
    """Return the most edges that the fan-outs let a batch of one seed draw; perhaps infinite."""
    typed = isinstance(sampler, TypedSampler)
    fanouts = sampler.type_fanouts if typed else np.array(sampler.fanouts)[:, None]
    drawn = np.where(fanouts < 0, np.inf, fanouts).sum(axis=1)
    return float(np.cumprod(drawn).sum())


def split_by_edges(
    rows: NDArray[np.int64], indptr: NDArray[np.int64], num_parts: int
) -> list[NDArray[np.int64]]:
    """Cut sorted vertices into contiguous parts of about equal edges plus vertices."""
    work = count_work(rows, indptr)
    total = int(work[-1]) if work.size else 0
    goals = [total * part // num_parts for part in range(1, num_parts)]
    return np.split(rows, np.searchsorted(work, goals, side="right"))


EVALUATION_EPOCH = 1 << 31
"""Epoch of evaluation's negatives, which no training reaches."""
_CHUNK_BYTES = 64 << 20


@dataclass(kw_only=True)
class _Encoding(Evaluation):
    """Pass that keeps the encoder's output rows instead of scoring them."""

    table: LayerTable

    def count(self, logits: Tensor, ids: NDArray[np.int64]) -> None:
        """Write the rows into the table."""
        width = self.table.rows.shape[1]
        if logits.shape[1] != width:
            raise InputError(
                f"model: expected node vectors of the workload's hidden width {width} for task "
                f"link, found {logits.shape[1]}"
            )
        self.table.rows[ids] = logits.float().cpu().numpy()


def evaluate_links(
    model: nn.Module,
    graph: Graph,
    store: AbstractFeatureStore | None,
    pairs: NDArray[np.int64],
    *,
    workload: Workload,
    fanouts: list[int] | None = None,
    comm: Communicator | None = None,
    chunk_bytes: int = MOST_CHUNK_BYTES,
    table_bytes: int | None = None,
    device_table_bytes: int = 0,
    scratch: Path | None = None,
    where: str = "evaluation",
) -> Score:
    """Return the MRR of links among `workload.links.eval_negatives` uniform negatives each.

    Every rank calls it with the same `pairs`, int64 (n, 2) of source and destination. Stored edges
    of the graph are not drawn as negatives. The model gives node vectors of the workload's hidden
    width. All else is as in `evaluate`.
    """
    sampler = NegativeSampler(
        graph.indptr, graph.indices, workload.links.eval_negatives, seed=workload.seed
    )
    pairs = np.asarray(pairs)
    negatives = sampler.draw(pairs, np.arange(len(pairs)), epoch=EVALUATION_EPOCH, step=0)
    wanted = np.zeros(graph.num_nodes, np.bool_)
    wanted[pairs] = wanted[negatives] = True
    nodes = np.flatnonzero(wanted)
    metric = metric_of("link")
    run = _Encoding(
        model=model, graph=graph, store=store, workload=workload, comm=comm, metric=metric,
        chunk_bytes=chunk_bytes, table_bytes=table_bytes, device_table_bytes=device_table_bytes,
        scratch=scratch,
        table=LayerTable(
            graph.num_nodes, workload.hidden, comm, scratch, table_bytes,
            written_bytes(len(nodes), graph.num_nodes, workload.hidden),
        ),
    )  # fmt: skip
    layered = run.run(nodes, fanouts)
    parts = (
        split_by_edges(nodes, graph.indptr, run.size)
        if layered
        else [nodes[rank :: run.size] for rank in range(run.size)]
    )
    run.table.exchange(parts)
    h = torch.from_numpy(np.asarray(run.table.rows))
    own = slice(run.rank, None, run.size)
    mine = torch.from_numpy(np.concatenate([pairs[own], negatives[own]], axis=1))
    size = max(1, min(_CHUNK_BYTES, chunk_bytes) // (4 * workload.hidden * mine.shape[1]))
    with torch.no_grad():
        for chunk in mine.split(size):
            metric.update(h, chunk)
    del h
    run.table.close()
    value, count = metric.compute(comm, where)
    return Score(metric=metric.name, value=value, count=count, note=run.note)
