"""Caches that fill themselves while training: LRU and CLOCK in each rank on one host's cores."""

from collections.abc import Hashable, Iterator

import numpy as np
from numpy.typing import NDArray

from planner.candidate import Candidate
from planner.cost.cache_model import DrawnReads, ExpectedReads, SuccessiveReads
from planner.cost.request import Request
from planner.cost.terms import look_up_seconds
from planner.placement.caches import place_behind_caches
from planner.placement.place import Capacity, Memories, Placed
from planner.search.dimensions.dimension import Ask, Kind, LeftOut, Question
from planner.workload import Hotness
from runtime.plan.schema import DYNAMIC


class Caches(Kind):
    """Rows where the last batches left them."""

    name = "caches that fill themselves"
    bounded = False

    def taken(self, candidate: Candidate) -> bool:
        """Whether the placement is a cache."""
        return candidate.cache is not None

    def changes(self, candidate: Candidate) -> int:
        """One."""
        del candidate
        return 1

    def sort(self, candidate: Candidate) -> Hashable:
        """Which cache."""
        return candidate.cache

    def idle(self, candidate: Candidate) -> str:
        """The cache itself."""
        return f"a {candidate.cache} cache that fills itself"

    def propose(self, ask: Ask, base: Candidate | None) -> Iterator[Candidate | LeftOut]:
        """Each cache on the same ranks, where they are alone on a host's cores."""
        del ask
        if base is None or base.kind != "cpu" or base.hosts > 1 or base.batching == "cooperative":
            return
        for policy in DYNAMIC:
            yield base.with_policy(policy)

    def placement_key(self, candidate: Candidate) -> Hashable:
        """Batches that hang together find more of their rows again."""
        return candidate.kappa

    def placement_room(self, room: Capacity) -> Hashable:
        """Bytes besides: slots and rows of the host share them."""
        return room

    def looks_at(self, hotness: Hotness) -> Hotness:
        """Every vertex: batches are drawn, and read by id."""
        return hotness.everything

    def place(
        self, ask: Question, request: Request, candidate: Candidate, hotness: Hotness,
        memories: Memories,
    ) -> Placed | None:  # fmt: skip
        """Slots of the caches beside what the host holds."""
        batches = _batches(ask, request, candidate, memories)
        reads = _reads(ask, candidate, hotness, batches)
        return place_behind_caches(request, candidate, hotness, reads, memories)


def _batches(
    ask: Question, request: Request, candidate: Candidate, memories: Memories
) -> list[NDArray[np.int32]]:
    """A rank's successive batches, as ids; none where they cannot be drawn.

    Nor are they drawn where the cache could not win, and nobody asked for it, if it never missed.
    """
    if ask.draws is None or _cannot_win(ask, request, candidate, memories):
        return []
    found = ask.draws.batches(candidate.num_ranks, candidate.kappa)
    return [] if isinstance(found, str) else found


def _reads(
    ask: Question, candidate: Candidate, hotness: Hotness, batches: list[NDArray[np.int32]]
) -> SuccessiveReads:
    """From a rank's successive batches; from frequencies where none were drawn."""
    if not batches:
        return ExpectedReads(p=hotness.features, num_batches=hotness.num_batches)
    asked = ask.settings.sampler_parameters.get("kappa", 1)
    alone = candidate.kappa is None and float(asked) == 1.0
    return DrawnReads(batches=batches, num_nodes=hotness.features.size, independent=alone)


def _cannot_win(ask: Question, request: Request, candidate: Candidate, memories: Memories) -> bool:
    """Whether the host holds every row and hands one out sooner than any cache would."""
    if memories.room.host_rows is not None or ask.settings.policy == candidate.policy:
        return False
    costs = memories.costs
    look_up = look_up_seconds(request.machine, candidate, request.graph.num_nodes, 0.0)
    return costs.host <= costs.local + look_up
