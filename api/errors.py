"""Refusals of the service, as one tree; each is a problem document with its status and type.

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
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from gnnplan.runtime.errors import InputError


class ServiceError(Exception):
    """Anything a request is refused for."""

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
    """There is no such thing."""

    status, kind = 404, "not-found"


class UnauthorizedError(ServiceError):
    """A key is needed, and none or a wrong one was given."""

    status, kind = 401, "unauthorized"


class ForbiddenError(ServiceError):
    """The key may not do this."""

    status, kind = 403, "forbidden"


class ConflictError(ServiceError):
    """The state of things does not allow this now."""

    status, kind = 409, "conflict"


class UnprocessableError(ServiceError):
    """The request is understood and wrong."""

    status, kind = 422, "invalid-request"


class TooManyError(ServiceError):
    """Too many requests or jobs."""

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
    """One problem as a response."""
    text = problem_text(path, status, detail, kind, **extensions)
    return Response(text, status, headers, MEDIA_TYPE)


def problem_text(path: str, status: int, detail: str, kind: str, **extensions: Any) -> str:
    """One problem as JSON."""
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
    """A refusal of the service as a response."""
    return problem_response(
        path, error.status, error.detail, error.kind, error.headers, **error.extensions
    )


def validation_text(error: RequestValidationError) -> str:
    """What is wrong with a request's fields, in one line."""
    return "; ".join(
        f"{'.'.join(str(p) for p in e['loc'][1:]) or 'body'}: {e['msg']}"
        for e in error.errors()[:20]
    )


def install(app: FastAPI) -> None:
    """Answer every failure with a problem document."""

    async def on_service(request: Request, error: Exception) -> Response:
        assert isinstance(error, ServiceError)
        return of_service_error(request.url.path, error)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        return problem_response(
            request.url.path, error.status_code, str(error.detail), headers=headers
        )

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return problem_response(request.url.path, 422, validation_text(error), "invalid-request")

    async def on_input(request: Request, error: Exception) -> Response:
        return problem_response(request.url.path, 422, str(error), "invalid-request")

    app.add_exception_handler(ServiceError, on_service)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(InputError, on_input)
