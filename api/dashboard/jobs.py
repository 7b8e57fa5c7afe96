"""Pages of jobs: the list, one job as it goes on, and its end at a button."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from api.dashboard.pages import PageRoute, page, part_status, see
from api.routes.common import ServiceIn
from api.schemas.resources import Job
from api.security.auth import Maker, Reader
from api.service import jobs

router = APIRouter(route_class=PageRoute, include_in_schema=False)
JobId = Annotated[str, Path(max_length=64)]
LOG_LINES = 200


@router.get("/jobs")
def list_jobs(
    request: Request,
    service: ServiceIn,
    _who: Reader,
    cursor: Annotated[str | None, Query(max_length=512)] = None,
) -> Response:
    """Jobs, newest first; htmx asks again for the rows."""
    found = jobs.list_jobs(service, cursor=cursor, limit=50)
    rows = [Job.of(row) for row in found.items]
    template = "job_rows.html" if "hx-request" in request.headers else "jobs.html"
    return page(request, template, jobs=rows, next_cursor=found.next_cursor, cursor=cursor)


@router.get("/jobs/{job}")
def show_job(request: Request, service: ServiceIn, who: Reader, job: JobId) -> Response:
    """One job; htmx asks again for what changes."""
    row = jobs.get_job(service, job)
    found = Job.of(row)
    log = jobs.job_log(service, job).decode(errors="replace").splitlines()[-LOG_LINES:]
    template = "job_state.html" if "hx-request" in request.headers else "job.html"
    attempts = jobs.list_attempts(service, job)
    status = part_status(request, found.state)
    return page(
        request,
        template,
        status=status,
        job=found,
        attempts=attempts,
        log=log,
        may_cancel=jobs.may_cancel(who, row),
    )


@router.post("/jobs/{job}/cancel")
def cancel_job(service: ServiceIn, who: Maker, job: JobId) -> Response:
    """Cancel a job, and back to it."""
    row = jobs.cancel_job(service, who, job)
    return see(f"/runs/{row.id}" if row.kind == "train" else f"/jobs/{row.id}")
