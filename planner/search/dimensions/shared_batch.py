"""Cooperative batches: the ranks sample one batch together and each vertex has one owner."""

from collections.abc import Iterator
from dataclasses import replace

from planner.candidate import Candidate
from planner.placement.owned import OWNED
from planner.search.dimensions.dimension import Ask, Kind, LeftOut
from planner.settings import PlanSettings
from runtime.errors import SamplerError
from runtime.plan.schema import Sampler
from runtime.sampling.parameters import number, parameters_of

SHARED_MODELS = ("sage", "gcn", "gat")
"""Models that can stop between two layers to exchange rows."""


class SharedBatch(Kind):
    """Ranks that share the work of one batch."""

    name = "cooperative batches"

    def taken(self, candidate: Candidate) -> bool:
        """Whether the ranks share a batch."""
        return candidate.batching == "cooperative"

    def words(self, candidate: Candidate) -> str:
        """That they do."""
        del candidate
        return self.name

    def changes(self, candidate: Candidate) -> int:
        """One."""
        del candidate
        return 1

    def propose(self, ask: Ask, base: Candidate | None) -> Iterator[Candidate | LeftOut]:
        """The same ranks sharing a batch, where they keep no rows of their own."""
        if base is None or base.policy != "none":
            return
        if base.kind == "cuda":
            yield LeftOut(name=self.name, why="not priced where ranks are GPUs")
        elif ask.settings.batching == "independent":
            yield LeftOut(name=self.name, why="independent batches are asked for")
        elif not shares_batches(ask.settings, ask.task):
            yield LeftOut(name=self.name, why="this model and sampler cannot be split over ranks")
        elif ask.profile is not None and ask.profile.shared is None:
            yield LeftOut(name=self.name, why="the profile did not count what ranks would exchange")
        elif base.num_ranks > 1:
            yield replace(base, batching="cooperative")

    def settled(self, candidate: Candidate) -> Candidate:
        """Independent batches where rows are placed otherwise than ranks that share one can."""
        if candidate.policy in ("none", OWNED):
            return candidate
        return replace(candidate, batching="independent")

    def seeds(self, batch_size: int) -> int | None:
        """All of the batch's."""
        return batch_size


def shares_batches(settings: PlanSettings, task: str) -> bool:
    """Whether ranks can share a batch of this request: what the runtime would refuse is not tried.

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
        values = parameters_of(sampler)
        return settings.sampler in ("neighbor", "full") or (
            settings.sampler == "labor"
            and values["variant"] != "star"
            and number("labor", values, "variant") == 0
        )
    except SamplerError:
        return False
