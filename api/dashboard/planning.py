"""The form that makes a plan: fields of the REST request, checked by the same schema."""

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from api.dashboard.pages import PageRoute, form, page, see
from api.errors import ServiceError
from api.routes.common import CallerIn, ServiceIn
from api.schemas.requests import PlanRequest
from api.security.auth import Planner
from api.service import graphs, machines, planning
from api.service.context import Service
from planner.errors import SettingsError
from planner.settings import POLICIES
from planner.units import parse_bytes
from runtime.errors import InputError

router = APIRouter(route_class=PageRoute, include_in_schema=False)
WHOLE = ("devices", "hidden", "batch_size", "seed")
SIZES = {"device_memory": "device_memory_bytes", "host_memory": "host_memory_bytes"}
WORDS = ("graph", "machine", "model", "policy", "allow", "mode", "batching", "sampler")
MODELS = ("sage", "gcn", "gat", "rgcn")
DEFAULTS = {
    "model": "sage",
    "hidden": "256",
    "fanouts": "15,10",
    "batch_size": "1024",
    "policy": "auto",
    "allow": "exact",
    "mode": "auto",
    "batching": "auto",
    "sampler": "auto",
    "seed": "0",
}


@router.get("/plans/new")
def show_form(request: Request, service: ServiceIn, _who: Planner) -> Response:
    """The form."""
    return _form(request, service, DEFAULTS)


@router.post("/plans/new")
async def create_plan(
    request: Request, service: ServiceIn, _who: Planner, caller: CallerIn
) -> Response:
    """Accept the form; on at the job, or at the plan where it was there already."""
    fields = await form(request)
    try:
        wanted = PlanRequest.model_validate(request_fields(fields))
        row, done = await run_in_threadpool(planning.create_plan, service, caller, wanted)
    except ValidationError as error:
        told = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        return await run_in_threadpool(_form, request, service, fields, told, 422)
    except ServiceError as error:
        status = error.status
        return await run_in_threadpool(_form, request, service, fields, [error.detail], status)
    except InputError as error:
        return await run_in_threadpool(_form, request, service, fields, [str(error)], 422)
    return see(f"/plans/{row.subject}" if done else f"/jobs/{row.id}")


def request_fields(fields: dict[str, str]) -> dict[str, Any]:
    """A form's fields as the REST request has them.

    Raises:
        SettingsError: a field is no number or size.
    """
    wanted: dict[str, Any] = {name: fields[name] for name in WORDS if name in fields}
    for name in WHOLE:
        if name in fields:
            wanted[name] = _whole(name, fields[name])
    if "fanouts" in fields:
        wanted["fanouts"] = [_whole("fanouts", part) for part in fields["fanouts"].split(",")]
    for name, field in SIZES.items():
        if name in fields:
            wanted[field] = parse_bytes(fields[name], name.replace("_", " "))
    return wanted


def _whole(name: str, text: str) -> int:
    try:
        return int(text.strip())
    except ValueError:
        raise SettingsError(
            f"{name.replace('_', ' ')}: expected a whole number, found {text[:40]!r}"
        ) from None


def _form(
    request: Request,
    service: Service,
    fields: dict[str, str],
    told: list[str] | None = None,
    status: int = 200,
) -> Response:
    return page(
        request,
        "new_plan.html",
        status=status,
        fields={**dict.fromkeys((*WORDS, *WHOLE, *SIZES, "fanouts"), ""), **fields},
        told=told or [],
        graphs=graphs.list_graphs(service),
        machines=machines.list_machines(service, limit=200).items,
        models=sorted({*MODELS, *service.settings.allowed_models}),
        policies=["auto", *[name for name in POLICIES if name != "auto"]],
    )
