"""Jobs: looked at, followed, cancelled."""

from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.sse import EventSourceResponse
from starlette.concurrency import run_in_threadpool

from gnnplan.api.requests import NoopRequest
from gnnplan.api.resources import Document, PageOf, job_of, resource_of
from gnnplan.api.routes.common import (
    CallerIn,
    PageIn,
    ServiceIn,
    accepted,
    shown,
    tagged,
    tagged_resource,
)
from gnnplan.api.security import Maker, Planner, Reader
from gnnplan.api.service import jobs
from gnnplan.api.service.events import JobStates, Position, follow
from gnnplan.planner.client.resources import Attempt, Job, JobKind, JobState

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
JobId = Annotated[str, Path(max_length=64)]
LastEventId = Annotated[str | None, Header(max_length=64, description="Go on behind this event.")]
TEXT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}}
}
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
}


@router.get("")
def list_jobs(
    service: ServiceIn,
    _who: Reader,
    page: PageIn,
    kind: JobKind | None = None,
    state: JobState | None = None,
    plan: Annotated[str | None, Query(max_length=64, description="Id of a plan.")] = None,
) -> PageOf[Job]:
    """Jobs, newest first."""
    found = jobs.list_jobs(service, kind=kind, state=state, subject=plan, **page)
    return shown(found, job_of)


@router.post("", status_code=202)
def create_job(
    service: ServiceIn, _who: Planner, caller: CallerIn, body: NoopRequest, response: Response
) -> Job:
    """Accept a job that waits and does nothing, to see that jobs run."""
    return accepted(response, jobs.submit_noop(service, caller, body))


@router.get("/{job}", response_model=Job)
def get_job(request: Request, service: ServiceIn, _who: Reader, job: JobId) -> Response:
    """State, progress, result or problem."""
    return tagged_resource(request, job_of(jobs.get_job(service, job)))


@router.get("/{job}/attempts")
def list_attempts(service: ServiceIn, _who: Reader, job: JobId) -> PageOf[Attempt]:
    """What was tried for the job, first attempt first."""
    return PageOf(items=[resource_of(Attempt, row) for row in jobs.list_attempts(service, job)])


@router.post("/{job}/cancel", status_code=202)
def cancel_job(service: ServiceIn, who: Maker, job: JobId) -> Job:
    """Cancel a job of one's own that waits; one that runs ends soon.

    It takes the scope that made it: run for training, plan for the rest; admin for others' jobs.
    """
    return job_of(jobs.cancel_job(service, who, job))


@router.get("/{job}/result", response_model=Document)
def get_result(request: Request, service: ServiceIn, _who: Reader, job: JobId) -> Response:
    """The document that a job made."""
    data, digest = jobs.job_result(service, job)
    return tagged(request, data, tag=digest[:32])


@router.get("/{job}/log", response_class=Response, responses=TEXT)
def get_log(service: ServiceIn, _who: Reader, job: JobId) -> Response:
    """The last mebibyte of what the job's processes printed."""
    return Response(jobs.job_log(service, job), media_type="text/plain; charset=utf-8")


@router.get("/{job}/events", response_class=Response, responses=EVENTS)
async def follow_job(
    request: Request,
    service: ServiceIn,
    _who: Reader,
    job: JobId,
    last_event_id: LastEventId = None,
) -> Response:
    """Progress, events and log lines as they come; `end` is the last event."""
    await run_in_threadpool(jobs.get_job, service, job)
    return stream(request, service, job, last_event_id)


def stream(request: Request, service: ServiceIn, job: str, last_event_id: str | None) -> Response:
    """The events of a job that is there."""
    states: JobStates = request.app.state.job_states
    states.refuse_more()
    return EventSourceResponse(
        follow(service, states, job, Position.parse(last_event_id)),
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )
