"""Whether the service lives and is ready, and its metrics."""

from importlib.metadata import version

from fastapi import APIRouter, Depends, Response
from prometheus_client import CONTENT_TYPE_LATEST

from api.errors import UnavailableError
from api.routes.common import ServiceIn
from api.schemas.resources import Health
from api.security.auth import require

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> Health:
    """The service answers."""
    return Health(version=version("gnnplan"))


@router.get("/readyz")
def readyz(service: ServiceIn) -> Health:
    """The database and the data folder can be written, and jobs are taken."""
    if reason := service.readiness.why_not(service.storage.check_writable):
        raise UnavailableError(reason, headers={"Retry-After": "5"})
    if not service.lanes.alive:
        raise UnavailableError("a worker is gone; start the service again")
    return Health(version=version("gnnplan"))


@router.get(
    "/metrics",
    dependencies=[Depends(require("read"))],
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def metrics(service: ServiceIn) -> Response:
    """Counters for Prometheus."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)
