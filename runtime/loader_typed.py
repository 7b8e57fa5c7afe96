"""What a loader of typed graphs has instead: the sampler by edge type, the tables by node type."""

from typing import Any

from runtime.errors import InputError
from runtime.graph.dataset import Graph
from runtime.graph.types import is_typed as is_typed, types_of
from runtime.plan import Workload
from runtime.sampling.typed import TypedSampler


def typed_sampler(
    graph: Graph, workload: Workload, fanouts: list[int] | None = None, **settings: Any
) -> TypedSampler:
    """The sampler of a typed graph.

    Args:
        graph: A dataset with edge types.
        workload: `fanouts` for all edge types but those that `type_fanouts` names.
        fanouts: Evaluation's, for all types, instead.
        settings: `TypedSampler`'s.

    Raises:
        DatasetError: the dataset has no edge types.
        InputError: fan-outs for an edge type that the dataset does not have.
    """
    names = types_of(graph).edge_types
    unknown = sorted(set(workload.type_fanouts) - set(names))
    if unknown:
        raise InputError(
            f"type_fanouts: expected edge types among {', '.join(names)}, found {unknown[0]!r}"
        )
    by_type = [
        fanouts if fanouts is not None else workload.type_fanouts.get(name, workload.fanouts)
        for name in names
    ]
    assert graph.edge_type is not None
    return TypedSampler(
        graph.indptr,
        graph.indices,
        graph.edge_type,
        by_type,
        node_type=graph.node_type if graph.x_by_type else None,
        seed=workload.seed,
        **settings,
    )
