"""Place rows for ranks that share a batch: each reads the vertices it owns, and no others.

Owners are dealt by the runtime's own hash, or by parts of the graph, so a rank's law is p_v of the
global batch on its own vertices and 0 elsewhere. Copies are never read by another rank: rows that
others need are sent with the batch (docs/formulas.md 5.6).
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.candidate import Candidate, PlacedRows, RankRows
from gnnplan.planner.cost.cache_model import cross_validate
from gnnplan.planner.cost.request import Request
from gnnplan.planner.cost.stages.gather import touched_rows
from gnnplan.planner.placement.evaluate import SOURCES, RowReads, evaluate_rows
from gnnplan.planner.placement.order import hotness_order
from gnnplan.planner.placement.place import (
    CandidatePlacement,
    Capacity,
    Memories,
    code_bytes,
    disk_requests,
    rows_by_source,
)
from gnnplan.planner.placement.placement import ItemPlacement, Placement
from gnnplan.planner.placement.problem import rows_problem
from gnnplan.planner.workload import Hotness
from gnnplan.runtime.sampling.distributed.owner import Owners

OWNED = "owned"
"""Policy that keeps the hottest of a rank's own vertices; `none` keeps nothing."""


def owners_of(num_nodes: int, num_ranks: int) -> NDArray[np.int32]:
    """Find the rank that owns each node, by the runtime's hash."""
    owners = Owners(num_ranks, num_nodes=num_nodes)
    return owners.of(np.arange(num_nodes, dtype=np.int64))


def place_shared(
    request: Request,
    candidate: Candidate,
    hotness: Hotness,
    memories: Memories,
    *,
    owner: NDArray[np.int32] | None = None,
) -> CandidatePlacement:
    """Place rows for a candidate whose ranks share a batch, by policy none or owned.

    `hotness` is of the global batch; what a peer's row costs is not looked at. `owner` is the rank
    of each node; None for the hash.
    """
    room, costs = memories.room, replace(memories.costs, peer=np.inf)
    ranks = candidate.num_ranks
    owner = owners_of(request.graph.num_nodes, ranks) if owner is None else owner

    def place(p: NDArray[np.float32]) -> Placement:
        own = [np.zeros(0, np.int64) for _ in range(ranks)]
        if candidate.policy == OWNED:
            own = _hottest(p, owner, ranks, room.own_rows)
        items = ItemPlacement(own=own, on_host=_on_host(p, own, room))
        alone = tuple((rank,) for rank in range(ranks))
        return Placement(
            policy=candidate.policy, cliques=alone, items=(items,), variant=candidate.policy
        )

    def score(placement: Placement, p: NDArray[np.float32]) -> RowReads:
        return evaluate_rows(rows_problem(_laws(p, owner, ranks), costs, [0] * ranks), placement)

    def reads(
        chosen_on: NDArray[np.float32], scored_on: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        found = score(place(chosen_on), scored_on)
        return np.stack([found.rows[kind] for kind in SOURCES], axis=1)

    p = hotness.features
    placement = place(p)
    shares = cross_validate(hotness.first_half, hotness.second_half, reads)
    rank_rows = [
        _rank_rows(request, law, placement.own[g], placement.on_host, shares[g])
        for g, law in enumerate(_laws(p, owner, ranks))
    ]
    return CandidatePlacement(
        placement=placement,
        reads=score(placement, p),
        memories=Memories(room=room, costs=costs),
        rows=PlacedRows(
            policy=candidate.policy,
            ranks=rank_rows,
            host_rows=request.graph.num_nodes if room.host_rows is None else room.host_rows,
            code_bytes=code_bytes(request.graph.num_nodes),
            distinct_tables=len({own.tobytes() for own in placement.own}),
        ),
    )


def shared_floor(hotness: Hotness, memories: Memories, num_ranks: int) -> float:
    """Bound the seconds of a rank's feature reads from below, whatever is kept.

    The hottest own_rows of each rank come from the cheaper of own memory and the host, the rest
    from the cheapest place.
    """
    costs, own_rows = memories.costs, memories.room.own_rows
    cheapest = min(costs.local, costs.host, costs.disk)
    elsewhere = min(costs.host, costs.disk)
    p = np.sort(hotness.features)[::-1]
    kept = float(p[: own_rows * num_ranks].sum(dtype=np.float64))
    rest = float(p.sum(dtype=np.float64)) - kept
    return (kept * cheapest + rest * elsewhere) / num_ranks


def _laws(p: NDArray[np.float32], owner: NDArray[np.int32], num_ranks: int) -> NDArray[np.float32]:
    """Select the hotness of the vertices each rank owns, shape [P, N]."""
    return np.stack([np.where(owner == g, p, np.float32(0)) for g in range(num_ranks)])


def _hottest(
    p: NDArray[np.float32], owner: NDArray[np.int32], num_ranks: int, most: int
) -> list[NDArray[np.int64]]:
    """Select the hottest rows of each owner that are read at all, as many as fit."""
    order = hotness_order(p)
    order = order[p[order] > 0]
    mine = owner[order]
    return [np.asarray(order[mine == g][:most], np.int64) for g in range(num_ranks)]


def _on_host(
    p: NDArray[np.float32], kept: list[NDArray[np.int64]], room: Capacity
) -> NDArray[np.bool_] | None:
    """Choose the hottest rows that nobody keeps, as many as the host has room for; None: all."""
    if room.host_rows is None:
        return None
    free = np.ones(p.size, np.bool_)
    for ids in kept:
        free[ids] = False
    order = hotness_order(p)
    on_host = np.zeros(p.size, np.bool_)
    on_host[order[free[order]][: room.host_rows]] = True
    return on_host


def _rank_rows(
    request: Request,
    p: NDArray[np.float32],
    own: NDArray[np.int64],
    on_host: NDArray[np.bool_] | None,
    share: NDArray[np.float64],
) -> RankRows:
    """Count the rows of one rank by source; p is 0 on others' vertices."""
    elsewhere = p.copy()
    elsewhere[own] = 0
    spread = dict.fromkeys(SOURCES, touched_rows(elsewhere)) | {"own": touched_rows(p[own])}
    found = {kind: float(s) for kind, s in zip(SOURCES, share, strict=True) if s > 0}
    total = float(p.sum(dtype=np.float64))
    asked = (1.0, 0.0)
    if "disk" in found:
        if on_host is not None:
            elsewhere[on_host] = 0
        asked = disk_requests(request, request.workload.batch_size, elsewhere)
    return rows_by_source(found, total, spread, own_rows=len(own), asked=asked)
