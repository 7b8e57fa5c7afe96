"""Types of a graph's nodes and edges: their names, and where a node's own table has its row.

A typed dataset keeps one numbering for all nodes. `node_type.npy` and `edge_type.npy` hold numbers,
graph.json their names; an edge type is named `source__relation__destination`, PyG's triple.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.errors import DatasetError
from runtime.graph.dataset import Graph
from runtime.plan.schema import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphTypes:
    """What a model of typed graphs needs to know of the graph."""

    edge_types: list[str]
    """Names; their order is their number."""
    node_types: list[str]
    widths: list[int]
    """Feature columns of each node type."""


def is_typed(workload: Workload) -> bool:
    """Whether the model reads the types of edges, so that each type is sampled apart."""
    return workload.model == "rgcn"


def types_of(graph: Graph) -> GraphTypes:
    """The types of a dataset; one without node types has the single type `node`.

    Raises:
        DatasetError: the edges have no types, or more than there are names.
    """
    if graph.edge_type is None:
        raise DatasetError(
            f"{graph.name}: expected edge types (edge_type.npy) for model rgcn, found none; "
            "choose another model"
        )
    count = int(graph.edge_type.max()) + 1
    names = list(graph.meta.edge_types) or [str(number) for number in range(count)]
    if count > len(names):
        raise DatasetError(
            f"{graph.name}: expected edge types from 0 to {len(names) - 1}, as many as graph.json "
            f"names, found {count - 1}"
        )
    if not graph.x_by_type:
        return GraphTypes(edge_types=names, node_types=["node"], widths=[graph.feature_dim])
    node_types = list(graph.meta.node_types)
    widths = [int(graph.x_by_type[name].shape[1]) for name in node_types]
    return GraphTypes(edge_types=names, node_types=node_types, widths=widths)


def rows_within_types(node_type: NDArray[np.integer], num_types: int) -> NDArray[np.int64]:
    """Each node's rank by id among the nodes of its type, int64 [N]: its row in the type's table.

    >>> rows_within_types(np.array([0, 1, 0, 0, 1]), 2).tolist()
    [0, 0, 1, 2, 1]
    """
    rows = np.empty(len(node_type), np.int64)
    for number in range(num_types):
        own = np.flatnonzero(np.asarray(node_type) == number)
        rows[own] = np.arange(len(own))
    return rows
