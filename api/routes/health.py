"""Whether the service lives and is ready, and its metrics."""

from importlib.metadata import version

from fastapi import APIRouter, Depends, Response
from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy import text

from api.errors import UnavailableError
from api.routes.common import ServiceIn
from api.schemas.common import Health
from api.security.auth import require

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> Health:
    """The service answers."""
    return Health(version=version("gnnplan"))


@router.get("/readyz")
def readyz(service: ServiceIn) -> Health:
    """The database answers, and jobs are taken."""
    try:
        with service.storage.database.reading() as session:
            session.execute(text("SELECT 1"))
    except Exception as error:
        raise UnavailableError(f"the database does not answer: {type(error).__name__}") from None
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
