"""Choose how batches are drawn: in stacks, dependent on each other, or from near neighbours.

A stack is k of the same batches, sampled in one call. Of dependent batches, kappa share random
draws, so that rows recur. Locality-aware sampling prefers neighbours whose rows a rank keeps.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from gnnplan.planner.candidate import Candidate, RankRows
from gnnplan.planner.cost.memory import gpu_stack_bytes, stack_bytes
from gnnplan.planner.cost.rates import MachineTable
from gnnplan.planner.cost.request import Request, seeds_per_rank
from gnnplan.planner.machine.model import Table
from gnnplan.planner.placement.place import CandidatePlacement
from gnnplan.planner.search.dimensions.dimension import (
    Dimension,
    Draws,
    LocalBatches,
    Proposal,
    ProposalInputs,
)
from gnnplan.planner.search.samplers import explain_refusal, of_links_or_types
from gnnplan.planner.workload import BatchProfile
from gnnplan.runtime.plan.schema import DYNAMIC, Sampler
from gnnplan.runtime.sampling.registry import find_sampler, is_able, sampler_or_unknown


def at_stack_rate(request: Request, candidate: Candidate, draws: Draws | None) -> Request:
    """Return the request on a machine that knows the rate of a candidate's stacks.

    Stacks that ranks draw together are priced by `planner.cost.backends.grid`.
    """
    if candidate.bulk_batches == 1 or candidate.topology.policy == "partitioned" or draws is None:
        return request
    return _with_rate(
        request, MachineTable.BULK_SAMPLE, lambda: draws.stack_rate(candidate.num_ranks)
    )


def at_dependent_rate(request: Request, candidate: Candidate, draws: Draws | None) -> Request:
    """Return the request that knows the rate of a candidate's dependent batches.

    On cores it is measured; a GPU's follows from the lists that its batches expand.
    """
    if candidate.kappa is None or draws is None:
        return request
    if candidate.gpus:
        return with_read_edges(request, candidate, draws)
    return _with_rate(
        request, MachineTable.DEPENDENT_SAMPLE, lambda: draws.dependent_rate(candidate.num_ranks)
    )


def with_read_edges(request: Request, candidate: Candidate, draws: Draws) -> Request:
    """Return the request whose profile says how many entries a batch's lists have."""
    seeds = seeds_per_rank(request.workload.batch_size, candidate.num_ranks)
    found = draws.read_edges(candidate.num_ranks)
    if isinstance(found, str):
        return request
    sizes = [
        replace(b, read_edges=found) if b.seeds_per_rank == seeds else b
        for b in request.profile.batches
    ]
    return replace(request, profile=replace(request.profile, batches=sizes))


def _with_rate(request: Request, name: MachineTable, rate: Callable[[], Table | str]) -> Request:
    """Return the request with a table of drawn batches, where it is missing and can be made.

    Without it such batches are priced as single, independent ones.
    """
    timed = any(t.sample_seconds > 0 for t in request.profile.timing.values())
    if name in request.machine.tables or not timed:
        return request
    found = rate()
    if isinstance(found, str):
        return request
    return replace(request, machine=request.machine.with_tables({name.value: found}))


BULKS = (4, 16, 64)


class Stacks(Dimension):
    """Batches of which several are sampled in one call."""

    name = "stacks of batches"

    def applies(self, candidate: Candidate) -> bool:
        """Return whether more than one batch is sampled at once."""
        return candidate.bulk_batches > 1

    def describe(self, candidate: Candidate) -> str:
        """Name the number of batches."""
        return f"{candidate.bulk_batches} batches sampled at once"

    def no_gain_reason(self, candidate: Candidate) -> str:
        """Name the bytes that the stack takes."""
        return f"{candidate.bulk_bytes / 1e6:.1f} MB of stacked batches on each rank"

    def propose(self, asked: ProposalInputs, base: Candidate | None) -> Iterator[Proposal]:
        """Yield every size that an epoch has steps for."""
        if base is None:
            return
        room = _on_gpus(asked, base) if base.kind == "cuda" else _on_cores(asked, base)
        if isinstance(room, str):
            yield self.omit(room)
            return
        sizes = sorted({min(k, asked.num_steps) for k in BULKS})
        if sizes[-1] < 2:
            yield self.omit("an epoch is a single step")
            return
        for k in sizes:
            if k > 1:
                yield replace(base, bulk_batches=k, bulk_bytes=room(k))

    def read_shape(self, candidate: Candidate) -> Candidate:
        """Ignore stacks, which read what single batches do."""
        return replace(candidate, bulk_batches=1, bulk_bytes=0)

    def adapt_request(self, request: Request, candidate: Candidate, draws: Draws | None) -> Request:
        """Return the request at the measured rate of stacks."""
        return request if candidate.kind == "cuda" else at_stack_rate(request, candidate, draws)


Room = Callable[[int], int]
"""Returns the bytes of a stack of so many batches."""


def _on_cores(asked: ProposalInputs, base: Candidate) -> Room | str:
    """Return bytes of stacks as drawn batches show them, or why nothing is stacked."""
    drawn = asked.draws
    pilot = "nothing was drawn of this graph" if drawn is None else drawn.bulk(base.num_ranks)
    if isinstance(pilot, str):
        return pilot
    return lambda k: stack_bytes(pilot, k, base.prefetch_depth)


def _on_gpus(asked: ProposalInputs, base: Candidate) -> Room | str:
    """Return bytes of stacks by the profiled sizes, or why a GPU cannot stack such batches."""
    settings = asked.settings
    sampler, parameters = settings.sampler, settings.sampler_parameters
    if of_links_or_types(asked.task, settings.workload):
        return "a GPU draws links and typed graphs batch by batch"
    if not is_able(sampler, parameters, "stacks"):
        return f"sampler {sampler} with these parameters has no stacks on a GPU"
    if asked.profile is None:
        return "nothing was profiled"
    batch = asked.profile.batch(seeds_per_rank(settings.workload.batch_size, base.num_ranks))
    every_hop = settings.dialect == "every_hop"
    return lambda k: gpu_stack_bytes(batch, k, base.prefetch_depth, every_hop=every_hop)


KAPPAS = (4, 16, 64, 256)


def share_draws(base: Candidate, kappa: int | None) -> Candidate:
    """Return a candidate whose sampler draws kappa batches with the same random numbers.

    With kappa None the user's sampler decides.
    """
    others = {k: v for k, v in base.sampler.parameters.items() if k != "kappa"}
    chosen = others if kappa is None else {**others, "kappa": float(kappa)}
    return replace(base, sampler=replace(base.sampler, parameters=chosen))


class Dependence(Dimension):
    """Successive batches that share random draws."""

    name = "dependent batches"

    def applies(self, candidate: Candidate) -> bool:
        """Return whether kappa is the planner's choice."""
        return candidate.kappa is not None

    def describe(self, candidate: Candidate) -> str:
        """Name the number of batches."""
        one = candidate.kappa == 1
        return "batches independent" if one else f"{candidate.kappa} batches hang together"

    def no_gain_reason(self, candidate: Candidate) -> str:
        """Say that fixed rows gain nothing when nodes recur."""
        if candidate.cache is not None:
            return ""
        return "rows at fixed places gain nothing from batches that hang together"

    def propose(self, asked: ProposalInputs, base: Candidate | None) -> Iterator[Proposal]:
        """Yield every kappa, on the base's own placement and on each cache."""
        if base is None:
            return
        why = self._refused(asked, base)
        if why:
            yield self.omit(why)
            return
        for kappa in KAPPAS:
            dependent = share_draws(base, kappa)
            why = explain_refusal(asked.settings, dependent) or _undrawn(
                asked, base.num_ranks, kappa
            )
            if why:
                yield self.omit(why)
                return
            for policy in dict.fromkeys((base.policy, *DYNAMIC)):
                yield dependent.with_policy(policy)

    def adapt_request(self, request: Request, candidate: Candidate, draws: Draws | None) -> Request:
        """Return the request at the measured rate of dependent batches."""
        return at_dependent_rate(request, candidate, draws)

    def read_shape(self, candidate: Candidate) -> Candidate:
        """Ignore kappa: fixed rows are read as often."""
        return share_draws(candidate, None)

    def _refused(self, asked: ProposalInputs, base: Candidate) -> str:
        """Return why nothing is proposed; empty where something may be."""
        if not find_sampler(asked.settings.sampler).dependent:
            others = "(labor, ladies and pladies need not)"
            return f"sampler {asked.settings.sampler} draws each batch afresh {others}"
        return "kappa is the user's own" if "kappa" in asked.settings.sampler_parameters else ""


def _undrawn(asked: ProposalInputs, num_ranks: int, kappa: int) -> str:
    """Return why no such batches were drawn; empty where they were."""
    if asked.draws is None:
        return "nothing was drawn"
    found = asked.draws.batches(num_ranks, kappa)
    return found if isinstance(found, str) else ""


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
    if of_links_or_types(asked.task, asked.settings.workload):
        return "links and typed graphs are drawn by neighbours that are all alike"
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
