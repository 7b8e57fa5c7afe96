"""Check what link prediction and typed graphs ask of a planning request."""

from dataclasses import replace

from gnnplan.planner.errors import SettingsError
from gnnplan.planner.settings import PlanSettings
from gnnplan.runtime.graph.dataset import Graph, is_typed, types_of
from gnnplan.runtime.sampling.registry import DEFAULT_SAMPLER, is_default

LINK_TASK = "link"


def is_link(graph: Graph) -> bool:
    """Return whether the dataset's task is link prediction."""
    return str(graph.task) == LINK_TASK


def check_kind(graph: Graph, settings: PlanSettings) -> None:
    """Refuse what the runtime cannot do with this dataset's task and types.

    Raises:
        SettingsError: the settings do not go with the dataset.
        DatasetError: model rgcn for a graph without edge types.
    """
    work = settings.workload
    if graph.x_by_type and not is_typed(work):
        raise SettingsError(
            f"{graph.name}: expected model rgcn for features by node type, found {work.model}; "
            "add --model rgcn"
        )
    if not (is_link(graph) or is_typed(work)):
        if work.type_fanouts:
            raise SettingsError(
                f"expected fan-outs by edge type with model rgcn alone, found model {work.model}; "
                "drop --type-fanouts"
            )
        return
    what = f"task {LINK_TASK}" if is_link(graph) else "model rgcn"
    if is_link(graph) and is_typed(work):
        raise SettingsError(
            "expected model sage, gcn, gat or module:factory for task link, found rgcn; links of "
            "typed graphs cannot be trained on"
        )
    if not is_default(settings.sampler, settings.sampler_parameters):
        raise SettingsError(
            f"{what}: expected sampler {DEFAULT_SAMPLER} without parameters, found "
            f"{settings.sampler}{' with parameters' if settings.sampler_parameters else ''}; "
            "drop --sampler"
        )
    if is_typed(work):
        _check_types(graph, settings)


def _check_types(graph: Graph, settings: PlanSettings) -> None:
    names = types_of(graph).edge_types
    unknown = sorted(set(settings.workload.type_fanouts) - set(names))
    if unknown:
        raise SettingsError(
            f"--type-fanouts: expected edge types among {', '.join(names)}, found {unknown[0]!r}"
        )
    if graph.x_by_type and settings.policy not in ("auto", "none"):
        raise SettingsError(
            f"{graph.name}: expected policy auto or none for features by node type, which stay on "
            f"the host, found {settings.policy}"
        )
    if graph.x_by_type and not settings.shared_host:
        raise SettingsError(
            f"{graph.name}: expected the host's shared mapping for features by node type; drop "
            "--no-shared-host"
        )


def settled(graph: Graph, settings: PlanSettings) -> PlanSettings:
    """Return the settings with the only placement that features by node type can have."""
    return replace(settings, policy="none") if graph.x_by_type else settings


def sampler_words(graph: Graph, settings: PlanSettings) -> str:
    """Return the sampler's name, and what its rates differ by from plain neighbour sampling."""
    if is_typed(settings.workload):
        return "neighbor by edge type"
    if is_link(graph) and settings.workload.links.exclude != "none":
        return "neighbor without the step's links"
    return settings.sampler
