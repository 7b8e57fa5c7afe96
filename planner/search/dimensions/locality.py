"""Choose locality-aware sampling, which prefers neighbours whose rows a rank keeps."""

from collections.abc import Iterator
from dataclasses import replace

from gnnplan.planner.candidate import Candidate, RankRows
from gnnplan.planner.cost.request import Request, seeds_per_rank
from gnnplan.planner.placement.place import CandidatePlacement
from gnnplan.planner.search.dimensions.dimension import (
    Dimension,
    Draws,
    LocalBatches,
    Proposal,
    ProposalInputs,
)
from gnnplan.planner.search.samplers import explain_refusal
from gnnplan.planner.workload import BatchProfile
from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.sampling.registry import find_sampler, sampler_or_unknown


def preferring_local(
    request: Request, candidate: Candidate, placed: CandidatePlacement, drawn: LocalBatches
) -> tuple[Request, CandidatePlacement]:
    """Return request and reads of a candidate whose sampler prefers the ranks' own rows.

    Sizes of batches are those drawn. Of the rows that a rank does not keep, each source has its
    share. The model's seconds stay those of the profiled batch.
    """
    seeds = seeds_per_rank(request.workload.batch_size, candidate.num_ranks)
    batch = request.profile.batch(seeds)
    sizes = [_resized(b, drawn) if b is batch else b for b in request.profile.batches]
    ranks = [_moved(rows, drawn) for rows in placed.rows.ranks]
    # The user's own sampler was timed, and not this one.
    timing = {k: replace(t, sample_seconds=0.0) for k, t in request.profile.timing.items()}
    profile = replace(request.profile, batches=sizes, timing=timing)
    local = sampler_or_unknown(request.sampler).local_form
    changed = replace(request, profile=profile, sampler=local)
    return changed, replace(placed, rows=replace(placed.rows, ranks=ranks))


def _resized(batch: BatchProfile, drawn: LocalBatches) -> BatchProfile:
    edges = sum(e.mean for e in batch.edges)
    vertices = drawn.vertices / batch.vertices[-1].mean if batch.vertices[-1].mean > 0 else 1.0
    factor = drawn.edges / edges if edges > 0 else 1.0
    return replace(
        batch,
        vertices=[s.scaled(vertices) for s in batch.vertices],
        edges=[s.scaled(factor) for s in batch.edges],
        block_edges=[s.scaled(factor) for s in batch.block_edges],
        read_edges=drawn.read_edges,
    )


def _moved(rows: RankRows, drawn: LocalBatches) -> RankRows:
    """Read own rows by the share drawn, and the others in their proportions."""
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


FACTORS = (2.0, 4.0, 8.0, 16.0)


def prefer_local(base: Candidate, factor: float) -> Candidate:
    """Return a candidate whose sampler prefers a rank's own rows by a factor."""
    shared = {k: v for k, v in base.sampler.parameters.items() if k == "kappa"}
    name = find_sampler(base.sampler.name).local_form
    return replace(base, sampler=Sampler(name=name, parameters={**shared, "factor": factor}))


class LocalNeighbours(Dimension):
    """Local neighbours preferred: fewer rows from elsewhere, a little more variance."""

    name = "local neighbours"
    bounded = False

    def applies(self, candidate: Candidate) -> bool:
        """Return whether the factor is the planner's choice."""
        return candidate.las is not None

    def describe(self, candidate: Candidate) -> str:
        """Name the factor."""
        return f"local neighbours preferred {candidate.las:g}-fold"

    def propose(self, asked: ProposalInputs, base: Candidate | None) -> Iterator[Proposal]:
        """Yield every factor, where ranks keep rows that could be preferred."""
        if base is None:
            return
        why = _refused(asked, base)
        if why:
            yield self.omit(why)
            return
        for factor in FACTORS:
            yield prefer_local(base, factor)

    def adjust_reads(
        self,
        request: Request,
        candidate: Candidate,
        placed: CandidatePlacement,
        draws: Draws | None,
    ) -> tuple[Request, CandidatePlacement]:
        """Return sizes and shares as drawn with the preference."""
        if candidate.las is None or draws is None:
            return request, placed
        held = placed.expand(placed.placement.own[0])
        drawn = draws.local(candidate.num_ranks, candidate.las, held)
        if isinstance(drawn, str):
            return request, placed
        return preferring_local(request, candidate, placed, drawn)


def _refused(asked: ProposalInputs, base: Candidate) -> str:
    sampler, parameters = asked.settings.sampler, asked.settings.sampler_parameters
    spec = find_sampler(sampler)
    if spec.prefers_local and "factor" in parameters:
        return "the factor is the user's own"
    if not spec.local_form or "factor" in parameters:
        return f"sampler {sampler} has no form that prefers local neighbours"
    if not spec.prefers_local and parameters:
        return "the sampler's parameters are the user's own"
    why = explain_refusal(asked.settings, prefer_local(base, FACTORS[0]))
    if why:
        return why
    if asked.draws is None:
        return "nothing was drawn"
    if base.policy == "none" or base.cache is not None:
        return "no fast candidate keeps rows of its own"
    return ""
