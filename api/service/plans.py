"""Plans: read, explain, compare, ask what else could have been, and forget."""

import shutil
from typing import Any

from api.errors import ConflictError, NotFoundError, UnprocessableError
from api.jobs.registry import KINDS
from api.schemas.requests import SimulationRequest, WhatIfRequest, WhyNotRequest
from api.security.auth import check_owner
from api.security.keys import Principal
from api.service.context import Caller, Service
from api.service.documents import as_json
from api.service.jobs import submit
from api.service.machines import machine_reference
from api.storage.catalogue import PlanInUseError
from api.storage.paging import Page
from api.storage.tables import JobRow, PlanRow
from planner.queries.diff import PlanDiff, diff
from planner.queries.explain import explain
from planner.settings import POLICIES
from runtime.plan.io import PLAN_FILE, load_plan
from runtime.plan.schema import Plan


def list_plans(
    service: Service,
    *,
    graph: str | None = None,
    machine: str | None = None,
    policy: str | None = None,
    cursor: str | None = None,
    limit: int = 50,
) -> Page[PlanRow]:
    """Plans, newest first."""
    return service.storage.catalogue.plans(
        graph=graph, machine=machine, policy=policy, cursor=cursor, limit=limit
    )


def get_plan(service: Service, plan_id: str) -> Plan:
    """The plan of that id, checked.

    Raises:
        NotFoundError: there is none.
        PlanError: its folder was altered.
    """
    _row(service, plan_id)
    return load_plan(service.storage.catalogue.plan_folder(plan_id))


def plan_document(service: Service, plan_id: str) -> bytes:
    """plan.json as it was written.

    Raises:
        NotFoundError: there is no such plan.
    """

    def read() -> bytes:
        _row(service, plan_id)
        try:
            return (service.storage.catalogue.plan_folder(plan_id) / PLAN_FILE).read_bytes()
        except OSError:
            raise NotFoundError(f"no plan {plan_id}") from None

    return service.documents.get_or_make(f"{plan_id}/plan", read)


def explanation_document(service: Service, plan_id: str) -> bytes:
    """Why a plan is what it is, as `gnnplan explain --json` prints it.

    Raises:
        NotFoundError: there is no such plan.
    """

    def make() -> bytes:
        return as_json(explain(get_plan(service, plan_id)))

    return service.documents.get_or_make(f"{plan_id}/explain", make)


def compare_plans(service: Service, plan_a: str, plan_b: str) -> PlanDiff:
    """What two plans decide and predict differently.

    Raises:
        NotFoundError: there is no such plan.
    """
    return diff(get_plan(service, plan_a), get_plan(service, plan_b))


def ask_why_not(service: Service, caller: Caller, plan_id: str, request: WhyNotRequest) -> JobRow:
    """Accept the question what a policy would cost.

    Raises:
        NotFoundError: there is no such plan.
        UnprocessableError: there is no such policy.
    """
    if request.policy not in POLICIES:
        raise UnprocessableError(
            f"expected a policy among {', '.join(POLICIES)}, found {request.policy!r}"
        )
    body = {"policy": request.policy}
    return _ask(service, caller, "why-not", plan_id, body, request.time_limit_seconds)


def ask_what_if(service: Service, caller: Caller, plan_id: str, request: WhatIfRequest) -> JobRow:
    """Accept the question what another machine or budget would give.

    Raises:
        NotFoundError: there is no such plan.
        UnprocessableError: nothing is changed and no target is given.
    """
    if not request.changes and request.target_epoch_seconds is None:
        raise UnprocessableError("expected changes or target_epoch_seconds, found neither")
    body: dict[str, Any] = {
        "changes": list(request.changes),
        "target_epoch_seconds": request.target_epoch_seconds,
    }
    return _ask(service, caller, "what-if", plan_id, body, request.time_limit_seconds)


def ask_simulation(
    service: Service, caller: Caller, plan_id: str, request: SimulationRequest
) -> JobRow:
    """Accept a replay of the plan's batches.

    Raises:
        NotFoundError: there is no such plan.
        UnprocessableError: there is no such machine.
    """
    body: dict[str, Any] = {
        "machine": machine_reference(service, request.machine),
        "batches": request.batches,
    }
    return _ask(service, caller, "simulate", plan_id, body, request.time_limit_seconds)


def delete_plan(service: Service, who: Principal, plan_id: str, *, with_runs: bool = False) -> None:
    """Remove a plan and its folder, and where asked all that its runs left.

    Args:
        service: the service.
        who: who asks.
        plan_id: the plan.
        with_runs: remove its runs too; else a plan that has some is kept.

    Raises:
        NotFoundError: there is none.
        ForbiddenError: it, or a run of it, is another key's.
        ConflictError: a job that has not ended is about it, or it has runs.
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
    shutil.rmtree(service.storage.catalogue.plan_folder(plan_id), ignore_errors=True)


def _ask(
    service: Service,
    caller: Caller,
    kind: str,
    plan_id: str,
    body: dict[str, Any],
    time_limit_seconds: float | None,
) -> JobRow:
    _row(service, plan_id)
    folder = service.storage.catalogue.plan_folder(plan_id).resolve()
    return submit(
        service,
        caller,
        kind,
        {"plan_folder": str(folder), **body},
        subject=plan_id,
        time_limit_seconds=time_limit_seconds,
    )


def _row(service: Service, plan_id: str) -> PlanRow:
    row = service.storage.catalogue.plan(plan_id)
    if row is None:
        raise NotFoundError(f"no plan {plan_id}")
    return row
