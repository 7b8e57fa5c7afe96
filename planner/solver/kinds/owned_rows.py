"""Rows of ranks that share a batch: each keeps the hottest of its own vertices, or none."""

from collections.abc import Iterator
from dataclasses import replace

from planner.candidate import Candidate
from planner.cost.model import Request
from planner.solver.cooperative import OWNED, place_shared, shared_floor
from planner.solver.kinds.kind import Ask, Kind, LeftOut, Question
from planner.solver.placing import Placed, capacity
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

    def place(
        self, ask: Question, request: Request, candidate: Candidate, hotness: Hotness
    ) -> Placed | None:
        """What fits of each owner's hottest."""
        whole = hotness.everything  # owners are dealt by id
        return place_shared(request, candidate, whole, shared_host=ask.settings.shared_host)

    def floor(
        self, ask: Question, request: Request, candidate: Candidate, placed: Placed,
        hotness: Hotness,
    ) -> float | None:  # fmt: skip
        """Each rank with its share of the hottest rows."""
        room = capacity(request, candidate, shared_host=ask.settings.shared_host)
        return shared_floor(hotness.everything, placed.costs, room.own_rows, candidate.num_ranks)
