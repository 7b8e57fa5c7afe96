"""Jobs, and runs, which are jobs of training: lists, states, events, results, logs."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Header, Request, Response
from fastapi.sse import EventSourceResponse
from starlette.concurrency import run_in_threadpool

from gnnplan.api.requests import NoopRequest, RunRequest
from gnnplan.api.resources import Document, PageOf, job_of, resource_of, run_of
from gnnplan.api.routes.common import (
    CallerIn,
    Id,
    PageIn,
    PlanFilter,
    ServiceIn,
    answer_accepted,
    answer_resource,
    answer_tagged,
    answers_text,
    show_page,
)
from gnnplan.api.security import Maker, Planner, Reader, Runner
from gnnplan.api.service import artefacts, jobs, runs
from gnnplan.api.service.context import as_json
from gnnplan.api.service.jobs import JobStates, Position, follow
from gnnplan.api.storage.tables import JobRow
from gnnplan.planner.client.resources import Attempt, Job, JobKind, JobState, Run
from gnnplan.planner.queries.compare import Comparison
from gnnplan.runtime.report import RunReport

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
runs_router = APIRouter(prefix="/v1/runs", tags=["runs"])
LastEventId = Annotated[str | None, Header(max_length=64, description="Go on behind this event.")]
TEXT, EVENTS = answers_text("text/plain"), answers_text("text/event-stream")


@router.get("")
def list_jobs(
    service: ServiceIn,
    _who: Reader,
    page: PageIn,
    kind: JobKind | None = None,
    state: JobState | None = None,
    plan: PlanFilter = None,
) -> PageOf[Job]:
    """Jobs, newest first."""
    found = service.storage.database.page(JobRow, kind=kind, state=state, subject=plan, **page)
    return show_page(found, job_of)


@router.post("", status_code=202)
def create_job(
    service: ServiceIn, _who: Planner, caller: CallerIn, body: NoopRequest, response: Response
) -> Job:
    """Accept a job that waits and does nothing, to see that jobs run."""
    return answer_accepted(response, jobs.submit_noop(service, caller, body))


@router.get("/{job}", response_model=Job)
def get_job(request: Request, service: ServiceIn, _who: Reader, job: Id) -> Response:
    """State, progress, result or problem."""
    return answer_resource(request, job_of(jobs.get_job(service, job)))


@router.get("/{job}/attempts")
def list_attempts(service: ServiceIn, _who: Reader, job: Id) -> PageOf[Attempt]:
    """What was tried for the job, first attempt first."""
    return PageOf(items=[resource_of(Attempt, row) for row in jobs.list_attempts(service, job)])


@router.post("/{job}/cancel", status_code=202)
def cancel_job(service: ServiceIn, who: Maker, job: Id) -> Job:
    """Cancel a job of one's own that waits; one that runs ends soon.

    It takes the scope that made it: run for training, plan for the rest; admin for others' jobs.
    """
    return job_of(jobs.cancel_job(service, who, job))


@router.get("/{job}/result", response_model=Document)
def get_result(request: Request, service: ServiceIn, _who: Reader, job: Id) -> Response:
    """The document that a job made."""
    data, digest = jobs.job_result(service, job)
    return answer_tagged(request, data, tag=digest[:32])


@router.get("/{job}/log", response_class=Response, responses=TEXT)
def get_log(service: ServiceIn, _who: Reader, job: Id) -> Response:
    """The last mebibyte of what the job's processes printed."""
    return Response(jobs.job_log(service, job), media_type="text/plain; charset=utf-8")


@router.get("/{job}/events", response_class=Response, responses=EVENTS)
async def follow_job(
    request: Request, service: ServiceIn, _who: Reader, job: Id, last_event_id: LastEventId = None
) -> Response:
    """Progress, events and log lines as they come; `end` is the last event."""
    await run_in_threadpool(jobs.get_job, service, job)
    return stream(request, service, job, last_event_id)


def stream(request: Request, service: ServiceIn, job: str, last_event_id: str | None) -> Response:
    """Stream the events of a job that exists."""
    states: JobStates = request.app.state.job_states
    states.refuse_more()
    may_follow = partial(service.auth.still_knows, request.headers)
    return EventSourceResponse(
        follow(service, states, job, Position.parse(last_event_id), may_follow),
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


@runs_router.get("")
def list_runs(
    service: ServiceIn,
    _who: Reader,
    page: PageIn,
    plan: PlanFilter = None,
    state: JobState | None = None,
) -> PageOf[Run]:
    """Runs, newest first."""
    return show_page(runs.list_runs(service, plan=plan, state=state, **page), run_of)


@runs_router.post("", status_code=202)
def start_run(
    service: ServiceIn, _who: Runner, caller: CallerIn, body: RunRequest, response: Response
) -> Job:
    """Train under a plan; the run has the id of its job."""
    return answer_accepted(response, runs.start_run(service, caller, body))


@runs_router.get("/{run}", response_model=Run)
def get_run(request: Request, service: ServiceIn, _who: Reader, run: Id) -> Response:
    """State and progress of a run."""
    return answer_resource(request, run_of(runs.get_run(service, run)))


@runs_router.get("/{run}/events", response_class=Response, responses=EVENTS)
async def follow_run(
    request: Request, service: ServiceIn, _who: Reader, run: Id, last_event_id: LastEventId = None
) -> Response:
    """Steps, epochs and log lines as they come; `end` is the last event."""
    await run_in_threadpool(runs.get_run, service, run)
    return stream(request, service, run, last_event_id)


@runs_router.post("/{run}/cancel", status_code=202)
def cancel_run(service: ServiceIn, who: Runner, run: Id) -> Job:
    """End a run of one's own; its checkpoints and what it measured stay."""
    runs.get_run(service, run)
    return job_of(jobs.cancel_job(service, who, run))


@runs_router.get("/{run}/report", response_model=RunReport)
def get_report(request: Request, service: ServiceIn, _who: Reader, run: Id) -> Response:
    """What the run has measured, up to its last epoch."""
    return answer_tagged(request, as_json(runs.run_report(service, run)))


@runs_router.get("/{run}/comparison", response_model=Comparison)
def get_comparison(request: Request, service: ServiceIn, _who: Reader, run: Id) -> Response:
    """Predicted against measured, per stage."""
    return answer_tagged(request, as_json(runs.run_comparison(service, run)))


@runs_router.get("/{run}/report.html", response_class=Response, responses=answers_text("text/html"))
def get_page(request: Request, service: ServiceIn, _who: Reader, run: Id) -> Response:
    """The plan as one self-contained page, beside what the run measured."""
    return answer_tagged(
        request, artefacts.run_page(service, run).encode(), media_type=artefacts.HTML
    )


@runs_router.get("/{run}/trace.json", response_model=Document)
def get_trace(request: Request, service: ServiceIn, _who: Reader, run: Id) -> Response:
    """Predicted and measured stages of single steps as Chrome trace events, for Perfetto."""
    return answer_tagged(request, artefacts.run_trace(service, run).encode())


@runs_router.get("/{run}/log", name="get_log", response_class=Response, responses=TEXT)
def get_run_log(service: ServiceIn, _who: Reader, run: Id) -> Response:
    """The last mebibyte of what the ranks printed."""
    return Response(runs.run_log(service, run), media_type="text/plain; charset=utf-8")
