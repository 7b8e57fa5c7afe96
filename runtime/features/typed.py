"""Features of typed graphs: one table per node type, each of its own width, read from the host.

A row is the node's own row followed by zeros up to the widest type's width, so that a batch's rows
are one buffer as everywhere; a model takes each type's columns alone. Only what a type has is read
and counted.
"""

from typing import Any, no_type_check

import numba
import numpy as np
from numpy.typing import NDArray

from runtime.errors import DatasetError, PlanError
from runtime.features.gather import check_output
from runtime.features.tier import AbstractFeatureStore, Counters
from runtime.graph.dataset import Graph
from runtime.graph.types import rows_within_types
from runtime.plan.schema import Plan

_jit: Any = numba.njit(cache=True, nogil=True)


@_jit
@no_type_check
def _copy_type(table, number, node_type, row_of, ids, out):
    """Copy the rows of the ids of one type; return how many there are."""
    width = table.shape[1]
    count = 0
    for i in range(ids.shape[0]):
        if node_type[ids[i]] == number:
            source = table[row_of[ids[i]]]
            for c in range(width):
                out[i, c] = source[c]
            out[i, width:] = 0
            count += 1
    return count


class TypedFeatureStore(AbstractFeatureStore):
    """The dataset's own tables.

    Args:
        graph: A dataset with a feature table per node type.
        plan: Refused where it places rows elsewhere than on the host; None: not looked at.

    Raises:
        DatasetError: the dataset has no such tables.
        PlanError: the plan places rows in ranks or on disk.
    """

    def __init__(self, graph: Graph, plan: Plan | None = None) -> None:
        if not graph.x_by_type or graph.node_type is None:
            raise DatasetError(f"{graph.name}: expected a feature table per node type, found none")
        placed = None if plan is None else plan.strategy.features
        cached = placed is not None and placed.cache.policy != "none"
        if placed is not None and (any(placed.own_rows) or placed.disk_budget_bytes or cached):
            raise PlanError(
                "expected typed features to be placed on the host, found a plan with rows in ranks "
                "or on disk, or with a cache; plan again"
            )
        self._tables: list[Any] = [
            np.asarray(graph.x_by_type[name]) for name in graph.meta.node_types
        ]
        self.feature_dim = max(int(table.shape[1]) for table in self._tables)
        self._node_type = np.ascontiguousarray(graph.node_type)
        self._row_of = rows_within_types(self._node_type, len(self._tables))

    @property
    def resident_bytes(self) -> int:
        """Bytes of the index from node to row."""
        return self._row_of.nbytes

    def read(self, ids: NDArray[np.int64], out: NDArray[np.float32]) -> Counters:
        """See `AbstractFeatureStore.read`; columns beyond a node's type are zero."""
        check_output(ids, out, self.feature_dim)
        if len(ids) and (ids.min() < 0 or ids.max() >= len(self._node_type)):
            raise IndexError(f"expected node ids from 0 to {len(self._node_type) - 1}")
        counters = Counters()
        for number, table in enumerate(self._tables):
            rows = int(_copy_type(table, number, self._node_type, self._row_of, ids, out))
            counters.add_rows("host", rows, rows * table.shape[1] * table.dtype.itemsize)
        return counters

    def close(self) -> None:
        """Nothing is held open."""
