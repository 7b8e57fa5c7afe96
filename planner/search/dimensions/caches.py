"""Choose a cache that fills itself while training: LRU or CLOCK, in memory of cores or of GPUs."""

from collections.abc import Hashable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.cache_model import DrawnReads, ExpectedReads, SuccessiveReads
from gnnplan.planner.cost.request import Request
from gnnplan.planner.cost.terms import look_up_seconds
from gnnplan.planner.placement.caches import place_behind_caches
from gnnplan.planner.placement.place import CandidatePlacement, Memories
from gnnplan.planner.search.dimensions.dimension import (
    Proposal,
    ProposalInputs,
    RowsDimension,
    SearchInputs,
)
from gnnplan.planner.workload import Hotness
from gnnplan.runtime.plan.schema import DYNAMIC


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
