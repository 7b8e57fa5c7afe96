"""A candidate's feature rows where ranks keep caches that fill themselves, and nothing else."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from planner.candidate import Candidate, PlacedRows, RankRows
from planner.cost.gather import touched_rows
from planner.cost.model import Request, row_bytes
from planner.cost.successive import Masks, SuccessiveReads
from planner.errors import SettingsError
from planner.placement.policy import Placement
from planner.solver.dynamic import (
    cached_rows,
    gather_seconds,
    missed_law,
    splits,
    with_working_rows,
)
from planner.solver.placing import (
    KINDS,
    Memories,
    Placed,
    code_bytes,
    disk_requests,
    shares_of,
)
from planner.solver.policies import place
from planner.workload import Hotness


def place_behind_caches(
    request: Request,
    candidate: Candidate,
    hotness: Hotness,
    reads: SuccessiveReads,
    memories: Memories,
) -> Placed:
    """Every rank's rows behind a cache that fills itself, by the split of memory that reads best.

    Args:
        request: graph, machine and budgets.
        candidate: its ranks, and which cache.
        hotness: of its batches.
        reads: of one rank.
        memories: of the candidate.

    Raises:
        SettingsError: the ranks are GPUs.
    """
    if candidate.kind == "cuda":
        raise SettingsError(
            f"policy {candidate.policy}: expected ranks on cores (the cache lies in host memory), "
            "found GPUs; choose another policy"
        )
    room, costs = memories.room, memories.costs
    nodes, stored = request.graph.num_nodes, row_bytes(request.graph)
    total = float(hotness.features.sum(dtype=np.float64))
    tried: list[tuple[Placement, RankRows, int, float]] = []
    for split in splits(room.own_bytes, room.host_rows, nodes, candidate.num_ranks, stored):

        def choose(p: NDArray[np.float32], kept: int | None = split.host_rows) -> Placement:
            nothing = [0] * candidate.num_ranks
            return place("none", p, costs, nothing, cliques=candidate.groups, host_rows=kept)

        placement = choose(hotness.features)
        mask = placement.on_host
        masks: Masks = {"host": None} if mask is None else {"host": mask, "disk": ~mask}
        kept = shares_of(choose, hotness, costs)[0]
        shares = {str(kind): float(share) for kind, share in zip(KINDS, kept, strict=True)}
        reuse = reads.reuse(masks)
        rows = cached_rows(shares, reuse, split.slots, total, holds_all=split.slots >= nodes)
        touched = {k: touched_rows(_only(hotness.features, m)) for k, m in masks.items()}
        in_host = nodes if split.host_rows is None else split.host_rows
        stay = reuse.stay(split.slots)
        tried.append((placement, with_working_rows(rows, touched), in_host, stay))
    placement, rows, in_host, stay = min(tried, key=lambda each: gather_seconds(each[1], costs))
    rows = _with_requests(request, placement, rows, hotness, reads, stay)
    placed = PlacedRows(
        policy=candidate.policy,
        ranks=[rows] * candidate.num_ranks,
        host_rows=in_host,
        code_bytes=code_bytes(nodes),
    )
    return Placed(placement=placement, memories=memories, rows=placed)


def _with_requests(
    request: Request,
    placement: Placement,
    rows: RankRows,
    hotness: Hotness,
    reads: SuccessiveReads,
    stay: float,
) -> RankRows:
    """The same rows, and how many of those that the cache misses one read of the disk brings.

    Counted on batches; where none were drawn, by the law of what an LRU cache misses.
    """
    if rows.rows.get("disk", 0.0) <= 0.0:
        return rows
    near = placement.on_host
    far = np.ones(hotness.features.size, np.bool_) if near is None else ~near
    found = reads.missed(far, stay, row_bytes(request.graph))
    if found is not None:
        each, size = found.requests / found.rows, found.moved_bytes / found.requests
        return replace(rows, disk_requests=each, disk_request_bytes=size)
    missed = missed_law(np.where(far, hotness.features, 0), rows.rows["disk"])
    each, size = disk_requests(request, hotness.seeds_per_rank, missed)
    return replace(rows, disk_requests=each, disk_request_bytes=size)


def _only(p: NDArray[np.float32], mask: NDArray[np.bool_] | None) -> NDArray[np.float32]:
    return p if mask is None else p[mask]
