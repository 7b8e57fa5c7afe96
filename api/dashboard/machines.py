"""Pages of machines: the list, and one machine with its picture."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from api.dashboard.pages import PageRoute, page
from api.routes.common import ServiceIn
from api.security.auth import Reader
from api.service import machines
from planner.report.links import link_rows
from planner.report.page import swatch
from planner.report.topology import draw_topology

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/machines")
def list_machines(
    request: Request,
    service: ServiceIn,
    _who: Reader,
    cursor: Annotated[str | None, Query(max_length=512)] = None,
) -> Response:
    """Presets and uploaded machines."""
    found = machines.list_machines(service, cursor=cursor, limit=50)
    return page(request, "machines.html", machines=found.items, next_cursor=found.next_cursor)


@router.get("/machines/{machine}")
def show_machine(
    request: Request,
    service: ServiceIn,
    _who: Reader,
    machine: Annotated[str, Path(max_length=128)],
) -> Response:
    """One machine."""
    found = machines.machine_model(service, machine)
    links = link_rows(found, None)
    return page(
        request,
        "machine_page.html",
        machine=found,
        machine_id=machine,
        links=links,
        topology_picture=draw_topology(found, links),
        swatch=swatch,
    )
