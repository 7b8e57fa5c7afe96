"""Decide which samplers a request may use, and which are tried where the user names none."""

from dataclasses import replace

from gnnplan.planner.candidate import Candidate
from gnnplan.planner.cost.graph_memory import why_cores_draw
from gnnplan.planner.cost.request import sampler_of
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.settings import AUTO_SAMPLER, PlanSettings, SamplerChoice, refuse_changed
from gnnplan.runtime.graph.dataset import Graph, is_typed
from gnnplan.runtime.plan.schema import Sampler, Workload
from gnnplan.runtime.sampling.registry import (
    BY_TYPE,
    DEFAULT_SAMPLER,
    SAMPLERS,
    WITHOUT_LINKS,
    is_able,
)
from gnnplan.runtime.sampling.statistics import (
    StatisticsClass,
    class_of,
    is_weighted,
    layer_of_model,
)

LINK_TASK = "link"


def is_link(graph: Graph) -> bool:
    """Return whether the dataset's task is link prediction."""
    return str(graph.task) == LINK_TASK


def of_links_or_types(task: str, workload: Workload) -> bool:
    """Return whether batches are of links, or of a typed graph."""
    return task == LINK_TASK or is_typed(workload)


def plan_sampler(settings: PlanSettings, candidate: Candidate | None = None) -> Sampler:
    """Return the sampler as a plan names it: the user's, with the candidate's own choices."""
    user_sampler = Sampler(
        name=settings.sampler, dialect=settings.dialect, parameters=settings.sampler_parameters
    )
    return sampler_of(user_sampler, candidate)


def statistics_of(settings: PlanSettings, candidate: Candidate | None = None) -> StatisticsClass:
    """Return the statistics class of sampler, estimator and layer."""
    sampler = plan_sampler(settings, candidate)
    return class_of(sampler, layer_of_model(settings.workload.model))


def explain_refusal(settings: PlanSettings, candidate: Candidate) -> str:
    """Return why a candidate's sampler cannot be used; empty where it can."""
    if is_unfit(settings, candidate):
        return "model gat takes no edge weights of a sampler"
    found, allowed = statistics_of(settings, candidate), StatisticsClass(settings.workload.allow)
    if allowed.allows(found):
        return ""
    return f"statistics would be {found.value}, --allow is {allowed.value}"


def is_unfit(settings: PlanSettings, candidate: Candidate | None = None) -> bool:
    """Return whether the model cannot train on the sampler's blocks.

    Attention has no unbiased weighted form: the runtime refuses such blocks.
    """
    return settings.workload.model == "gat" and is_weighted(plan_sampler(settings, candidate))


def with_samplers(graph: Graph, settings: PlanSettings) -> PlanSettings:
    """Return the settings with the samplers that `auto` tries; a named sampler stays.

    Layer-wise samplers need sizes, which only the user can give; a preference for local neighbours
    is a candidate of the search. Links and typed graphs are sampled by neighbours alone.

    Raises:
        SettingsError: parameters without a named sampler.
    """
    if settings.sampler != AUTO_SAMPLER:
        return settings
    if settings.sampler_parameters:
        raise SettingsError(
            "sampler auto: expected no parameters, found "
            f"{', '.join(settings.sampler_parameters)}; name the sampler that they are of"
        )
    plain = replace(settings, sampler=DEFAULT_SAMPLER)
    if settings.mode == "full-graph" or is_link(graph) or is_typed(settings.workload):
        return plain
    return replace(plain, other_samplers=[*_others(plain), *settings.other_samplers])


def _others(settings: PlanSettings) -> list[SamplerChoice]:
    """Return each sampler that auto tries, with the first of its parameters that are allowed."""
    allowed, found = StatisticsClass(settings.workload.allow), list[SamplerChoice]()
    for name, spec in SAMPLERS.items():
        for parameters in spec.auto_parameters:
            tried = replace(settings, sampler=name, sampler_parameters=parameters)
            in_grids = settings.replication is None or is_able(name, parameters, "grid")
            if in_grids and not is_unfit(tried) and allowed.allows(statistics_of(tried)):
                found.append(SamplerChoice(name=name, parameters=parameters))
                break
    return found


def why_fed_by_cores(graph: Graph, settings: PlanSettings) -> str:
    """Say what of a plan for GPUs makes cores draw its batches; empty where the GPUs draw them."""
    sampler, sparse = plan_sampler(settings), graph.x_csr is not None
    return why_cores_draw(str(graph.task), settings.workload, sampler, sparse=sparse)


def fed_by_cores(settings: PlanSettings, *, sparse: bool) -> PlanSettings:
    """Return the settings with what GPUs can do whose batches cores draw, and gather if `sparse`.

    Lists are read where the cores are.
    """
    policy = "none" if sparse else settings.policy
    return replace(settings, policy=policy, topology="host", batching="independent")


def fix_placement(graph: Graph, settings: PlanSettings, *, gpus: bool = False) -> PlanSettings:
    """Return the settings with the only placement that cores have for features by node type.

    Raises:
        SettingsError: GPUs are to keep or share what cores draw or gather for them.
    """
    if gpus and (why := why_fed_by_cores(graph, settings)):
        refuse_changed(settings, ("replication", "owner"), f"the default with {why}")
        sparse = graph.x_csr is not None
        other = "import it with --features dense" if sparse else "choose another sampler"
        fixed = fed_by_cores(settings, sparse=sparse)
        for name in ("policy", "topology", "batching"):
            found, only = getattr(settings, name), getattr(fixed, name)
            if found not in ("auto", only):
                raise SettingsError(
                    f"{graph.name}: expected {name} auto or {only} with {why}, found {found}; "
                    f"{other}, or add --cores"
                )
    return replace(settings, policy="none") if graph.x_by_type and not gpus else settings


def sampler_words(graph: Graph, settings: PlanSettings) -> str:
    """Return the sampler's name, and what its rates differ by from plain neighbour sampling."""
    if is_typed(settings.workload):
        return BY_TYPE
    if is_link(graph) and settings.workload.links.exclude != "none":
        return WITHOUT_LINKS
    return settings.sampler
