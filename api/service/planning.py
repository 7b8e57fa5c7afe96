"""Requests that plan: check them, answer from what is there, or make a job."""

from pathlib import Path
from typing import Any

from api.errors import ForbiddenError, UnprocessableError
from api.fingerprints import graph_fingerprint, request_key
from api.jobs.registry import PLANNING, PROBING
from api.schemas.requests import PlanRequest, ProfileRequest, WorkloadRequest
from api.security.requests import check_model
from api.service.context import Caller, Service
from api.service.graphs import graph_folder
from api.service.jobs import submit
from api.service.machines import machine_reference
from api.storage.tables import JobRow
from planner.machine.model import MachineModel, load_machine
from planner.probe.presets import load_preset
from planner.probe.probe import cached_machine
from planner.queries.calibrate import load_calibration
from planner.request import check_graph
from runtime import codec
from runtime.errors import DatasetError, InputError
from runtime.graph.dataset import Graph, open_graph


def create_plan(service: Service, caller: Caller, request: PlanRequest) -> tuple[JobRow, bool]:
    """Accept a planning request; True where a plan was there already and the job is done.

    Raises:
        ForbiddenError: the graph or the model may not be used.
        SettingsError: the fields contradict each other.
        UnprocessableError: no such machine or graph.
        DatasetError: the graph is damaged.
    """
    wanted = _checked(service, request, calibrated=request.calibrated) | {
        "calibrated": request.calibrated
    }
    known = _known_plan(service, wanted, request)
    result = None if known is None else f"/v1/plans/{known}"
    row = submit(
        service,
        caller,
        "plan",
        wanted,
        subject=known or "",
        time_limit_seconds=request.time_limit_seconds,
        result=result,
        lane=_lane(wanted),
    )
    if known is not None:
        service.metrics.cached_plans.inc()
    return row, row.state == "succeeded"


def create_profile(service: Service, caller: Caller, request: ProfileRequest) -> JobRow:
    """Accept a request to profile a graph.

    Raises:
        ForbiddenError: as for `create_plan`, and the other errors too.
    """
    wanted = _checked(service, request)
    return submit(
        service,
        caller,
        "profile",
        wanted,
        time_limit_seconds=request.time_limit_seconds,
        lane=_lane(wanted),
    )


def _lane(wanted: dict[str, Any]) -> str:
    """Where the job waits: apart, where this machine has to be probed first."""
    return PROBING if _known_machine(wanted["machine"]) is None else PLANNING


def _checked(
    service: Service, request: WorkloadRequest, *, calibrated: bool = False
) -> dict[str, Any]:
    """What the job is told, once all of it may be used."""
    settings = request.settings()
    check_model(settings.workload.model, service.settings.allowed_models)
    machine = machine_reference(service, request.machine)
    graph = _opened(service, request.graph)
    check_graph(graph, settings, calibrate=calibrated)
    return {
        "graph": str(graph.path),
        "roots": [str(root.resolve()) for root in service.graph_roots],
        "machine": machine,
        "settings": codec.to_plain(settings),
    }


def _opened(service: Service, name: str) -> Graph:
    """The dataset of that name, which can be read.

    Raises:
        ForbiddenError: it leads out of the graph roots.
        UnprocessableError: there is none.
        DatasetError: it is damaged.
    """
    try:
        folder = graph_folder(service, name)
    except InputError as error:
        raise UnprocessableError(
            f"{error}; GET /v1/graphs lists what there is", kind="unknown-graph"
        ) from None
    try:
        return open_graph(folder, validate=False)
    except OSError as error:
        raise DatasetError(
            f"{name}: expected files that can be read, found {error.strerror}"
        ) from None


def _known_plan(service: Service, wanted: dict[str, Any], request: PlanRequest) -> str | None:
    """Id of the plan that answers the request, where fingerprints are known without measuring."""
    try:
        machine = _known_machine(wanted["machine"])
        if machine is None:
            return None
        graph = graph_fingerprint(graph_folder(service, request.graph))
    except (InputError, ForbiddenError, OSError):
        return None  # the job finds the same, and says so
    factors = load_calibration(machine.fingerprint).factors(graph) if request.calibrated else {}
    key = request_key(graph, machine, request.settings(), factors)
    return service.storage.catalogue.plan_of_request(key)


def _known_machine(reference: dict[str, str] | None) -> MachineModel | None:
    """The machine, where it need not be probed."""
    if reference is None:
        return cached_machine()
    if "preset" in reference:
        return load_preset(reference["preset"])
    return load_machine(Path(reference["file"]))
