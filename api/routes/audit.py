"""Who has asked for what that changes something."""

from typing import Annotated

from fastapi import APIRouter, Query

from api.routes.common import PageIn, ServiceIn, shown
from api.schemas.resources import AuditLine, PageOf
from api.security.auth import Admin

router = APIRouter(prefix="/v1/audit", tags=["audit"])


@router.get("")
def list_audit(
    service: ServiceIn,
    _who: Admin,
    page: PageIn,
    principal: Annotated[str | None, Query(max_length=64, description="Id of a key.")] = None,
) -> PageOf[AuditLine]:
    """The audit log, newest first."""
    return shown(service.storage.access.audit(principal=principal, **page), AuditLine.of)
