"""Place a candidate's feature rows where ranks keep caches that fill themselves, and nothing else.

A row comes from the cache unless the batches since its last touch filled it with others
(`planner.cost.cache_model`); then it comes from where it would without a cache. A GPU's cache lies
in its own memory. Of ranks on cores, where the host does not hold every row, its memory goes to the
caches or half to them and half to the hottest rows.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.candidate import Candidate, PlacedRows, RankRows
from gnnplan.planner.cost.cache_model import Masks, Misses, Reuse, SuccessiveReads
from gnnplan.planner.cost.memory import SLOT_BYTES, slot_bytes
from gnnplan.planner.cost.request import Request, held_row_bytes, row_bytes
from gnnplan.planner.cost.stages.gather import touched_rows
from gnnplan.planner.placement.costs import RowCosts
from gnnplan.planner.placement.evaluate import SOURCES
from gnnplan.planner.placement.place import (
    CandidatePlacement,
    Capacity,
    Memories,
    RowPlacer,
    code_bytes,
    disk_requests,
    rows_by_source,
)
from gnnplan.planner.placement.placement import Placement
from gnnplan.planner.placement.policies.policy import Knowledge
from gnnplan.planner.placement.problem import rows_problem
from gnnplan.planner.workload import Hotness

LEVELS, DEEPEST = 64, 30
"""Classes of frequencies per factor e, and such factors below 1 that are told apart."""
SUREST = 1.0 - 1e-9
"""Cap on the chance to be read: a row in every batch keeps a finite logarithm of being left out."""
LONGEST, TRIES = 1e9, 60
"""Most batches that a row may stay away, and halvings of a range of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySplit:
    """Memory shared out between the host's mapping and the ranks' caches."""

    slots: int
    """Slots of each rank's cache."""
    host_rows: int | None
    """Rows the mapping holds; None: all of them."""


def list_splits(
    own_bytes: int, host_rows: int | None, num_nodes: int, num_ranks: int, row_bytes: int
) -> list[MemorySplit]:
    """List ways to share out memory between caches and mapping; one where the host holds every row.

    `own_bytes` are a rank's beside the mapping, which could hold `host_rows` (None: all).

    >>> [(s.slots, s.host_rows) for s in list_splits(0, 88, 1000, 1, 64)]
    [(64, 0), (32, 44)]
    """
    each = row_bytes + SLOT_BYTES

    def with_slots(size: int, kept: int | None) -> MemorySplit:
        return MemorySplit(slots=min(num_nodes, max(0, size) // each), host_rows=kept)

    if host_rows is None:
        return [with_slots(own_bytes, None)]
    found = [with_slots(own_bytes + host_rows * row_bytes // num_ranks, 0)]
    if host_rows > 1:
        half = host_rows // 2
        freed = (host_rows - half) * row_bytes // num_ranks
        found.append(with_slots(own_bytes + freed, half))
    return found


def splits_of(
    candidate: Candidate, room: Capacity, num_nodes: int, row_bytes: int
) -> list[MemorySplit]:
    """List the ways to share out a candidate's memory; one for GPUs, whose memory is no host's."""
    if not candidate.gpus:
        ranks = candidate.num_ranks
        return list_splits(room.own_bytes, room.host_rows, num_nodes, ranks, row_bytes)
    slots = room.own_bytes // (row_bytes + slot_bytes(candidate))
    return [MemorySplit(slots=min(num_nodes, slots), host_rows=room.host_rows)]


def cached_rows(
    shares: dict[str, float], reuse: Reuse, slots: int, p: NDArray[np.float32], masks: Masks
) -> RankRows:
    """Count what a rank reads from its cache and from below it.

    `shares` and `reuse` are by source without the cache, p [N] the chance that a batch reads each
    row, `masks` the rows of each source. A cache of N slots never loses a row.
    """
    saved, _ = reuse.hits(slots)
    left = {kind: _missed(saved[kind], m, slots >= p.size) for kind, m in reuse.misses.items()}
    found = {kind: share * left.get(kind, 1.0) for kind, share in shares.items()}
    found = {"cache": sum(shares.values()) - sum(found.values()), **found}
    used = {kind: share for kind, share in found.items() if share > 0}
    touched = {kind: touched_rows(p if m is None else p[m]) for kind, m in masks.items()}
    touched["cache"] = float(slots)
    return rows_by_source(used, float(p.sum(dtype=np.float64)), touched, cache_rows=slots)


def missed_law(p: NDArray[np.float32], rows: float) -> NDArray[np.float32]:
    """Compute the chance that a batch reads each row and its cache misses it, shape (num_nodes,).

    p_v (1 - p_v)^tau, tau such that they add up to the `rows` that the cache was found to miss; p
    is 0 for rows of other sources. Source: docs/formulas.md 8.7 [A7], the characteristic time of an
    LRU cache.

    >>> found = missed_law(np.array([0.5, 0.0, 0.1], np.float32), 0.206)  # tau = 2
    >>> [round(float(chance), 3) for chance in found]
    [0.125, 0.0, 0.081]
    """
    total = float(p.sum(dtype=np.float64))
    if rows >= total:
        return p
    if rows <= 0.0:
        return np.zeros_like(p)
    seen = p[p > 0].astype(np.float64)
    # Rows read about as often stand together: one pass over them all, not one for every try.
    level = np.minimum(-np.log(seen) * LEVELS, LEVELS * DEEPEST).astype(np.int64)
    counts, sums = np.bincount(level), np.bincount(level, weights=seen)
    stay = np.log1p(-np.minimum(sums / np.maximum(counts, 1), SUREST))
    low, high = 0.0, 1.0

    def missed(tau: float) -> float:
        return float((sums * np.exp(tau * stay)).sum())

    while missed(high) > rows and high < LONGEST:
        low, high = high, 2 * high
    for _ in range(TRIES):
        middle = (low + high) / 2
        low, high = (middle, high) if missed(middle) > rows else (low, middle)
    return (p * (1.0 - np.minimum(p, SUREST)) ** high).astype(np.float32)


def gather_seconds(rows: RankRows, costs: RowCosts) -> float:
    """Add up a batch's reads at plain row costs, to compare splits by."""
    prices = {"cache": costs.local, "peer": costs.peer, "host": costs.host, "disk": costs.disk}
    return sum(count * prices[kind] for kind, count in rows.rows.items())


def _missed(saved: float, misses: Misses, holds_all: bool) -> float:
    """Return the share of a source's rows that the cache does not save."""
    if holds_all or misses[0] <= 0:
        return 0.0 if holds_all else 1.0
    return max(0.0, 1.0 - saved / float(misses[0]))


def place_behind_caches(
    request: Request,
    candidate: Candidate,
    hotness: Hotness,
    reads: SuccessiveReads,
    memories: Memories,
) -> CandidatePlacement:
    """Place rows behind caches that fill themselves, by the split of memory that reads best.

    `hotness` is of the candidate's batches, `reads` are those of one rank.
    """
    room, costs = memories.room, memories.costs
    nodes, stored = request.graph.num_nodes, held_row_bytes(request.graph, candidate)
    tried: list[tuple[RowPlacer, Placement, RankRows, int, float]] = []
    for split in splits_of(candidate, room, nodes, stored):
        nothing = [0] * candidate.num_ranks
        problem = rows_problem(hotness.features, costs, nothing, candidate.cliques, split.host_rows)
        placer = RowPlacer(policy="none", problem=problem, know=Knowledge())
        placement = placer.place(hotness.features)
        mask = placement.on_host
        masks: Masks = {"host": None} if mask is None else {"host": mask, "disk": ~mask}
        kept = placer.cross_validate(hotness)[0]
        shares = {kind: float(share) for kind, share in zip(SOURCES, kept, strict=True)}
        reuse = reads.reuse(masks)
        rows = cached_rows(shares, reuse, split.slots, hotness.features, masks)
        in_host = nodes if split.host_rows is None else split.host_rows
        tried.append((placer, placement, rows, in_host, reuse.stay(split.slots)))
    placer, placement, rows, in_host, stay = min(
        tried, key=lambda each: gather_seconds(each[2], costs)
    )
    rows = _with_requests(request, placement, rows, hotness, reads, stay)
    placed = PlacedRows(
        policy=candidate.policy,
        ranks=[rows] * candidate.num_ranks,
        host_rows=in_host,
        code_bytes=code_bytes(nodes),
    )
    scored = placer.evaluate(placement, hotness.features)
    return CandidatePlacement(placement=placement, reads=scored, memories=memories, rows=placed)


def _with_requests(
    request: Request,
    placement: Placement,
    rows: RankRows,
    hotness: Hotness,
    reads: SuccessiveReads,
    stay: float,
) -> RankRows:
    """Add how many of the rows that the cache misses one read of the disk brings.

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
