"""Graphs, machines and profiles: what plans are made of."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from gnnplan.api.errors import NotFoundError
from gnnplan.api.requests import EstimateRequest, ProfileRequest, estimate_query
from gnnplan.api.resources import Document, PageOf, resource_of
from gnnplan.api.routes.common import (
    CallerIn,
    Id,
    PageIn,
    ServiceIn,
    answer_accepted,
    answer_resource,
    answer_tagged,
    show_page,
)
from gnnplan.api.security import Planner, Reader
from gnnplan.api.service import inputs, plans
from gnnplan.api.storage.tables import ProfileRow
from gnnplan.planner.client.resources import (
    GraphDetail,
    GraphSummary,
    Job,
    MachineSummary,
    ProfileSummary,
)
from gnnplan.planner.machine.model import MachineModel
from gnnplan.planner.queries.estimate import Estimates, EstimateSettings
from gnnplan.planner.workload import WorkloadProfile
from gnnplan.runtime import codec

graphs_router = APIRouter(prefix="/v1/graphs", tags=["graphs"])


@graphs_router.get("")
def list_graphs(service: ServiceIn, _who: Reader) -> PageOf[GraphSummary]:
    """Datasets below the graph roots, by name."""
    return PageOf(items=inputs.list_graphs(service))


@graphs_router.get("/{graph:path}", response_model=GraphDetail)
def get_graph(
    request: Request,
    service: ServiceIn,
    _who: Reader,
    graph: Annotated[str, Path(min_length=1, max_length=4096)],
) -> Response:
    """One dataset, by its folder below a root."""
    return answer_resource(request, inputs.get_graph(service, graph))


machines_router = APIRouter(prefix="/v1/machines", tags=["machines"])


@machines_router.get("")
def list_machines(service: ServiceIn, _who: Reader, page: PageIn) -> PageOf[MachineSummary]:
    """Presets first, then uploaded machines, newest first."""
    found = inputs.list_machines(service, **page)
    return PageOf(items=found.items, next_cursor=found.next_cursor)


@machines_router.post("", status_code=201)
def upload_machine(
    service: ServiceIn, _who: Planner, document: Document, response: Response
) -> MachineSummary:
    """Keep a machine file that `gnnplan probe` wrote; equal content is one machine."""
    kept = inputs.upload_machine(service, document)
    response.headers["Location"] = f"/v1/machines/{kept.id}"
    return kept


@machines_router.get("/{machine}", response_model=MachineModel)
def get_machine(
    request: Request,
    service: ServiceIn,
    _who: Reader,
    machine: Annotated[str, Path(max_length=128)],
) -> Response:
    """Processors, memories, links and tables; NAME:N is N boxes of a preset."""
    return answer_tagged(request, codec.dumps(inputs.machine_model(service, machine)).encode())


profiles_router = APIRouter(prefix="/v1/profiles", tags=["profiles"])


@profiles_router.get("")
def list_profiles(
    service: ServiceIn,
    _who: Reader,
    page: PageIn,
    graph: Annotated[str | None, Query(max_length=4096, description="Name of the graph.")] = None,
) -> PageOf[ProfileSummary]:
    """Profiles that were made here, newest first."""
    found = service.storage.database.page(ProfileRow, graph=graph, **page)
    return show_page(found, partial(resource_of, ProfileSummary))


@profiles_router.post("", status_code=202)
def create_profile(
    service: ServiceIn, _who: Planner, caller: CallerIn, body: ProfileRequest, response: Response
) -> Job:
    """Draw batches and time the model; follow the job at Location."""
    return answer_accepted(response, plans.create_profile(service, caller, body))


@profiles_router.get("/{profile}", response_model=WorkloadProfile)
def get_profile(request: Request, service: ServiceIn, _who: Reader, profile: Id) -> Response:
    """A profile's numbers."""
    row = service.storage.database.get(ProfileRow, profile)
    data = None if row is None else service.storage.artefacts.get(row.sha256)
    if row is None or data is None:
        raise NotFoundError(f"no profile {profile}")
    return answer_tagged(request, data, tag=row.sha256[:32])


estimate_router = APIRouter(prefix="/v1/estimate", tags=["estimates"])


@estimate_router.get("", response_model=Estimates)
def get_estimate(
    request: Request,
    service: ServiceIn,
    _who: Reader,
    settings: Annotated[EstimateSettings, Depends(estimate_query())],
    graph: Annotated[
        str | None, Query(min_length=1, max_length=4096, description="Name of a dataset.")
    ] = None,
) -> Response:
    """What a training would take on each known machine, and cost; nothing is measured."""
    return answer_resource(request, inputs.estimates_of(service, settings, graph))


@estimate_router.post("", response_model=Estimates)
def make_estimate(
    request: Request, service: ServiceIn, _who: Reader, body: EstimateRequest
) -> Response:
    """The same, asked for by a document."""
    return answer_resource(request, inputs.estimates_of(service, body.settings(), body.graph))
