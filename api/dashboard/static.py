"""The files that pages load: our own and a vendored htmx, each named here."""

import hashlib
from functools import cache

from fastapi import APIRouter, HTTPException, Request, Response

from api.dashboard.pages import ASSETS
from api.routes.common import tagged
from planner.report.page import style

router = APIRouter(include_in_schema=False)
FILES = {
    "htmx.min.js": "text/javascript",
    "live.js": "text/javascript",
    "dashboard.css": "text/css",
    "report.css": "text/css",
}


@router.get("/static/{name}")
def get_file(request: Request, name: str) -> Response:
    """One of them."""
    if name not in FILES:
        raise HTTPException(404, "no such file")
    body = contents(name)
    tag = hashlib.sha256(body).hexdigest()[:32]
    return tagged(request, body, tag=tag, media_type=FILES[name], cache="public, max-age=600")


@cache
def contents(name: str) -> bytes:
    """A file's bytes."""
    return style().encode() if name == "report.css" else (ASSETS / name).read_bytes()
