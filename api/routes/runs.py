"""Runs: training under a plan, on the service's machine."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from gnnplan.api.requests import RunRequest
from gnnplan.api.resources import PageOf, job_of, run_of
from gnnplan.api.routes.common import (
    CallerIn,
    PageIn,
    ServiceIn,
    accepted,
    shown,
    tagged,
    tagged_resource,
)
from gnnplan.api.routes.jobs import EVENTS, TEXT, LastEventId, stream
from gnnplan.api.security import Reader, Runner
from gnnplan.api.service import artefacts as pages, jobs, runs
from gnnplan.api.service.artefacts import HTML
from gnnplan.api.service.context import as_json
from gnnplan.planner.client.resources import Job, JobState, Run
from gnnplan.planner.queries.compare import Comparison
from gnnplan.runtime.report import RunReport

router = APIRouter(prefix="/v1/runs", tags=["runs"])
PAGE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/html": {"schema": {"type": "string"}}}}
}
RunId = Annotated[str, Path(max_length=64)]


@router.get("")
def list_runs(
    service: ServiceIn,
    _who: Reader,
    page: PageIn,
    plan: Annotated[str | None, Query(max_length=64, description="Id of a plan.")] = None,
    state: JobState | None = None,
) -> PageOf[Run]:
    """Runs, newest first."""
    return shown(runs.list_runs(service, plan=plan, state=state, **page), run_of)


@router.post("", status_code=202)
def start_run(
    service: ServiceIn, _who: Runner, caller: CallerIn, body: RunRequest, response: Response
) -> Job:
    """Train under a plan; the run has the id of its job."""
    return accepted(response, runs.start_run(service, caller, body))


@router.get("/{run}", response_model=Run)
def get_run(request: Request, service: ServiceIn, _who: Reader, run: RunId) -> Response:
    """State and progress of a run."""
    return tagged_resource(request, run_of(runs.get_run(service, run)))


@router.get("/{run}/events", response_class=Response, responses=EVENTS)
async def follow_run(
    request: Request,
    service: ServiceIn,
    _who: Reader,
    run: RunId,
    last_event_id: LastEventId = None,
) -> Response:
    """Steps, epochs and log lines as they come; `end` is the last event."""
    await run_in_threadpool(runs.get_run, service, run)
    return stream(request, service, run, last_event_id)


@router.post("/{run}/cancel", status_code=202)
def cancel_run(service: ServiceIn, who: Runner, run: RunId) -> Job:
    """End a run of one's own; its checkpoints and what it measured stay."""
    runs.get_run(service, run)
    return job_of(jobs.cancel_job(service, who, run))


@router.get("/{run}/report", response_model=RunReport)
def get_report(request: Request, service: ServiceIn, _who: Reader, run: RunId) -> Response:
    """What the run has measured, up to its last epoch."""
    return tagged(request, as_json(runs.run_report(service, run)))


@router.get("/{run}/comparison", response_model=Comparison)
def get_comparison(request: Request, service: ServiceIn, _who: Reader, run: RunId) -> Response:
    """Predicted against measured, per stage."""
    return tagged(request, as_json(runs.run_comparison(service, run)))


@router.get("/{run}/report.html", response_class=Response, responses=PAGE)
def get_page(request: Request, service: ServiceIn, _who: Reader, run: RunId) -> Response:
    """The plan as one self-contained page, beside what the run measured."""
    return tagged(request, pages.run_page(service, run).encode(), media_type=HTML)


@router.get("/{run}/log", response_class=Response, responses=TEXT)
def get_log(service: ServiceIn, _who: Reader, run: RunId) -> Response:
    """The last mebibyte of what the ranks printed."""
    return Response(runs.run_log(service, run), media_type="text/plain; charset=utf-8")
