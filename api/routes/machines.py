"""Machines that plans can be made for."""

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from api.routes.common import PageIn, ServiceIn, tagged
from api.schemas.resources import Document, MachineSummary, PageOf
from api.security.auth import Planner, Reader
from api.service import machines
from planner.machine.model import MachineModel
from runtime import codec

router = APIRouter(prefix="/v1/machines", tags=["machines"])


@router.get("")
def list_machines(service: ServiceIn, _who: Reader, page: PageIn) -> PageOf[MachineSummary]:
    """Presets first, then uploaded machines, newest first."""
    found = machines.list_machines(service, **page)
    return PageOf(items=found.items, next_cursor=found.next_cursor)


@router.post("", status_code=201)
def upload_machine(
    service: ServiceIn, _who: Planner, document: Document, response: Response
) -> MachineSummary:
    """Keep a machine file that `gnnplan probe` wrote; equal content is one machine."""
    kept = machines.upload_machine(service, document)
    response.headers["Location"] = f"/v1/machines/{kept.id}"
    return kept


@router.get("/{machine}", response_model=MachineModel)
def get_machine(
    request: Request,
    service: ServiceIn,
    _who: Reader,
    machine: Annotated[str, Path(max_length=128)],
) -> Response:
    """Processors, memories, links and tables; NAME:N is N boxes of a preset."""
    return tagged(request, codec.dumps(machines.machine_model(service, machine)).encode())
