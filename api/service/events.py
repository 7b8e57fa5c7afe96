"""Follow a job: stream its events and log lines as server-sent events, from any position.

An event's id says how far both files were read. A follower that comes back with it misses nothing
and gets nothing twice, and the service keeps nothing but these two offsets.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from gnnplan.api.errors import UnavailableError
from gnnplan.api.jobs.events import EVENTS_FILE, LOG_FILE, Tail, event_of
from gnnplan.api.resources import job_of
from gnnplan.api.service.context import Service, as_json
from gnnplan.api.storage.job_queue import ENDED
from gnnplan.api.storage.tables import JobRow

LOOK_SECONDS = 0.25
KEEPALIVE_SECONDS = 15.0
STATE_SECONDS = 0.5
"""Age in seconds up to which a job's state is shown; all its followers share one query."""


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


async def follow(
    service: Service, states: JobStates, job_id: str, start: Position
) -> AsyncIterator[bytes]:
    """Stream events and log lines of a job until it has ended, and then its end."""
    states.followers += 1
    service.metrics.followers.set(states.followers)
    try:
        async for chunk in _follow(service, states, job_id, start):
            yield chunk
    finally:
        states.followers -= 1
        service.metrics.followers.set(states.followers)


async def _follow(
    service: Service, states: JobStates, job_id: str, start: Position
) -> AsyncIterator[bytes]:
    folder = service.storage.job_folder(job_id)
    events = Tail(folder / EVENTS_FILE, start.events)
    log = Tail(folder / LOG_FILE, start.log)
    said, shown = time.monotonic(), ""
    while True:
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
