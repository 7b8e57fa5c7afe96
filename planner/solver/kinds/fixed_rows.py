"""Fixed copies of rows in each rank, by any of the named policies or none."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from planner.candidate import Candidate
from planner.cost.model import Request
from planner.placement.policy import Parts
from planner.solver.floor import reads_floor
from planner.solver.kinds.kind import Ask, Kind, LeftOut, Question
from planner.solver.placing import Memories, Placed, chooser, memories_of, place_rows
from planner.solver.policies import BY_HEAT, NEEDS_DEGREE
from planner.solver.spreading import of_all, spread_placement
from planner.workload import Hotness

POLICIES = ("song-jiang", "joint", "degree", "random", "naive")
"""Placements that auto tries beside none, the plain ones first: equal times keep the plainer."""


class FixedRows(Kind):
    """Rows at places that stay while training."""

    name = "fixed rows"

    def taken(self, candidate: Candidate) -> bool:
        """Whether rows lie at fixed places, for ranks with batches of their own."""
        return candidate.cache is None and candidate.batching == "independent"

    def propose(self, ask: Ask, base: Candidate | None) -> Iterator[Candidate | LeftOut]:
        """Every such policy on the same ranks."""
        del ask
        if base is not None and base.batching == "independent":
            for policy in POLICIES:
                yield replace(base, policy=policy)

    def alike(self, candidate: Candidate) -> Candidate:
        """Of the ways to place rows on the same ranks the best stands for all."""
        return replace(candidate, policy="")

    def shape(self, candidate: Candidate) -> Candidate:
        """One bound holds for all policies."""
        return replace(candidate, policy="")

    def place(
        self, ask: Question, request: Request, candidate: Candidate, hotness: Hotness,
        memories: Memories,
    ) -> Placed | None:  # fmt: skip
        """By the named policy."""
        return place_rows(request, candidate, hotness, memories, **_known(ask, candidate))

    def spread(
        self, ask: Question, request: Request, candidate: Candidate, placed: Placed,
        hotness: Hotness,
    ) -> Placed | None:  # fmt: skip
        """Where heat alone decides, each as the one that stands for it; else placed anew."""
        if hotness.stride == 1:
            return placed
        if candidate.policy in BY_HEAT:
            whole = spread_placement(placed, hotness)
        else:
            every, shared_host = hotness.everything, ask.settings.shared_host
            memories = memories_of(request, candidate, every, shared_host=shared_host)
            choose = chooser(request, candidate, every, memories, **_known(ask, candidate))
            whole = choose(every.features)
        return of_all(request, placed, whole, hotness)

    def floor(
        self, ask: Question, request: Request, candidate: Candidate, placed: Placed,
        hotness: Hotness,
    ) -> float | None:  # fmt: skip
        """By weak duality, at these costs and capacities."""
        del ask, request, candidate
        room, costs = placed.memories.room, placed.memories.costs
        cliques = placed.placement.cliques
        own = hotness.most_places(room.own_rows)
        on_host = None if room.host_rows is None else hotness.most_places(room.host_rows)
        return reads_floor(hotness, costs, own, on_host, cliques)


class _Known(TypedDict):
    """What policies may look at besides heat."""

    out_degree: NDArray[np.int64] | None
    parts: Parts | None


def _known(ask: Question, candidate: Candidate) -> _Known:
    return _Known(
        out_degree=ask.out_degree() if candidate.policy in NEEDS_DEGREE else None,
        parts=ask.parts,
    )
