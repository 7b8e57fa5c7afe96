"""What a candidate's sampler may do: to training statistics, and to the model's layers."""

from planner.candidate import Candidate
from planner.settings import PlanSettings
from planner.solver.sampling import plan_sampler, statistics_of
from runtime.sampling.parameters import is_weighted
from runtime.sampling.statistics import StatisticsClass


def forbidden(settings: PlanSettings, candidate: Candidate) -> str:
    """Why a candidate's sampler cannot be used; empty where it can."""
    if unfit(settings, candidate):
        return "model gat takes no edge weights of a sampler"
    found, allowed = statistics_of(settings, candidate), StatisticsClass(settings.workload.allow)
    if allowed.allows(found):
        return ""
    return f"statistics would be {found.value}, --allow is {allowed.value}"


def unfit(settings: PlanSettings, candidate: Candidate | None = None) -> bool:
    """Whether the model cannot train on the sampler's blocks, whatever is allowed.

    Attention has no unbiased weighted form: the runtime refuses such blocks, so no plan has them.
    """
    return settings.workload.model == "gat" and is_weighted(plan_sampler(settings, candidate))
