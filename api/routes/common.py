"""What routes share: the service, the caller, pages of lists, and documents with an ETag."""

import hashlib
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Header, Path, Query, Request, Response
from fastapi.routing import APIRoute

from gnnplan.api.errors import UnprocessableError
from gnnplan.api.resources import PageOf, job_of
from gnnplan.api.security import principal_in
from gnnplan.api.service.context import Caller, Service, as_json
from gnnplan.api.storage.database import Page
from gnnplan.api.storage.tables import JobRow
from gnnplan.planner.client.resources import Job

Row = TypeVar("Row")
Shown = TypeVar("Shown")
JSON = "application/json"


async def service_of(request: Request) -> Service:
    """Return the running service."""
    return request.app.state.service


async def caller_of(
    request: Request,
    idempotency_key: Annotated[
        str | None,
        Header(
            min_length=1,
            max_length=255,
            pattern=r"^[!-~]+$",
            description="The same key with the same request makes no second job.",
        ),
    ] = None,
) -> Caller:
    """Return who asks for something that makes a job."""
    return Caller(
        principal=principal_in(request).name,
        request_id=request.scope["request_id"],
        idempotency_key=idempotency_key,
    )


async def page_of(
    cursor: Annotated[
        str | None, Query(max_length=512, description="next_cursor of the page before.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=200, description="Most items of the page.")] = 50,
) -> dict[str, Any]:
    """Return which page of a list is asked for."""
    return {"cursor": cursor, "limit": limit}


async def no_other_parameters(request: Request) -> None:
    """Refuse query parameters that an operation does not have."""
    if not request.query_params:
        return
    known = query_names(request.scope["route"])
    unknown = sorted(set(request.query_params) - set(known))
    if unknown:
        raise UnprocessableError(
            f"expected query parameters among {', '.join(known) or 'none'}, found "
            f"{', '.join(name[:60] for name in unknown[:5])}"
        )


def query_names(route: APIRoute) -> list[str]:
    """Return the names of an operation's query parameters, sorted."""
    names, left = set[str](), [route.dependant]
    while left:
        part = left.pop()
        names |= {each.alias for each in part.query_params}
        left += part.dependencies
    return sorted(names)


Id = Annotated[str, Path(max_length=64)]
Cursor = Annotated[str | None, Query(max_length=512)]
PlanFilter = Annotated[str | None, Query(max_length=64, description="Id of a plan.")]
ServiceIn = Annotated[Service, Depends(service_of)]
CallerIn = Annotated[Caller, Depends(caller_of)]
PageIn = Annotated[dict[str, Any], Depends(page_of)]


def show_page(page: Page[Row], show: Callable[[Row], Shown]) -> PageOf[Shown]:
    """Turn a page of rows into a page of resources."""
    return PageOf(items=[show(row) for row in page.items], next_cursor=page.next_cursor)


def answer_accepted(response: Response, row: JobRow) -> Job:
    """Answer 202 with the address of a job."""
    response.status_code = 202
    response.headers["Location"] = f"/v1/jobs/{row.id}"
    response.headers["Retry-After"] = "1"
    return job_of(row)


def answers_text(media_type: str) -> dict[int | str, dict[str, Any]]:
    """Describe an operation that answers a text, for the OpenAPI document."""
    return {200: {"content": {media_type: {"schema": {"type": "string"}}}}}


def answer_tagged(
    request: Request,
    body: bytes,
    *,
    tag: str | None = None,
    media_type: str = JSON,
    cache: str = "private, no-cache",
) -> Response:
    """Answer a document with its ETag, or 304 where the client has it."""
    name = f'"{tag or hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {"ETag": name, "Cache-Control": cache}
    known = request.headers.get("if-none-match", "")
    wanted = {each.strip().removeprefix("W/") for each in known.split(",")}
    if name in wanted or "*" in wanted:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=media_type)


def answer_resource(request: Request, resource: object) -> Response:
    """Answer a resource with its ETag."""
    return answer_tagged(request, as_json(resource))
