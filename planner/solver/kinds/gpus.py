"""Ranks on GPUs: how many, which ones, in which cliques (`planner.solver.candidates_gpu`)."""

from collections.abc import Hashable, Iterator
from dataclasses import replace

from planner.candidate import Candidate
from planner.cost.model import Request
from planner.solver.candidates_gpu import machine_candidates, plans_gpus
from planner.solver.kinds.kind import Ask, Kind, LeftOut
from planner.solver.relaxed_gpu import relaxed_gpus


class Gpus(Kind):
    """One rank to a GPU."""

    name = "GPUs"

    def taken(self, candidate: Candidate) -> bool:
        """Whether the ranks are GPUs."""
        return candidate.kind == "cuda"

    def sort(self, candidate: Candidate) -> Hashable:
        """How many."""
        return candidate.num_ranks

    def propose(self, ask: Ask, base: Candidate | None) -> Iterator[Candidate | LeftOut]:
        """Every number of GPUs in every cover by cliques."""
        del base
        if plans_gpus(ask.machine):
            yield from machine_candidates(ask.settings, ask.machine, ask.policies)
            return
        why = "the machine has none" if not ask.machine.gpus else "too little is known of them"
        yield LeftOut(name=self.name, why=why)

    def alike(self, candidate: Candidate) -> Candidate:
        """Of lanes the best depth alone."""
        return replace(candidate, prefetch_depth=0)

    def relaxed(self, request: Request) -> dict[str, Request]:
        """More memory of GPUs and hosts, faster links of one sort."""
        return relaxed_gpus(request)
