"""Batches as PyG's loaders give them: what the dataset keeps of nodes and edges, in its places."""

from typing import Any

import numpy as np
import torch

from runtime.graph.dataset import Graph
from runtime.graph.types import types_of
from runtime.loader_typed import is_typed
from runtime.plan import Workload
from runtime.sampling.minibatch import MiniBatch

NO_EDGE = np.iinfo(np.int64).min
"""`e_id` of a self-loop that import added: no edge of the source. As an index it is an error, where
-1 would take the last edge's row."""


class PygView:
    """Turns a loader's batches into PyG's `Data`, or `HeteroData` of a typed graph.

    Samplers count edges by their place in the dataset's `indices`. In a batch `e_id` is the edge's
    place in the source that was imported, so that `data.edge_attr[batch.e_id]` are its edges' rows;
    `edge_weight` are the dataset's, unless the sampler gives weights of its own. Both are read here
    and nowhere else, from mapped files.

    Args:
        graph: The dataset.
        workload: Says whether the graph is typed.
    """

    def __init__(self, graph: Graph, workload: Workload) -> None:
        self._graph, self._hetero = graph, None
        self._edge_id = None if graph.edge_id is None else np.asarray(graph.edge_id)
        self._weight = None if graph.edge_weight is None else np.asarray(graph.edge_weight)
        if is_typed(workload):
            from runtime.sampling.hetero import HeteroView

            self._hetero = HeteroView(graph, types_of(graph))

    def __call__(self, batch: MiniBatch) -> Any:
        """The batch with x and y of all its nodes.

        Raises:
            SamplerError: the batch has no such view.
        """
        if self._hetero is not None:
            typed = self._hetero(batch, batch.x)
            for store in typed.edge_stores:
                self._fill_edges(store)
            return typed
        from runtime.sampling.pyg import to_pyg

        labels = None if self._graph.y is None else torch.from_numpy(self._graph.y[batch.n_id])
        data = to_pyg(batch, batch.x, labels)
        self._fill_edges(data)
        return data

    def _fill_edges(self, edges: Any) -> None:
        """Give edges, whose `e_id` are places in `indices`, the source's places and weights."""
        if "e_id" not in edges:
            return
        places = edges.e_id.numpy()
        if self._weight is not None and "edge_weight" not in edges:
            edges.edge_weight = torch.from_numpy(self._weight[places])
        if self._edge_id is not None:
            found = self._edge_id[places]
            edges.e_id = torch.from_numpy(np.where(found < 0, NO_EDGE, found))
