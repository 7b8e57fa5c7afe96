"""Jobs of the service: looked at, followed, waited for, cancelled.

Following a job over connections that may break: no event is missed, none comes twice.

Each event's id says how far the service has read; whoever comes back with it in Last-Event-ID is
given what comes behind it.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2

from gnnplan.planner.client.connection import (
    AGAIN,
    Connection,
    JobCancelledError,
    ServiceProblemError,
    error_of,
)
from gnnplan.planner.client.resources import Attempt, Event, Job, decoded, problem_in, resource
from gnnplan.runtime.errors import GnnplanError

SILENCE_SECONDS = 45.0
"""Longest silence on an open stream: the service says something every 15 s."""
PATIENCE_SECONDS = 300.0
LONGEST_WAIT_SECONDS = 8.0
OPEN_SECONDS = 1.0
"""A stream that breaks sooner than this, without an event, counts as silence."""
LARGEST_EVENT_BYTES = 16 * 2**20
END = "end"


def follow(
    connection: Connection,
    path: str,
    *,
    after: str | None = None,
    patience_seconds: float = PATIENCE_SECONDS,
) -> Iterator[Event]:
    """Events of a job until its end, from the beginning or behind an event.

    Args:
        connection: to the service.
        path: of the events.
        after: id of the last event that is known.
        patience_seconds: how long a service that is away is waited for.

    Raises:
        ServiceProblemError: there is no such job, or the key may not read it.
        ServiceUnreachableError: the service has been away for longer than `patience_seconds`.
    """
    heard, wait = time.monotonic(), 0.25
    failure: Exception = httpx2.RemoteProtocolError("the stream ended before the job")
    while True:
        opened: list[float] = []
        try:
            for event in _events(connection, path, after, opened):
                heard, wait = time.monotonic(), 0.25
                after = event.id or after
                yield event
                if event.name == END:
                    return
        except httpx2.TransportError as error:
            failure = error
        except ServiceProblemError as error:
            if error.problem.status not in AGAIN:
                raise
            failure = error
        # A stream that was open was not silent: comments come where there are no events.
        if opened and time.monotonic() - opened[0] > OPEN_SECONDS:
            heard = time.monotonic()
        if time.monotonic() - heard > patience_seconds:
            raise connection.unreachable(failure)
        time.sleep(wait)
        wait = min(2 * wait, LONGEST_WAIT_SECONDS)


def _events(
    connection: Connection, path: str, after: str | None, opened: list[float]
) -> Iterator[Event]:
    headers = {} if after is None else {"Last-Event-ID": after}
    headers["Accept"] = "text/event-stream"
    with connection.stream(path, headers=headers, read_seconds=SILENCE_SECONDS) as answer:
        opened.append(time.monotonic())
        for each in httpx2.EventSource(answer, max_event_size=LARGEST_EVENT_BYTES):
            if each.data:
                yield Event(name=each.event, data=_object(each.data), id=each.id)


def _object(text: str) -> dict[str, Any]:
    try:
        data: Any = json.loads(text)
    except ValueError:
        data = text
    return data if isinstance(data, dict) else {"value": data}  # pyright: ignore[reportUnknownVariableType]


T = TypeVar("T")
Progress = Callable[[str, float], None]
"""Told what is being done and the share of it that is done, 0 to 1."""
OnEvent = Callable[[Event], None]


def segment(name: str) -> str:
    """A name as one part of an address."""
    return quote(name, safe="")


def pages(
    connection: Connection, path: str, cls: type[T], params: dict[str, Any] | None = None
) -> Iterator[T]:
    """Every item of a list, page after page as they are read."""
    wanted: dict[str, Any] = dict(params or {})
    while True:
        page = connection.get(path, wanted)
        for item in page["items"]:
            yield resource(cls, item)
        if page.get("next_cursor") is None:
            return
        wanted["cursor"] = page["next_cursor"]


class Jobs:
    """`client.jobs`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list(
        self, *, kind: str | None = None, state: str | None = None, plan: str | None = None
    ) -> Iterator[Job]:
        """Jobs, newest first."""
        params = {"kind": kind, "state": state, "plan": plan}
        return pages(self._connection, "/v1/jobs", Job, params)

    def get(self, job: str) -> Job:
        """A job as it stands now."""
        return resource(Job, self._connection.get(f"/v1/jobs/{segment(job)}"))

    def start(self, path: str, body: Any, *, idempotency_key: str | None = None) -> Job:
        """POST what makes a job."""
        answer = self._connection.post(path, body, idempotency_key=idempotency_key)
        return resource(Job, answer)

    def noop(
        self, *, seconds: float = 0.0, steps: int = 1, idempotency_key: str | None = None
    ) -> Job:
        """Start a job that waits and does nothing, to see that jobs run."""
        body = {"kind": "noop", "seconds": seconds, "steps": steps}
        return self.start("/v1/jobs", body, idempotency_key=idempotency_key)

    def follow(self, job: str, *, after: str | None = None) -> Iterator[Event]:
        """Events and log lines as they come, `end` last; goes on after broken connections.

        Args:
            job: id of the job.
            after: id of the last event that is known already.
        """
        path = f"/v1/jobs/{segment(job)}/events"
        return follow(self._connection, path, after=after)

    def wait(
        self,
        job: Job,
        *,
        progress: Progress | None = None,
        on_event: OnEvent | None = None,
        cancel_on_interrupt: bool = False,
    ) -> Job:
        """The job once it has succeeded.

        Args:
            job: as it was accepted.
            progress: told what is being done.
            on_event: given every event.
            cancel_on_interrupt: Ctrl-C cancels the job too.

        Raises:
            ServiceProblemError: it failed; the text is the job's own reason.
            JobCancelledError: it was cancelled.
        """
        try:
            return self._finished(self._followed(job, progress, on_event))
        except KeyboardInterrupt:
            if cancel_on_interrupt:
                with contextlib.suppress(GnnplanError):  # it may have ended just now
                    self.cancel(job.id)
            raise

    def cancel(self, job: str) -> Job:
        """Cancel a job; one that runs ends soon."""
        return resource(Job, self._connection.post(f"/v1/jobs/{segment(job)}/cancel"))

    def log(self, job: str) -> str:
        """The end of what the job's processes printed."""
        return self._connection.get_bytes(f"/v1/jobs/{segment(job)}/log").decode(errors="replace")

    def attempts(self, job: str) -> Iterator[Attempt]:
        """What was tried for a job."""
        return pages(self._connection, f"/v1/jobs/{segment(job)}/attempts", Attempt)

    def result(self, job: Job, cls: type[T]) -> T:
        """The document that a job has made."""
        return decoded(cls, self._connection.get(f"/v1/jobs/{segment(job.id)}/result"))

    def answer(self, path: str, body: Any, cls: type[T], *, progress: Progress | None = None) -> T:
        """Ask a question that a job answers, and wait; Ctrl-C cancels the job.

        Raises:
            ServiceProblemError: the request is refused or the job fails.
        """
        job = self.start(path, body)
        return self.result(self.wait(job, progress=progress, cancel_on_interrupt=True), cls)

    def _followed(self, job: Job, progress: Progress | None, on_event: OnEvent | None) -> Job:
        if job.ended:
            return job
        for event in self.follow(job.id):
            if on_event is not None:
                on_event(event)
            if event.name == END:
                return resource(Job, event.data)
            if event.name == "progress" and progress is not None:
                progress(str(event.data.get("stage", "")), float(event.data.get("share", 0.0)))
        raise AssertionError("a stream ends with its end")

    def _finished(self, job: Job) -> Job:
        if job.state == "cancelled":
            raise JobCancelledError(f"job {job.id} was cancelled")
        if job.state != "succeeded":
            raise self._failure(job)
        return job

    def _failure(self, job: Job) -> ServiceProblemError:
        return error_of(problem_in(job))
