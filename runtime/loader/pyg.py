"""PyG's side of a loader: the seeds and keywords that a script names, and the batches it gets.

Training goes over the plan's training seeds, and the plan decides how. Validation, test and
inference go over other seeds, with sizes of the script's own, under the plan's tiers. Batches are
PyG's `Data`, with what a script adds to them.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from gnnplan.runtime.errors import InputError, warn_once
from gnnplan.runtime.graph.dataset import Graph, GraphTypes, is_typed, types_of
from gnnplan.runtime.plan.schema import Plan, Sampler, Strategy, TopologyPlacement, Workload
from gnnplan.runtime.sampling.memory import HopShapes
from gnnplan.runtime.sampling.minibatch import MiniBatch
from gnnplan.runtime.sampling.pyg import (
    NO_EDGE,
    HeteroView,
    columns_of,
    label_links,
    pad_pyg,
    take_edge_rows,
    take_rows,
    to_pyg,
)
from gnnplan.runtime.sampling.registry import DEFAULT_SAMPLER
from gnnplan.runtime.sampling.typed import fanouts_by_type, read_fanouts

_log = logging.getLogger(__name__)

SPLITS = ("train", "val", "test")
_THREADS = {
    "num_workers", "persistent_workers", "pin_memory", "pin_memory_device", "prefetch_factor",
    "timeout", "multiprocessing_context", "in_order", "filter_per_worker", "is_sorted",
}  # fmt: skip
"""Keywords of how batches are made, which change no batch: the plan's threads make them."""
_NEUTRAL: dict[str, Any] = {
    "replace": False, "subgraph_type": "directional", "disjoint": False, "directed": True,
    "temporal_strategy": "uniform", "input_time": None, "time_attr": None, "weight_attr": None,
    "neighbor_sampler": None, "transform_sampler_output": None, "edge_label_time": None,
    "worker_init_fn": None, "generator": None, "collate_fn": None, "sampler": None,
    "batch_sampler": None,
}  # fmt: skip
"""Value of each of PyG's and torch's keywords that asks for what the plan does anyway."""
_FLAGS = {"replace": "--sampler neighbor:draws=replacement", "weight_attr": "--sampler"}
_OTHER_GRAPH = "the graph is the plan's; import yours (gnnplan graph import) and plan it"
_ELSEWHERE = {
    "data": _OTHER_GRAPH,
    "dataset": _OTHER_GRAPH,
    "edge_label": "label links by neg_sampling='binary'",
}


def check_keywords(given: Mapping[str, Any]) -> None:
    """Accept PyG's and torch's other keywords where they ask for nothing else than the plan.

    Keywords of workers are left out with one line of the log; one that would change the batches is
    refused with a TypeError that says who decides it.

    >>> check_keywords({"replace": True})
    Traceback (most recent call last):
    TypeError: PlannedLoader: replace=True: the plan decides that; leave it out, or plan again \
(gnnplan plan --sampler neighbor:draws=replacement)
    """
    ignored = sorted(_THREADS & given.keys())
    for name in sorted(given.keys() - _THREADS):
        if name in _ELSEWHERE:
            raise TypeError(f"PlannedLoader: {name}: {_ELSEWHERE[name]}")
        if name not in _NEUTRAL:
            raise TypeError(f"PlannedLoader() got an unexpected keyword argument {name!r}")
        value, same = getattr(given[name], "value", given[name]), _NEUTRAL[name]  # of PyG's enums
        if not (value is same or value == same):
            flag = f" (gnnplan plan {_FLAGS[name]})" if name in _FLAGS else ""
            raise TypeError(
                f"PlannedLoader: {name}={value!r:.60}: the plan decides that; leave it out, or "
                f"plan again{flag}"
            )
    if ignored:
        _log.info("PlannedLoader: %s left out: the plan's threads make batches", ", ".join(ignored))


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Seeds that a loader goes over, and the plan that it follows there."""

    graph: Graph
    """The plan's graph, with the seeds as `train_idx`."""
    plan: Plan
    shuffle: bool = True
    drop_last: bool = False
    alone: bool = False
    """Whether this rank goes over all of the seeds by itself."""


def check_padded(padded: float, workload: Workload, *, blocks: bool) -> None:
    """Refuse padded batches of several types or blocks, and what is no share of batches."""
    if not padded:
        return
    if blocks:
        raise TypeError("PlannedLoader: padded: expected blocks=False, since it pads PyG's Data")
    if not 0 < padded <= 1:
        raise TypeError(
            f"PlannedLoader: padded: expected True, or the share of batches that fit, between 0 "
            f"and 1, found {padded!r:.60}"
        )
    if is_typed(workload):
        raise InputError(
            "padded: expected a graph without types, found types, for which it is not built; leave "
            "it out"
        )


def select_training_seeds(
    plan: Plan,
    graph: Graph,
    *,
    batch_size: int | None = None,
    num_neighbors: Any = None,
    shuffle: bool | None = None,
    drop_last: bool = False,
) -> Selection:
    """Return the plan's own seeds; TypeError for keywords that ask for something else."""
    if shuffle is False or drop_last:
        raise TypeError(
            "PlannedLoader: shuffle and drop_last: training goes over each seed once per epoch in "
            "an order of its own, as the plan counts on; leave them out, or name other input_nodes"
        )
    _refuse_other_sizes(plan, graph, batch_size, num_neighbors)
    return Selection(graph=graph, plan=plan)


def select_seeds(
    plan: Plan,
    graph: Graph,
    input_nodes: Any = None,
    *,
    edge_label_index: Any = None,
    batch_size: int | None = None,
    num_neighbors: Any = None,
    shuffle: bool | None = None,
    drop_last: bool = False,
    blocks: bool = True,
    alone: bool = False,
) -> Selection:
    """Return the seeds that PyG's keywords ask for, and the plan for them.

    Their neighbours are drawn by the plain neighbour sampler; each rank takes its share.

    Args:
        plan: The plan.
        graph: Its dataset.
        input_nodes: "train", "val", "test", a mask [N], node ids, None for all nodes; in a typed
            graph also (type, mask or ids of that type, or None).
        edge_label_index: Links [2, n] of task link, instead of `input_nodes`.
        batch_size: Seeds per batch of one rank; None: as in training.
        num_neighbors: Fan-outs by hop, -1 for all; by edge type in a typed graph; None: as in
            training.
        shuffle: Whether each epoch has an order of its own; otherwise the order is as given.
        drop_last: Leave out an incomplete last batch.
        blocks: False draws in dialect first_seen, as PyG does.
        alone: Give this rank all seeds, instead of its share; rows of peers may then not be
            exchanged.

    Raises:
        InputError: seeds that the graph does not have.
    """
    seeds = _seeds(graph, input_nodes, edge_label_index)
    if not len(seeds):
        raise InputError("input_nodes: expected at least one seed, found none; name others")
    if alone and any(s.kind in ("peer", "remote") for s in plan.strategy.features.sources):
        raise InputError(
            "alone: expected a plan whose ranks read no rows of one another, found one that does; "
            "go over a share of the seeds on every rank, and sum the counts"
        )
    ranks = 1 if alone else plan.num_ranks
    if shuffle and ranks > 1:
        _say_split(seeds, graph.train_idx, ranks)
    size = plan.workload.batch_size if batch_size is None else int(batch_size) * ranks
    if size < 1:
        raise InputError(f"batch_size: expected at least 1, found {batch_size}; correct it")
    workload = replace(plan.workload, batch_size=size)
    if num_neighbors is not None:
        workload = replace(workload, **read_fanouts(graph, workload, num_neighbors))
    return Selection(
        graph=replace(graph, train_idx=seeds),
        plan=replace(plan, workload=workload, strategy=_plain(plan, blocks)),
        shuffle=bool(shuffle),
        drop_last=drop_last,
        alone=alone,
    )


def means_training(graph: Graph, input_nodes: Any, edge_label_index: Any, shuffle: Any) -> bool:
    """Tell whether a script means the plan's training: by name, or by its seeds, shuffled.

    They have to come in the dataset's order, of which `input_id` are places.
    """
    if edge_label_index is None and isinstance(input_nodes, str) and input_nodes == "train":
        return True
    seeds = _seeds(graph, input_nodes, edge_label_index) if shuffle else None
    return seeds is not None and np.array_equal(seeds, graph.train_idx)


def _say_split(seeds: NDArray[np.int64], train: NDArray[np.int64], ranks: int) -> None:
    """Warn of seeds that are as many of the training nodes as a script gives each rank of DDP."""
    parts = (len(train) // ranks, -(-len(train) // ranks))
    if len(seeds) in parts and seeds.ndim == 1 and np.isin(seeds, train).all():
        warn_once(
            "seeds split by hand",
            f"PlannedLoader: input_nodes are {len(seeds)} of {len(train)} training nodes, as if "
            f"split over {ranks} ranks: each rank goes over its share of them alone; give all "
            "training nodes on every rank",
            UserWarning,
        )


def _plain(plan: Plan, blocks: bool) -> Strategy:
    """Return the plan's strategy with plain neighbour sampling, each rank by itself.

    Shapes of a captured step are those of training's batches, and are left out.
    """
    strategy = plan.strategy
    topology = strategy.topology
    if topology.policy == "partitioned":
        topology = TopologyPlacement()
    return replace(
        strategy,
        sampler=Sampler(
            name=DEFAULT_SAMPLER, dialect=strategy.sampler.dialect if blocks else "first_seen"
        ),
        batching="independent",
        bulk_batches=1,
        topology=topology,
        threads=replace(strategy.threads, capture=False),
        step="eager",
        shapes=None,
    )


def _refuse_other_sizes(
    plan: Plan, graph: Graph, batch_size: int | None, num_neighbors: Any
) -> None:
    """Refuse another batch or other fan-outs than the plan's own."""
    workload, ranks = plan.workload, plan.num_ranks
    if batch_size is not None and batch_size * ranks != workload.batch_size:
        raise TypeError(
            f"PlannedLoader: batch_size: expected {workload.batch_size / ranks:g} on each of "
            f"{ranks} ranks, as planned ({workload.batch_size} in all), found {batch_size}; leave "
            "it out, or plan again (gnnplan plan --batch-size, which counts all ranks)"
        )
    if num_neighbors is None:
        return
    asked = replace(workload, **read_fanouts(graph, workload, num_neighbors))
    planned = fanouts_by_type(graph, workload)
    if fanouts_by_type(graph, asked) != planned:
        expected = planned if workload.type_fanouts else list(workload.fanouts)
        raise TypeError(
            f"PlannedLoader: num_neighbors: expected {expected} as planned, found "
            f"{num_neighbors!r:.100}; leave it out, or plan again (gnnplan plan --fanouts)"
        )


def _seeds(graph: Graph, input_nodes: Any, edge_label_index: Any) -> NDArray[np.int64]:
    """Return the nodes or links that PyG's keywords mean, before any are shuffled."""
    links = _links(graph, input_nodes, edge_label_index)
    return _nodes(graph, input_nodes) if links is None else links


def _links(graph: Graph, input_nodes: Any, edge_label_index: Any) -> NDArray[np.int64] | None:
    """Return links [n, 2] of task link; None for a task of nodes."""
    if graph.task != "link":
        if edge_label_index is not None:
            raise InputError(
                f"edge_label_index: expected a dataset of task link, found {graph.task}; import "
                "it with --task link, or name input_nodes"
            )
        return None
    if edge_label_index is not None:
        pairs = np.asarray(edge_label_index, np.int64).T
    elif isinstance(input_nodes, str) and input_nodes in SPLITS:
        pairs = np.asarray(getattr(graph, f"{input_nodes}_idx"), np.int64)
    else:
        raise InputError(
            f"input_nodes: expected val, test or edge_label_index [2, n] for task link, found "
            f"{input_nodes!r:.60}; name links"
        )
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise InputError(
            f"edge_label_index: expected shape [2, n], found {list(pairs.T.shape)}; give source "
            "and destination of each link"
        )
    _check_range("edge_label_index", pairs, graph.num_nodes)
    return pairs


def _nodes(graph: Graph, input_nodes: Any) -> NDArray[np.int64]:
    """Return the node ids that PyG's `input_nodes` means."""
    if isinstance(input_nodes, str):
        if input_nodes in SPLITS:
            return np.asarray(getattr(graph, f"{input_nodes}_idx"), np.int64)
        if not graph.x_by_type:
            raise InputError(
                f"input_nodes: expected train, val, test, a mask, ids or None, found "
                f"{input_nodes!r:.60}; correct it"
            )
        input_nodes = (input_nodes, None)
    if isinstance(input_nodes, tuple) and input_nodes and isinstance(input_nodes[0], str):
        own = _nodes_of_type(graph, input_nodes[0])
        return own[_ids_of(input_nodes[1], len(own))]
    return _ids_of(input_nodes, graph.num_nodes)


def _nodes_of_type(graph: Graph, name: str) -> NDArray[np.int64]:
    names = list(graph.meta.node_types) if graph.x_by_type else ["node"]
    if name not in names:
        raise InputError(
            f"input_nodes: expected a node type among {', '.join(names)}, found {name!r:.60}"
        )
    if graph.node_type is None:
        return np.arange(graph.num_nodes)
    return np.flatnonzero(np.asarray(graph.node_type) == names.index(name))


def _ids_of(asked: Any, count: int) -> NDArray[np.int64]:
    """Return ids below `count` by a mask, by ids, or all of them for None."""
    if asked is None:
        return np.arange(count)
    given = np.asarray(asked.cpu() if isinstance(asked, torch.Tensor) else asked)
    if given.dtype == np.bool_:
        if given.shape != (count,):
            raise InputError(
                f"input_nodes: expected a mask of {count} nodes, found shape {list(given.shape)}"
            )
        return np.flatnonzero(given)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise InputError(
            f"input_nodes: expected a mask of booleans or a list of node ids, found "
            f"{given.dtype} of shape {list(given.shape)}"
        )
    ids = given.astype(np.int64)
    _check_range("input_nodes", ids, count)
    return ids


def _check_range(what: str, ids: NDArray[np.int64], count: int) -> None:
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        wrong = ids[(ids < 0) | (ids >= count)]
        raise InputError(
            f"{what}: expected nodes from 0 to {count - 1}, found {int(wrong[0])}; correct it"
        )


class PygView:
    """View of a loader's batches as PyG's `Data`, or `HeteroData` of a typed graph.

    Samplers count edges by their place in the dataset's `indices`. In a view `e_id` is the edge's
    place in the imported source, for `data.edge_attr[batch.e_id]`; `edge_weight` holds the
    dataset's weights, unless the sampler gives its own. Both are read here alone, from mapped
    files. `form`, `transform`, `node_data` and `edge_data` are as in `PlannedLoader`; batches are
    padded to `shapes`, where there are any, and lie where the rows do.
    """

    def __init__(
        self,
        graph: Graph,
        workload: Workload,
        *,
        form: Literal["triplet", "binary"] = "triplet",
        transform: Callable[[Any], Any] | None = None,
        node_data: Mapping[str, Any] | None = None,
        edge_data: Mapping[Any, Any] | None = None,
        shapes: HopShapes | None = None,
    ) -> None:
        self._graph, self._hetero = graph, None
        self._form, self._transform, self._shapes = form, transform, shapes
        self.overflowed = 0
        self._edge_id = None if graph.edge_id is None else np.asarray(graph.edge_id)
        self._weight = None if graph.edge_weight is None else np.asarray(graph.edge_weight)
        sizes: dict[str, int] = {}
        if is_typed(workload):
            types = types_of(graph)
            self._hetero = HeteroView(graph, types)
            sizes = _sizes_by_type(graph, types)
        self._node_data = columns_of("node_data", node_data, sizes or graph.num_nodes)
        if sizes and edge_data:
            self._edge_data = {
                name if isinstance(name, str) else "__".join(name): columns_of(
                    "edge_data", columns, None
                )
                for name, columns in edge_data.items()
            }
            unknown = sorted(self._edge_data.keys() - set(types_of(graph).edge_types))
            if unknown:
                raise InputError(
                    f"edge_data: expected columns by edge type among "
                    f"{', '.join(types_of(graph).edge_types)}, found {unknown[0]!r:.80}"
                )
        else:
            self._edge_data = columns_of("edge_data", edge_data, None)

    def __call__(self, batch: MiniBatch) -> Any:
        """Return the batch with x, y and the further columns of all its nodes and edges."""
        found = self._typed(batch) if self._hetero is not None else self._plain(batch)
        if self._shapes is not None:
            found = self._padded(found, batch.y, self._shapes)
        if self._form == "binary" and "src_index" in found:
            label_links(found)
        return found if self._transform is None else self._transform(found)

    def _padded(self, data: Any, labels: Any, shapes: HopShapes) -> Any:
        """Return the batch in fixed shapes; count one that does not fit, and say so once."""
        of_edges = [name for name in ("e_id", "edge_weight") if name in data]
        padded = pad_pyg(
            data, shapes, None if shapes.links else labels,
            [*(name for name in ("x", "n_id") if name in data), *self._node_data],
            [*of_edges, *self._edge_data],
        )  # fmt: skip
        if not padded.padded and not self.overflowed:
            _log.warning(
                "PlannedLoader: a batch of %d nodes and %d edges does not fit padded shapes of %d "
                "and %d; such batches come as they are, and are counted (overflowed)",
                padded.num_nodes, padded.num_edges, sum(shapes.nodes), sum(shapes.edges),
            )  # fmt: skip
        self.overflowed += not padded.padded
        return padded

    def _plain(self, batch: MiniBatch) -> Any:
        if self._shapes is None:
            y = None if self._graph.y is None else torch.from_numpy(self._graph.y[batch.n_id])
            y = None if y is None else y.to(batch.x.device)
            data = to_pyg(batch, batch.x, y, notes=self._graph.meta.notes)
        else:
            data = self._where_rows_are(batch)
        for name, rows in self._node_data.items():
            data[name] = take_rows(rows, data.n_id)
        self._fill_edges(data, self._edge_data)
        return data

    def _where_rows_are(self, batch: MiniBatch) -> Any:
        """Return a batch that is on the rows' device, without its edges' places if none asks."""
        drawn, notes = getattr(batch, "drawn", batch), self._graph.meta.notes
        data = to_pyg(drawn, batch.x, notes=notes).to(batch.x.device)
        if self._weight is None and not self._edge_data:
            data.e_id = None  # to look places up, the host would wait for the device
        return data

    def _typed(self, batch: MiniBatch) -> Any:
        assert self._hetero is not None
        data = self._hetero(batch, batch.x)
        for name, columns in self._node_data.items():
            for column, rows in columns.items():
                data[name][column] = take_rows(rows, data[name].n_id)
        for key, store in zip(data.edge_types, data.edge_stores, strict=True):
            self._fill_edges(store, self._edge_data.get("__".join(key), {}))
        return data

    def _fill_edges(self, edges: Any, columns: Mapping[str, Any]) -> None:
        """Give the source's places and columns to edges, whose `e_id` are places in `indices`."""
        if "e_id" not in edges:
            return
        device, places = edges.e_id.device, edges.e_id.cpu().numpy()
        if self._weight is not None and "edge_weight" not in edges:
            edges.edge_weight = torch.from_numpy(self._weight[places]).to(device)
        if self._edge_id is not None:
            found = self._edge_id[places]
            edges.e_id = torch.from_numpy(np.where(found < 0, NO_EDGE, found)).to(device)
        for name, rows in columns.items():
            edges[name] = take_edge_rows(name, rows, edges.e_id)


def _sizes_by_type(graph: Graph, types: GraphTypes) -> dict[str, int]:
    if graph.node_type is None or not graph.x_by_type:
        return {types.node_types[0]: graph.num_nodes}
    counts = np.bincount(graph.node_type, minlength=len(types.node_types))
    return dict(zip(types.node_types, counts.tolist(), strict=True))
