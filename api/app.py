"""Build the REST service as one FastAPI application; torch is never imported here.

    middleware.Gate -> routes/*.py, dashboard/*.py -> service/*.py -> storage/*.py, jobs/*.py

Routes translate bytes and statuses. The work is done by functions of `api.service`, which pages
and tests call too.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path

from fastapi import Depends, FastAPI

from gnnplan.api import errors as problems, openapi
from gnnplan.api.dashboard import jobs as job_pages, pages, plans as plan_pages
from gnnplan.api.middleware import Gate
from gnnplan.api.routes import inputs, jobs, operations, plans
from gnnplan.api.routes.common import no_other_parameters
from gnnplan.api.service.context import Service, ServiceSettings, open_service
from gnnplan.api.service.jobs import JobStates
from gnnplan.api.service.runs import count_error

SWEEP_SECONDS = 3600.0
LOG = logging.getLogger("gnnplan.service")


def create_app(settings: ServiceSettings | Path) -> FastAPI:
    """Build the service; a path means the data folder, with all settings at their defaults.

    Raises:
        InputError: the database does not answer, or its URL is wrong.
    """
    if isinstance(settings, Path):
        settings = ServiceSettings(data_dir=settings)
    service = open_service(settings, ended=count_error)

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
        operations.health_router,
        inputs.graphs_router,
        inputs.machines_router,
        inputs.profiles_router,
        inputs.estimate_router,
        plans.router,
        jobs.runs_router,
        jobs.router,
        operations.audit_router,
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
