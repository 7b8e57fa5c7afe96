"""Refusals of requests; each is answered as a problem document (RFC 9457) of its status and type.

ServiceError
  NotFoundError             404 not-found
  UnauthorizedError         401 unauthorized
  ForbiddenError            403 forbidden
  ConflictError             409 conflict
  UnprocessableError        422 invalid-request
  TooManyError              429 too-many-requests
  UnavailableError          503 unavailable
"""

import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from gnnplan.runtime.errors import InputError


class ServiceError(Exception):
    """A refused request: a text for people, a kind for programs, further members."""

    status = 500
    kind = "internal"

    def __init__(
        self,
        detail: str,
        *,
        kind: str | None = None,
        headers: dict[str, str] | None = None,
        **extensions: Any,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.kind = kind or type(self).kind
        self.headers = headers or {}
        self.extensions = extensions


class NotFoundError(ServiceError):
    """What is named does not exist."""

    status, kind = 404, "not-found"


class UnauthorizedError(ServiceError):
    """A key is needed, and none or a wrong one was given."""

    status, kind = 401, "unauthorized"


class ForbiddenError(ServiceError):
    """The key may not do this."""

    status, kind = 403, "forbidden"


class ConflictError(ServiceError):
    """The present state does not allow this."""

    status, kind = 409, "conflict"


class UnprocessableError(ServiceError):
    """The request can be read and is wrong."""

    status, kind = 422, "invalid-request"


class TooManyError(ServiceError):
    """There are too many requests or jobs."""

    status, kind = 429, "too-many-requests"


class UnavailableError(ServiceError):
    """The service cannot answer now."""

    status, kind = 503, "unavailable"


MEDIA_TYPE = "application/problem+json"


def problem_response(
    path: str,
    status: int,
    detail: str,
    kind: str = "about:blank",
    headers: dict[str, str] | None = None,
    **extensions: Any,
) -> Response:
    """Answer with a problem document."""
    text = problem_text(path, status, detail, kind, **extensions)
    return Response(text, status, headers, MEDIA_TYPE)


def problem_text(path: str, status: int, detail: str, kind: str, **extensions: Any) -> str:
    """Write a problem document as JSON."""
    problem = {
        "type": kind,
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "instance": path,
        **extensions,
    }
    return json.dumps(problem)


def of_service_error(path: str, error: ServiceError) -> Response:
    """Answer with the problem document of a refusal."""
    return problem_response(
        path, error.status, error.detail, error.kind, error.headers, **error.extensions
    )


def validation_text(error: RequestValidationError) -> str:
    """Describe what is wrong with a request's fields in one line."""
    return "; ".join(
        f"{'.'.join(str(p) for p in e['loc'][1:]) or 'body'}: {e['msg']}"
        for e in error.errors()[:20]
    )


def install(app: FastAPI) -> None:
    """Let an application answer every failure with a problem document."""

    def answer(kind: type[Exception], make: Callable[[str, Any], Response]) -> None:
        async def handler(request: Request, error: Exception) -> Response:
            return make(request.url.path, error)

        app.add_exception_handler(kind, handler)

    def invalid(path: str, detail: str) -> Response:
        return problem_response(path, 422, detail, "invalid-request")

    def refused(path: str, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        return problem_response(path, error.status_code, str(error.detail), headers=headers)

    answer(ServiceError, of_service_error)
    answer(HTTPException, refused)
    answer(RequestValidationError, lambda path, error: invalid(path, validation_text(error)))
    answer(InputError, lambda path, error: invalid(path, str(error)))
