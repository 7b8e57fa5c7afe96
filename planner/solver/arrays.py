"""A chosen placement as the plan's arrays: location codes and own ids of every rank."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.placement.location import build_locations, check_locations, sources
from planner.solver.placing import Placed
from runtime.features.location import Codes, LocationTable, renumber
from runtime.plan import Source


def plan_arrays(placed: Placed, num_nodes: int) -> tuple[list[Source], dict[str, NDArray[Any]]]:
    """Location tables and own ids, under the names the runtime looks for.

    Args:
        placed: the placement and the costs it was made for.
        num_nodes: of the graph.

    Returns:
        The sources that some table uses, in the order of their numbers, and the arrays.

    Raises:
        PlanError: a code does not address the row it stands for.
    """
    placement = placed.placement
    own = [np.ascontiguousarray(ids, dtype=np.int64) for ids in placement.own]
    tables = build_locations(
        own, num_nodes, placed.memories.costs, cliques=placement.cliques, on_host=placement.on_host
    )
    check_locations(tables, own, num_nodes)
    kept, tables = used_sources(tables, sources(len(own)))
    arrays: dict[str, NDArray[Any]] = {}
    for g, (codes, ids) in enumerate(zip(tables, own, strict=True)):
        arrays[f"feature_location_{g}"] = codes
        arrays[f"feature_own_ids_{g}"] = ids
    return kept, arrays


def used_sources(tables: list[Codes], named: list[Source]) -> tuple[list[Source], list[Codes]]:
    """Drop the sources no table points to, and renumber the rest in place.

    A listed peer makes every read an exchange between ranks, so it matters that none is listed
    for nothing.
    """
    distinct = list({id(codes): codes for codes in tables}.values())
    counts = np.sum([LocationTable(codes, named).count() for codes in distinct], axis=0)
    kept = np.flatnonzero(counts)
    numbers = np.zeros(len(counts), dtype=np.int64)
    numbers[kept] = np.arange(kept.size)
    if (numbers[kept] != kept).any():
        for codes in distinct:
            renumber(codes, numbers)
    return [named[i] for i in kept], tables
