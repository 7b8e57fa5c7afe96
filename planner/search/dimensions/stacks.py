"""Stacks: identical batches, k of them sampled at once."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from planner.candidate import Candidate
from planner.cost.memory import gpu_stack_bytes, stack_bytes
from planner.cost.request import Request, seeds_per_rank
from planner.machine.model import Table
from planner.search.dimensions.dimension import Ask, Kind, LeftOut
from planner.search.drawn import Draws
from runtime.sampling.parameters import LAYERWISE

TABLE = "bulk_sample"
"""Seconds of a batch in a stack over those of one alone; axis: batches (`cost.terms`)."""
DEPENDENT = "dependent_sample"
"""Seconds of a batch that hangs together with others over an independent one's; axis: kappa."""


def at_stack_rate(request: Request, candidate: Candidate, draws: Draws | None) -> Request:
    """The request on a machine that knows the rate of a candidate's stacks.

    Unchanged where nothing is stacked and where ranks draw stacks together (`cost.backends.grid`
    prices those).
    """
    if candidate.bulk_batches == 1 or candidate.topology.policy == "partitioned" or draws is None:
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


BULKS = (4, 16, 64)
"""Batches of a stack."""


class Stacks(Kind):
    """Several batches in one call of the sampler."""

    name = "stacks of batches"

    def taken(self, candidate: Candidate) -> bool:
        """Whether more than one batch is sampled at once."""
        return candidate.bulk_batches > 1

    def words(self, candidate: Candidate) -> str:
        """How many batches."""
        return f"{candidate.bulk_batches} batches sampled at once"

    def changes(self, candidate: Candidate) -> int:
        """One."""
        del candidate
        return 1

    def idle(self, candidate: Candidate) -> str:
        """Their room."""
        return f"{candidate.bulk_bytes / 1e6:.1f} MB of stacked batches on each rank"

    def propose(self, ask: Ask, base: Candidate | None) -> Iterator[Candidate | LeftOut]:
        """Every size that an epoch has steps for."""
        if base is None:
            return
        room = _on_gpus(ask, base) if base.kind == "cuda" else _on_cores(ask, base)
        if isinstance(room, str):
            yield LeftOut(name=self.name, why=room)
            return
        sizes = sorted({min(k, ask.num_steps) for k in BULKS})
        if sizes[-1] < 2:
            yield LeftOut(name=self.name, why="an epoch is a single step")
            return
        for k in sizes:
            if k > 1:
                yield replace(base, bulk_batches=k, bulk_bytes=room(k))

    def shape(self, candidate: Candidate) -> Candidate:
        """Stacked batches read what single ones do."""
        return replace(candidate, bulk_batches=1, bulk_bytes=0)

    def request(self, request: Request, candidate: Candidate, draws: Draws | None) -> Request:
        """The machine with the rate that stacks were timed at."""
        return request if candidate.kind == "cuda" else at_stack_rate(request, candidate, draws)


Room = Callable[[int], int]
"""Bytes of a stack of so many batches."""


def _on_cores(ask: Ask, base: Candidate) -> Room | str:
    """As batches of the graph told; or why nothing is stacked."""
    drawn = ask.draws
    pilot = "nothing was drawn of this graph" if drawn is None else drawn.bulk(base.num_ranks)
    if isinstance(pilot, str):
        return pilot
    return lambda k: stack_bytes(pilot, k, base.prefetch_depth)


def _on_gpus(ask: Ask, base: Candidate) -> Room | str:
    """By the profiled sizes; or why a GPU cannot stack such batches (runtime.device_stack)."""
    settings = ask.settings
    sampler, parameters = settings.sampler, settings.sampler_parameters
    if ask.task == "link" or settings.workload.model == "rgcn":
        return "links and typed graphs are sampled by the host where ranks are GPUs"
    if sampler not in ("full", *LAYERWISE) and (sampler != "neighbor" or parameters):
        return f"sampler {sampler} with these parameters has no stacks on a GPU"
    if ask.profile is None:
        return "nothing was profiled"
    batch = ask.profile.batch(seeds_per_rank(settings.workload.batch_size, base.num_ranks))
    every_hop = settings.dialect == "every_hop"
    return lambda k: gpu_stack_bytes(batch, k, base.prefetch_depth, every_hop=every_hop)
