"""What pages share: templates, headers, static files, refusals as pages, and the login.

A browser's key is kept in a cookie that scripts and other sites cannot read.
"""

import hashlib
import time
from collections.abc import Callable, Coroutine
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute
from jinja2 import Environment
from starlette.concurrency import run_in_threadpool

from gnnplan.api.errors import ServiceError, UnauthorizedError, validation_text
from gnnplan.api.routes.common import ServiceIn, answer_tagged
from gnnplan.api.security import COOKIE, Principal, principal_of
from gnnplan.planner.client.resources import JobState
from gnnplan.planner.errors import PlanDoesNotFit
from gnnplan.planner.report.page import environment, style
from gnnplan.runtime.errors import InputError

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
ASSETS = Path(__file__).parent / "assets"
ENDED: tuple[JobState, ...] = ("succeeded", "failed", "cancelled")
MOST_FIELDS = 100
STOP_ASKING = 286
"""Status after which htmx asks no more."""


@cache
def templates() -> Environment:
    """Return the templates of the dashboard and of a plan's page."""
    made = environment("gnnplan.api.dashboard", "gnnplan.planner.report")
    made.filters.update(when=time_words)  # pyright: ignore[reportUnknownMemberType] - jinja2 leaves it open
    return made


def time_words(seconds: float | None) -> str:
    """Write a Unix time for people, in UTC.

    >>> time_words(0.0), time_words(None)
    ('1970-01-01 00:00:00 UTC', '')
    """
    if seconds is None:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def lasting(begun: float | None, ended: float | None, *, scale: float = 1.0) -> str:
    """Write the time between two Unix times, or until now, for people; empty before the first.

    >>> lasting(0.0, 75.0), lasting(0.0, 3.2), lasting(0.0, 7300.0), lasting(None, None)
    ('1 min 15 s', '3 s', '2 h 1 min', '')
    """
    if begun is None:
        return ""
    seconds = round(max(0.0, (time.time() if ended is None else ended) - begun) * scale)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"


def page(request: Request, template: str, *, status: int = 200, **values: Any) -> Response:
    """Render a page, or the part of one that htmx asked for."""
    who: Principal | None = request.scope.get("principal")
    text = (
        templates()
        .get_template(template)
        .render(
            **values,
            here=request.url.path,
            who="" if who is None else who.name,
            scopes=frozenset[str]() if who is None else who.scopes,
            ended=ENDED,
        )
    )
    return HTMLResponse(text, status_code=status, headers=headers())


def part_status(request: Request, state: str) -> int:
    """Return the status of a page that htmx asks for again until its job has ended."""
    return STOP_ASKING if "hx-request" in request.headers and state in ENDED else 200


def headers() -> dict[str, str]:
    """Return headers of every page: no foreign content, and no shared caches."""
    return {"Content-Security-Policy": POLICY, "Cache-Control": "private, no-store"}


def download(text: str, name: str, media_type: str = "application/json") -> Response:
    """Answer a text as a file to keep."""
    kept = {**headers(), "Content-Disposition": f'attachment; filename="{name}"'}
    return Response(text, media_type=media_type, headers=kept)


def redirect_to(address: str) -> Response:
    """Redirect to another page after a form."""
    return RedirectResponse(address, status_code=303, headers=headers())


async def form(request: Request) -> dict[str, str]:
    """Read a form: the last value of each name, without empty values; refuse other bodies."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise HTTPException(415, "expected a form")
    try:
        text = (await request.body()).decode()
        pairs = parse_qsl(text, max_num_fields=MOST_FIELDS, errors="strict")
    except ValueError:
        raise HTTPException(400, "expected a form in UTF-8 with at most 100 fields") from None
    return {name: value for name, value in pairs if value}


class PageRoute(APIRoute):
    """A route whose refusals are pages; without a key it leads to the login."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, with refusals caught."""
        handle = super().get_route_handler()

        async def caught(request: Request) -> Response:
            try:
                return await handle(request)
            except UnauthorizedError:
                return redirect_to("/login")
            except ServiceError as error:
                return refusal(request, error.status, error.detail)
            except PlanDoesNotFit as error:
                return refusal(request, 409, str(error))
            except InputError as error:
                return refusal(request, 422, str(error))
            except RequestValidationError as error:
                return refusal(request, 422, validation_text(error))
            except HTTPException as error:
                return refusal(request, error.status_code, str(error.detail))

        return caught


def refusal(request: Request, status: int, detail: str) -> Response:
    """Render why there is no page."""
    return page(request, "refusal.html", status=status, code=status, detail=detail)


router = APIRouter(include_in_schema=False)
FILES = {
    "htmx.min.js": "text/javascript",
    "live.js": "text/javascript",
    "tables.js": "text/javascript",
    "dashboard.css": "text/css",
    "report.css": "text/css",
}


@router.get("/static/{name}")
def get_file(request: Request, name: str) -> Response:
    """Answer a static file."""
    if name not in FILES:
        raise HTTPException(404, "no such file")
    body = contents(name)
    tag = hashlib.sha256(body).hexdigest()[:32]
    return answer_tagged(
        request, body, tag=tag, media_type=FILES[name], cache="public, max-age=600"
    )


@cache
def contents(name: str) -> bytes:
    """Return the bytes of a static file."""
    return style().encode() if name == "report.css" else (ASSETS / name).read_bytes()


login_router = APIRouter(route_class=PageRoute, include_in_schema=False)
KEPT_SECONDS = 30 * 86400


@login_router.get("/login")
def show_login(request: Request) -> Response:
    """Show the form that takes a key."""
    return page(request, "login.html", told="")


@login_router.post("/login")
async def log_in(request: Request, service: ServiceIn) -> Response:
    """Store a valid key in a cookie."""
    text = (await form(request)).get("key", "").strip()
    who = await run_in_threadpool(principal_of, service.storage.access, text) if text else None
    if who is None:
        told = "Expected a valid key, found one that is unknown or revoked."
        return page(request, "login.html", status=401, told=told)
    answer = redirect_to("/plans")
    answer.set_cookie(
        COOKIE,
        text,
        max_age=KEPT_SECONDS,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return answer


@login_router.post("/logout")
def log_out() -> Response:
    """Delete the cookie."""
    answer = redirect_to("/login")
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer
