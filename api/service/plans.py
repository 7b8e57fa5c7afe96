"""Make, read, explain, compare, question and remove plans."""

import json
from pathlib import Path
from typing import Any, Literal

from gnnplan.api.errors import ConflictError, ForbiddenError, NotFoundError, UnprocessableError
from gnnplan.api.jobs.lanes import KINDS, PLANNING, PROBING
from gnnplan.api.requests import (
    Limited,
    PlanRequest,
    ProfileRequest,
    SimulationRequest,
    WhatIfRequest,
    WhyNotRequest,
    WorkloadRequest,
    graph_fingerprint,
    request_key,
)
from gnnplan.api.security import Principal, check_model, check_owner
from gnnplan.api.service.context import Caller, Service, as_json
from gnnplan.api.service.inputs import graph_folder, machine_reference
from gnnplan.api.service.jobs import find_repeat, submit
from gnnplan.api.storage.storage import PlanInUseError
from gnnplan.api.storage.tables import JobRow, PlanRow
from gnnplan.planner.machine.model import MachineModel, load_machine
from gnnplan.planner.probe.presets import load_preset
from gnnplan.planner.probe.probe import cached_machine
from gnnplan.planner.profile.cache import load_record
from gnnplan.planner.queries.calibrate import load_calibration
from gnnplan.planner.queries.diff import PlanDiff, diff
from gnnplan.planner.queries.explain import explain
from gnnplan.planner.request import (
    check_graph,
    check_replayable,
    refuse_unused,
)
from gnnplan.planner.settings import POLICIES
from gnnplan.runtime import codec
from gnnplan.runtime.errors import DatasetError, InputError
from gnnplan.runtime.graph.dataset import Graph, open_graph
from gnnplan.runtime.plan.io import PLAN_FILE, load_plan
from gnnplan.runtime.plan.schema import Plan

Probe = Literal["none", "quick", "full"]
"""What a job needs to know of this machine."""


def get_plan(service: Service, plan_id: str) -> Plan:
    """Load the plan of an id."""
    _row(service, plan_id)
    return load_plan(service.storage.catalogue.plan_folder(plan_id))


def plan_document(service: Service, plan_id: str) -> bytes:
    """Return plan.json as it was written."""

    def read() -> bytes:
        _row(service, plan_id)
        try:
            return (service.storage.catalogue.plan_folder(plan_id) / PLAN_FILE).read_bytes()
        except OSError:
            raise NotFoundError(f"no plan {plan_id}") from None

    return service.documents.get_or_make(f"{plan_id}/plan", read)


def explanation_document(service: Service, plan_id: str, today: str | None = None) -> bytes:
    """Explain a plan, in the JSON of `gnnplan explain --json`, beside what is run today."""

    def make() -> bytes:
        return as_json(explain(get_plan(service, plan_id), today))

    if today is not None:
        return make()
    return service.documents.get_or_make(f"{plan_id}/explain", make)


def compare_plans(service: Service, plan_a: str, plan_b: str) -> PlanDiff:
    """Return what two plans decide and predict differently."""
    return diff(get_plan(service, plan_a), get_plan(service, plan_b))


def ask_why_not(service: Service, caller: Caller, plan_id: str, request: WhyNotRequest) -> JobRow:
    """Accept a job that prices a plan under another policy or other settings."""
    if request.policy is None and not request.changes:
        raise UnprocessableError("expected a policy or changes, found neither")
    if request.policy is not None and request.policy not in POLICIES:
        raise UnprocessableError(
            f"expected a policy among {', '.join(POLICIES)}, found {request.policy!r}"
        )
    body = {"policy": request.policy or "", "changes": list(request.changes)}
    return _ask(service, caller, "why-not", plan_id, request, body)


def ask_what_if(service: Service, caller: Caller, plan_id: str, request: WhatIfRequest) -> JobRow:
    """Accept a job that plans again with something changed."""
    if not request.changes and request.target_epoch_seconds is None:
        raise UnprocessableError("expected changes or target_epoch_seconds, found neither")
    body: dict[str, Any] = {
        "changes": list(request.changes),
        "target_epoch_seconds": request.target_epoch_seconds,
    }
    return _ask(service, caller, "what-if", plan_id, request, body)


def ask_simulation(
    service: Service, caller: Caller, plan_id: str, request: SimulationRequest
) -> JobRow:
    """Accept a job that replays a plan's batches."""
    body: dict[str, Any] = {
        "machine": machine_reference(service, request.machine),
        "batches": request.batches,
    }
    return _ask(service, caller, "simulate", plan_id, request, body)


def delete_plan(service: Service, who: Principal, plan_id: str, *, with_runs: bool = False) -> None:
    """Remove a plan and its folder, and with `with_runs` its runs and their files.

    Raises:
        ForbiddenError: it, or a run of it, is another key's.
        ConflictError: an unfinished job uses it, or it has runs that are not removed too.
    """
    check_owner(who, KINDS["plan"].scope, _row(service, plan_id).owner, f"plan {plan_id}")
    runs = service.storage.catalogue.runs_of(plan_id) if with_runs else []
    for run in runs:
        check_owner(who, KINDS[run.kind].scope, run.principal, f"run {run.id}")
    ids = [run.id for run in runs]
    try:
        service.storage.catalogue.forget_plan(plan_id, ids)
    except PlanInUseError as error:
        raise ConflictError(f"plan {plan_id}: {error}", kind="in-use") from None
    service.storage.remove_job_files(ids)
    service.documents.forget(f"{plan_id}/")
    service.storage.remove_plan_files(plan_id)


def _ask(
    service: Service,
    caller: Caller,
    kind: str,
    plan_id: str,
    request: Limited,
    body: dict[str, Any],
) -> JobRow:
    asked = [plan_id, dict(request)]
    if (known := find_repeat(service, caller, kind, asked)) is not None:
        return known
    _check_question(service, kind, plan_id, body)
    folder = service.storage.catalogue.plan_folder(plan_id).resolve()
    return submit(
        service,
        caller,
        kind,
        {"plan_folder": str(folder), **body},
        asked=asked,
        subject=plan_id,
        time_limit_seconds=request.time_limit_seconds,
    )


def _row(service: Service, plan_id: str) -> PlanRow:
    row = service.storage.catalogue.plan(plan_id)
    if row is None:
        raise NotFoundError(f"no plan {plan_id}")
    return row


def create_plan(service: Service, caller: Caller, request: PlanRequest) -> tuple[JobRow, bool]:
    """Accept a planning request; return its job, and whether a plan answers it already.

    Raises:
        ForbiddenError: the graph or the model may not be used.
        SettingsError: the fields contradict each other.
        UnprocessableError: there is no such machine or graph.
        DatasetError: the graph is damaged.
    """
    asked = dict(request)
    if (repeated := find_repeat(service, caller, "plan", asked)) is not None:
        return repeated, repeated.state == "succeeded"
    wanted = _check_request(service, request, calibrated=request.calibrated) | {
        "calibrated": request.calibrated
    }
    settings, known = request.settings(), _known_plan(service, wanted, request)
    probe: Probe = "none" if settings.quick else "full" if settings.thorough else "quick"
    result = None if known is None else f"/v1/plans/{known}"
    row = submit(
        service,
        caller,
        "plan",
        wanted,
        asked=asked,
        subject=known or "",
        time_limit_seconds=request.time_limit_seconds,
        result=result,
        lane=_lane(wanted, probe=probe),
    )
    if known is not None:
        service.metrics.cached_plans.inc()
    return row, row.state == "succeeded"


def create_profile(service: Service, caller: Caller, request: ProfileRequest) -> JobRow:
    """Accept a job that profiles a graph."""
    asked = dict(request)
    if (repeated := find_repeat(service, caller, "profile", asked)) is not None:
        return repeated
    if request.settings().mode == "full-graph":
        raise UnprocessableError(
            "mode: expected auto or minibatch, found full-graph, which is timed when it is planned"
        )
    wanted = _check_request(service, request)
    return submit(
        service,
        caller,
        "profile",
        wanted,
        asked=asked,
        time_limit_seconds=request.time_limit_seconds,
        lane=_lane(wanted, probe="full"),
    )


def _lane(wanted: dict[str, Any], *, probe: Probe) -> str:
    """Return the job's lane: a lane of its own where this machine is probed first."""
    if probe == "none" or _known_machine(wanted["machine"], quick=probe == "quick") is not None:
        return PLANNING
    return PROBING


def _check_request(
    service: Service, request: WorkloadRequest, *, calibrated: bool = False
) -> dict[str, Any]:
    """Return the request of the job, once all that it names may be used."""
    settings = request.settings()
    check_model(settings.workload.model, service.settings.allowed_models)
    machine = machine_reference(service, request.machine)
    refuse_unused(settings)
    graph = _open_named_graph(service, request.graph)
    check_graph(graph, settings, calibrate=calibrated)
    return {
        "graph": str(graph.path),
        "roots": [str(root.resolve()) for root in service.settings.graph_roots],
        "machine": machine,
        "settings": codec.to_plain(settings),
    }


def _open_named_graph(service: Service, name: str) -> Graph:
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


def check_job(service: Service, job: JobRow) -> None:
    """Refuse a job that may not be run any more: by its model, its dataset or its plan.

    It may have been accepted before the service was started with other models and graph roots.

    Raises:
        ForbiddenError: the model is not allowed, or the dataset is outside the graph roots.
        InputError: the dataset or the plan cannot be read.
    """
    asked: dict[str, Any] = json.loads(job.request)
    if "settings" in asked:
        check_model(asked["settings"]["workload"]["model"], service.settings.allowed_models)
        graph_folder(service, asked["graph"])
    elif job.kind == "train":
        check_model(get_plan(service, job.subject).workload.model, service.settings.allowed_models)
    elif job.kind in ("why-not", "what-if", "simulate"):
        _check_question(service, job.kind, job.subject, asked)


def _check_question(service: Service, kind: str, plan_id: str, asked: dict[str, Any]) -> None:
    """Refuse a question of a plan that it cannot answer, or that names a model not allowed."""
    plan = get_plan(service, plan_id)
    if graph_fingerprint(Path(plan.graph.path)) != plan.graph.fingerprint:
        raise UnprocessableError(
            f"plan {plan_id}: expected its dataset {plan.graph.name} as it was planned, found "
            "another in its place; plan again"
        )
    if kind == "simulate":
        check_replayable(plan)
    if asked.get("machine") is not None:
        return  # simulated elsewhere: it needs no record of the plan's own machine
    record = load_record(plan)
    if kind in ("why-not", "what-if"):
        from gnnplan.planner.queries.whatif import (  # on use: with the whole planner
            apply_changes,
            check_changed,
        )

        changed = apply_changes(record, asked.get("changes", []))
        check_model(changed.settings.workload.model, service.settings.allowed_models)
        if kind == "what-if":  # of why-not, what cannot be is the answer
            check_changed(open_graph(Path(plan.graph.path), validate=False), changed)


def _known_plan(service: Service, wanted: dict[str, Any], request: PlanRequest) -> str | None:
    """Return the id of the plan that answers a request, if no measurement is needed to tell."""
    try:
        machine = _known_machine(wanted["machine"], quick=not request.settings().thorough)
        if machine is None:
            return None
        folder = graph_folder(service, request.graph)
        graph = graph_fingerprint(folder)
    except (InputError, ForbiddenError, OSError):
        return None  # the job finds the same, and says so
    factors = load_calibration(machine.fingerprint).factors(graph) if request.calibrated else {}
    key = request_key(folder, graph, machine, request.settings(), factors)
    return service.storage.catalogue.plan_of_request(key)


def _known_machine(reference: dict[str, str] | None, *, quick: bool) -> MachineModel | None:
    """Return the machine; None where it must be probed first."""
    if reference is None:
        return cached_machine(quick=quick)
    if "preset" in reference:
        return load_preset(reference["preset"])
    return load_machine(Path(reference["file"]))
