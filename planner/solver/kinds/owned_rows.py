"""Rows of ranks that share a batch: each keeps the hottest of its own vertices, or none."""

from collections.abc import Iterator
from dataclasses import replace

from planner.candidate import Candidate
from planner.cost.model import Request
from planner.solver.cooperative import OWNED, place_shared, shared_floor
from planner.solver.kinds.kind import Ask, Kind, LeftOut, Question
from planner.solver.placing import Memories, Placed
from planner.workload import Hotness


class OwnedRows(Kind):
    """Rows that nobody but their owner reads."""

    name = "owned rows"

    def taken(self, candidate: Candidate) -> bool:
        """Whether the ranks share a batch, and so read their own vertices alone."""
        return candidate.batching == "cooperative"

    def propose(self, ask: Ask, base: Candidate | None) -> Iterator[Candidate | LeftOut]:
        """The hottest of every owner."""
        del ask
        if base is not None and self.taken(base):
            yield replace(base, policy=OWNED)

    def shape(self, candidate: Candidate) -> Candidate:
        """One bound holds for keeping rows and for none."""
        return replace(candidate, policy="")

    def looks_at(self, hotness: Hotness) -> Hotness:
        """Every vertex: owners are dealt by id."""
        return hotness.everything

    def place(
        self, ask: Question, request: Request, candidate: Candidate, hotness: Hotness,
        memories: Memories,
    ) -> Placed | None:  # fmt: skip
        """What fits of each owner's hottest."""
        del ask
        return place_shared(request, candidate, hotness, memories)

    def floor(
        self, ask: Question, request: Request, candidate: Candidate, placed: Placed,
        hotness: Hotness,
    ) -> float | None:  # fmt: skip
        """Each rank with its share of the hottest rows."""
        del ask, request
        return shared_floor(hotness, placed.memories, candidate.num_ranks)
