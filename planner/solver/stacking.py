"""Stacks of batches priced at the rate they were timed at."""

from dataclasses import replace

from planner.candidate import Candidate
from planner.cost.model import Request
from planner.solver.drawn import Draws

TABLE = "bulk_sample"
"""Seconds of a batch in a stack over those of one alone; axis: batches (`planner.cost.choices`)."""


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
