"""Choose how successive batches are drawn: in stacks, or dependent on each other.

A stack is k of the same batches, sampled in one call. Of dependent batches, kappa share random
draws, so that rows recur.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.memory import gpu_stack_bytes, stack_bytes
from gnnplan.planner.cost.request import Request, seeds_per_rank
from gnnplan.planner.machine.model import Table
from gnnplan.planner.search.dimensions.dimension import (
    Dimension,
    Draws,
    Proposal,
    ProposalInputs,
)
from gnnplan.planner.search.samplers import explain_refusal, of_links_or_types
from gnnplan.runtime.plan.schema import DYNAMIC
from gnnplan.runtime.sampling.registry import find_sampler, is_able

TABLE = "bulk_sample"
"""Table of a stacked batch's seconds over a single one's; axis: batches (`cost.terms`)."""
DEPENDENT = "dependent_sample"
"""Table of a dependent batch's seconds over an independent one's; axis: kappa."""


def at_stack_rate(request: Request, candidate: Candidate, draws: Draws | None) -> Request:
    """Return the request on a machine that knows the rate of a candidate's stacks.

    Stacks that ranks draw together are priced by `planner.cost.backends.grid`.
    """
    if candidate.bulk_batches == 1 or candidate.topology.policy == "partitioned" or draws is None:
        return request
    return _with_rate(request, TABLE, lambda: draws.stack_rate(candidate.num_ranks))


def at_dependent_rate(request: Request, candidate: Candidate, draws: Draws | None) -> Request:
    """Return the request that knows the rate of a candidate's dependent batches.

    On cores it is measured; a GPU's follows from the lists that its batches expand.
    """
    if candidate.kappa is None or draws is None:
        return request
    if candidate.gpus:
        return with_read_edges(request, candidate, draws)
    return _with_rate(request, DEPENDENT, lambda: draws.dependent_rate(candidate.num_ranks))


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


def _with_rate(request: Request, name: str, rate: Callable[[], Table | str]) -> Request:
    """Return the request with a table of drawn batches, where it is missing and can be made.

    Without it such batches are priced as single, independent ones.
    """
    timed = any(t.sample_seconds > 0 for t in request.profile.timing.values())
    if name in request.machine.tables or not timed:
        return request
    found = rate()
    if isinstance(found, str):
        return request
    return replace(request, machine=request.machine.with_tables({name: found}))


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
