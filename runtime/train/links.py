"""Validation and test of link prediction: the rank of a true destination among drawn ones.

The encoder runs once, layer by layer over full neighbourhoods (`evaluate`), for the ends of all
links and negatives; then the ranks of the job share the links. A link's negatives depend on its
position in the split alone: they are the same after every epoch and on any number of ranks.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gnnplan.runtime.comm.collectives import Communicator
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.features.store import AbstractFeatureStore
from gnnplan.runtime.graph.dataset import Graph
from gnnplan.runtime.models.metrics import metric_of
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.sampling.negative import NegativeSampler
from gnnplan.runtime.train.evaluate import (
    MOST_CHUNK_BYTES,
    Evaluation,
    LayerTable,
    Score,
    reader_of,
    split_by_edges,
)

EVALUATION_EPOCH = 1 << 31
"""An epoch that no training reaches: its negatives are those of evaluation."""
_CHUNK_BYTES = 64 << 20


@dataclass(kw_only=True)
class _Encoding(Evaluation):
    """Keeps the encoder's output rows instead of scoring them."""

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
    scratch: Path | None = None,
    where: str = "evaluation",
) -> Score:
    """MRR of links among `workload.links.eval_negatives` uniform negatives each.

    Every rank calls it with the same `pairs`. Stored edges of the graph are not drawn as negatives.

    Args:
        model: forward(x, blocks) -> node vectors; left in the mode it was in.
        graph: The dataset; the links are none of its stored edges, or are known to the model.
        store: See `evaluate`.
        pairs: int64 [n, 2], source and destination.
        workload: Names the model's weights, layers, seed and links.
        fanouts: Encode by sampling with these, first hop first; None: full neighbourhoods.
        comm: The ranks; None: this process alone.
        chunk_bytes: See `evaluate`.
        table_bytes: See `evaluate`.
        scratch: See `evaluate`.
        where: See `evaluate`.

    Raises:
        DatasetError: the graph has no features.
        InputError: the model gives vectors of another width.
        GnnplanError: a score is NaN or infinite; every rank raises it.
    """
    sampler = NegativeSampler(
        graph.indptr, graph.indices, workload.links.eval_negatives, seed=workload.seed
    )
    pairs = np.asarray(pairs)
    negatives = sampler.draw(pairs, np.arange(len(pairs)), epoch=EVALUATION_EPOCH, step=0)
    links = np.concatenate([pairs, negatives], axis=1)
    nodes = np.unique(links)
    metric = metric_of("link")
    run = _Encoding(
        model=model,
        graph=graph,
        read=reader_of(graph, store if comm is None or comm.size == 1 else None),
        workload=workload,
        comm=comm,
        metric=metric,
        device=next((p.device for p in model.parameters()), torch.device("cpu")),
        chunk_bytes=chunk_bytes,
        table_bytes=table_bytes,
        scratch=scratch,
        table=LayerTable(graph.num_nodes, workload.hidden, comm, scratch, table_bytes),
    )
    layered = run.run(nodes, fanouts)
    parts = (
        split_by_edges(nodes, graph.indptr, run.size)
        if layered
        else [nodes[rank :: run.size] for rank in range(run.size)]
    )
    run.table.exchange(parts)
    h = torch.from_numpy(np.asarray(run.table.rows))
    mine = torch.from_numpy(links[run.rank :: run.size])
    size = max(1, min(_CHUNK_BYTES, chunk_bytes) // (4 * workload.hidden * links.shape[1]))
    with torch.no_grad():
        for chunk in mine.split(size):
            metric.update(h, chunk)
    del h
    run.table.close()
    value, count = metric.compute(comm, where)
    return Score(metric=metric.name, value=value, count=count)
