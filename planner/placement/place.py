"""Place a candidate's feature rows: which rank keeps which, within the memory that is left.

Rates come from the machine, capacities from the budgets, hotness from the profile; a policy
decides. The result is put in the cost model's terms, its hit rates cross-validated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.array_cache import declare_final
from gnnplan.planner.candidate import Candidate, PlacedRows, RankRows
from gnnplan.planner.cost.cache_model import Shares, cross_validate
from gnnplan.planner.cost.graph_memory import host_parts
from gnnplan.planner.cost.host_memory import disk_bytes, drawn_parts, ordered_parts
from gnnplan.planner.cost.memory import (
    code_bytes,
    gpu_capacity,
    host_bytes,
    least_host_bytes,
    peer_bytes,
    ranks_by_host,
)
from gnnplan.planner.cost.model import batch_and_timing, fixed_parts
from gnnplan.planner.cost.rates import MachineTable, lookup, ranks_here, readers
from gnnplan.planner.cost.request import Request, held_row_bytes, row_bytes
from gnnplan.planner.cost.stages.exchange import exchange_rates
from gnnplan.planner.cost.stages.exchange_gpu import most_in_transit
from gnnplan.planner.cost.stages.gather import expected_runs, row_rate, touched_rows
from gnnplan.planner.cost.stages.gather_gpu import read_seconds
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.placement.costs import PLACES, ReadNetwork, RowCosts, unshared_network
from gnnplan.planner.placement.evaluate import SOURCES, RowReads, evaluate_rows
from gnnplan.planner.placement.order import VertexRuns
from gnnplan.planner.placement.placement import Placement, first_alike
from gnnplan.planner.placement.policies.legion import CliqueHeat, ListPlacement, place_lists
from gnnplan.planner.placement.policies.policy import Knowledge, Parts, place
from gnnplan.planner.placement.problem import PlacementProblem, rows_problem
from gnnplan.planner.workload import Hotness


def gpu_room(
    request: Request, candidate: Candidate, code_bytes: int, *, shared_host: bool
) -> tuple[int, int]:
    """Count the bytes that every GPU, and the rows that the least host, has room for.

    Everything else comes first. Every host maps the same rows, so the least of them decides; both
    are 0 where the fixed parts alone do not fit.
    """
    machine, stored = request.machine, held_row_bytes(request.graph, candidate)
    # Ranks whose GPUs hold as much have as much beside their rows.
    sizes = {
        gpu_capacity(machine, candidate, rank, request.budgets): rank
        for rank in range(candidate.num_ranks)
    }
    own = min(
        size - sum(fixed_parts(request, candidate, rank, code_bytes).values())
        for size, rank in sizes.items()
    )
    process = int(machine.table("gpu_process").at(ranks=float(candidate.num_ranks)))
    nodes, held = request.graph.num_nodes, sum(host_parts(request, candidate).values())

    def rows_beside(rank_bytes: int) -> int:
        left = min(
            host_bytes(machine, host, request.budgets)[1] - rank_bytes * len(ranks)
            for host, ranks in ranks_by_host(machine, candidate).items()
        )
        return min(nodes, max(0, left - held) // stored) if shared_host else 0

    passed = ordered_parts(request, candidate) | drawn_parts(request, candidate)
    each = process + sum(passed.values())
    on_host = rows_beside(each)
    if on_host < nodes:
        on_host = rows_beside(each + disk_bytes(request, candidate))
    own -= most_in_transit(request, candidate, disk=on_host < nodes)
    return max(0, own), on_host


def gpu_row_costs(request: Request, candidate: Candidate) -> RowCosts:
    """Find the seconds per row from each place of the GPU that waits longest, while all read."""
    found = read_seconds(request.machine, candidate, row_bytes(request.graph))
    seconds = {place: max(s for s in each if s < inf) for place, each in found.items()}
    return RowCosts(
        local=seconds["own"],
        peer=seconds.get("peer", inf),
        host=seconds["host"],
        disk=seconds.get("disk", inf),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """Rows that fit after everything else."""

    own_rows: int
    """Rows each rank may keep."""
    host_rows: int | None
    """Rows the shared mapping may hold; None: all of them."""
    own_bytes: int = 0
    """Bytes of each rank that `own_rows` counts in whole rows."""
    own_rows_of: tuple[int, ...] = ()
    """Rows that each rank may keep, where ranks differ in that; `own_rows` is the least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memories:
    """Memories that a candidate's rows may lie in, and the seconds per row from each."""

    room: Capacity
    costs: RowCosts


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidatePlacement:
    """A candidate's placement, the memories that it was made for, and the rows left to read."""

    placement: Placement
    reads: RowReads
    """Expected rows and seconds of the vertices that were placed."""
    memories: Memories
    rows: PlacedRows
    """Rows that each rank reads, for the cost model."""
    expand: Callable[[NDArray[np.int64]], NDArray[np.int64]] = lambda ids: ids
    """Function from ids of the placement to the vertices that they stand for."""
    lists: ListPlacement | None = None
    """Adjacency lists of every vertex that ranks keep; None where they keep none or all."""
    list_cliques: tuple[tuple[int, ...], ...] = ()
    """Ranks that read each other's lists."""


def capacity(request: Request, candidate: Candidate, *, shared_host: bool) -> Capacity:
    """Count the rows that a rank, and the host, have room for.

    The shared mapping comes first: it serves all ranks. What is left of the host is split evenly;
    a device budget limits each rank besides. Both are zero where the ranks alone do not fit.
    """
    stored, nodes = held_row_bytes(request.graph, candidate), request.graph.num_nodes
    codes = code_bytes(nodes)
    if candidate.kind == "cuda":
        own_bytes, host_rows = gpu_room(request, candidate, codes, shared_host=shared_host)
        return Capacity(
            own_rows=min(nodes, own_bytes // stored),
            host_rows=None if host_rows >= nodes else host_rows,
            own_bytes=own_bytes,
        )
    private, here = sum(fixed_parts(request, candidate, 0, codes).values()), ranks_here(candidate)
    host = least_host_bytes(request.machine)
    if request.budgets.host_bytes is not None:
        host = min(host, request.budgets.host_bytes)
    mapped = sum(host_parts(request, candidate).values())
    left = host - mapped - request.launcher_bytes - here * private
    if not shared_host or left < nodes * stored:  # the others may be on the disk
        read = disk_bytes(request, candidate)
        private, left = private + read, left - here * read
    left = max(0, left)
    host_rows = min(nodes, left // stored) if shared_host else 0
    own_bytes = (left - host_rows * stored) // here
    if request.budgets.device_bytes is not None:
        own_bytes = min(own_bytes, max(0, request.budgets.device_bytes - private))
    if host_rows < nodes:  # ranks may read rows of each other, through buffers
        batch, _ = batch_and_timing(request, candidate)
        own_bytes = max(0, own_bytes - peer_bytes(candidate, batch, stored))
    own = min(nodes, own_bytes // stored)
    return Capacity(
        own_rows=own, host_rows=None if host_rows >= nodes else host_rows, own_bytes=own_bytes
    )


def row_costs(request: Request, candidate: Candidate, hotness: Hotness, room: Capacity) -> RowCosts:
    """Find the measured seconds per row from each place; infinite where there is no such place.

    A peer on the same host is never better than the shared mapping (docs/modelling.md 10), so peers
    are priced only where the mapping does not hold every row.
    """
    if candidate.kind == "cuda":
        return gpu_row_costs(request, candidate)
    stored, machine, ranks = row_bytes(request.graph), request.machine, candidate.num_ranks
    rows = float(hotness.features.sum(dtype=np.float64)) * hotness.weight
    coordinates = {
        "row_bytes": float(stored),
        "working_set_bytes": max(1.0, touched_rows(hotness.features) * hotness.weight) * stored,
        "readers": float(readers(candidate) * candidate.threads.gather),
    }
    local = lookup(machine, MachineTable.GATHER, **coordinates).seconds
    host = lookup(machine, MachineTable.MAPPED_GATHER, **coordinates).seconds
    peer = disk = float("inf")
    if room.host_rows is not None:
        empty = RankRows(rows={}, working_rows={}, shares={})
        disk = row_rate(machine, "disk", empty, stored, candidate).seconds
        if ranks > 1:
            asked, sent = exchange_rates(machine, max(1.0, rows), stored, candidate)
            peer = local + (asked.seconds + sent.seconds) / max(1.0, rows)
    return RowCosts(local=local, peer=peer, host=host, disk=disk)


def memories_of(
    request: Request, candidate: Candidate, hotness: Hotness, *, shared_host: bool
) -> Memories:
    """Find the memories of a candidate's ranks and hosts.

    How many rows are read decides what one costs; the host may map rows if it is a `shared_host`.
    """
    room = capacity(request, candidate, shared_host=shared_host)
    return Memories(room=room, costs=row_costs(request, candidate, hotness, room))


def read_network(
    machine: MachineModel, candidate: Candidate, stored: int, costs: RowCosts
) -> RowCosts | ReadNetwork:
    """Find what each rank's reads cost: alike on cores; a GPU's seconds per row while all read."""
    if candidate.kind != "cuda":
        return costs
    found = read_seconds(machine, candidate, stored)
    alone = np.full((candidate.num_ranks, len(PLACES)), inf)
    for s, place_name in enumerate(PLACES):
        if place_name in found:
            alone[:, s] = found[place_name]
    return unshared_network(alone, tuple(f"{name} reads" for name in candidate.gpus))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowPlacer:
    """A candidate's placement problem, to be solved for any hotness of the same vertices."""

    policy: str
    problem: PlacementProblem
    know: Knowledge

    def place(self, hotness: NDArray[np.float32]) -> Placement:
        """Place vertices that are that hot, by the candidate's policy."""
        return place(self.policy, self.problem.with_hotness(hotness), self.know)

    def evaluate(self, placement: Placement, hotness: NDArray[np.float32]) -> RowReads:
        """Evaluate a placement where vertices are that hot."""
        return evaluate_rows(self.problem.with_hotness(hotness), placement)

    def cross_validate(self, hotness: Hotness, laws: Sequence[Hotness] = ()) -> Shares:
        """Cross-validate the share of rows by rank and kind of source, shape (ranks, kinds)."""

        def rows(chosen_on: NDArray[np.float32], scored_on: NDArray[np.float32]) -> Shares:
            found = self.evaluate(self.place(chosen_on), scored_on)
            return np.stack([found.rows[kind] for kind in SOURCES], axis=1)

        first, second = (heat_by_law(hotness, laws, f"{half}_half") for half in ("first", "second"))
        return cross_validate(first, second, rows)


def heat_by_law(hotness: Hotness, laws: Sequence[Hotness], name: str) -> NDArray[np.float32]:
    """Return frequencies by clique, shape [C, N], where cliques draw from laws of their own."""
    if not laws:
        return getattr(hotness, name)
    return np.stack([getattr(law, name) for law in laws])


def make_placer(
    request: Request,
    candidate: Candidate,
    hotness: Hotness,
    memories: Memories,
    *,
    out_degree: NDArray[np.int64] | None = None,
    parts: Parts | None = None,
    laws: Sequence[Hotness] = (),
) -> RowPlacer:
    """State a candidate's placement problem; arguments are those of `place_rows`."""
    room, few, ranks = memories.room, hotness.stride > 1, candidate.num_ranks
    own_rows = room.own_rows_of or (room.own_rows,) * ranks
    problem = rows_problem(
        hotness.features,
        read_network(request.machine, candidate, row_bytes(request.graph), memories.costs),
        [hotness.places(rows) for rows in own_rows],
        candidate.cliques,
        None if room.host_rows is None else hotness.places(room.host_rows),
    )
    if laws:
        heat = heat_by_law(hotness, laws, "features")
        law_of = tuple(problem.clique_of().tolist())
        problem = replace(problem, kinds=(replace(problem.kinds[0], heat=heat, laws=law_of),))

    def parts_here(name: str) -> NDArray[np.int32]:
        assert parts is not None
        return parts(name, ranks)[hotness.ids] if few else parts(name, ranks)

    return RowPlacer(
        policy=candidate.policy,
        problem=problem,
        know=Knowledge(
            out_degree=declare_final(out_degree[hotness.ids])
            if few and out_degree is not None
            else out_degree,
            parts=None if parts is None else parts_here,
            seed=request.workload.seed,
        ),
    )


def place_rows(
    request: Request,
    candidate: Candidate,
    hotness: Hotness,
    memories: Memories,
    *,
    out_degree: NDArray[np.int64] | None = None,
    parts: Parts | None = None,
    laws: Sequence[Hotness] = (),
) -> CandidatePlacement:
    """Place the rows by the candidate's policy, and say what each rank is left to read.

    Where few vertices stand for all, the placement is of those; what it says of rows is of all.

    Args:
        request: graph, machine and budgets.
        candidate: ranks and policy.
        hotness: of a rank's batches; it says which vertices are placed.
        memories: of the candidate.
        out_degree: lists each vertex stands in, of every vertex; for policies that need them.
        parts: partitions of the graph; for policies that need them.
        laws: hotness of each clique's batches, where cliques draw seeds of their own.
    """
    placer = make_placer(
        request, candidate, hotness, memories, out_degree=out_degree, parts=parts, laws=laws
    )
    features = heat_by_law(hotness, laws, "features")
    placement = placer.place(features)
    shares = placer.cross_validate(hotness, laws)
    by_clique = [rank_rows(request, placement, shares, law) for law in laws or [hotness]]
    law_of = placer.problem.kinds[0].laws
    host_rows = memories.room.host_rows
    return CandidatePlacement(
        placement=placement,
        reads=placer.evaluate(placement, features),
        memories=memories,
        rows=PlacedRows(
            policy=candidate.policy,
            ranks=[by_clique[law][rank] for rank, law in enumerate(law_of)],
            host_rows=request.graph.num_nodes if host_rows is None else host_rows,
            code_bytes=code_bytes(request.graph.num_nodes),
            distinct_tables=len(set(first_alike(placement.own))),
        ),
        expand=lambda ids: VertexRuns(hotness).ids(ids),
    )


def place_rows_and_lists(
    request: Request,
    candidate: Candidate,
    hotness: Hotness,
    memories: Memories,
    degrees: NDArray[np.int64],
    *,
    out_degree: NDArray[np.int64] | None = None,
    parts: Parts | None = None,
    laws: Sequence[Hotness] = (),
) -> CandidatePlacement:
    """Place adjacency lists and rows in one memory, which Legion's model divides (formulas 2.4).

    `degrees` are the lengths of all lists, other arguments those of `place_rows`. The policy places
    rows in what lists leave. Lists are placed vertex by vertex: in length they are not alike.
    """
    stored = held_row_bytes(request.graph, candidate)
    room, ranks = memories.room, candidate.num_ranks
    every = [law.everything for law in laws or [hotness]]
    keeps = candidate.policy != "none"
    heats = [
        CliqueHeat(rows=law.features if keeps else np.zeros_like(law.features), lists=law.topology)
        for law in every
    ]
    lists = place_lists(
        heats if laws else heats * len(candidate.cliques),
        candidate.cliques,
        degrees,
        row_bytes=stored,
        device_bytes=room.own_bytes,
        peers=candidate.topology.peers,
    )
    left = [room.own_bytes - size for size in lists.num_bytes]
    own_rows = tuple(min(request.graph.num_nodes, size // stored) for size in left)
    smaller = replace(
        room, own_rows=min(own_rows), own_bytes=min(left), own_rows_of=own_rows[:ranks]
    )
    placed = place_rows(
        request, candidate, hotness, replace(memories, room=smaller), out_degree=out_degree,
        parts=parts, laws=laws,
    )  # fmt: skip
    found = [
        replace(rows, list_bytes=size, list_shares=shares)
        for rows, size, shares in zip(placed.rows.ranks, lists.num_bytes, lists.shares, strict=True)
    ]
    rows = replace(placed.rows, ranks=found, list_words=lists.words)
    readers = candidate.cliques if candidate.topology.peers else tuple((g,) for g in range(ranks))
    return replace(placed, rows=rows, lists=lists, list_cliques=readers)


def rank_rows(
    request: Request, placement: Placement, shares: Shares, hotness: Hotness
) -> list[RankRows]:
    """Count rows, working sets and cross-validated shares of every rank, of all vertices.

    `shares` are by rank and kind of source, `placement` is of the vertices that `hotness` has.
    """
    p, weight = hotness.features, hotness.weight
    total, touched = float(p.sum(dtype=np.float64)) * weight, touched_rows(p) * weight
    runs: dict[tuple[int, ...], tuple[float, float]] = {}
    found: list[RankRows] = []
    firsts = first_alike(placement.own)
    kept_by = {first: touched_rows(p[placement.own[first]]) * weight for first in set(firsts)}
    for rank, own in enumerate(placement.own):
        # Cross-validated shares, not the flattered ones of the placement's counts [A9].
        share = {kind: float(s) for kind, s in zip(SOURCES, shares[rank], strict=True) if s > 0}
        kept = kept_by[firsts[rank]]
        asked = (1.0, 0.0)
        if "disk" in share:
            peers = "peer" in share
            own_clique = next(clique for clique in placement.cliques if rank in clique)
            holders = own_clique if peers else (firsts[rank],)
            if holders not in runs:
                runs[holders] = _disk_requests(request, placement, holders, hotness)
            asked = runs[holders]
        spread = dict.fromkeys(SOURCES, touched - kept) | {"own": kept}
        own_rows = round(len(own) * weight)
        found.append(rows_by_source(share, total, spread, own_rows=own_rows, asked=asked))
    return found


def rows_by_source(
    shares: dict[str, float],
    total: float,
    spread: dict[str, float],
    *,
    own_rows: int = 0,
    cache_rows: int = 0,
    asked: tuple[float, float] = (1.0, 0.0),
) -> RankRows:
    """Split a rank's `total` rows of a batch over the sources that it reads.

    `shares` are above 0, `spread` the rows that reads of each source are spread over; `asked` as
    `disk_requests` returns.
    """
    return RankRows(
        rows={kind: total * share for kind, share in shares.items()},
        working_rows={kind: spread[kind] for kind in shares},
        shares=shares,
        own_rows=own_rows,
        cache_rows=cache_rows,
        disk_requests=asked[0],
        disk_request_bytes=asked[1],
    )


def _disk_requests(
    request: Request, placement: Placement, holders: tuple[int, ...], hotness: Hotness
) -> tuple[float, float]:
    """Count `disk_requests` for rows that neither those ranks nor the host has."""
    near = np.zeros(hotness.features.size, np.bool_)
    if placement.on_host is not None:
        near[placement.on_host] = True
    for rank in holders:
        near[placement.own[rank]] = True
    # Which rows lie together is seen among all vertices, not among those that stand for them.
    far = hotness.everything.features.copy()
    far[VertexRuns(hotness).mask(near)] = 0
    return disk_requests(request, hotness.seeds_per_rank, far)


def disk_requests(request: Request, seeds: int, far: NDArray[np.float32]) -> tuple[float, float]:
    """Count requests per row that is read from disk, and their mean bytes; (1, 0) where none is.

    What is left of a batch is taken to lie together as much as whole batches of `seeds` do: as
    counted, over as expected of independent rows. `far` is the chance that a batch reads each row
    from disk, shape (num_nodes,).
    """
    reads, moved = expected_runs(far, row_bytes(request.graph))
    if reads <= 0:
        return 1.0, 0.0
    batch = request.profile.batch(seeds)
    reads, moved = reads * batch.disk_requests, moved * batch.disk_bytes
    return reads / float(far.sum(dtype=np.float64)), moved / reads
