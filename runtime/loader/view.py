"""View of a loader's batches as PyG hands them out, with what a script adds to them."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch

from gnnplan.runtime.errors import InputError
from gnnplan.runtime.graph.dataset import Graph, GraphTypes, is_typed, types_of
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.sampling.pyg import HeteroView, to_pyg

NO_EDGE = np.iinfo(np.int64).min
"""`e_id` of a self-loop that import added, which is no edge of the source.

It is an error as an index, where -1 would take the last edge's row.
"""


class PygView:
    """View of a loader's batches as PyG's `Data`, or `HeteroData` of a typed graph.

    Samplers count edges by their place in the dataset's `indices`. In a view `e_id` is the edge's
    place in the imported source, for `data.edge_attr[batch.e_id]`; `edge_weight` holds the
    dataset's weights, unless the sampler gives its own. Both are read here alone, from mapped
    files. `form`, `transform`, `node_data` and `edge_data` are as in `PlannedLoader`.
    """

    def __init__(
        self,
        graph: Graph,
        workload: Workload,
        *,
        form: Literal["triplet", "binary"] = "triplet",
        transform: Callable[[Any], Any] | None = None,
        node_data: Mapping[str, Any] | None = None,
        edge_data: Mapping[str, Any] | None = None,
    ) -> None:
        self._graph, self._hetero = graph, None
        self._form, self._transform = form, transform
        self._edge_id = None if graph.edge_id is None else np.asarray(graph.edge_id)
        self._weight = None if graph.edge_weight is None else np.asarray(graph.edge_weight)
        sizes: dict[str, int] = {}
        if is_typed(workload):
            types = types_of(graph)
            self._hetero = HeteroView(graph, types)
            sizes = _sizes_by_type(graph, types)
        self._node_data = _columns_of("node_data", node_data, sizes or graph.num_nodes)
        self._edge_data = _columns_of("edge_data", edge_data, None)

    def __call__(self, batch: MiniBatch) -> Any:
        """Return the batch with x, y and the further columns of all its nodes and edges."""
        found = self._typed(batch) if self._hetero is not None else self._plain(batch)
        return found if self._transform is None else self._transform(found)

    def _plain(self, batch: MiniBatch) -> Any:
        labels = None if self._graph.y is None else torch.from_numpy(self._graph.y[batch.n_id])
        data = to_pyg(batch, batch.x, labels)
        if batch.links is not None and self._form == "binary":
            _label_links(data)
        for name, rows in self._node_data.items():
            data[name] = _take(rows, data.n_id)
        self._fill_edges(data)
        return data

    def _typed(self, batch: MiniBatch) -> Any:
        assert self._hetero is not None
        data = self._hetero(batch, batch.x)
        for name, columns in self._node_data.items():
            for column, rows in columns.items():
                data[name][column] = _take(rows, data[name].n_id)
        for store in data.edge_stores:
            self._fill_edges(store)
        return data

    def _fill_edges(self, edges: Any) -> None:
        """Give the source's places and columns to edges, whose `e_id` are places in `indices`."""
        if "e_id" not in edges:
            return
        places = edges.e_id.numpy()
        if self._weight is not None and "edge_weight" not in edges:
            edges.edge_weight = torch.from_numpy(self._weight[places])
        if self._edge_id is not None:
            found = self._edge_id[places]
            edges.e_id = torch.from_numpy(np.where(found < 0, NO_EDGE, found))
        for name, rows in self._edge_data.items():
            edges[name] = _take_edges(name, rows, edges.e_id)


def _sizes_by_type(graph: Graph, types: GraphTypes) -> dict[str, int]:
    if graph.node_type is None or not graph.x_by_type:
        return {types.node_types[0]: graph.num_nodes}
    counts = np.bincount(graph.node_type, minlength=len(types.node_types))
    return dict(zip(types.node_types, counts.tolist(), strict=True))


def _columns_of(
    what: str, given: Mapping[str, Any] | None, sizes: Mapping[str, int] | int | None
) -> dict[str, Any]:
    """Return columns after a look at their numbers of rows; by type where sizes are."""
    found: dict[str, Any] = {}
    for name, rows in (given or {}).items():
        if isinstance(sizes, Mapping):
            if name not in sizes or not isinstance(rows, Mapping):
                raise InputError(
                    f"{what}: expected columns by node type among {', '.join(sizes)}, found "
                    f"{name!r:.60}"
                )
            found[name] = _columns_of(f"{what}[{name!r}]", rows, sizes[name])
            continue
        column = rows if isinstance(rows, torch.Tensor) else np.asarray(rows)
        if sizes is not None and (column.ndim == 0 or len(column) != sizes):
            raise InputError(
                f"{what}: expected {name} with one row for each of {sizes} nodes, found shape "
                f"{list(column.shape)}"
            )
        found[name] = column
    return found


def _take(rows: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return rows of a tensor, or of an array that may be mapped from a file."""
    return rows[ids] if isinstance(rows, torch.Tensor) else torch.from_numpy(rows[ids.numpy()])


def _take_edges(name: str, rows: Any, e_id: torch.Tensor) -> torch.Tensor:
    """Return the rows of a batch's edges, by their places in the source."""
    if e_id.numel() and not 0 <= int(e_id.min()) <= int(e_id.max()) < len(rows):
        if int(e_id.min()) == NO_EDGE:
            raise InputError(
                f"edge_data: expected a row of {name} for each edge, found self-loops that import "
                "added, which have none; import without --self-loops add"
            )
        raise InputError(
            f"edge_data: expected {name} with a row per edge of the source, found {len(rows)} rows "
            f"and an edge {int(e_id.max())}"
        )
    return _take(rows, e_id)


def _label_links(data: Any) -> None:
    """Put links in PyG's binary form: `edge_label_index` and `edge_label`, negatives last."""
    source, negative = data.src_index, data.dst_neg_index
    count = negative.shape[1]
    positives = torch.stack([source, data.dst_pos_index])
    negatives = torch.stack([source.repeat_interleave(count), negative.reshape(-1)])
    data.edge_label_index = torch.cat([positives, negatives], dim=1)
    data.edge_label = torch.cat([torch.ones(len(source)), torch.zeros(negatives.shape[1])])
    for name in ("src_index", "dst_pos_index", "dst_neg_index"):
        del data[name]
