"""Stacks of batches, and batches that hang together, priced at the rates they were timed at."""

from collections.abc import Callable
from dataclasses import replace

from planner.candidate import Candidate
from planner.cost.model import Request
from planner.machine import Table
from planner.solver.drawn import Draws

TABLE = "bulk_sample"
"""Seconds of a batch in a stack over those of one alone; axis: batches (`planner.cost.choices`)."""
DEPENDENT = "dependent_sample"
"""Seconds of a batch that hangs together with others over an independent one's; axis: kappa."""


def at_stack_rate(request: Request, candidate: Candidate, draws: Draws | None) -> Request:
    """The request on a machine that knows the rate of a candidate's stacks.

    Unchanged where nothing is stacked and where ranks draw stacks together (`cost.partitioned`
    prices those).
    """
    if candidate.bulk == 1 or candidate.topology == "partitioned" or draws is None:
        return request
    return _with_rate(request, TABLE, lambda: draws.stack_rate(candidate.num_ranks))


def at_dependent_rate(request: Request, candidate: Candidate, draws: Draws | None) -> Request:
    """The request on a machine that knows the rate of a candidate's dependent batches.

    Unchanged where kappa is not the planner's choice.
    """
    if candidate.kappa is None or draws is None:
        return request
    return _with_rate(request, DEPENDENT, lambda: draws.dependent_rate(candidate.num_ranks))


def _with_rate(request: Request, name: str, rate: Callable[[], Table | str]) -> Request:
    """The request with a table of drawn batches.

    Unchanged where the machine brings the table, where it cannot be made, and where the sampler
    itself was not timed: such batches are priced as single, independent ones.
    """
    timed = any(t.sample_seconds > 0 for t in request.profile.timing.values())
    if name in request.machine.tables or not timed:
        return request
    found = rate()
    if isinstance(found, str):
        return request
    return replace(request, machine=request.machine.with_tables({name: found}))
