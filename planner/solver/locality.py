"""Locality-aware sampling priced by batches drawn with it: fewer rows, and more of them local."""

from dataclasses import replace

from planner.candidate import Candidate, RankRows
from planner.cost.model import Request, seeds_per_rank
from planner.solver.drawn import LocalBatches
from planner.solver.placing import Placed
from planner.workload import BatchProfile


def preferring_local(
    request: Request, candidate: Candidate, placed: Placed, drawn: LocalBatches
) -> tuple[Request, Placed]:
    """The request and the reads of a candidate whose sampler prefers the ranks' own rows.

    Sizes of batches change by what was drawn over what was profiled; of the rows that a rank does
    not hold, each source keeps its share. The model's seconds stay those of the profiled batch.

    Args:
        request: as profiled, with the user's own sampler.
        candidate: its ranks.
        placed: rows as they would be read without the preference.
        drawn: batches with it.
    """
    seeds = seeds_per_rank(request.workload.batch_size, candidate.num_ranks)
    batch = request.profile.batch(seeds)
    sizes = [_resized(b, drawn) if b is batch else b for b in request.profile.batches]
    ranks = [_moved(rows, drawn) for rows in placed.rows.ranks]
    # The user's own sampler was timed, and not this one.
    timing = {k: replace(t, sample_seconds=0.0) for k, t in request.profile.timing.items()}
    profile = replace(request.profile, batches=sizes, timing=timing)
    changed = replace(request, profile=profile, sampler="las")
    return changed, replace(placed, rows=replace(placed.rows, ranks=ranks))


def _resized(batch: BatchProfile, drawn: LocalBatches) -> BatchProfile:
    """Every hop in proportion to the whole."""
    edges = sum(e.mean for e in batch.edges)
    vertices = drawn.vertices / batch.vertices[-1].mean if batch.vertices[-1].mean > 0 else 1.0
    factor = drawn.edges / edges if edges > 0 else 1.0
    return replace(
        batch,
        vertices=[s.scaled(vertices) for s in batch.vertices],
        edges=[s.scaled(factor) for s in batch.edges],
        block_edges=[s.scaled(factor) for s in batch.block_edges],
    )


def _moved(rows: RankRows, drawn: LocalBatches) -> RankRows:
    """Own rows by the share drawn, the others by their shares among themselves."""
    if "own" not in rows.shares:
        return rows
    elsewhere = sum(share for kind, share in rows.shares.items() if kind != "own")
    left = 1.0 - drawn.own_share
    shares = {
        kind: drawn.own_share if kind == "own" else left * share / max(elsewhere, 1e-12)
        for kind, share in rows.shares.items()
    }
    counts = {kind: drawn.vertices * share for kind, share in shares.items()}
    return replace(rows, shares=shares, rows=counts)
