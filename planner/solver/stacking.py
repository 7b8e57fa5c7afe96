"""Stacks of batches, and batches that hang together, priced at the rates they were timed at."""

from dataclasses import replace

from planner.candidate import Candidate
from planner.cost.model import Request
from planner.solver.drawn import Draws

TABLE = "bulk_sample"
"""Seconds of a batch in a stack over those of one alone; axis: batches (`planner.cost.choices`)."""


DEPENDENT = "dependent_sample"
"""Seconds of a batch that hangs together with others over an independent one's; axis: kappa."""


def at_stack_rate(request: Request, candidate: Candidate, draws: Draws | None) -> Request:
    """The request on a machine that knows the rate of a candidate's stacks.

    Unchanged where nothing is stacked, where ranks draw stacks together (`cost.partitioned` prices
    those), where the machine brings the table, and where the sampler itself was not timed: such
    stacks are priced as single batches.
    """
    single = candidate.bulk == 1 or candidate.topology == "partitioned"
    if single or draws is None or TABLE in request.machine.tables:
        return request
    if not any(t.sample_seconds > 0 for t in request.profile.timing.values()):
        return request
    rate = draws.stack_rate(candidate.num_ranks)
    if isinstance(rate, str):
        return request
    return replace(request, machine=request.machine.with_tables({TABLE: rate}))


def at_dependent_rate(request: Request, candidate: Candidate, draws: Draws | None) -> Request:
    """The request on a machine that knows the rate of a candidate's dependent batches.

    Unchanged where kappa is not the planner's choice, where the machine brings the table, and where
    the sampler itself was not timed.
    """
    if candidate.kappa is None or draws is None or DEPENDENT in request.machine.tables:
        return request
    if not any(t.sample_seconds > 0 for t in request.profile.timing.values()):
        return request
    rate = draws.dependent_rate(candidate.num_ranks)
    if isinstance(rate, str):
        return request
    return replace(request, machine=request.machine.with_tables({DEPENDENT: rate}))
