"""Pages of machines: the list, and one machine with its picture."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from gnnplan.api.dashboard.pages import PageRoute, page
from gnnplan.api.routes.common import ServiceIn
from gnnplan.api.security import Reader
from gnnplan.api.service import machines
from gnnplan.api.service.context import Service
from gnnplan.planner.report.links import link_rows
from gnnplan.planner.report.page import machine_line, swatch
from gnnplan.planner.report.topology import draw_topology
from gnnplan.runtime.errors import InputError

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
    lines = {each.id: _line(service, each.id) for each in found.items}
    return page(
        request, "machines.html", machines=found.items, lines=lines, next_cursor=found.next_cursor
    )


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
        line=machine_line(found),
        links=links,
        topology_picture=draw_topology(found, links),
        swatch=swatch,
    )


def _line(service: Service, name: str) -> str:
    """What a machine has; the reason where its file cannot be read."""
    try:
        return machine_line(machines.machine_model(service, name))
    except InputError as error:
        return str(error)
