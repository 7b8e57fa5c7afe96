"""A placement of vertices that stand for others, as one of all vertices.

Every vertex lies where the one that stands for it was placed: the same memories are filled and the
same reads are left, to a run of vertices. What the placement costs is evaluated anew over all.
"""

from dataclasses import replace

import numpy as np

from planner.cost.request import Request
from planner.placement.alike import first_alike
from planner.placement.evaluate import evaluate
from planner.placement.policy import Placement
from planner.solver.placing import KINDS, Placed, rank_rows
from planner.thinned import Spread
from planner.workload import Hotness


def spread_placement(placed: Placed, hotness: Hotness) -> Placement:
    """The placement of every vertex as the one that stands for it.

    Args:
        placed: of the vertices that `hotness` has.
        hotness: as it was placed on.
    """
    spread, found = Spread(hotness), placed.placement
    firsts = first_alike(found.own)
    lists = {g: spread.ids(found.own[g]) for g in set(firsts)}
    own = [lists[first] for first in firsts]  # equal lists are one array
    on_host = None if found.on_host is None else spread.mask(found.on_host)
    evaluation = evaluate(
        hotness.everything.features,
        own,
        placed.memories.costs,
        cliques=found.cliques,
        on_host=on_host,
        row_bytes=found.evaluation.row_bytes,
    )
    return replace(found, own=own, on_host=on_host, evaluation=evaluation)


def of_all(request: Request, placed: Placed, whole: Placement, hotness: Hotness) -> Placed:
    """What a placement of every vertex leaves to read.

    Args:
        request: whose rows they are.
        placed: of the vertices that `hotness` has; the shares of reads stay those that were
            cross-validated there.
        whole: the same policy's, of every vertex.
        hotness: as the few were placed on.
    """
    shares = np.array([[r.shares.get(kind, 0.0) for kind in KINDS] for r in placed.rows.ranks])
    ranks = rank_rows(request, whole, shares, hotness.everything)
    return Placed(placement=whole, memories=placed.memories, rows=replace(placed.rows, ranks=ranks))
