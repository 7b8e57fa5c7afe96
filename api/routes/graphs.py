"""Datasets that plans can be made for."""

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from api.routes.common import ServiceIn, tagged_model
from api.schemas.resources import GraphDetail, GraphSummary, PageOf
from api.security.auth import Reader
from api.service import graphs

router = APIRouter(prefix="/v1/graphs", tags=["graphs"])


@router.get("")
def list_graphs(service: ServiceIn, _who: Reader) -> PageOf[GraphSummary]:
    """Datasets below the graph roots, by name."""
    return PageOf(items=graphs.list_graphs(service))


@router.get("/{graph:path}", response_model=GraphDetail)
def get_graph(
    request: Request,
    service: ServiceIn,
    _who: Reader,
    graph: Annotated[str, Path(min_length=1, max_length=4096)],
) -> Response:
    """One dataset, by its folder below a root."""
    return tagged_model(request, graphs.get_graph(service, graph))
