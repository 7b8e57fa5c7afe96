"""A candidate's feature rows: which rank keeps which, within the memory that is left.

Rates come from the machine, capacities from the budgets, rows from the profile; planner.placement
decides. The result is put in the cost model's terms, its hit rates cross-validated.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.candidate import Candidate, PlacedRows, RankRows
from planner.cost.budget import least_host_bytes
from planner.cost.disk import expected_runs
from planner.cost.gather import touched_rows
from planner.cost.hit_rates import Shares, cross_validated
from planner.cost.model import Request, fixed_parts, row_bytes
from planner.cost.rates import (
    exchange_rates,
    lookup,
    ranks_here,
    readers,
    row_rate,
    topology_bytes,
)
from planner.placement.costs import RowCosts
from planner.placement.evaluate import evaluate
from planner.placement.policy import Parts, Placement
from planner.solver.network_gpu import contended_network
from planner.solver.placing_gpu import gpu_room, gpu_row_costs
from planner.solver.policies import place
from planner.workload import Hotness

KINDS = ("own", "peer", "host", "disk")
NARROW_CODE_BYTES, WIDE_CODE_BYTES = 4, 8
NARROW_SLOTS = 1 << 24
"""Slots a 32-bit location code can name beside its source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """Rows that fit after everything else."""

    own_rows: int
    """Rows each rank may keep."""
    host_rows: int | None
    """Rows the shared mapping may hold; None: all of them."""
    own_bytes: int = 0
    """Bytes of each rank that `own_rows` counts in whole rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A placement, the costs it was made for, and what it leaves to read."""

    placement: Placement
    costs: RowCosts
    rows: PlacedRows


def code_bytes(num_nodes: int) -> int:
    """Bytes of one location code.

    >>> code_bytes(1000), code_bytes(1 << 25)
    (4, 8)
    """
    return NARROW_CODE_BYTES if num_nodes <= NARROW_SLOTS else WIDE_CODE_BYTES


def capacity(request: Request, candidate: Candidate, *, shared_host: bool) -> Capacity:
    """Rows that a rank, and the host, have room for.

    The shared mapping comes first: it serves all ranks. What is left of the host is split evenly;
    a device budget limits each rank besides. Both are zero where the ranks alone do not fit.
    """
    stored, nodes = row_bytes(request.graph), request.graph.num_nodes
    codes = code_bytes(nodes)
    if candidate.kind == "cuda":
        own, host_rows = gpu_room(request, candidate, codes, shared_host=shared_host)
        return Capacity(own_rows=own, host_rows=None if host_rows >= nodes else host_rows)
    private, here = sum(fixed_parts(request, candidate, 0, codes).values()), ranks_here(candidate)
    host = least_host_bytes(request.machine)
    if request.budgets.host_bytes is not None:
        host = min(host, request.budgets.host_bytes)
    mapped = 0 if candidate.topology == "partitioned" else topology_bytes(request.graph)
    left = max(0, host - mapped - here * private)
    host_rows = min(nodes, left // stored) if shared_host else 0
    own_bytes = (left - host_rows * stored) // here
    if request.budgets.device_bytes is not None:
        own_bytes = min(own_bytes, max(0, request.budgets.device_bytes - private))
    own = min(nodes, own_bytes // stored)
    return Capacity(
        own_rows=own, host_rows=None if host_rows >= nodes else host_rows, own_bytes=own_bytes
    )


def row_costs(request: Request, candidate: Candidate, hotness: Hotness, room: Capacity) -> RowCosts:
    """Seconds per row from each place, as measured; infinite where there is no such place.

    A peer on the same host is never better than the shared mapping (modelling.md 10), so peers are
    priced only where the mapping does not hold every row.
    """
    if candidate.kind == "cuda":
        return gpu_row_costs(request, candidate)
    stored, machine, ranks = row_bytes(request.graph), request.machine, candidate.num_ranks
    rows = float(hotness.features.sum(dtype=np.float64))
    coordinates = {
        "row_bytes": float(stored),
        "working_set_bytes": max(1.0, touched_rows(hotness.features)) * stored,
        "readers": float(readers(candidate) * candidate.threads.gather),
    }
    local = lookup(machine, "gather", **coordinates).seconds
    host = lookup(machine, "mapped_gather", **coordinates).seconds
    peer = disk = float("inf")
    if room.host_rows is not None:
        empty = RankRows(rows={}, working_rows={}, shares={})
        disk = row_rate(machine, "disk", empty, stored, candidate).seconds
        if ranks > 1:
            asked, sent = exchange_rates(machine, max(1.0, rows), stored, candidate)
            peer = local + (asked.seconds + sent.seconds) / max(1.0, rows)
    return RowCosts(local=local, peer=peer, host=host, disk=disk)


def place_rows(
    request: Request,
    candidate: Candidate,
    hotness: Hotness,
    *,
    shared_host: bool,
    out_degree: NDArray[np.int64] | None,
    parts: Parts | None = None,
) -> Placed:
    """Place the rows by the candidate's policy, and say what each rank is left to read."""
    room = capacity(request, candidate, shared_host=shared_host)
    costs = row_costs(request, candidate, hotness, room)
    stored = row_bytes(request.graph)
    gpus = candidate.kind == "cuda"
    network = contended_network(request.machine, candidate, stored) if gpus else None

    def choose(p: NDArray[np.float32]) -> Placement:
        return place(
            candidate.policy,
            p,
            costs,
            [room.own_rows] * candidate.num_ranks,
            cliques=candidate.groups,
            host_rows=room.host_rows,
            out_degree=out_degree,
            parts=parts,
            row_bytes=stored,
            seed=request.workload.seed,
            network=network,
        )

    placement = choose(hotness.features)
    shares = shares_of(choose, hotness, costs)
    in_host = request.graph.num_nodes if room.host_rows is None else room.host_rows
    placed = PlacedRows(
        policy=candidate.policy,
        ranks=[
            _rank_rows(placement, g, shares, hotness.features, stored)
            for g in range(candidate.num_ranks)
        ],
        host_rows=in_host,
        code_bytes=code_bytes(request.graph.num_nodes),
        distinct_tables=len({own.tobytes() for own in placement.own}),
    )
    return Placed(placement=placement, costs=costs, rows=placed)


def shares_of(
    choose: Callable[[NDArray[np.float32]], Placement],
    hotness: Hotness,
    costs: RowCosts,
) -> Shares:
    """Cross-validated share of rows by rank and kind of source, shape (ranks, kinds)."""

    def rows(chosen_on: NDArray[np.float32], scored_on: NDArray[np.float32]) -> Shares:
        found = choose(chosen_on)
        scored = evaluate(scored_on, found.own, costs, cliques=found.cliques, on_host=found.on_host)
        return np.stack([scored.rows[kind] for kind in KINDS], axis=1)

    return cross_validated(hotness.first_half, hotness.second_half, rows)


def _rank_rows(
    placement: Placement,
    rank: int,
    shares: NDArray[np.float64],
    p: NDArray[np.float32],
    stored_bytes: int,
) -> RankRows:
    """Rows, working sets and honest shares of one rank."""
    own = placement.own[rank]
    elsewhere = p.copy()
    elsewhere[own] = 0
    working = {kind: touched_rows(elsewhere) for kind in KINDS}
    working["own"] = touched_rows(p[own])
    total = float(p.sum(dtype=np.float64))
    found = {kind: float(share) for kind, share in zip(KINDS, shares[rank], strict=True)}
    used = [kind for kind in KINDS if found[kind] > 0]
    reads = row_reads = moved = 0.0
    if found["disk"] > 0:
        far = _on_disk_only(placement, rank, elsewhere, peers=found["peer"] > 0)
        reads, moved = expected_runs(far, stored_bytes)
        row_reads = float(far.sum(dtype=np.float64))
    return RankRows(
        # Cross-validated shares, not the flattered ones of the placement's own counts [A9].
        rows={kind: total * found[kind] for kind in used},
        working_rows={kind: working[kind] for kind in used},
        shares={kind: found[kind] for kind in used},
        own_rows=len(own),
        disk_requests=reads / row_reads if reads > 0 else 1.0,
        disk_request_bytes=moved / reads if reads > 0 else 0.0,
    )


def _on_disk_only(
    placement: Placement, rank: int, elsewhere: NDArray[np.float32], *, peers: bool
) -> NDArray[np.float32]:
    """`elsewhere` [N], chances of the rows that a rank does not keep, without what is in memory."""
    far = elsewhere.copy()
    if placement.on_host is not None:
        far[placement.on_host] = 0
    if peers:
        for clique in placement.cliques:
            for other in clique if rank in clique else ():
                far[placement.own[other]] = 0
    return far
