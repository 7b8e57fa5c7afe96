"""Stacks: identical batches, k of them sampled at once."""

from collections.abc import Iterator
from dataclasses import replace

from planner.candidate import Candidate
from planner.cost.choices import stack_bytes
from planner.cost.model import Request
from planner.solver.drawn import Draws
from planner.solver.kinds.kind import Ask, Kind, LeftOut
from planner.solver.stacking import at_stack_rate

BULKS = (4, 16, 64)
"""Batches of a stack."""


class Stacks(Kind):
    """Several batches in one call of the sampler."""

    name = "stacks of batches"

    def taken(self, candidate: Candidate) -> bool:
        """Whether more than one batch is sampled at once."""
        return candidate.bulk > 1

    def words(self, candidate: Candidate) -> str:
        """How many batches."""
        return f"{candidate.bulk} batches sampled at once"

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
        if base.kind == "cuda":
            yield LeftOut(name=self.name, why="stacks are not priced where ranks are GPUs")
            return
        drawn = ask.draws
        pilot = "nothing was drawn of this graph" if drawn is None else drawn.bulk(base.num_ranks)
        if isinstance(pilot, str):
            yield LeftOut(name=self.name, why=pilot)
            return
        sizes = sorted({min(k, ask.num_steps) for k in BULKS})
        if sizes[-1] < 2:
            yield LeftOut(name=self.name, why="an epoch is a single step")
            return
        for k in sizes:
            if k > 1:
                need = stack_bytes(pilot, k, base.prefetch_depth)
                yield replace(base, bulk=k, bulk_bytes=need)

    def shape(self, candidate: Candidate) -> Candidate:
        """Stacked batches read what single ones do."""
        return replace(candidate, bulk=1, bulk_bytes=0)

    def request(self, request: Request, candidate: Candidate, draws: Draws | None) -> Request:
        """The machine with the rate that stacks were timed at."""
        return request if candidate.kind == "cuda" else at_stack_rate(request, candidate, draws)
