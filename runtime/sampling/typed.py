"""Neighbour sampling on typed graphs: every edge type has its own fan-out at every hop.

A vertex draws, of each edge type apart, up to that type's fan-out of in-neighbours, uniformly and
without replacement (tests/reference). With R edge types, the edges of type r of vertex v are row
v * R + r; that number also keys their draws. Blocks list a destination's edges type after type,
with `relation_ptr` telling them apart.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, no_type_check

import numpy as np
from numpy.typing import NDArray

from gnnplan.runtime.errors import InputError, SamplerError
from gnnplan.runtime.graph.dataset import Graph, is_typed, types_of
from gnnplan.runtime.plan.schema import Workload
from gnnplan.runtime.sampling.checks import check_fanouts, check_graph, read_only
from gnnplan.runtime.sampling.choose.uniform import AHEAD, choose_row
from gnnplan.runtime.sampling.compiled import form_for, kernel
from gnnplan.runtime.sampling.frontier import (
    Weights,
    bound_edges,
    choose_rows,
    expand_chunks,
    expand_hop,
    rows_per_node,
)
from gnnplan.runtime.sampling.minibatch import Block, MiniBatch, Request
from gnnplan.runtime.sampling.neighbor import NeighborSampler
from gnnplan.runtime.sampling.placed_indices import prefetch_read
from gnnplan.runtime.sampling.workspace import Workspace


@kernel
@no_type_check
def sort_by_type(indptr, indices, edge_type, num_types, ends, sorted_indices, order):
    """Sort each vertex's edges by type, stably.

    Fill ends [N * R + 1], the sorted in-neighbours and, unless `order` is empty, each one's former
    position. Return the position of the first type out of range, or -1.
    """
    ends[:] = 0
    for v in range(indptr.shape[0] - 1):
        for e in range(indptr[v], indptr[v + 1]):
            if edge_type[e] < 0 or edge_type[e] >= num_types:
                return e
            ends[v * num_types + edge_type[e] + 1] += 1
    for row in range(1, ends.shape[0]):
        ends[row] += ends[row - 1]
    free = np.empty(num_types, np.int64)
    for v in range(indptr.shape[0] - 1):
        free[:] = ends[v * num_types : (v + 1) * num_types]
        for e in range(indptr[v], indptr[v + 1]):
            place = free[edge_type[e]]
            free[edge_type[e]] += 1
            sorted_indices[place] = indices[e]
            if order.shape[0] > 0:
                order[place] = e
    return -1


class TypedRows(NamedTuple):
    """A graph with R edge types: vertex v has the rows v * R .. v * R + R - 1."""

    indptr: NDArray[np.integer]
    """Shape (N * R + 1,)."""
    indices: NDArray[np.integer]
    fanouts: NDArray[np.int64]
    """Shape (L, R)."""


@form_for(rows_per_node, TypedRows)
@no_type_check
def _rows_per_node(rows):
    return rows.fanouts.shape[1]


@form_for(bound_edges, TypedRows)
@no_type_check
def _bound_edges(rows, hop, node_ids, first, last):
    total, num_types = 0, rows.fanouts.shape[1]
    for r in range(num_types):
        if rows.fanouts[hop, r] > 0:
            total += (last - first) * rows.fanouts[hop, r]
        else:
            for i in range(first, last):
                row = node_ids[i] * num_types + r
                total += rows.indptr[row + 1] - rows.indptr[row]
    return total


@form_for(choose_rows, TypedRows)
@no_type_check
def _choose_rows(rows, hop, stream, node_ids, i, last, row, edge, enough, row_ptr, positions):
    indptr, indices, fanouts = rows
    num_types = fanouts.shape[1]
    while i < last and edge < enough:
        prefetch_read(indptr, node_ids[i + AHEAD] * num_types)
        for r in range(num_types):
            number = np.uint64(node_ids[i] * num_types + r)
            edge = choose_row(indptr, indices, stream, fanouts[hop, r], number, positions, edge)
            row += 1
            row_ptr[row] = edge
        i += 1
    return i, edge


form_for(expand_hop, TypedRows)(expand_chunks.py_func)


Fill = Callable[[NDArray[np.uint8]], None]
"""Function that fills a stretch of memory."""
Hold = Callable[[int, Fill], NDArray[np.uint8]]
"""Function that finds so many bytes of memory, has them filled, and returns them."""


def hold_alone(num_bytes: int, fill: Fill) -> NDArray[np.uint8]:
    """Hold bytes in this process's memory."""
    room = np.empty(num_bytes, np.uint8)
    fill(room)
    return room


@dataclass(frozen=True, slots=True)
class SortedByType:
    """A graph's lists sorted by type, stably: vertex v has the rows v * R .. v * R + R - 1."""

    ends: NDArray[np.int64]
    """Shape (N * R + 1,)."""
    indices: NDArray[np.integer]
    order: NDArray[np.int64]
    """Position in the graph of each sorted edge; empty where it was not kept."""

    @staticmethod
    def of(
        indptr: NDArray[np.integer],
        indices: NDArray[np.integer],
        edge_type: NDArray[np.integer],
        num_types: int,
        *,
        keep_order: bool = True,
        hold: Hold = hold_alone,
    ) -> "SortedByType":
        """Sort a graph's edges into memory that `hold` finds.

        Raises:
            SamplerError: there are not as many types as edges, or one is out of range.
        """
        indptr, indices = check_graph(indptr, indices)
        if edge_type.shape != indices.shape:
            raise SamplerError(
                f"expected one edge type per edge ({len(indices)}), found {list(edge_type.shape)}"
            )
        types = read_only(np.ascontiguousarray(edge_type, dtype=np.int32))
        ends = 8 * ((len(indptr) - 1) * num_types + 1)
        order = ends + 8 * len(indices) * keep_order

        def arrays(room: NDArray[np.uint8]) -> SortedByType:
            return SortedByType(
                room[:ends].view(np.int64),
                room[order:].view(indices.dtype),
                room[ends:order].view(np.int64),
            )

        def fill(room: NDArray[np.uint8]) -> None:
            into = arrays(room)
            bad = int(
                sort_by_type(indptr, indices, types, num_types, into.ends, into.indices, into.order)
            )
            if bad >= 0:
                raise SamplerError(
                    f"expected edge types from 0 to {num_types - 1}, one fan-out list each, found "
                    f"type {int(edge_type[bad])} at edge {bad}; give it fan-outs"
                )

        return arrays(hold(order + indices.nbytes, fill))


def check_type_fanouts(fanouts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the fan-outs of every edge type as integers; all types have one per layer."""
    by_type = [check_fanouts(each) for each in fanouts]
    if not by_type or len({len(each) for each in by_type}) > 1:
        raise SamplerError(
            "expected fan-outs of one length for every edge type, found "
            f"{[list(each) for each in by_type]}; give each type one per layer"
        )
    return by_type


class TypedSampler(NeighborSampler):
    """Samples as `NeighborSampler`, with fan-outs by edge type.

    Takes 8 bytes per vertex and edge type, and 4 or 8 per edge, with edge ids 8 more.

    Args (others as in `NeighborSampler`):
        edge_type: int [E], from 0 to R - 1.
        fanouts: Per edge type its neighbours per hop, [R][L], next to the seeds first; -1 takes
            all.
        node_type: int [N], copied into each outermost block's `src_type`; None: one type.
        lists: The graph's lists sorted by type, with their order for edge ids; None sorts them.
    """

    def __init__(
        self,
        indptr: NDArray[np.integer],
        indices: NDArray[np.integer],
        edge_type: NDArray[np.integer],
        fanouts: Sequence[Sequence[int]],
        *,
        node_type: NDArray[np.integer] | None = None,
        lists: SortedByType | None = None,
        **settings: Any,
    ) -> None:
        by_type = check_type_fanouts(fanouts)
        super().__init__(indptr, indices, [-1] * len(by_type[0]), **settings)
        self.num_types = len(by_type)
        self.type_fanouts = np.array(by_type, dtype=np.int64).T.copy()
        self.node_type = node_type
        if lists is None or (self.edge_ids and not lists.order.size):
            lists = SortedByType.of(
                self.indptr, self.indices, edge_type, self.num_types, keep_order=self.edge_ids
            )
        self.lists = lists

    def _sample(self, request: Request) -> MiniBatch:
        batch = super()._sample(request)
        if self.node_type is not None:
            batch.blocks[0].src_type = np.asarray(self.node_type[batch.n_id], dtype=np.int32)
        return batch

    def _rows_now(self) -> TypedRows:
        return TypedRows(self.lists.ends, self.lists.indices, self.type_fanouts)

    def _blocks(self, w: Workspace, weight: Weights | None) -> list[Block]:
        blocks = super()._blocks(w, weight)
        for block in blocks:
            block.num_dst //= self.num_types
            block.relation_ptr = block.indptr
            block.indptr = block.indptr[:: self.num_types].copy()
            if block.e_id is not None:
                block.e_id = self.lists.order[block.e_id]
        return blocks


def type_fanouts(
    graph: Graph, workload: Workload, fanouts: list[int] | None = None
) -> list[list[int]]:
    """Return the fan-outs of every edge type, by its number; arguments as in `typed_sampler`."""
    names = types_of(graph).edge_types
    unknown = sorted(set(workload.type_fanouts) - set(names))
    if unknown:
        raise InputError(
            f"type_fanouts: expected edge types among {', '.join(names)}, found {unknown[0]!r}"
        )
    return [
        fanouts if fanouts is not None else workload.type_fanouts.get(name, workload.fanouts)
        for name in names
    ]


def fanouts_by_type(graph: Graph, workload: Workload) -> dict[str, list[int]]:
    """Return the fan-outs of every edge type by its name; of a graph without types by ""."""
    if not is_typed(workload):
        return {"": list(workload.fanouts)}
    names = types_of(graph).edge_types
    return dict(zip(names, map(list, type_fanouts(graph, workload)), strict=True))


def read_fanouts(graph: Graph, workload: Workload, num_neighbors: Any) -> dict[str, Any]:
    """Return the fields of a workload for which PyG's `num_neighbors` stands.

    That is a list for all edges, a mapping by edge type, or PyG's NumNeighbors. InputError says
    what does not fit the graph.
    """
    by_type, default = dict[str, list[int]](), None
    if hasattr(num_neighbors, "get_mapped_values"):  # a NumNeighbors
        num_neighbors, default = num_neighbors.values, num_neighbors.default
    if isinstance(num_neighbors, Mapping):
        if not is_typed(workload):
            raise InputError(
                "num_neighbors: expected a list of fan-outs for a graph without types, found a "
                "mapping; give one number per hop"
            )
        names = types_of(graph).edge_types
        by_type = {name: list(default) for name in names if default is not None}
        for key, fanouts in num_neighbors.items():
            ends = (key[0], "to", key[1]) if len(key) == 2 else key  # PyG's usual relation
            by_type[key if isinstance(key, str) else "__".join(ends)] = [int(k) for k in fanouts]
        missing = sorted(set(names) - by_type.keys())
        if missing:
            raise InputError(
                f"num_neighbors: expected fan-outs of every edge type, found none of {missing[0]}; "
                "add them"
            )
        num_neighbors = next(iter(by_type.values()))
    numbers = num_neighbors if isinstance(num_neighbors, Iterable) else []
    fanouts = [int(k) for k in numbers]
    if not fanouts or min(fanouts) < -1:
        raise InputError(
            "num_neighbors: expected a number per hop, at least -1, found "
            f"{num_neighbors!r:.100}; correct them"
        )
    return {"fanouts": fanouts, "type_fanouts": by_type, "num_layers": len(fanouts)}


def typed_sampler(
    graph: Graph,
    workload: Workload,
    fanouts: list[int] | None = None,
    *,
    lists: SortedByType | None = None,
    **settings: Any,
) -> TypedSampler:
    """Make the sampler of a typed graph, over `lists` that are sorted already or its own.

    `fanouts` replaces the workload's for all types, in evaluation. InputError names an edge type
    that the dataset does not have.
    """
    by_type = type_fanouts(graph, workload, fanouts)
    assert graph.edge_type is not None
    return TypedSampler(
        graph.indptr,
        graph.indices,
        graph.edge_type,
        by_type,
        node_type=graph.node_type if graph.x_by_type else None,
        lists=lists,
        seed=workload.seed,
        **settings,
    )
