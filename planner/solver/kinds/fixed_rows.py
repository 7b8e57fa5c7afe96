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
from planner.solver.placing import Placed, capacity, chooser, place_rows
from planner.solver.policies import NEEDS_DEGREE
from planner.solver.spreading import of_all, spread_placement
from planner.workload import Hotness

POLICIES = ("song-jiang", "joint", "degree", "random", "naive")
"""Placements that auto tries beside none, the plain ones first: equal times keep the plainer."""
BY_HEAT = ("none", "song-jiang", "joint", "legion", "gnnlab")
"""Placements that look at nothing but how hot a vertex is."""


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
        self, ask: Question, request: Request, candidate: Candidate, hotness: Hotness
    ) -> Placed | None:
        """By the named policy."""
        return place_rows(request, candidate, hotness, **_known(ask, candidate))

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
            every = hotness.everything
            whole = chooser(request, candidate, every, **_known(ask, candidate))(every.features)
        return of_all(request, placed, whole, hotness)

    def floor(
        self, ask: Question, request: Request, candidate: Candidate, placed: Placed,
        hotness: Hotness,
    ) -> float | None:  # fmt: skip
        """By weak duality, at these costs and capacities."""
        room = capacity(request, candidate, shared_host=ask.settings.shared_host)
        cliques = placed.placement.cliques
        own = hotness.most_places(room.own_rows)
        on_host = None if room.host_rows is None else hotness.most_places(room.host_rows)
        return reads_floor(hotness, placed.costs, own, on_host, cliques)


class _Known(TypedDict):
    """What policies may look at besides heat, and whether the host may hold rows."""

    shared_host: bool
    out_degree: NDArray[np.int64] | None
    parts: Parts | None


def _known(ask: Question, candidate: Candidate) -> _Known:
    return _Known(
        shared_host=ask.settings.shared_host,
        out_degree=ask.out_degree() if candidate.policy in NEEDS_DEGREE else None,
        parts=ask.parts,
    )
