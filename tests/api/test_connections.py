"""Clients that do not finish what they begin are let go, and keep nobody else out."""

import asyncio
import contextlib
import gc
import json
import logging
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gnnplan.api.connections import (
    MOST_HEADER_BYTES,
    RESERVED_FILES,
    GuardedProtocol,
    limit_to_files,
)
from gnnplan.api.serve import connection_limits, server_of
from gnnplan.api.service.context import ServiceSettings
from tests.support.ranks import free_port
from tests.support.service import ServiceProcess

WAIT = 0.25
"""Seconds that the servers of these tests wait for headers, and for bodies."""
PIECE, PIECES = 1 << 20, 128
"""Bytes of a piece of a large answer, and their number: more than buffers hold."""
HALF = b"GET / HTTP/1.1\r\nHost: x\r\n"
WHOLE = HALF + b"\r\n"
GROWING = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """`/slow` says a word every tenth of a second, `/large` much; POST reads its body first."""
    if scope["method"] == "POST" and scope["path"] != "/refused":
        while (await receive()).get("more_body"):
            continue
    status = 401 if scope["path"] == "/refused" else 200
    await send({"type": "http.response.start", "status": status, "headers": []})
    if scope["path"] == "/slow":
        for _ in range(6):
            await send({"type": "http.response.body", "body": b"word\n", "more_body": True})
            await asyncio.sleep(0.1)
    if scope["path"] == "/large":
        for _ in range(PIECES):
            await send({"type": "http.response.body", "body": bytes(PIECE), "more_body": True})
    await send({"type": "http.response.body", "body": b"end\n"})


@contextlib.contextmanager
def serving(**limits: Any) -> Iterator[int]:
    """The port of a server in a thread of this process."""
    limits = {"header_seconds": WAIT, "body_seconds": WAIT, **limits}
    settings = ServiceSettings(data_dir=Path("unused"), **limits)
    port = free_port()
    app: Any = answer
    server = server_of(app, settings, "127.0.0.1", port)
    server.config.lifespan = "off"
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield port
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


def opened(port: int, text: bytes = b"") -> socket.socket:
    """A connection that has said something."""
    made = socket.create_connection(("127.0.0.1", port), timeout=60)
    made.sendall(text)
    return made


def rest_of(connection: socket.socket) -> bytes:
    """Everything that is still said until the connection ends."""
    with connection:
        found = b""
        try:
            while some := connection.recv(65536):
                found += some
        except ConnectionResetError:
            return found
        return found


def closed(connections: list[socket.socket]) -> int:
    """Connections that were ended by the other side."""
    ended = 0
    for each in connections:
        each.settimeout(0.001)
        try:
            ended += each.recv(65536) == b"" or each.recv(1) == b""
        except (TimeoutError, BlockingIOError):
            continue
        except ConnectionResetError:
            ended += 1
    return ended


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (HALF, b"408"),
        (HALF[:1], b"408"),
        (BODY, b"408"),
        (BODY + b"12345", b"408"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n", b"408"),
        (b"", b""),
        (b"\r\n", b""),
    ],
)
def test_a_request_that_is_not_finished_in_time_is_ended(said: bytes, words: bytes):
    with serving() as port:
        began = time.monotonic()
        found = rest_of(opened(port, said))
        assert time.monotonic() - began >= WAIT / 2
    assert found.split(b" ")[1:2] == ([words] if words else [])
    if words:
        problem = json.loads(found.partition(b"\r\n\r\n")[2])
        assert problem["status"] == 408
        assert "within 0.25 s" in problem["detail"]


@pytest.mark.parametrize("begun", [HALF + b"X: ", GROWING + b"0\r\nX: ", HALF[:5]])
def test_headers_that_do_not_end_are_refused(begun: bytes):
    with serving(header_seconds=20.0, body_seconds=20.0) as port:
        connection = opened(port, begun)
        time.sleep(0.1)  # what comes with the end of the headers is not counted
        connection.sendall(b"x" * (MOST_HEADER_BYTES + 1))
        assert rest_of(connection).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    "said",
    [
        HALF + b"X: " + b"x" * (MOST_HEADER_BYTES - 99) + b"\r\n\r\n",
        GROWING + b"3\r\nabc\r\n" * MOST_HEADER_BYTES + b"0\r\n\r\n",
    ],
)
def test_long_headers_and_longer_bodies_are_read(said: bytes):
    with serving(header_seconds=20.0, body_seconds=20.0) as port, opened(port, said) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("drop", [b"X: y\r\n", b"\r\n"])
def test_bytes_one_by_one_do_not_prolong_the_time(drop: bytes):
    """A header a little at a time, and empty lines after an answer, which begin no request."""
    with serving() as port:
        connection = opened(port, WHOLE if drop == b"\r\n" else HALF)
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 60:
                connection.sendall(drop)
                time.sleep(WAIT / 8)
                connection.settimeout(0.001)
                with contextlib.suppress(TimeoutError):
                    if connection.recv(65536) == b"":
                        break
        assert time.monotonic() - began < 30
        connection.close()


def test_a_body_that_was_refused_unread_is_not_waited_for_either():
    with serving() as port:
        found = rest_of(opened(port, BODY.replace(b"/ ", b"/refused ") + b"12345"))
    assert found.count(b"HTTP/1.1") == 1
    assert b" 401 " in found.split(b"\r\n")[0]


def test_whole_requests_on_one_connection_are_answered_however_far_apart():
    with serving(header_seconds=0.6) as port, opened(port, WHOLE) as connection:
        for _ in range(3):
            text = b""
            while b"end\n" not in text:
                some = connection.recv(65536)
                assert some
                text += some
            time.sleep(0.25)  # together longer than the time for one
            connection.sendall(WHOLE)


def test_who_follows_slowly_is_not_ended():
    with serving() as port:
        slow = opened(port, WHOLE.replace(b"/ ", b"/slow ", 1) + HALF)
        text = rest_of(slow)
    # What was half said meanwhile is waited for from then on.
    answered, _, late = text.partition(b"end\n")
    assert answered.count(b"word") == 6
    assert b"HTTP/1.1 408 " in late


def test_who_reads_nothing_of_an_answer_is_let_go_and_who_reads_slowly_is_not():
    request = b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with serving() as port, opened(port, request) as reading:
        unread, began, taken = opened(port, request), time.monotonic(), 0
        while some := reading.recv(PIECE):
            taken += len(some)
            time.sleep(WAIT / 20 if time.monotonic() - began < 4 * WAIT else 0)
        assert time.monotonic() - began > 4 * WAIT
        assert taken > PIECE * PIECES
        assert len(rest_of(unread)) < PIECE * PIECES


def test_where_there_are_too_many_the_one_that_waits_longest_goes(
    caplog: pytest.LogCaptureFixture,
):
    limits = {"max_connections": 40, "max_connections_of_client": 20, "header_seconds": 60.0}
    with caplog.at_level(logging.WARNING, "gnnplan.connections"), serving(**limits) as port:
        follower = opened(port, WHOLE.replace(b"/ ", b"/slow ", 1))
        assert b"200" in follower.recv(4096)
        unfinished = [opened(port, HALF) for _ in range(60)]
        assert b" 200 " in rest_of(opened(port, HALF + b"Connection: close\r\n\r\n"))
        # The last ones are there; of the first none is.
        assert closed(unfinished[:30]) == 30
        assert closed(unfinished[-10:]) == 0
        assert b"word" in follower.recv(4096)
        for each in (*unfinished, follower):
            each.close()
    assert [r.message for r in caplog.records if r.name == "gnnplan.connections"] == [
        "too many connections: one that waits is closed for each new"
    ]


def test_where_all_are_being_answered_a_new_one_is_refused_with_a_word(
    caplog: pytest.LogCaptureFixture,
):
    with (
        caplog.at_level(logging.WARNING, "gnnplan.connections"),
        serving(max_connections_of_client=3) as port,
    ):
        followers = [opened(port, WHOLE.replace(b"/ ", b"/slow ", 1)) for _ in range(3)]
        for each in followers:
            assert b"200" in each.recv(4096)
        refused = rest_of(opened(port, WHOLE))
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert json.loads(refused.partition(b"\r\n\r\n")[2])["detail"].startswith("expected fewer")
        for each in followers:
            each.close()
    assert "too many connections: new ones are refused" in caplog.messages


def test_nothing_is_kept_of_a_client_that_left_before_its_deadline():
    with serving(header_seconds=600.0, body_seconds=600.0) as port:
        for said in (b"", HALF, BODY + b"12345"):
            opened(port, said).close()
        assert b" 200 " in rest_of(opened(port, HALF + b"Connection: close\r\n\r\n"))
        deadline = time.monotonic() + 20
        while kept_protocols() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert kept_protocols() == 0


def kept_protocols() -> int:
    """Connections of this process that something still refers to."""
    gc.collect()
    return sum(issubclass(type(each), GuardedProtocol) for each in gc.get_objects())


def test_one_address_never_takes_all_and_files_are_left_for_the_rest(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (1024, 4096))
    assert limit_to_files(5000) == 1024 - RESERVED_FILES
    assert limit_to_files(100) == 100
    found = connection_limits(ServiceSettings(data_dir=Path("unused")))
    assert (found.most, found.most_of_client) == (768, 576)


@pytest.mark.distributed
def test_a_thousand_unfinished_requests_do_not_shut_the_health_check_out(tmp_path: Path):
    service = ServiceProcess(tmp_path / "data", "--header-seconds", "3", files=1024)
    service.start()
    try:
        unfinished = [opened(service.port, HALF) for _ in range(1010)]
        assert service.call("GET", "/healthz")["status"] == "ok"
        assert service.call("GET", "/readyz")["status"] == "ok"
        deadline = time.monotonic() + 120
        while closed(unfinished) < len(unfinished):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        for each in unfinished:
            each.close()
    finally:
        service.stop()
    assert "too many connections" in (tmp_path / "data.log").read_text()
