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

from typing import Any


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
