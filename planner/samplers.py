"""Samplers that are tried where the user names none: neighbour sampling and, if allowed, LABOR."""

from dataclasses import replace

from planner.errors import SettingsError
from planner.kinds import is_link
from planner.settings import AUTO_SAMPLER, PlanSettings, SamplerChoice
from planner.solver.kinds.allowed import unfit
from planner.solver.sampling import statistics_of
from runtime.graph.dataset import Graph
from runtime.graph.types import is_typed
from runtime.sampling.statistics import StatisticsClass

LABOR: tuple[dict[str, float | str], ...] = (
    {},
    {"estimator": "horvitz-thompson"},
    {"estimator": "plain"},
)
"""Its estimators, the preferred one first; the others for stricter users and for attention."""


def with_samplers(graph: Graph, settings: PlanSettings) -> PlanSettings:
    """The settings with samplers for `auto`; those of a user who named one stay as they are.

    The fan-outs are the user's. Layer-wise samplers need sizes, which only the user can give, and
    a preference for local neighbours is a candidate of the search already.

    Args:
        graph: links and typed graphs are sampled by neighbours alone.
        settings: the request.

    Raises:
        SettingsError: parameters of no sampler.
    """
    if settings.sampler != AUTO_SAMPLER:
        return settings
    if settings.sampler_parameters:
        raise SettingsError(
            "sampler auto: expected no parameters, found "
            f"{', '.join(settings.sampler_parameters)}; name the sampler that they are of"
        )
    plain = replace(settings, sampler="neighbor")
    if settings.mode == "full-graph" or is_link(graph) or is_typed(settings.workload):
        return plain
    return replace(plain, other_samplers=[*_labor(plain), *settings.other_samplers])


def _labor(settings: PlanSettings) -> list[SamplerChoice]:
    allowed = StatisticsClass(settings.workload.allow)
    for parameters in LABOR:
        tried = replace(settings, sampler="labor", sampler_parameters=parameters)
        if not unfit(tried) and allowed.allows(statistics_of(tried)):
            return [SamplerChoice(name="labor", parameters=parameters)]
    return []
