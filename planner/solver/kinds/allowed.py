"""Whether the user's --allow permits what a candidate does to training statistics."""

from planner.candidate import Candidate
from planner.settings import PlanSettings
from planner.solver.sampling import statistics_of
from runtime.sampling.statistics import StatisticsClass


def forbidden(settings: PlanSettings, candidate: Candidate) -> str:
    """Why --allow does not permit a candidate; empty where it does."""
    found, allowed = statistics_of(settings, candidate), StatisticsClass(settings.workload.allow)
    if allowed.allows(found):
        return ""
    return f"statistics would be {found.value}, --allow is {allowed.value}"
