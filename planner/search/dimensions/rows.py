"""Choose which rows each rank keeps: by a policy, by owner, or in a cache that fills itself.

Large graphs are placed by a few nodes, each of which stands for several. A plan places every node:
where hotness alone decides, a node lies where the one that stands for it does.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.candidate import Candidate, in_columns
from gnnplan.planner.cost.cache_model import DrawnReads, ExpectedReads, SuccessiveReads
from gnnplan.planner.cost.request import Request
from gnnplan.planner.cost.terms import look_up_seconds
from gnnplan.planner.placement.caches import place_behind_caches
from gnnplan.planner.placement.evaluate import SOURCES, evaluate
from gnnplan.planner.placement.order import VertexRuns
from gnnplan.planner.placement.owned import OWNED, place_shared, shared_floor
from gnnplan.planner.placement.place import (
    CandidatePlacement,
    Memories,
    make_placer,
    memories_of,
    place_rows,
    place_rows_and_lists,
    rank_rows,
)
from gnnplan.planner.placement.placement import ItemPlacement, Placement, first_alike
from gnnplan.planner.placement.policies.joint import bound_placements
from gnnplan.planner.placement.policies.policy import Parts
from gnnplan.planner.placement.policies.registry import find_policy, list_tried_by_auto
from gnnplan.planner.placement.problem import rows_problem
from gnnplan.planner.search.dimensions.dimension import (
    Proposal,
    ProposalInputs,
    RowsDimension,
    SearchInputs,
)
from gnnplan.planner.workload import Hotness
from gnnplan.runtime.plan.schema import DYNAMIC


def spread_placement(placed: Placement, hotness: Hotness) -> Placement:
    """Place every node where the one that stands for it (in `hotness`) lies."""
    runs, items = VertexRuns(hotness), placed.items[0]
    firsts = first_alike(items.own)
    lists = {g: runs.ids(items.own[g]) for g in set(firsts)}
    own = [lists[first] for first in firsts]  # equal lists are one array
    on_host = None if items.on_host is None else runs.mask(items.on_host)
    return replace(placed, items=(ItemPlacement(own=own, on_host=on_host),))


def of_all(
    request: Request, placed: CandidatePlacement, whole: Placement, hotness: Hotness
) -> CandidatePlacement:
    """Return what a placement of every node leaves to read.

    Cross-validated shares of reads stay those of `placed`, the placement of the few nodes of
    `hotness` by the same policy.
    """
    shares = np.array([[r.shares.get(kind, 0.0) for kind in SOURCES] for r in placed.rows.ranks])
    every, costs = hotness.everything, placed.memories.costs
    reads = evaluate(every.features, whole.own, costs, cliques=whole.cliques, on_host=whole.on_host)
    ranks = [
        replace(rows, list_bytes=known.list_bytes, list_shares=known.list_shares)
        for rows, known in zip(
            rank_rows(request, whole, shares, every), placed.rows.ranks, strict=True
        )
    ]
    return CandidatePlacement(
        placement=whole,
        reads=reads,
        memories=placed.memories,
        rows=replace(placed.rows, ranks=ranks),
        lists=placed.lists,
        list_cliques=placed.list_cliques,
    )


class FixedRows(RowsDimension):
    """Rows that stay where they are, for ranks with batches of their own."""

    name = "fixed rows"

    def applies(self, candidate: Candidate) -> bool:
        """Return whether rows stay where they are and batches are independent."""
        return candidate.cache is None and candidate.batching == "independent"

    def propose(self, asked: ProposalInputs, base: Candidate | None) -> Iterator[Proposal]:
        """Yield every policy that auto tries, on the same ranks; on a grid also in its columns."""
        del asked
        if base is not None and base.batching == "independent":
            in_parts = base.topology.policy == "partitioned" and base.kind == "cuda"
            for policy in list_tried_by_auto():
                for each in (base, in_columns(base)) if in_parts else (base,):
                    yield each.with_policy(policy)

    def placement_key(self, candidate: Candidate, memories: Memories) -> Hashable:
        """Tell apart where lists lie, which share the memory of rows."""
        known, lists = super().placement_key(candidate, memories), candidate.topology
        if lists.policy != "cached":
            return known
        return known, memories.room.own_bytes, lists.peers, candidate.partition

    def dedup_key(self, candidate: Candidate) -> Candidate:
        """Leave the policy blank."""
        return candidate.with_policy("")

    def read_shape(self, candidate: Candidate) -> Candidate:
        """Leave the policy blank: one bound holds for all policies."""
        return candidate.with_policy("")

    def place(
        self, search: SearchInputs, request: Request, candidate: Candidate, hotness: Hotness,
        memories: Memories,
    ) -> CandidatePlacement:  # fmt: skip
        """Place rows by the named policy, with adjacency lists where they share memory."""
        known = _known(search, candidate)
        if candidate.topology.policy != "cached":
            return place_rows(request, candidate, hotness, memories, **known)
        assert search.in_degree is not None
        parts, laws = search.shards_of(candidate), list[Hotness]()
        if parts is not None and search.draws is not None:
            laws = search.draws.clique_hotness(candidate.cliques, parts)
            hotness = laws[0]
        return place_rows_and_lists(
            request, candidate, hotness, memories, search.in_degree(), laws=laws, **known
        )

    def place_all(
        self, search: SearchInputs, request: Request, candidate: Candidate,
        placed: CandidatePlacement, hotness: Hotness,
    ) -> CandidatePlacement:  # fmt: skip
        """Follow the nodes that stand for others where hotness decides; else place anew."""
        if hotness.stride == 1 or candidate.partition != "none":
            return placed
        if find_policy(candidate.policy).heat_alone:
            whole = spread_placement(placed.placement, hotness)
        else:
            every, shared_host = hotness.everything, search.settings.shared_host
            memories = memories_of(request, candidate, every, shared_host=shared_host)
            if placed.lists is not None:
                memories = replace(memories, room=placed.memories.room)
            placer = make_placer(request, candidate, every, memories, **_known(search, candidate))
            whole = placer.place(every.features)
        return of_all(request, placed, whole, hotness)

    def least_read_seconds(
        self, candidate: Candidate, placed: CandidatePlacement, hotness: Hotness
    ) -> float:
        """Bound the reads by weak duality, at the placement's costs and capacities."""
        room, cliques = placed.memories.room, placed.placement.cliques
        own = [hotness.most_places(room.own_rows)] * candidate.num_ranks
        on_host = None if room.host_rows is None else hotness.most_places(room.host_rows)
        features, costs = hotness.features, placed.memories.costs
        return bound_placements(rows_problem(features, costs, own, cliques, on_host), "serial")


class _Known(TypedDict):
    """Inputs of policies besides hotness."""

    out_degree: NDArray[np.int64] | None
    parts: Parts | None


def _known(search: SearchInputs, candidate: Candidate) -> _Known:
    needs = find_policy(candidate.policy).needs
    return _Known(
        out_degree=search.out_degree() if "out_degree" in needs else None,
        parts=search.parts if "parts" in needs else None,
    )


class OwnedRows(RowsDimension):
    """The hottest rows that each rank owns, which no other rank reads."""

    name = "owned rows"

    def applies(self, candidate: Candidate) -> bool:
        """Return whether ranks share a batch, so that each reads its own nodes alone."""
        return candidate.batching == "cooperative"

    def propose(self, asked: ProposalInputs, base: Candidate | None) -> Iterator[Proposal]:
        """Yield the same ranks, each keeping its hottest rows."""
        del asked
        if base is not None and self.applies(base):
            yield base.with_policy(OWNED)

    def read_shape(self, candidate: Candidate) -> Candidate:
        """Ignore whether rows are kept: one bound holds."""
        return candidate.with_policy("")

    def select_hotness(
        self, hotness: Mapping[int, Hotness], batch_size: int, candidate: Candidate
    ) -> Hotness:
        """Return the whole batch's hotness of every node: owners are dealt by id."""
        del candidate
        return hotness[batch_size].everything

    def place(
        self, search: SearchInputs, request: Request, candidate: Candidate, hotness: Hotness,
        memories: Memories,
    ) -> CandidatePlacement:  # fmt: skip
        """Place what fits of each owner's hottest rows."""
        owner = search.shards_of(candidate)
        return place_shared(request, candidate, hotness, memories, owner=owner)

    def placement_key(self, candidate: Candidate, memories: Memories) -> Hashable:
        """Return the room, and who owns the nodes."""
        return candidate.owner, super().placement_key(candidate, memories)

    def least_read_seconds(
        self, candidate: Candidate, placed: CandidatePlacement, hotness: Hotness
    ) -> float:
        """Give each rank its share of the hottest rows."""
        return shared_floor(hotness, placed.memories, candidate.num_ranks)


class Caches(RowsDimension):
    """Caches that keep the rows of the last batches."""

    name = "caches that fill themselves"
    bounded = False

    def applies(self, candidate: Candidate) -> bool:
        """Return whether the placement is a cache."""
        return candidate.cache is not None

    def count_changes(self, candidate: Candidate) -> int:
        """Count the cache, which the name says by its policy."""
        del candidate
        return 1

    def family(self, candidate: Candidate) -> Hashable:
        """Tell the caches apart."""
        return candidate.cache

    def no_gain_reason(self, candidate: Candidate) -> str:
        """Name the cache."""
        return f"a {candidate.cache} cache that fills itself"

    def propose(self, asked: ProposalInputs, base: Candidate | None) -> Iterator[Proposal]:
        """Yield each cache on the same ranks, where each reads for itself (cores: one host)."""
        del asked
        if base is None or base.hosts > 1 or base.batching == "cooperative":
            return
        for policy in DYNAMIC:
            yield base.with_policy(policy)

    def placement_key(self, candidate: Candidate, memories: Memories) -> Hashable:
        """Add the bytes shared by slots and host rows, and kappa, by which rows recur."""
        return memories.room, candidate.kappa

    def select_hotness(
        self, hotness: Mapping[int, Hotness], batch_size: int, candidate: Candidate
    ) -> Hotness:
        """Return the hotness of every node: drawn batches name nodes by id."""
        return super().select_hotness(hotness, batch_size, candidate).everything

    def place(
        self, search: SearchInputs, request: Request, candidate: Candidate, hotness: Hotness,
        memories: Memories,
    ) -> CandidatePlacement:  # fmt: skip
        """Divide memory between cache slots and the host's rows."""
        batches = _batches(search, request, candidate, memories)
        reads = _reads(search, candidate, hotness, batches)
        return place_behind_caches(request, candidate, hotness, reads, memories)


def _batches(
    search: SearchInputs, request: Request, candidate: Candidate, memories: Memories
) -> list[NDArray[np.int32]]:
    """Return the ids of a rank's successive batches; none where no cache could win."""
    if search.draws is None or _cannot_win(search, request, candidate, memories):
        return []
    found = search.draws.batches(candidate.num_ranks, candidate.kappa)
    return [] if isinstance(found, str) else found


def _reads(
    search: SearchInputs, candidate: Candidate, hotness: Hotness, batches: list[NDArray[np.int32]]
) -> SuccessiveReads:
    """Count reads in successive batches, or expect them from hotness where none were drawn."""
    if not batches:
        return ExpectedReads(p=hotness.features, num_batches=hotness.num_batches)
    asked = search.settings.sampler_parameters.get("kappa", 1)
    alone = candidate.kappa is None and float(asked) == 1.0
    return DrawnReads(batches=batches, num_nodes=hotness.features.size, independent=alone)


def _cannot_win(
    search: SearchInputs, request: Request, candidate: Candidate, memories: Memories
) -> bool:
    """Return whether the host holds every row and serves it sooner than any cache."""
    if memories.room.host_rows is not None or search.settings.policy == candidate.policy:
        return False
    costs = memories.costs
    look_up = look_up_seconds(request.machine, candidate, request.graph.num_nodes, 0.0)
    return costs.host <= costs.local + look_up
