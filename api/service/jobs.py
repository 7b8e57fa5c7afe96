"""Accept, read and cancel jobs."""

from pathlib import Path
from typing import Any

from gnnplan.api.errors import ConflictError, NotFoundError, TooManyError, UnprocessableError
from gnnplan.api.jobs.events import LOG_FILE
from gnnplan.api.jobs.registry import KINDS
from gnnplan.api.requests import NoopRequest
from gnnplan.api.security import Principal, check_owner, owns
from gnnplan.api.service.context import Caller, Service
from gnnplan.api.storage.job_queue import ENDED, KeyReusedError, NewJob, PlanGoneError
from gnnplan.api.storage.tables import AttemptRow, JobRow

LONGEST_LOG_BYTES = 1 << 20
RETRY_SECONDS = 5


def submit(
    service: Service,
    caller: Caller,
    kind: str,
    request: dict[str, Any],
    *,
    subject: str = "",
    time_limit_seconds: float | None = None,
    result: str | None = None,
    lane: str | None = None,
) -> JobRow:
    """Accept a job, or find the job that the caller's Idempotency-Key made.

    Args:
        service: the service.
        caller: who asks.
        kind: of the job.
        request: what its process reads.
        subject: id of the plan that it is about, if any.
        time_limit_seconds: of an attempt; None: the kind's.
        result: path of a resource that exists already, so that nothing is left to do.
        lane: where it waits; None: in its kind's lane.
    """
    if result is None and service.storage.jobs.num_waiting() >= service.settings.max_queued_jobs:
        raise TooManyError(
            f"expected fewer than {service.settings.max_queued_jobs} jobs in the queue; try later",
            kind="queue-full",
            headers={"Retry-After": str(RETRY_SECONDS)},
        )
    spec = KINDS[kind]
    limit = spec.limit_seconds if time_limit_seconds is None else time_limit_seconds
    job = NewJob(
        kind=kind,
        lane=lane or spec.lane,
        request=request,
        time_limit_seconds=min(limit, spec.limit_seconds),
        subject=subject,
        principal=caller.principal,
        request_id=caller.request_id,
        idempotency_key=caller.idempotency_key,
        result=result,
    )
    try:
        row, _ = service.storage.jobs.add(job)
    except PlanGoneError:
        raise NotFoundError(f"no plan {subject}") from None
    except KeyReusedError:
        raise UnprocessableError(
            f"Idempotency-Key {caller.idempotency_key!r}: expected the request it was first used "
            "with, found another; choose a new key",
            kind="idempotency-key-reused",
        ) from None
    service.lanes.notify(job.lane)
    return row


def submit_noop(service: Service, caller: Caller, request: NoopRequest) -> JobRow:
    """Accept a job that waits and does nothing."""
    return submit(
        service,
        caller,
        "noop",
        {"seconds": request.seconds, "steps": request.steps},
        time_limit_seconds=request.time_limit_seconds,
    )


def get_job(service: Service, job_id: str) -> JobRow:
    """Return the job of an id."""
    row = service.storage.jobs.get(job_id)
    if row is None:
        raise NotFoundError(f"no job {job_id}")
    return row


def list_attempts(service: Service, job_id: str) -> list[AttemptRow]:
    """Return the attempts at a job, oldest first."""
    get_job(service, job_id)
    return service.storage.jobs.attempts(job_id)


def may_cancel(who: Principal, row: JobRow) -> bool:
    """Return whether a principal may cancel a job."""
    return owns(who, KINDS[row.kind].scope, row.principal)


def cancel_job(service: Service, who: Principal, job_id: str) -> JobRow:
    """Cancel a job; a running one ends soon."""
    before = get_job(service, job_id)
    check_owner(who, KINDS[before.kind].scope, before.principal, f"job {job_id}")
    if before.state in ENDED and before.state != "cancelled":
        raise ConflictError(f"job {job_id} has {before.state} already", kind="job-ended")
    row = service.storage.jobs.cancel(job_id)
    if row is None:
        raise NotFoundError(f"no job {job_id}")
    if row.state == "running":
        service.lanes.cancel(job_id)
    return row


def job_result(service: Service, job_id: str) -> tuple[bytes, str]:
    """Return the document that a job made, and its sha256."""
    row = get_job(service, job_id)
    if row.state != "succeeded":
        raise ConflictError(f"job {job_id} is {row.state}, there is no result", kind="no-result")
    digest = row.result_sha256
    data = None if digest is None else service.storage.artefacts.get(digest)
    if digest is None or data is None:
        raise NotFoundError(f"job {job_id} keeps no document; see its result {row.result}")
    return data, digest


def job_log(service: Service, job_id: str) -> bytes:
    """Return the end of what a job's processes printed."""
    get_job(service, job_id)
    return read_end(service.storage.job_folder(job_id) / LOG_FILE)


def read_end(path: Path) -> bytes:
    """Return the last mebibyte of a file; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LONGEST_LOG_BYTES))
            return file.read()
    except OSError:
        return b""
