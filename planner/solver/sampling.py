"""The sampler of a candidate: the user's own, with what the planner may change of it."""

from planner.candidate import Candidate
from planner.settings import PlanSettings
from runtime.plan import Sampler
from runtime.sampling.parameters import class_of
from runtime.sampling.statistics import StatisticsClass, layer_of_model


def plan_sampler(settings: PlanSettings, candidate: Candidate | None = None) -> Sampler:
    """The sampler as a plan names it: as asked for, but for the candidate's own choices."""
    name, parameters = settings.sampler, settings.sampler_parameters
    if candidate is not None and candidate.las is not None:
        kept = parameters if name == "las" else {}
        name, parameters = "las", {**kept, "factor": candidate.las}
    if candidate is not None and candidate.kappa is not None:
        parameters = {**parameters, "kappa": float(candidate.kappa)}
    return Sampler(name=name, dialect=settings.dialect, parameters=parameters)


def statistics_of(settings: PlanSettings, candidate: Candidate | None = None) -> StatisticsClass:
    """Class of (sampler, estimator, layer), by the one function that decides it."""
    sampler = plan_sampler(settings, candidate)
    return class_of(sampler, layer_of_model(settings.workload.model))
