"""The key of a browser: given once, kept in a cookie that scripts and other sites cannot use."""

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from api.dashboard.pages import PageRoute, form, page, see
from api.routes.common import ServiceIn
from api.security.auth import COOKIE
from api.security.keys import principal_of

router = APIRouter(route_class=PageRoute, include_in_schema=False)
KEPT_SECONDS = 30 * 86400


@router.get("/login")
def show_login(request: Request) -> Response:
    """Where a key is given."""
    return page(request, "login.html", told="")


@router.post("/login")
async def log_in(request: Request, service: ServiceIn) -> Response:
    """Keep a valid key in a cookie."""
    text = (await form(request)).get("key", "").strip()
    who = await run_in_threadpool(principal_of, service.storage.access, text) if text else None
    if who is None:
        told = "Expected a valid key, found one that is unknown or revoked."
        return page(request, "login.html", status=401, told=told)
    answer = see("/plans")
    answer.set_cookie(
        COOKIE,
        text,
        max_age=KEPT_SECONDS,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return answer


@router.post("/logout")
def log_out() -> Response:
    """Forget the key."""
    answer = see("/login")
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer
