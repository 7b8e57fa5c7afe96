"""Bodies of requests from the planner's own settings; their fields mirror the command's flags."""

from typing import Any

from planner.errors import SettingsError
from planner.settings import PlanSettings
from runtime import codec

_OF_LINKS = ("negatives", "num_negatives", "exclude", "eval_negatives")
_DERIVED = ("num_layers", "links")


def plan_body(
    graph: str, settings: PlanSettings, *, machine: str | None = None, calibrated: bool = False
) -> dict[str, Any]:
    """Body of `POST /v1/plans`.

    Args:
        graph: its folder below a graph root of the service.
        settings: the request.
        machine: preset, or id of an uploaded machine; None: the service's own.
        calibrated: scale stages by what `compare` learnt of that machine.
    """
    return profile_body(graph, settings, machine=machine) | {"calibrated": calibrated}


def profile_body(
    graph: str, settings: PlanSettings, *, machine: str | None = None
) -> dict[str, Any]:
    """Body of `POST /v1/profiles`; as `plan_body`."""
    if not graph:
        raise SettingsError("expected the name of a graph of the service, found none")
    found: dict[str, Any] = codec.to_plain(settings)
    work: dict[str, Any] = found.pop("workload")
    links: dict[str, Any] = work["links"]
    flat = {name: value for name, value in work.items() if name not in _DERIVED}
    return (
        found
        | flat
        | {name: links[name] for name in _OF_LINKS}
        | {
            "graph": graph,
            "machine": machine,
        }
    )
