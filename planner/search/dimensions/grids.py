"""Choose a partitioned topology: ranks form a 1.5D grid over hosts, none with all lists."""

from collections.abc import Iterator
from dataclasses import replace

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.search.dimensions.dimension import Dimension, LeftOut, Proposing
from gnnplan.planner.search.dimensions.shared_batch import SHARED_MODELS
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.plan.schema import TopologyPlacement
from gnnplan.runtime.sampling.registry import is_able

GRID_BULKS = (1, 8)
"""Batches of each rank that a grid samples at once."""


class Grids(Dimension):
    """Adjacency lists spread over hosts."""

    name = "topology in parts"

    def applies(self, candidate: Candidate) -> bool:
        """Return whether the topology is partitioned."""
        return candidate.topology.policy == "partitioned"

    def describe(self, candidate: Candidate) -> str:
        """Name the number of copies of the lists."""
        copies = "copy" if candidate.topology.replication == 1 else "copies"
        return f"{self.name}, {candidate.topology.replication} {copies}"

    def propose(self, asked: Proposing, base: Candidate | None) -> Iterator[Candidate | LeftOut]:
        """Yield every number of copies; one host's shared mapping holds all lists anyway."""
        if base is None or base.policy != "none":
            return
        if base.kind == "cuda":
            yield LeftOut(name=self.name, why="not priced where ranks are GPUs")
        elif not shares_topology(asked.settings, asked.task):
            yield LeftOut(name=self.name, why="grids draw uniform neighbours of one type alone")
        elif asked.profile is not None and not asked.profile.stacks:
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
    """Return whether a grid can sample this request: uniform neighbours of one node type.

    >>> shares_topology(PlanSettings(), "multiclass"), shares_topology(PlanSettings(), "link")
    (True, False)
    """
    named = is_able(settings.sampler, settings.sampler_parameters, "grid")
    return named and task != "link" and settings.workload.model in SHARED_MODELS
