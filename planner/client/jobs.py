"""Start, follow, await and cancel jobs of the service.

A job is followed over connections that may break. Each event's id says how far the service has
read its files; sent back as Last-Event-ID, it misses no event and repeats none.
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
    Problem,
    ServiceProblemError,
    error_of,
)
from gnnplan.planner.client.resources import Attempt, Event, Job, decode_document, read_resource
from gnnplan.runtime.errors import GnnplanError

SILENCE_SECONDS = 45.0
"""Longest silence on an open stream; the service sends something every 15 s."""
PATIENCE_SECONDS = 300.0
LONGEST_WAIT_SECONDS = 8.0
OPEN_SECONDS = 1.0
"""Seconds below which a stream that breaks without an event counts as silent."""
LARGEST_EVENT_BYTES = 16 * 2**20
END = "end"


def follow(connection: Connection, path: str, *, after: str | None = None) -> Iterator[Event]:
    """Yield the events of a job until its end.

    Args:
        connection: to the service.
        path: of the events.
        after: id of the last known event; None: begin with the first.

    Raises:
        ServiceProblemError: there is no such job, or the key may not read it.
        ServiceUnreachableError: the service was away for longer than `PATIENCE_SECONDS`.
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
        if time.monotonic() - heard > PATIENCE_SECONDS:
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
"""Called with what is being done and its share that is done, 0 to 1."""
OnEvent = Callable[[Event], None]


def quote_segment(name: str) -> str:
    """Quote a name as one segment of a URL's path."""
    return quote(name, safe="")


def read_pages(
    connection: Connection, path: str, cls: type[T], params: dict[str, Any] | None = None
) -> Iterator[T]:
    """Yield the items of a list, reading one page after another."""
    wanted: dict[str, Any] = dict(params or {})
    while True:
        page = connection.get(path, wanted)
        for item in page["items"]:
            yield read_resource(cls, item)
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
        """List jobs, newest first."""
        params = {"kind": kind, "state": state, "plan": plan}
        return read_pages(self._connection, "/v1/jobs", Job, params)

    def get(self, job: str) -> Job:
        """Return a job."""
        return read_resource(Job, self._connection.get(f"/v1/jobs/{quote_segment(job)}"))

    def start(self, path: str, body: Any, *, idempotency_key: str | None = None) -> Job:
        """Send a POST that makes a job."""
        answer = self._connection.post(path, body, idempotency_key=idempotency_key)
        return read_resource(Job, answer)

    def noop(
        self, *, seconds: float = 0.0, steps: int = 1, idempotency_key: str | None = None
    ) -> Job:
        """Start a job that waits and does nothing, to see that jobs run."""
        body = {"kind": "noop", "seconds": seconds, "steps": steps}
        return self.start("/v1/jobs", body, idempotency_key=idempotency_key)

    def follow(self, job: str, *, after: str | None = None) -> Iterator[Event]:
        """Yield events and log lines behind the event `after`, whatever connections break."""
        path = f"/v1/jobs/{quote_segment(job)}/events"
        return follow(self._connection, path, after=after)

    def wait(
        self,
        job: Job,
        *,
        progress: Progress | None = None,
        on_event: OnEvent | None = None,
        cancel_on_interrupt: bool = False,
    ) -> Job:
        """Return a job after it has succeeded.

        Args:
            job: as it was accepted.
            progress: called with its progress.
            on_event: called with every event.
            cancel_on_interrupt: let Ctrl-C cancel the job.

        Raises:
            ServiceProblemError: it failed; the text is its reason.
            JobCancelledError: it was cancelled.
        """
        try:
            ended = self._follow_to_end(job, progress, on_event)
        except KeyboardInterrupt:
            if cancel_on_interrupt:
                with contextlib.suppress(GnnplanError):  # it may have ended just now
                    self.cancel(job.id)
            raise
        if ended.state == "cancelled":
            raise JobCancelledError(f"job {job.id} was cancelled")
        if ended.state != "succeeded":
            reason = ended.problem or {"detail": f"job {job.id} failed without a reason"}
            raise error_of(Problem.of(reason))
        return ended

    def wait_for_id(self, job: Job, *, progress: Progress | None = None) -> str:
        """Wait for a job and return the id of what it made; Ctrl-C cancels the job."""
        done = self.wait(job, progress=progress, cancel_on_interrupt=True)
        return (done.result or "").rpartition("/")[2]

    def cancel(self, job: str) -> Job:
        """Cancel a job; a running one ends soon."""
        return read_resource(Job, self._connection.post(f"/v1/jobs/{quote_segment(job)}/cancel"))

    def log(self, job: str) -> str:
        """Return the end of what the job's processes printed."""
        return self._connection.get_bytes(f"/v1/jobs/{quote_segment(job)}/log").decode(
            errors="replace"
        )

    def attempts(self, job: str) -> Iterator[Attempt]:
        """Yield the attempts at a job, oldest first."""
        return read_pages(self._connection, f"/v1/jobs/{quote_segment(job)}/attempts", Attempt)

    def result(self, job: Job, cls: type[T]) -> T:
        """Return the document that a job made."""
        return decode_document(
            cls, self._connection.get(f"/v1/jobs/{quote_segment(job.id)}/result")
        )

    def answer(self, path: str, body: Any, cls: type[T], *, progress: Progress | None = None) -> T:
        """Start a job, wait, and return its document; Ctrl-C cancels the job."""
        job = self.start(path, body)
        return self.result(self.wait(job, progress=progress, cancel_on_interrupt=True), cls)

    def _follow_to_end(self, job: Job, progress: Progress | None, on_event: OnEvent | None) -> Job:
        if job.ended:
            return job
        for event in self.follow(job.id):
            if on_event is not None:
                on_event(event)
            if event.name == END:
                return read_resource(Job, event.data)
            if event.name == "progress" and progress is not None:
                progress(str(event.data.get("stage", "")), float(event.data.get("share", 0.0)))
        raise AssertionError("a stream ends with its end")
