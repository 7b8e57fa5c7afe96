"""Limit how many connections clients may hold, and how long each may keep the service waiting.

A connection either waits for its client to send something, or is being answered. Waiting has a
deadline; an answer has none, so that followers of events may take their time, as long as the client
reads what it is sent: one that reads nothing is let go. When there are too many connections, the
one that has waited longest is closed, first among those of the same client. A new connection is
refused only when none waits.
"""

import asyncio
import logging
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gnnplan.api.errors import MEDIA_TYPE, problem_text

RESERVED_FILES = 256
"""Number of files kept for the database, the logs of jobs and pipes."""
LEAST_CONNECTIONS = 16
MOST_HEADER_BYTES = 64 * 2**10
"""Bytes of a request's address and headers, or of what follows its body, that are read."""
TOLD_SECONDS = 10.0
"""Least seconds between two log lines of the same kind."""
LOG = logging.getLogger("gnnplan.connections")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionLimits:
    """What clients may hold, and for how long."""

    most: int
    most_of_client: int
    header_seconds: float
    """Longest wait for the headers of a request, from its first byte or the request before."""
    body_seconds: float
    """Longest wait for the body of a request, from the end of its headers, and for a client to read
    on where it has left much of an answer unread."""


def limit_to_files(most: int) -> int:
    """Return how many of `most` connections the limit of open files leaves room for."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return most
    return max(LEAST_CONNECTIONS, min(most, files - RESERVED_FILES))


class Connections:
    """The open connections of one server by client, oldest first."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._of_client: dict[str, dict[GuardedProtocol, None]] = {}
        self._number = 0
        self._told: dict[str, tuple[float, int]] = {}

    def __len__(self) -> int:
        return self._number

    def admit(self, new: "GuardedProtocol") -> bool:
        """Count a new connection; return False where it must be refused."""
        mine = self._of_client.get(new.peer, {})
        if len(mine) >= self.limits.most_of_client:
            admitted = self._make_room([mine], new.peer)
        elif self._number >= self.limits.most:
            largest_first = sorted(self._of_client.values(), key=len, reverse=True)
            admitted = self._make_room(largest_first, new.peer)
        else:
            admitted = True
        if admitted:
            self._of_client.setdefault(new.peer, {})[new] = None
            self._number += 1
        return admitted

    def leave(self, gone: "GuardedProtocol") -> None:
        """Forget a connection, if it is known."""
        mine = self._of_client.get(gone.peer, {})
        if gone in mine:
            del mine[gone]
            self._number -= 1
            if not mine:
                del self._of_client[gone.peer]

    def _make_room(self, clients: Iterable[dict["GuardedProtocol", None]], peer: str) -> bool:
        """Close the connection that has waited longest; return False where none waits."""
        for connections in clients:
            for each in connections:
                if each.is_waiting:
                    self.tell("too many connections: one that waits is closed for each new", peer)
                    each.end()
                    self.leave(each)
                    return True
        self.tell("too many connections: new ones are refused", peer)
        return False

    def tell(self, what: str, client: str) -> None:
        """Log an event of the connections, with how often it came since it was logged last."""
        now = time.monotonic()
        when, times = self._told.get(what, (-TOLD_SECONDS, 0))
        if now - when < TOLD_SECONDS:
            self._told[what] = when, times + 1
            return
        self._told[what] = now, 0
        LOG.warning(what, extra={"client": client, "times": times + 1, "open": self._number})


class GuardedProtocol(HttpToolsProtocol):
    """One HTTP/1.1 connection, with a deadline while it waits for its client."""

    guard: Connections

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.peer = ""
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._missing: Literal["request", "headers", "body"] = "request"
        self._header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Wait for the first request, unless there are too many connections."""
        super().connection_made(transport)
        self.peer = self.client[0] if self.client else "unknown"
        self._wait(self.guard.limits.header_seconds)
        if not self.guard.admit(self):
            self._refuse(503, "expected fewer connections; try later")

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
        self._forget_unread()
        self.guard.leave(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Wait for the client to read what fills the buffers."""
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        """Go on with an answer of which the client has read more."""
        self._forget_unread()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Read what came, unless headers have become too long; the parser keeps all of them."""
        self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes <= MOST_HEADER_BYTES or self.transport.is_closing():
            return
        self.guard.tell("requests whose headers are too long are ended", self.peer)
        if self._missing == "request" or self._is_held_back():
            self.end()
        else:
            self._refuse(431, f"expected at most {MOST_HEADER_BYTES} bytes of headers, found more")

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body, which the application limits."""
        self._header_bytes = 0
        super().on_body(body)

    def on_message_begin(self) -> None:
        """Wait for the rest of the headers after the first byte of a request."""
        super().on_message_begin()
        self._missing = "headers"
        self._wait(self.guard.limits.header_seconds)

    def on_headers_complete(self) -> None:
        """Wait for the body after the headers."""
        super().on_headers_complete()
        self._header_bytes, self._missing = 0, "body"
        self._wait(self.guard.limits.body_seconds)

    def on_message_complete(self) -> None:
        """Stop waiting after a whole request."""
        super().on_message_complete()
        self._header_bytes, self._missing = 0, "request"
        self._stop_waiting()
        self._wait_for_next()

    def on_response_complete(self) -> None:
        """Wait for the next request after an answer."""
        super().on_response_complete()
        if self._deadline is None:
            self._wait_for_next()

    @property
    def is_waiting(self) -> bool:
        """Return whether the client has to send something next."""
        return self._deadline is not None and not self._is_held_back()

    def end(self) -> None:
        """Close the connection at once."""
        self._stop_waiting()
        self.transport.abort()

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(seconds, self._run_out, seconds)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _wait_for_next(self) -> None:
        if not self._is_answering():
            self._wait(self.guard.limits.header_seconds)

    def _is_answering(self) -> bool:
        """Return whether the newest whole request is not fully answered."""
        return self.cycle is not None and not self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison] - None at first

    def _is_held_back(self) -> bool:
        """Return whether the service, not the client, holds the connection up."""
        return self.flow.read_paused or (self._missing != "body" and self._is_answering())

    def _run_out(self, seconds: float) -> None:
        self._deadline = None
        if self._is_held_back():
            self._wait(seconds)
        elif self._missing == "request" or self.transport.is_closing():
            self.transport.abort()
        else:
            self.guard.tell("requests that are not finished in time are ended", self.peer)
            detail = f"expected the {self._missing} of the request within {seconds:g} s"
            self._refuse(408, detail)

    def _wait_for_reader(self) -> None:
        self._forget_unread()
        left = self.transport.get_write_buffer_size()
        seconds = self.guard.limits.body_seconds
        self._unread = self.loop.call_later(seconds, self._run_out_unread, left)

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _run_out_unread(self, left_bytes: int) -> None:
        self._unread = None
        if self.transport.get_write_buffer_size() < left_bytes:
            self._wait_for_reader()
            return
        self.guard.tell("connections whose client does not read are ended", self.peer)
        self.end()

    def _refuse(self, status: int, detail: str) -> None:
        """Answer with a problem document, unless an answer has begun, and close."""
        self._stop_waiting()
        if self._missing != "body" or not self.cycle.response_started:
            self.transport.write(_response(status, detail))
        if self.transport.get_write_buffer_size() > 0:
            self.transport.abort()  # it does not read either
        else:
            self.transport.close()


def protocol_of(guard: Connections) -> type[GuardedProtocol]:
    """Make the protocol class of a server whose connections are counted in `guard`."""
    return type("GuardedProtocol", (GuardedProtocol,), {"guard": guard})


def _response(status: int, detail: str) -> bytes:
    body = problem_text("", status, detail, "connection").encode()
    head = (
        f"HTTP/1.1 {status} \r\ncontent-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode() + body
