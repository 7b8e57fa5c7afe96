"""Whether the service lives and is ready, its metrics, and who has asked for what."""

from importlib.metadata import version
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response
from prometheus_client import CONTENT_TYPE_LATEST

from gnnplan.api.errors import UnavailableError
from gnnplan.api.resources import AuditLine, Health, PageOf
from gnnplan.api.routes.common import PageIn, ServiceIn, answers_text, show_page
from gnnplan.api.security import Admin, require
from gnnplan.api.storage.tables import AuditRow

health_router = APIRouter(tags=["health"])


@health_router.get("/healthz")
async def healthz() -> Health:
    """The service answers."""
    return Health(version=version("gnnplan"))


@health_router.get("/readyz")
def readyz(service: ServiceIn) -> Health:
    """The database and the data folder can be written, and jobs are taken."""
    if reason := service.readiness.why_not(service.storage.check_writable):
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
