"""Pages of runs: start one, watch it, see it beside its plan."""

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from api.dashboard.live import draw_losses, losses
from api.dashboard.pages import PageRoute, form, page, part_status, see
from api.errors import ConflictError
from api.routes.common import CallerIn, ServiceIn
from api.schemas.requests import RunRequest
from api.schemas.resources import Job
from api.security.auth import Reader, Runner
from api.service import jobs, runs
from api.service.context import Service
from planner.errors import SettingsError
from planner.report.machine import machine_of
from planner.report.measured import Measured, draw_measured, measured
from planner.report.page import swatch
from planner.report.run_links import measured_links
from runtime.errors import GnnplanError
from runtime.plan.schema import Plan

router = APIRouter(route_class=PageRoute, include_in_schema=False)
RunId = Annotated[str, Path(max_length=64)]


@router.post("/plans/{plan}/train")
async def start_run(
    request: Request,
    service: ServiceIn,
    _who: Runner,
    caller: CallerIn,
    plan: Annotated[str, Path(max_length=64)],
) -> Response:
    """Train under the plan, and on to the run."""
    fields = await form(request)
    options = {"epochs": fields.get("epochs", "10"), "force": fields.get("force") == "yes"}
    try:
        wanted = RunRequest.model_validate({"plan": plan, **options})
    except ValidationError as error:
        raise SettingsError(f"epochs: {error.errors()[0]['msg']}") from None
    row = await run_in_threadpool(runs.start_run, service, caller, wanted)
    return see(f"/runs/{row.id}")


@router.get("/runs/{run}")
def show_run(request: Request, service: ServiceIn, who: Reader, run: RunId) -> Response:
    """One run; htmx asks again for what changes."""
    row = runs.get_run(service, run)
    plan = runs.plan_of_run(service, row)
    found = _measured(service, run, plan)
    told = losses(service.storage.job_folder(run))
    template = "run_state.html" if "hx-request" in request.headers else "run_page.html"
    return page(
        request,
        template,
        status=part_status(request, row.state),
        job=Job.of(row),
        may_cancel=jobs.may_cancel(who, row),
        plan=plan,
        run=found,
        run_picture=draw_measured(found) if found and found.stages else None,
        losses=told,
        loss_picture=draw_losses(told) if told else None,
        links=_links(plan, found),
        swatch=swatch,
    )


def _measured(service: Service, run: str, plan: Plan) -> Measured | None:
    """What was measured so far; None before the first epoch's end."""
    try:
        return measured(plan, runs.run_report(service, run))
    except ConflictError:
        return None


def _links(plan: Plan, found: Measured | None) -> list[object]:
    """Load of the links, predicted and counted; none where the machine is not known."""
    try:
        machine = machine_of(plan)
        if machine is None:
            return []
        return list(measured_links(plan, machine, None if found is None else found.report))
    except GnnplanError:
        return []
