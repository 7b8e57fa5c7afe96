"""The topology in parts: a 1.5D grid of ranks over hosts, none of which holds all lists."""

from collections.abc import Iterator
from dataclasses import replace

from planner.candidate import Candidate
from planner.search.dimensions.dimension import Ask, Kind, LeftOut
from planner.search.dimensions.shared_batch import SHARED_MODELS
from planner.settings import PlanSettings
from runtime.plan.schema import TopologyPlacement

GRID_BULKS = (1, 8)
"""Batches of each rank that a grid samples at once."""


class Grids(Kind):
    """Adjacency lists in parts over hosts."""

    name = "topology in parts"

    def taken(self, candidate: Candidate) -> bool:
        """Whether the topology is in parts."""
        return candidate.topology.policy == "partitioned"

    def words(self, candidate: Candidate) -> str:
        """How many copies there are of the lists."""
        copies = "copy" if candidate.topology.replication == 1 else "copies"
        return f"{self.name}, {candidate.topology.replication} {copies}"

    def changes(self, candidate: Candidate) -> int:
        """One."""
        del candidate
        return 1

    def propose(self, ask: Ask, base: Candidate | None) -> Iterator[Candidate | LeftOut]:
        """Every number of copies; on one host its shared mapping holds all lists once."""
        if base is None or base.policy != "none":
            return
        if base.kind == "cuda":
            yield LeftOut(name=self.name, why="not priced where ranks are GPUs")
        elif not shares_topology(ask.settings, ask.task):
            yield LeftOut(name=self.name, why="grids draw uniform neighbours of one type alone")
        elif ask.profile is not None and not ask.profile.stacks:
            yield LeftOut(
                name=self.name, why="the profile did not count the rows that stacks ask for"
            )
        elif base.hosts > 1:
            for copies in range(1, base.num_ranks):
                if base.num_ranks % copies == 0:
                    for bulk in GRID_BULKS:
                        topology = TopologyPlacement(policy="partitioned", replication=copies)
                        yield replace(base, topology=topology, bulk_batches=bulk)


def shares_topology(settings: PlanSettings, task: str) -> bool:
    """Whether a grid can sample this request: uniform neighbours of one node type.

    >>> shares_topology(PlanSettings(), "multiclass"), shares_topology(PlanSettings(), "link")
    (True, False)
    """
    named = settings.sampler == "neighbor" and not settings.sampler_parameters
    return named and task != "link" and settings.workload.model in SHARED_MODELS
