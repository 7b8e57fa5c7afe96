"""The client follows a job's events: nothing twice, nothing lost, and not for ever."""

import json
from collections.abc import Iterator

import httpx2
import pytest

from gnnplan.planner.client import ServiceUnreachableError, jobs as following
from gnnplan.planner.client.connection import RequestRefusedError
from tests.api.test_client import answering


class Streams:
    """A service whose streams break: each request is answered with the next piece."""

    def __init__(self, *pieces: bytes | Exception) -> None:
        self.pieces = list(pieces)
        self.after: list[str | None] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.after.append(request.headers.get("Last-Event-ID"))
        piece = self.pieces.pop(0)
        if isinstance(piece, Exception):
            raise piece
        if piece.startswith(b"{"):
            kind = {"content-type": "application/problem+json"}
            return httpx2.Response(json.loads(piece)["status"], headers=kind, content=piece)
        return httpx2.Response(
            200, headers={"content-type": "text/event-stream"}, content=_broken(piece)
        )


def _broken(piece: bytes) -> Iterator[bytes]:
    yield piece
    if b"event: end\n" not in piece:
        raise httpx2.ReadError("cut off")


def block(name: str, place: str, data: str = "{}") -> bytes:
    return f"event: {name}\ndata: {data}\nid: {place}\n\n".encode()


def test_a_broken_stream_is_gone_on_with_behind_the_last_event(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(following.time, "sleep", lambda seconds: None)
    streams = Streams(
        block("progress", "1.0") + b": comment\n\n" + block("log", "1.9", '{"line": "a"}'),
        httpx2.ConnectError("refused"),
        b"event: progress\ndata: {}\nid: 2.9\n",  # cut within an event: it is given again
        b'{"status": 503, "detail": "starting"}',
        block("progress", "2.9") + block("end", "2.9"),
    )
    events = list(answering(streams).jobs.follow("j"))
    assert [(e.name, e.id) for e in events] == [
        ("progress", "1.0"), ("log", "1.9"), ("progress", "2.9"), ("end", "2.9"),
    ]  # fmt: skip
    assert events[1].data == {"line": "a"}
    assert streams.after == [None, "1.9", "1.9", "1.9", "1.9"]


def test_a_stream_of_a_job_that_is_gone_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(following.time, "sleep", lambda seconds: None)
    streams = Streams(block("progress", "1.0"), b'{"status": 404, "detail": "no job j"}')
    with pytest.raises(RequestRefusedError, match="no job j"):
        list(answering(streams).jobs.follow("j", after="0.5"))
    assert streams.after == ["0.5", "1.0"]


def test_a_service_that_stays_away_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(following.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(following.time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    refused = [httpx2.ConnectError("refused") for _ in range(1000)]
    streams = Streams(block("progress", "1.0"), *refused)
    with pytest.raises(ServiceUnreachableError, match="refused"):
        list(answering(streams).jobs.follow("j"))
    assert 300 < now[0] < 320


def test_ctrl_c_cancels_the_job_that_is_waited_for():
    cancelled: list[str] = []
    job = {"id": "j", "state": "running", "kind": "noop", "attempt": 1, "created_seconds": 1.0,
           "progress": {}}  # fmt: skip

    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/events"):
            raise KeyboardInterrupt
        if request.url.path.endswith("/cancel"):
            cancelled.append(request.url.path)
        return httpx2.Response(202, json=job)

    service = answering(answer)
    with pytest.raises(KeyboardInterrupt):
        service.jobs.wait(service.jobs.noop())
    assert cancelled == []
    with pytest.raises(KeyboardInterrupt):
        service.jobs.wait(service.jobs.noop(), cancel_on_interrupt=True)
    assert cancelled == ["/v1/jobs/j/cancel"]
