"""RFC 9457 problem details for every error the service answers."""

from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from api.schemas import Problem
from runtime.errors import InputError

MEDIA_TYPE = "application/problem+json"


def problem_response(request: Request, status: int, detail: str, kind: str = "about:blank"):
    """One problem as a response."""
    problem = Problem(
        type=kind,
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        instance=request.url.path,
    )
    return JSONResponse(problem.model_dump(), status_code=status, media_type=MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Answer every failure with a problem document."""

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        response = problem_response(request, error.status_code, str(error.detail))
        response.headers.update(error.headers or {})
        return response

    async def on_validation(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        parts = [
            f"{'.'.join(str(p) for p in e['loc'][1:]) or 'body'}: {e['msg']}"
            for e in error.errors()
        ]
        return problem_response(request, 422, "; ".join(parts), "invalid-request")

    async def on_input(request: Request, error: Exception) -> JSONResponse:
        return problem_response(request, 422, str(error), "invalid-request")

    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(InputError, on_input)
