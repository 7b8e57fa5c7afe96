"""Choose cooperative batches: ranks sample one batch together, each its own nodes."""

from collections.abc import Iterator
from dataclasses import replace

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.placement.owned import OWNED
from gnnplan.planner.search.dimensions.dimension import Dimension, LeftOut, Proposing
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.errors import SamplerError
from gnnplan.runtime.plan.schema import Sampler
from gnnplan.runtime.sampling.registry import why_alone

SHARED_MODELS = ("sage", "gcn", "gat")
"""Models that can stop between two layers to exchange rows."""


class SharedBatch(Dimension):
    """Batches whose work is shared among the ranks."""

    name = "cooperative batches"

    def applies(self, candidate: Candidate) -> bool:
        """Return whether the ranks share a batch."""
        return candidate.batching == "cooperative"

    def describe(self, candidate: Candidate) -> str:
        """Say that batches are cooperative."""
        del candidate
        return self.name

    def propose(self, asked: Proposing, base: Candidate | None) -> Iterator[Candidate | LeftOut]:
        """Yield the same ranks sharing a batch, where they keep no rows of their own."""
        if base is None or base.policy != "none":
            return
        if base.kind == "cuda":
            yield LeftOut(name=self.name, why="not priced where ranks are GPUs")
        elif asked.settings.batching == "independent":
            yield LeftOut(name=self.name, why="independent batches are asked for")
        elif not shares_batches(asked.settings, asked.task):
            yield LeftOut(name=self.name, why="this model and sampler cannot be split over ranks")
        elif asked.profile is not None and asked.profile.shared is None:
            yield LeftOut(name=self.name, why="the profile did not count what ranks would exchange")
        elif base.num_ranks > 1:
            yield replace(base, batching="cooperative")

    def normalise(self, candidate: Candidate) -> Candidate:
        """Make batches independent where the placement is not one for owners."""
        if candidate.policy in ("none", OWNED):
            return candidate
        return replace(candidate, batching="independent")


def shares_batches(settings: PlanSettings, task: str) -> bool:
    """Return whether the runtime lets ranks share a batch of this request.

    >>> shares_batches(PlanSettings(), "multiclass"), shares_batches(PlanSettings(), "link")
    (True, False)
    """
    work = settings.workload
    if settings.batching == "independent" or task == "link" or work.model not in SHARED_MODELS:
        return False
    if (work.model == "gcn" and work.gcn_norm == "sampled") or work.precision != "float32":
        return False
    sampler = Sampler(name=settings.sampler, parameters=settings.sampler_parameters)
    try:
        return not why_alone(sampler)
    except SamplerError:
        return False
