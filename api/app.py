"""Build the REST service as one FastAPI application; torch is never imported here.

    middleware.Gate -> routes/*.py, dashboard/*.py -> service/*.py -> storage/*.py, jobs/*.py

Routes translate bytes and statuses. The work is done by functions of `api.service`, which pages
and tests call too. Here are the routes of the service itself: whether it lives and is ready, its
metrics, and who has asked for what.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Query, Response
from prometheus_client import CONTENT_TYPE_LATEST

from gnnplan.api import errors as problems, openapi
from gnnplan.api.dashboard import jobs as job_pages, pages, plans as plan_pages
from gnnplan.api.errors import UnavailableError
from gnnplan.api.middleware import Gate
from gnnplan.api.resources import AuditLine, Health, PageOf
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
    app.openapi = lambda: openapi.document(app)
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
