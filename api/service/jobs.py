"""Accept, read, follow and cancel jobs.

A follower gets a job's events and log lines as server-sent events, from any position on. An event's
id says how far both files were read. A follower that comes back with it misses nothing and gets
nothing twice, and the service keeps nothing but these two offsets.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from gnnplan.api.errors import (
    ConflictError,
    NotFoundError,
    TooManyError,
    UnavailableError,
    UnprocessableError,
)
from gnnplan.api.jobs.lanes import KINDS
from gnnplan.api.jobs.process import EVENTS_FILE, LOG_FILE, Tail, event_of
from gnnplan.api.requests import NoopRequest
from gnnplan.api.resources import job_of
from gnnplan.api.security import Principal, check_owner, owns
from gnnplan.api.service.context import Caller, Service, as_json
from gnnplan.api.storage.job_queue import ENDED, KeyReusedError, NewJob, PlanGoneError
from gnnplan.api.storage.tables import AttemptRow, JobRow

LONGEST_LOG_BYTES = 1 << 20
RETRY_SECONDS = 5
LOOK_SECONDS = 0.25
KEEPALIVE_SECONDS = 15.0
STATE_SECONDS = 0.5
"""Age in seconds up to which a job's state is shown; all its followers share one query."""


def submit(
    service: Service,
    caller: Caller,
    kind: str,
    request: dict[str, Any],
    *,
    asked: Any = None,
    subject: str = "",
    time_limit_seconds: float | None = None,
    result: str | None = None,
    lane: str | None = None,
) -> JobRow:
    """Accept a job, or find the job that the caller's Idempotency-Key made.

    Args:
        service: that takes the job.
        caller: who asks.
        kind: of the job.
        request: what the job's process is given.
        asked: what the client sent, by which a repeat is known; None: `request`.
        subject: id of the plan that it is about.
        time_limit_seconds: longest time of an attempt; None: the kind's.
        result: a resource that exists already, so that nothing is left to do.
        lane: where it waits; None: the kind's.

    Raises:
        TooManyError: too many jobs wait.
        UnprocessableError: a time limit above the kind's, or a key of another request.
        NotFoundError: the plan is gone.
    """
    asked = request if asked is None else asked
    if (known := find_repeat(service, caller, kind, asked)) is not None:
        return known
    limit = _time_limit(kind, time_limit_seconds)
    if result is None and service.storage.jobs.num_waiting() >= service.settings.max_queued_jobs:
        raise TooManyError(
            f"expected fewer than {service.settings.max_queued_jobs} jobs in the queue; try later",
            kind="queue-full",
            headers={"Retry-After": str(RETRY_SECONDS)},
        )
    job = NewJob(
        kind=kind,
        lane=lane or KINDS[kind].lane,
        request=request,
        asked=asked,
        time_limit_seconds=limit,
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
    except KeyReusedError as error:
        raise _reused(error) from None
    service.lanes.notify(job.lane)
    return row


def find_repeat(service: Service, caller: Caller, kind: str, asked: Any) -> JobRow | None:
    """Find the job that the caller's Idempotency-Key made with the same request, if it made one.

    To be called before any check of the request: what was accepted once is not refused later.

    Raises:
        UnprocessableError: the key made a job with another request.
    """
    key, queue = caller.idempotency_key, service.storage.jobs
    try:
        return None if key is None else queue.find_repeat(caller.principal, key, kind, asked)
    except KeyReusedError as error:
        raise _reused(error) from None


def _reused(error: KeyReusedError) -> UnprocessableError:
    return UnprocessableError(
        f"Idempotency-Key {str(error)!r}: expected the request it was first used with, found "
        "another; choose a new key",
        kind="idempotency-key-reused",
    )


def _time_limit(kind: str, wanted: float | None) -> float:
    """Return the longest time of an attempt; refuse one beyond the kind's limit."""
    most = KINDS[kind].limit_seconds
    if wanted is not None and wanted > most:
        raise UnprocessableError(
            f"time_limit_seconds: expected at most {most:.0f}, the service's limit for jobs of "
            f"kind {kind}, found {wanted:.0f}; ask for less, or leave it out for that limit"
        )
    return most if wanted is None else wanted


def submit_noop(service: Service, caller: Caller, request: NoopRequest) -> JobRow:
    """Accept a job that waits and does nothing."""
    return submit(
        service,
        caller,
        "noop",
        {"seconds": request.seconds, "steps": request.steps},
        asked=dict(request),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How far a follower has read: bytes of the events and of the log."""

    events: int = 0
    log: int = 0

    @staticmethod
    def parse(text: str | None) -> "Position":
        """Read a Last-Event-ID; anything else means the beginning."""
        match = re.fullmatch(r"(\d{1,18})\.(\d{1,18})", text or "")
        return Position(events=int(match[1]), log=int(match[2])) if match else Position()


class JobStates:
    """States of followed jobs, read at most twice a second each."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.followers = 0
        self._known: dict[str, tuple[float, asyncio.Task[JobRow | None]]] = {}

    def refuse_more(self) -> None:
        """Refuse another follower where there are too many."""
        most = self._service.settings.max_followers
        if self.followers >= most:
            raise UnavailableError(f"expected fewer than {most} followers; try later")

    async def get(self, job_id: str) -> JobRow | None:
        """Return a job, at most `STATE_SECONDS` old."""
        now = time.monotonic()
        known = self._known.get(job_id)
        if known is None or (now - known[0] > STATE_SECONDS and known[1].done()):
            ask = asyncio.to_thread(self._service.storage.jobs.get, job_id)
            known = (now, asyncio.create_task(ask))
            self._known = {k: v for k, v in self._known.items() if now - v[0] < 60.0}
            self._known[job_id] = known
        return await asyncio.shield(known[1])


MayFollow = Callable[[], Awaitable[bool]]
"""Check of whether a follower's key is still valid, made before each time events are sent."""


async def follow(
    service: Service, states: JobStates, job_id: str, start: Position, may_follow: MayFollow
) -> AsyncIterator[bytes]:
    """Stream events and log lines of a job until it has ended, and then its end."""
    states.followers += 1
    service.metrics.followers.set(states.followers)
    try:
        async for chunk in _follow(service, states, job_id, start, may_follow):
            yield chunk
    finally:
        states.followers -= 1
        service.metrics.followers.set(states.followers)


async def _follow(
    service: Service, states: JobStates, job_id: str, start: Position, may_follow: MayFollow
) -> AsyncIterator[bytes]:
    folder = service.storage.job_folder(job_id)
    events = Tail(folder / EVENTS_FILE, start.events)
    log = Tail(folder / LOG_FILE, start.log)
    said, shown = time.monotonic(), ""
    while await may_follow():
        row = await states.get(job_id)
        wrote = False
        for chunk in _new(events, log):
            wrote = True
            yield chunk
        place = f"{events.offset}.{log.offset}"
        if row is None:
            return
        if row.state in ENDED and not wrote:
            yield format_sse_event(event="end", data_str=as_json(job_of(row)).decode(), id=place)
            return
        if row.state != shown:
            shown, wrote = row.state, True
            data = json.dumps({"state": shown, "attempt": row.attempt})
            yield format_sse_event(event="state", data_str=data, id=place)
        if wrote:
            said = time.monotonic()
        elif time.monotonic() - said > KEEPALIVE_SECONDS:
            said = time.monotonic()
            yield KEEPALIVE_COMMENT
        await asyncio.sleep(LOOK_SECONDS)


def _new(events: Tail, log: Tail) -> list[bytes]:
    found: list[bytes] = []
    for offset, line in events.lines():
        event = event_of(line)
        if event is not None:
            data = json.dumps({**event.get("data", {}), "attempt": event.get("attempt")})
            name = str(event["event"])
            found.append(format_sse_event(event=name, data_str=data, id=f"{offset}.{log.offset}"))
    for offset, line in log.lines():
        data = json.dumps({"line": line})
        found.append(format_sse_event(event="log", data_str=data, id=f"{events.offset}.{offset}"))
    return found
