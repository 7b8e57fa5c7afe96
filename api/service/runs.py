"""Start runs, which are training jobs under a plan, and read what they measured."""

import json
from pathlib import Path
from typing import Any

from gnnplan.api.errors import ConflictError, NotFoundError, ServiceError, UnprocessableError
from gnnplan.api.requests import RunRequest
from gnnplan.api.security import check_model
from gnnplan.api.service.context import Caller, Service
from gnnplan.api.service.jobs import find_repeat, read_end, submit
from gnnplan.api.service.plans import get_plan
from gnnplan.api.storage.database import Page
from gnnplan.api.storage.tables import JobRow
from gnnplan.planner.queries.compare import Comparison, compare
from gnnplan.runtime import codec
from gnnplan.runtime.errors import BudgetExceeded, InputError
from gnnplan.runtime.identity import check_identity
from gnnplan.runtime.launch.hosts import Place
from gnnplan.runtime.launch.launch import LOG_FILE, check_startable
from gnnplan.runtime.limits import check_limit, memory_group
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.report import RunReport, load_report
from gnnplan.runtime.train.evaluation_room import check_eval_fanouts


def start_run(service: Service, caller: Caller, request: RunRequest) -> JobRow:
    """Accept a training job."""
    asked = dict(request)
    if (repeated := find_repeat(service, caller, "train", asked)) is not None:
        return repeated
    plan = get_plan(service, request.plan)
    check_model(plan.workload.model, service.settings.allowed_models)
    check_eval_fanouts(request.options()["eval_fanouts"], plan.workload.num_layers)
    if service.settings.ray_address is None:  # else it is the cluster's machines that count
        check_can_begin(plan, force=request.options()["force"])
    folder = service.storage.catalogue.plan_folder(request.plan).resolve()
    # The job's own id names the run; it is known only once the job is accepted.
    wanted: dict[str, Any] = {
        "plan_folder": str(folder),
        "runs": str(service.storage.run_folder("").resolve()),
        "options": request.options(),
    }
    if service.settings.ray_address is not None:
        # With the job, not with the service: after a restart it is looked for where it was started.
        wanted["ray_address"] = service.settings.ray_address
    return submit(
        service,
        caller,
        "train",
        wanted,
        asked=asked,
        subject=request.plan,
        time_limit_seconds=request.time_limit_seconds,
    )


def check_can_begin(plan: Plan, *, force: bool) -> None:
    """Refuse a run that could not begin on this machine; `force` allows another graph or machine.

    Raises:
        UnprocessableError: its ranks cannot be started, graph or machine is another, or its memory
            may not be taken here.
    """
    try:
        check_startable(plan, Place())
        check_identity(plan, force=force)
        if not force:
            check_limit(plan, memory_group())
    except (InputError, BudgetExceeded) as error:
        raise UnprocessableError(
            f"plan {plan.plan_id} cannot be trained here: {error}", kind="cannot-start"
        ) from None


def list_runs(
    service: Service,
    *,
    plan: str | None = None,
    state: str | None = None,
    cursor: str | None = None,
    limit: int = 50,
) -> Page[JobRow]:
    """List training jobs, newest first."""
    return service.storage.database.page(
        JobRow, kind="train", subject=plan, state=state, cursor=cursor, limit=limit
    )


def get_run(service: Service, run_id: str) -> JobRow:
    """Return the training job of an id."""
    row = service.storage.jobs.get(run_id)
    if row is None or row.kind != "train":
        raise NotFoundError(f"no run {run_id}")
    return row


def plan_of_run(service: Service, row: JobRow) -> Plan:
    """Load the plan of a run."""
    try:
        return get_plan(service, row.subject)
    except NotFoundError:
        raise ConflictError(
            f"the plan {row.subject} of run {row.id} was removed; what the run measured is at "
            f"/v1/runs/{row.id}/report",
            kind="plan-gone",
        ) from None


def run_report(service: Service, run_id: str) -> RunReport:
    """Return what a run has measured up to its last epoch."""
    row = get_run(service, run_id)
    digest = row.result_sha256
    data = None if digest is None else service.storage.artefacts.get(digest)
    try:
        return (
            load_report(_folder(service, run_id)) if data is None else _decode_report(run_id, data)
        )
    except InputError:
        raise ConflictError(
            f"run {run_id} is {row.state} and has finished no epoch", kind="no-report"
        ) from None


def run_comparison(service: Service, run_id: str) -> Comparison:
    """Compare predicted with measured seconds."""
    row, report = get_run(service, run_id), run_report(service, run_id)
    try:
        return compare(plan_of_run(service, row), report)
    except InputError as error:
        raise ConflictError(str(error), kind="no-report") from None


def count_error(service: Service, job: JobRow, state: str) -> None:
    """Add a finished run's prediction error to the metrics, if it measured enough."""
    if job.kind != "train" or state != "succeeded":
        return
    try:
        found = run_comparison(service, job.id)
    except ServiceError:
        return
    service.metrics.step_ape.observe(found.step_seconds.ape)


def run_log(service: Service, run_id: str) -> bytes:
    """Return the end of what a run's ranks printed."""
    get_run(service, run_id)
    return read_end(_folder(service, run_id) / LOG_FILE)


def _folder(service: Service, run_id: str) -> Path:
    return service.storage.run_folder(run_id)


def _decode_report(run_id: str, data: bytes) -> RunReport:
    try:
        return codec.decode(RunReport, json.loads(data))
    except codec.CodecError as error:
        raise ConflictError(
            f"the report of run {run_id} is of another version of gnnplan ({error}); its document "
            f"is at /v1/jobs/{run_id}/result",
            kind="other-version",
        ) from None
