"""Pages of plans: the list, one plan, two plans side by side, its file to take away."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import HTMLResponse

from api.dashboard.pages import PageRoute, headers, page
from api.routes.common import ServiceIn
from api.schemas.resources import PlanSummary
from api.security.auth import Reader
from api.service import plans, runs
from api.service.artefacts import drawn_machine, measured_report, plan_page
from planner.queries.explain import explain
from planner.report.differences import differences, verdict
from planner.report.page import sections, swatch
from planner.report.timeline import Timeline, draw_timeline, timeline
from runtime.device import machine_fingerprint
from runtime.plan.schema import Plan

router = APIRouter(route_class=PageRoute, include_in_schema=False)
PlanId = Annotated[str, Path(max_length=64)]
Which = Annotated[str, Query(max_length=64)]


@router.get("/")
@router.get("/plans")
def list_plans(
    request: Request,
    service: ServiceIn,
    _who: Reader,
    cursor: Annotated[str | None, Query(max_length=512)] = None,
) -> Response:
    """Plans, newest first."""
    found = plans.list_plans(service, cursor=cursor, limit=50)
    rows = [PlanSummary.of(row) for row in found.items]
    return page(request, "plans.html", plans=rows, next_cursor=found.next_cursor)


@router.get("/plans/{plan}")
def show_plan(request: Request, service: ServiceIn, _who: Reader, plan: PlanId) -> Response:
    """One plan, as its report shows it."""
    found = plans.get_plan(service, plan)
    made = runs.list_runs(service, plan=plan, limit=20).items
    others = [PlanSummary.of(row) for row in plans.list_plans(service, limit=50).items]
    return page(
        request,
        "plan_page.html",
        **sections(found, drawn_machine(found), measured_report(service, plan), tried=bool(made)),
        runs=made,
        elsewhere=machine_fingerprint() not in found.machine.fingerprint.split("+"),
        others=[other for other in others if other.id != plan],
    )


@router.get("/plans/{plan}/report.html")
def take_report(service: ServiceIn, _who: Reader, plan: PlanId) -> Response:
    """The plan's self-contained page, with a run's measurements where there are any."""
    found = plans.get_plan(service, plan)
    name = f'attachment; filename="plan-{found.plan_id[:12]}.html"'
    return HTMLResponse(
        plan_page(service, found), headers={**headers(), "Content-Disposition": name}
    )


@router.get("/compare")
def compare(
    request: Request, service: ServiceIn, _who: Reader, a: Which = "", b: Which = ""
) -> Response:
    """Two plans side by side."""
    known = [PlanSummary.of(row) for row in plans.list_plans(service, limit=200).items]
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
