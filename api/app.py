"""Build the REST service as one FastAPI application, and its document; torch is never imported.

    middleware.Gate -> routes/*.py, dashboard/*.py -> service/*.py -> storage/*.py, jobs/*.py

Routes translate bytes and statuses. The work is done by functions of `api.service`, which pages
and tests call too. Here are the routes of the service itself: whether it lives and is ready, its
metrics, and who has asked for what. `python -m gnnplan.api.app` writes the committed openapi.json.
"""

import asyncio
import contextlib
import json
import logging
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Response
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST

from gnnplan.api import errors as problems
from gnnplan.api.dashboard import jobs as job_pages, pages, plans as plan_pages
from gnnplan.api.errors import UnavailableError
from gnnplan.api.middleware import Gate
from gnnplan.api.resources import AuditLine, Health, PageOf, Problem
from gnnplan.api.routes import inputs, jobs, plans
from gnnplan.api.routes.common import (
    PageIn,
    ServiceIn,
    answers_text,
    no_other_parameters,
    show_page,
)
from gnnplan.api.security import Admin, require
from gnnplan.api.service.context import Service, ServiceSettings, open_service
from gnnplan.api.service.jobs import JobStates
from gnnplan.api.service.plans import check_job
from gnnplan.api.service.runs import count_error
from gnnplan.api.storage.tables import AuditRow

SWEEP_SECONDS = 3600.0
COMMITTED = Path(__file__).with_name("openapi.json")
METHODS = ("get", "put", "post", "delete", "patch", "head", "options")
LOG = logging.getLogger("gnnplan.service")

health_router = APIRouter(tags=["health"])


@health_router.get("/healthz")
async def healthz() -> Health:
    """The service answers."""
    return Health(version=version("gnnplan"))


@health_router.get("/readyz")
def readyz(service: ServiceIn) -> Health:
    """The database, the data folder and the cache can be written, and jobs are taken."""
    if reason := service.readiness.why_not(service.check_writable):
        raise UnavailableError(reason, headers={"Retry-After": "5"})
    if not service.lanes.alive:
        raise UnavailableError("a worker is gone; start the service again")
    return Health(version=version("gnnplan"))


@health_router.get(
    "/metrics",
    dependencies=[Depends(require("read"))],
    response_class=Response,
    responses=answers_text("text/plain"),
)
def metrics(service: ServiceIn) -> Response:
    """Counters for Prometheus."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


audit_router = APIRouter(prefix="/v1/audit", tags=["audit"])


@audit_router.get("")
def list_audit(
    service: ServiceIn,
    _who: Admin,
    page: PageIn,
    principal: Annotated[str | None, Query(max_length=64, description="Id of a key.")] = None,
) -> PageOf[AuditLine]:
    """The audit log, newest first."""
    return show_page(
        service.storage.database.page(AuditRow, principal=principal, **page), AuditLine.of
    )


def create_app(settings: ServiceSettings | Path) -> FastAPI:
    """Build the service; a path means the data folder, with all settings at their defaults.

    Raises:
        InputError: the database does not answer, or its URL is wrong.
    """
    if isinstance(settings, Path):
        settings = ServiceSettings(data_dir=settings)
    service = open_service(settings, starts=check_job, ended=count_error)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None, None]:
        service.start()
        sweeper = asyncio.create_task(_sweep(service))
        yield
        sweeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sweeper
        await asyncio.to_thread(service.stop)
        service.close()

    app = FastAPI(
        title="gnnplan",
        version=version("gnnplan"),
        description="Placement plans for multi-GPU GNN training.",
        lifespan=lifespan,
        docs_url=None,  # both pages load their scripts from another host
        redoc_url=None,
    )
    app.state.service = service
    app.state.job_states = JobStates(service)
    problems.install(app)
    app.add_middleware(Gate, service=service)
    for router in (
        health_router,
        inputs.graphs_router,
        inputs.machines_router,
        inputs.profiles_router,
        inputs.estimate_router,
        plans.router,
        jobs.runs_router,
        jobs.router,
        audit_router,
    ):
        app.include_router(router, dependencies=[Depends(no_other_parameters)])
    # Fixed names before those that hold an id.
    for router in (pages.router, pages.login_router, plan_pages.router, job_pages.router):
        app.include_router(router)
    app.openapi = lambda: document(app)
    return app


async def _sweep(service: Service) -> None:
    """Remove expired jobs and files now and every hour."""
    while True:
        try:
            days = service.settings.retention_days
            removed = await asyncio.to_thread(service.storage.sweep, days)
            LOG.info("swept", extra={"jobs": removed})
        except Exception:
            LOG.exception("the sweep failed; it is tried again in an hour")
        await asyncio.sleep(SWEEP_SECONDS)


def document(app: FastAPI) -> dict[str, Any]:
    """Return an application's document, in which every refusal is a problem document."""
    if app.openapi_schema is None:
        found = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
            openapi_version=app.openapi_version,
        )
        _with_problems(found)
        app.openapi_schema = found
    return app.openapi_schema


def _with_problems(found: dict[str, Any]) -> None:
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    schemas["Problem"] = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    for name in ("Job", "Run"):
        schemas[name]["properties"]["problem"] = {
            "anyOf": [{"$ref": "#/components/schemas/Problem"}, {"type": "null"}]
        }
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    problem = {"schema": {"$ref": "#/components/schemas/Problem"}}
    for path in found["paths"].values():
        for method in METHODS:
            if method in path:
                operation = path[method]
                operation["responses"].pop("422", None)
                for status, words in refusals(operation).items():
                    operation["responses"][status] = {
                        "description": words,
                        "content": {"application/problem+json": problem},
                    }


def refusals(operation: dict[str, Any]) -> dict[str, str]:
    """Return what an operation may be refused for, by status."""
    found: dict[str, str] = {}
    if "security" in operation:
        found["401"] = "A key is needed, and none or a wrong one was given."
        found["403"] = "The key may not do this, or what is named may not be used."
    if any(each["in"] == "path" for each in operation.get("parameters", [])):
        found["404"] = "There is no such thing."
        found["409"] = "The state of things does not allow this now; `type` says why."
    if "requestBody" in operation:
        found["413"] = "The body is too large."
        found["415"] = "The body is not JSON."
    found["422"] = "The request is understood and wrong."
    found["429"] = "Too many requests or jobs; Retry-After says how long to wait."
    found["503"] = "The service cannot answer now."
    found["default"] = "Another problem (RFC 9457)."
    return found


def text_of(app: FastAPI) -> str:
    """Return the document as the committed text."""
    return json.dumps(document(app), indent=1, sort_keys=True) + "\n"


def write() -> None:
    """Write the committed document."""
    with tempfile.TemporaryDirectory() as folder:
        COMMITTED.write_text(text_of(create_app(Path(folder))))


if __name__ == "__main__":
    write()
