"""Workload profiles: what batches of a graph look like, and how long the model takes on them."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from api.errors import NotFoundError
from api.routes.common import CallerIn, PageIn, ServiceIn, accepted, shown, tagged
from api.schemas.requests import ProfileRequest
from api.schemas.resources import Job, PageOf, ProfileSummary
from api.security.auth import Planner, Reader
from api.service import planning
from planner.workload import WorkloadProfile

router = APIRouter(prefix="/v1/profiles", tags=["profiles"])


@router.get("")
def list_profiles(
    service: ServiceIn,
    _who: Reader,
    page: PageIn,
    graph: Annotated[str | None, Query(max_length=4096, description="Name of the graph.")] = None,
) -> PageOf[ProfileSummary]:
    """Profiles that were made here, newest first."""
    return shown(service.storage.catalogue.profiles(graph=graph, **page), ProfileSummary.of)


@router.post("", status_code=202)
def create_profile(
    service: ServiceIn, _who: Planner, caller: CallerIn, body: ProfileRequest, response: Response
) -> Job:
    """Draw batches and time the model; follow the job at Location."""
    return accepted(response, planning.create_profile(service, caller, body))


@router.get("/{profile}", response_model=WorkloadProfile)
def get_profile(
    request: Request,
    service: ServiceIn,
    _who: Reader,
    profile: Annotated[str, Path(max_length=64)],
) -> Response:
    """A profile's numbers."""
    row = service.storage.catalogue.profile(profile)
    data = None if row is None else service.storage.artefacts.get(row.sha256)
    if row is None or data is None:
        raise NotFoundError(f"no profile {profile}")
    return tagged(request, data, tag=row.sha256[:32])
