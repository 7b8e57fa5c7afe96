"""Fixed copies of rows in each rank, by any of the named policies or none.

A placement of vertices that stand for others, as one of all vertices.

Every vertex lies where the one that stands for it was placed: the same memories are filled and the
same reads are left, to a run of vertices. What the placement costs is evaluated anew over all.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from planner.candidate import Candidate
from planner.cost.request import Request
from planner.placement.downsample import Spread
from planner.placement.evaluate import evaluate
from planner.placement.owned import OWNED, place_shared, shared_floor
from planner.placement.place import (
    KINDS,
    Memories,
    Placed,
    chooser,
    memories_of,
    place_rows,
    rank_rows,
)
from planner.placement.policies.policy import Parts, Placement
from planner.placement.policies.registry import find_policy, list_tried_by_auto
from planner.placement.reads import first_alike
from planner.search.dimensions.dimension import Ask, Kind, LeftOut, Question
from planner.search.floor import reads_floor
from planner.workload import Hotness


def spread_placement(placed: Placed, hotness: Hotness) -> Placement:
    """The placement of every vertex as the one that stands for it.

    Args:
        placed: of the vertices that `hotness` has.
        hotness: as it was placed on.
    """
    spread, found = Spread(hotness), placed.placement
    firsts = first_alike(found.own)
    lists = {g: spread.ids(found.own[g]) for g in set(firsts)}
    own = [lists[first] for first in firsts]  # equal lists are one array
    on_host = None if found.on_host is None else spread.mask(found.on_host)
    evaluation = evaluate(
        hotness.everything.features,
        own,
        placed.memories.costs,
        cliques=found.cliques,
        on_host=on_host,
        row_bytes=found.evaluation.row_bytes,
    )
    return replace(found, own=own, on_host=on_host, evaluation=evaluation)


def of_all(request: Request, placed: Placed, whole: Placement, hotness: Hotness) -> Placed:
    """What a placement of every vertex leaves to read.

    Args:
        request: whose rows they are.
        placed: of the vertices that `hotness` has; the shares of reads stay those that were
            cross-validated there.
        whole: the same policy's, of every vertex.
        hotness: as the few were placed on.
    """
    shares = np.array([[r.shares.get(kind, 0.0) for kind in KINDS] for r in placed.rows.ranks])
    ranks = rank_rows(request, whole, shares, hotness.everything)
    return Placed(placement=whole, memories=placed.memories, rows=replace(placed.rows, ranks=ranks))


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
            for policy in list_tried_by_auto():
                yield base.with_policy(policy)

    def alike(self, candidate: Candidate) -> Candidate:
        """Of the ways to place rows on the same ranks the best stands for all."""
        return candidate.with_policy("")

    def shape(self, candidate: Candidate) -> Candidate:
        """One bound holds for all policies."""
        return candidate.with_policy("")

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
        if find_policy(candidate.policy).heat_alone:
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
    needs = find_policy(candidate.policy).needs
    return _Known(
        out_degree=ask.out_degree() if "out_degree" in needs else None,
        parts=ask.parts if "parts" in needs else None,
    )


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
            yield base.with_policy(OWNED)

    def shape(self, candidate: Candidate) -> Candidate:
        """One bound holds for keeping rows and for none."""
        return candidate.with_policy("")

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
