"""Check every request before its route, and complete, log, count and audit its answer.

name it -> its host and origin -> who asks -> how often -> how large -> route
        -> security headers -> log, count, audit
"""

import asyncio
import logging
import re
import time
import uuid
from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException
from sqlalchemy.exc import OperationalError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gnnplan.api.errors import (
    ForbiddenError,
    ServiceError,
    TooManyError,
    UnavailableError,
    of_service_error,
    problem_response,
)
from gnnplan.api.security import Principal
from gnnplan.api.service.context import Service
from gnnplan.api.storage.tables import AuditRow
from gnnplan.api.telemetry import REQUEST_ID

HEADERS = {
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'; base-uri 'none'; "
    b"form-action 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"same-origin",  # no-referrer makes browsers send forms' Origin as null
    b"cross-origin-resource-policy": b"same-origin",
    b"x-frame-options": b"DENY",
}
"""Security headers of every answer; a page may set others of the same names."""


LOG = logging.getLogger("gnnplan.requests")
SAFE = ("GET", "HEAD", "OPTIONS")
FORMS = "application/x-www-form-urlencoded"
AWAY = "the database does not answer, or its disk is full; try later"
JOB_ADDRESS = re.compile(r"/(?:v1/jobs|jobs|runs)/([0-9a-f]{32})")
"""Value of a Location header that names a job or a run."""


def with_security(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return an answer's headers together with the security headers that it lacks."""
    given = {name.lower() for name, _ in headers}
    return [*headers, *((n, v) for n, v in HEADERS.items() if n not in given)]


class Gate:
    """The middleware of the service."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service
        self._hosts = {h.lower() for h in service.settings.allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with a problem document."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        await _Passage(self, scope).run(receive, send)

    async def check(self, scope: Scope, headers: Headers) -> None:
        """Check a request before its route, and put its principal into the scope."""
        client = client_of(scope)
        try:
            self._check_host(scope, headers)
            if "\0" in scope["path"] or b"%00" in scope["query_string"]:
                raise HTTPException(400, "expected an address without zero bytes")
            principal = await self.service.auth.principal(headers)
        except (ServiceError, HTTPException):
            self._check_rate(f"refused {client}", scope, strict=True)
            raise
        scope["principal"] = principal
        name = client if principal is None or principal.name == "local" else principal.name
        self._check_rate(name, scope)
        self._check_body(scope, headers)

    def _check_host(self, scope: Scope, headers: Headers) -> None:
        host = host_of(headers.get("host", ""))
        if "*" not in self._hosts and host not in self._hosts:
            raise HTTPException(421, f"expected a host of this service, found {host[:100]!r}")
        origin = headers.get("origin")
        if scope["method"] in SAFE or origin is None:
            return
        if host_and_port(origin) != headers.get("host", "").lower():
            raise ForbiddenError(
                "expected a request of this service's own pages, found one of another site",
                kind="cross-origin",
            )

    def _check_rate(self, name: str, scope: Scope, *, strict: bool = False) -> None:
        safe = scope["method"] in SAFE and not strict
        limit = self.service.reads if safe else self.service.writes
        wait = limit.wait_seconds(name)
        if wait > 0:
            raise TooManyError(
                "expected fewer requests a second; try later",
                headers={"Retry-After": str(max(1, round(wait)))},
            )

    def _check_body(self, scope: Scope, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        most = self.service.settings.max_body_bytes
        if not length.isascii() or not length.isdigit():
            raise HTTPException(400, "expected a number as Content-Length")
        if len(length) > 18 or int(length) > most:
            raise HTTPException(413, f"expected at most {most} bytes, found {length[:18]}")
        if int(length) == 0 and "transfer-encoding" not in headers:
            return
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        form = kind == FORMS and not scope["path"].startswith("/v1/")
        if kind != "application/json" and not form:
            raise HTTPException(415, f"expected application/json, found {kind[:100] or 'no type'}")


class _Passage:
    """One request on its way."""

    def __init__(self, gate: Gate, scope: Scope) -> None:
        self._gate, self._scope = gate, scope
        self._service = gate.service
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        self._id = given if re.fullmatch(r"[\w.-]{1,64}", given) else uuid.uuid4().hex
        self._headers = headers
        self._status, self._job = 0, ""
        self._is_audited = scope["method"] not in SAFE
        self._started = time.perf_counter()

    async def run(self, receive: Receive, send: Send) -> None:
        token = REQUEST_ID.set(self._id)
        self._scope["request_id"] = self._id

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._note(message)
            await send(message)

        try:
            await self._pass(receive, answer)
        finally:
            await self._after()
            REQUEST_ID.reset(token)

    async def _pass(self, receive: Receive, answer: Send) -> None:
        path = self._scope["path"]
        try:
            await self._gate.check(self._scope, self._headers)
            most = self._service.settings.max_body_bytes
            await self._gate.app(self._scope, limit_body(receive, most), answer)
            return
        except ServiceError as error:
            # The log takes no more than may be asked, whoever sends how much.
            self._is_audited &= not isinstance(error, TooManyError)
            response = of_service_error(path, error)
        except HTTPException as error:
            response = problem_response(path, error.status_code, str(error.detail))
        except asyncio.CancelledError:
            raise
        except OperationalError:
            LOG.exception("the database does not answer", extra={"path": path})
            response = of_service_error(path, UnavailableError(AWAY, headers={"Retry-After": "5"}))
        except Exception:
            LOG.exception("a request failed", extra={"path": path})
            response = problem_response(path, 500, "the service failed; its log says why")
        if self._status == 0:
            await response(self._scope, receive, answer)

    def _note(self, message: Message) -> None:
        """Complete an answer's headers, count it, and note what is logged."""
        headers: list[tuple[bytes, bytes]] = list(message.get("headers", []))
        headers.append((b"x-request-id", self._id.encode()))
        message["headers"] = with_security(headers)
        self._status = message["status"]
        if made := JOB_ADDRESS.fullmatch(dict(headers).get(b"location", b"").decode()):
            self._job = made[1]
        route = getattr(self._scope.get("route"), "path", "unmatched")
        metrics, method = self._service.metrics, self._scope["method"]
        method = method if method in (*SAFE, "POST", "DELETE") else "other"
        metrics.requests.labels(method, route, self._status).inc()
        metrics.request_seconds.labels(method, route).observe(time.perf_counter() - self._started)
        if self._status >= 400:
            metrics.refusals.labels(str(self._status)).inc()

    async def _after(self) -> None:
        scope, principal = self._scope, self._scope.get("principal")
        name = principal.name if isinstance(principal, Principal) else "unknown"
        words: dict[str, Any] = {
            "method": scope["method"],
            "path": scope["path"],
            "status": self._status,
            "principal": name,
            "client": client_of(scope),
            "seconds": round(time.perf_counter() - self._started, 5),
        }
        if self._job:
            words["job_id"] = self._job
        LOG.info("answered", extra=words)
        if self._is_audited:
            row = AuditRow(
                time_seconds=time.time(),
                principal=name,
                client=client_of(scope)[:64],
                method=scope["method"][:8],
                path=scope["path"][:2000].replace("\0", "?"),
                status=self._status,
                request_id=self._id,
                job_id=self._job,
            )
            try:
                await asyncio.to_thread(self._service.storage.access.write_audit, row)
            except asyncio.CancelledError:
                return  # the client is gone; the thread writes all the same
            except Exception:
                LOG.exception("a line of the audit log is lost", extra=words)


def limit_body(receive: Receive, most_bytes: int) -> Receive:
    """Receive a body, and refuse it once it exceeds a number of bytes."""
    seen = 0

    async def receive_some() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > most_bytes:
            raise HTTPException(413, f"expected at most {most_bytes} bytes, found more")
        return message

    return receive_some


def host_of(header: str) -> str:
    """Return the host of a Host header in lower case, without port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def host_and_port(origin: str) -> str:
    """Return the host and port of an Origin header; empty where it has none.

    >>> host_and_port("https://Plans.example:8443"), host_and_port("null"), host_and_port("http://[")
    ('plans.example:8443', '', '')
    """
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def client_of(scope: Scope) -> str:
    """Return the address that a request came from."""
    client = scope.get("client")
    return str(client[0]) if client else "unknown"
