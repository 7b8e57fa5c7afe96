"""Pages of plans and machines: lists, one of each, two plans side by side, the form of a plan.

The form has the settings of a REST request and is checked by its schema.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from gnnplan.api.dashboard.pages import PageRoute, download, form, page, redirect_to
from gnnplan.api.errors import ServiceError
from gnnplan.api.requests import PlanRequest
from gnnplan.api.resources import resource_of
from gnnplan.api.routes.common import CallerIn, Cursor, Id, ServiceIn
from gnnplan.api.security import Planner, Reader
from gnnplan.api.service import inputs, plans, runs
from gnnplan.api.service.artefacts import (
    HTML,
    drawn_machine,
    measured_report,
    plan_page,
    plan_trace,
)
from gnnplan.api.service.context import Service
from gnnplan.api.storage.tables import PlanRow
from gnnplan.planner.client.resources import PlanSummary
from gnnplan.planner.cost.link_use import link_rows
from gnnplan.planner.errors import SettingsError
from gnnplan.planner.queries.estimate import EstimateSettings, render
from gnnplan.planner.queries.explain import explain
from gnnplan.planner.report.charts import Timeline, draw_timeline, timeline
from gnnplan.planner.report.measured import differences, verdict
from gnnplan.planner.report.page import machine_line, sections, swatch
from gnnplan.planner.report.topology import draw_topology
from gnnplan.planner.settings import MODELS, POLICIES, PlanSettings
from gnnplan.planner.units import YES_NO, default_text, read_texts
from gnnplan.runtime import codec
from gnnplan.runtime.device import machine_facts
from gnnplan.runtime.errors import InputError
from gnnplan.runtime.identity import is_planned_machine
from gnnplan.runtime.plan.schema import Plan
from gnnplan.runtime.plan.setting import SettingField, make_from, setting_fields

router = APIRouter(route_class=PageRoute, include_in_schema=False)
FIRST = ("devices", "model", "hidden", "fanouts", "batch_size")
"""Settings that the form shows at once; the others are under "More"."""
ESTIMATE_FIRST = (
    "nodes", "edges", "features", "like", "model", "hidden", "fanouts", "batch_size", "sort",
)  # fmt: skip
"""The same of an estimate's form."""


@router.get("/plans/new")
def show_form(request: Request, service: ServiceIn, _who: Planner) -> Response:
    """Show the form with the defaults."""
    return _form(request, service, {_key(each): default_text(each) for each in form_fields()})


@router.post("/plans/new")
async def create_plan(
    request: Request, service: ServiceIn, _who: Planner, caller: CallerIn
) -> Response:
    """Accept the form; lead to the job, or to the plan where one answers it already."""
    fields = await form(request)
    try:
        wanted = PlanRequest.model_validate(request_fields(fields))
        row, done = await run_in_threadpool(plans.create_plan, service, caller, wanted)
    except ValidationError as error:
        told = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        return await run_in_threadpool(_form, request, service, fields, told, 422)
    except ServiceError as error:
        status = error.status
        return await run_in_threadpool(_form, request, service, fields, [error.detail], status)
    except InputError as error:
        return await run_in_threadpool(_form, request, service, fields, [str(error)], 422)
    return redirect_to(f"/plans/{row.subject}" if done else f"/jobs/{row.id}")


def request_fields(fields: dict[str, str]) -> dict[str, Any]:
    """Turn a form's fields into those of a REST request."""
    wanted: dict[str, Any] = {name: fields[name] for name in ("graph", "machine") if name in fields}
    given = {each.name: fields[_key(each)] for each in form_fields() if _key(each) in fields}
    return wanted | codec.to_plain(read_texts(PlanSettings, given, name_of=_label))


def form_fields(kind: type = PlanSettings) -> list[SettingField]:
    """Return the settings that the form has, in the order of the flags."""
    return [each for each in setting_fields(kind) if each.setting.surface == "all"]


def _key(field: SettingField) -> str:
    return field.flag.removeprefix("--").replace("-", "_")


def _label(field: SettingField) -> str:
    return field.setting.label or _key(field).replace("_", " ").capitalize()


def _choices(field: SettingField, models: list[str]) -> tuple[str, ...]:
    open_names = {"policy": POLICIES, "model": tuple(models)}
    yes_no = YES_NO if field.hint is bool else ()
    return field.choices or yes_no or open_names.get(field.name, ())


def _form(
    request: Request,
    service: Service,
    fields: dict[str, str],
    told: list[str] | None = None,
    status: int = 200,
) -> Response:
    shown = _shown(PlanSettings, fields, sorted({*MODELS, *service.settings.allowed_models}))
    return page(
        request,
        "new_plan.html",
        status=status,
        fields={"graph": "", "machine": "", **fields},
        first=[shown[name] for name in FIRST],
        more=[each for name, each in shown.items() if name not in FIRST],
        told=told or [],
        graphs=inputs.list_graphs(service),
        machines=inputs.list_machines(service, limit=200).items,
    )


def _shown(kind: type, fields: dict[str, str], models: list[str]) -> dict[str, dict[str, Any]]:
    """Return what a form shows of each setting, by name."""
    return {
        each.name: {
            "key": _key(each),
            "label": _label(each),
            "choices": _choices(each, models),
            "hint": each.setting.unset or each.setting.how,
            "value": fields.get(_key(each), ""),
            "changed": fields.get(_key(each), "") not in ("", default_text(each)),
        }
        for each in form_fields(kind)
    }


Which = Annotated[str, Query(max_length=64)]


@router.get("/")
@router.get("/plans")
def list_plans(
    request: Request, service: ServiceIn, _who: Reader, cursor: Cursor = None
) -> Response:
    """List plans, newest first."""
    rows, next_cursor = _summaries(service, cursor=cursor)
    return page(request, "plans.html", plans=rows, next_cursor=next_cursor)


def _summaries(
    service: Service, *, cursor: str | None = None, limit: int = 50
) -> tuple[list[PlanSummary], str | None]:
    found = service.storage.database.page(PlanRow, cursor=cursor, limit=limit)
    return [resource_of(PlanSummary, row) for row in found.items], found.next_cursor


@router.get("/plans/{plan}")
def show_plan(request: Request, service: ServiceIn, _who: Reader, plan: Id) -> Response:
    """Show a plan as its report does."""
    found = plans.get_plan(service, plan)
    made = runs.list_runs(service, plan=plan, limit=20).items
    others, _ = _summaries(service)
    return page(
        request,
        "plan_page.html",
        **sections(found, drawn_machine(found), measured_report(service, plan), tried=bool(made)),
        runs=made,
        elsewhere=not is_planned_machine(found, machine_facts()),
        others=[other for other in others if other.id != plan],
    )


@router.get("/plans/{plan}/report.html")
def take_report(service: ServiceIn, _who: Reader, plan: Id) -> Response:
    """Download the plan's self-contained page, with a run's measurements, if any."""
    found = plans.get_plan(service, plan)
    return download(plan_page(service, found), f"plan-{found.plan_id[:12]}.html", HTML)


@router.get("/plans/{plan}/topology")
def show_topology(request: Request, service: ServiceIn, _who: Reader, plan: Id) -> Response:
    """Show the plan's load on its machine's links, large."""
    found = plans.get_plan(service, plan)
    return page(request, "topology_page.html", **sections(found, drawn_machine(found), None))


@router.get("/plans/{plan}/trace.json")
def take_trace(service: ServiceIn, _who: Reader, plan: Id) -> Response:
    """Download the plan's steps for Perfetto, with a run's measured ones, if any."""
    found = plans.get_plan(service, plan)
    return download(plan_trace(service, found), f"plan-{found.plan_id[:12]}-trace.json")


@router.get("/compare")
def compare(
    request: Request, service: ServiceIn, _who: Reader, a: Which = "", b: Which = ""
) -> Response:
    """Show two plans side by side."""
    known, _ = _summaries(service, limit=200)
    if not a or not b:
        return page(request, "compare.html", plans=known, a=a, b=b, sides=[])
    first, second = plans.get_plan(service, a), plans.get_plan(service, b)
    steps = timeline(first), timeline(second)
    # One scale: a bar that is twice as long takes twice the time, whichever plan it is of.
    whole = max(step.end_seconds for step in steps)
    return page(
        request,
        "compare.html",
        plans=known,
        a=a,
        b=b,
        same=first.plan_id == second.plan_id,
        found=differences(first, second),
        verdict=verdict(first, second),
        swatch=swatch,
        sides=[_side("a", first, steps[0], whole), _side("b", second, steps[1], whole)],
    )


def _side(name: str, plan: Plan, step: Timeline, whole_seconds: float) -> dict[str, Any]:
    return {
        "plan": plan,
        "told": explain(plan),
        "picture": draw_timeline(step, name=f"timeline-{name}", whole_seconds=whole_seconds),
    }


@router.get("/estimate")
def show_estimate(request: Request, service: ServiceIn, _who: Reader) -> Response:
    """Show the form of an estimate; where it was sent, the machines too."""
    sent = request.query_params
    given = {name: ",".join(sent.getlist(name)) for name in sent if sent[name]}
    told, found, status = "", None, 200
    if given:
        try:
            found = inputs.estimates_of(service, _estimate_settings(given))
        except (InputError, ServiceError) as error:
            told, status = str(error), 422
    plain = {_key(each): default_text(each) for each in form_fields(EstimateSettings)}
    shown = _shown(EstimateSettings, plain | given, [])
    table = None if found is None else render(found)
    return page(
        request,
        "estimate.html",
        status=status,
        first=[each for name, each in shown.items() if name in ESTIMATE_FIRST],
        more=[each for name, each in shown.items() if name not in ESTIMATE_FIRST],
        told=told,
        table=table,
    )


def _estimate_settings(fields: dict[str, str]) -> EstimateSettings:
    names = {_key(each): each.name for each in form_fields(EstimateSettings)}
    if unknown := sorted(set(fields) - set(names)):
        raise SettingsError(
            f"expected fields among {', '.join(names)}, found "
            f"{', '.join(name[:60] for name in unknown[:5])}"
        )
    given = {names[key]: text for key, text in fields.items()}
    return make_from(EstimateSettings, read_texts(EstimateSettings, given, name_of=_label))


@router.get("/machines")
def list_machines(
    request: Request, service: ServiceIn, _who: Reader, cursor: Cursor = None
) -> Response:
    """List presets and uploaded machines."""
    found = inputs.list_machines(service, cursor=cursor, limit=50)
    lines = {each.id: _machine_line(service, each.id) for each in found.items}
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
    """Show one machine with its picture."""
    found = inputs.machine_model(service, machine)
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


def _machine_line(service: Service, name: str) -> str:
    """Describe a machine in a line, or say why its file cannot be read."""
    try:
        return machine_line(inputs.machine_model(service, name))
    except InputError as error:
        return str(error)


@router.get("/reference")
def show_reference(request: Request, _who: Reader) -> Response:
    """Show every operation of the REST interface, from its OpenAPI document."""
    paths: dict[str, dict[str, dict[str, Any]]] = request.app.openapi()["paths"]
    operations = [
        {
            "method": method.upper(),
            "path": path,
            "told": operation.get("description") or operation.get("summary") or "",
            "takes": [each["name"] for each in operation.get("parameters", [])],
            "body": _body(operation),
            "answers": sorted(operation["responses"]),
        }
        for path, item in paths.items()
        for method, operation in item.items()
    ]
    return page(request, "reference.html", operations=operations)


def _body(operation: dict[str, Any]) -> str:
    """Return the name of what an operation takes as its body; empty for nothing."""
    content = operation.get("requestBody", {}).get("content", {})
    kinds = [str(each.get("schema", {}).get("$ref", "JSON")) for each in content.values()]
    return ", ".join(kind.rpartition("/")[2] for kind in kinds)
