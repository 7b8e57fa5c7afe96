"""A chosen placement as the plan's arrays: location codes and own ids of every rank."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.placement.location import build_locations, check_locations, sources
from planner.solver.placing import Placed
from runtime.features.location import SOURCE_BITS, Codes, encode
from runtime.plan import Source

_SOURCE_MASK = (1 << SOURCE_BITS) - 1


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
        own, num_nodes, placed.costs, cliques=placement.cliques, on_host=placement.on_host
    )
    check_locations(tables, own, num_nodes)
    kept, tables = used_sources(tables, sources(len(own)))
    arrays: dict[str, NDArray[Any]] = {}
    for g, (codes, ids) in enumerate(zip(tables, own, strict=True)):
        arrays[f"feature_location_{g}"] = codes
        arrays[f"feature_own_ids_{g}"] = ids
    return kept, arrays


def used_sources(tables: list[Codes], named: list[Source]) -> tuple[list[Source], list[Codes]]:
    """Drop the sources no table points to, and renumber the rest.

    A listed peer makes every read an exchange between ranks, so it matters that none is listed
    for nothing.
    """
    counts = np.zeros(len(named), dtype=np.int64)
    for codes in {id(t): t for t in tables}.values():
        numbers = (codes & _SOURCE_MASK).astype(np.int64)
        counts += np.bincount(numbers, minlength=len(named))
    kept = np.flatnonzero(counts)
    renumbered = np.zeros(len(named), dtype=np.int64)
    renumbered[kept] = np.arange(kept.size)
    done: dict[int, Codes] = {}
    for codes in tables:
        if id(codes) not in done:
            numbers = renumbered[(codes & _SOURCE_MASK).astype(np.int64)]
            slots = (codes >> SOURCE_BITS).astype(np.int64)
            done[id(codes)] = encode(numbers, slots, wide=codes.dtype == np.uint64)
    return [named[i] for i in kept], [done[id(codes)] for codes in tables]
