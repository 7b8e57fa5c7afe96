"""Following a job over connections that may break: no event is missed, none comes twice.

Each event's id says how far the service has read; whoever comes back with it in Last-Event-ID is
given what comes behind it.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx2

from planner.remote.connection import AGAIN, Connection
from planner.remote.errors import ServiceProblemError
from planner.remote.resources import Event

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
